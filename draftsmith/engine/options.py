"""`engine.options`: vLLM's own engine arguments, checked and joined with those that a stage sets. Does not import vLLM."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import EngineConfig
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console


def check_options(engine: EngineConfig) -> None:
    """Check the names of `engine.options` against the installed vLLM. Without vLLM, says that they are not checked.

    Raises:
        UserError: vLLM has no such engine argument; names the nearest.
    """
    if not engine.options:
        return
    known = engine_arguments()
    if known is None:
        console.print("engine.options: not checked, because vLLM is not installed here", highlight=False)
        return
    for name in engine.options:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else "vLLM's documentation lists them."
            raise UserError(
                f"`engine.options.{name}`: the installed vLLM has no engine argument of this name; {hint} Options of the server alone "
                "go into `serve.vllm_args`."
            )


@cache
def engine_arguments() -> frozenset[str] | None:
    """Names of the installed vLLM's engine arguments; None without vLLM.

    They are the fields of `EngineArgs`, read from its source: importing it takes ten seconds, and recipes are checked first.
    """
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for node in ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                names = {field.id for field in fields if isinstance(field, ast.Name)}
                return frozenset(name for name in names if not name.startswith("_"))
    return None


def say_overruled(stage: str, engine: EngineConfig, arguments: Mapping[str, Any]) -> None:
    """Print which of `engine.options` a stage does not use because it sets them itself.

    Args:
        arguments: the stage's of `vllm.LLM`, with the options joined.
    """
    for name, value in engine.options.items():
        if name in arguments and arguments[name] != value:
            console.print(
                f"{stage}: engine.options.{name} is not used here; this stage needs {_shown(arguments[name])}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def _shown(value: Any) -> str:
    return "its own" if isinstance(value, Mapping) else f"`{value}`"
