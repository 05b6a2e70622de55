"""Legacy vLLM arguments for speculation, and other places for today's; what to write in a recipe instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

OLDER = {
    "speculative_model": "model", "spec_model": "model", "spec_method": "method", "spec_tokens": "num_speculative_tokens",
    "num_speculative_tokens": "num_speculative_tokens", "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min", "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
}  # fmt: skip
"""Engine arguments of vLLM, most of them gone, and the keys of a method that took their place."""
GONE = {"use_v2_block_manager", "speculative_disable_mqa_scorer", "speculative_disable_by_batch_size"}
"""Engine arguments that vLLM no longer has and that need no replacement."""
WHOLE = "speculative_config"
_SECTIONS = ((), ("serve",), ("serve", "vllm_args"), ("engine",), ("engine", "options"), ("target",), ("evaluate",))
"""Where recipes may have them by mistake."""
_NAMED = (
    ("mlp_speculator", r"accelerator|mlp.?speculator"),
    ("medusa", r"medusa"),
    ("dspark", r"dspark"),
    ("dflash", r"dflash"),
    ("p_eagle", r"(?<![a-z])p[-_]?eagle"),
    ("eagle3", r"eagle-?3"),
    ("eagle", r"eagle"),
)
"""Methods, and how published drafters for them are called."""


def problem_of(recipe: Mapping[str, Any]) -> str | None:
    """Which of vLLM's other ways to ask for speculation a recipe has, with what to write instead; None if it has none.

    Args:
        recipe: as read from its file, before it is validated.
    """
    for path in _SECTIONS:
        section: Any = recipe
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping):
            continue
        named = {str(name): re.sub("-", "_", str(name)).lstrip("_") for name in section}
        found = [name for name, plain in named.items() if plain in OLDER or plain in (WHOLE, *GONE)]
        if not found:
            continue
        given = {named[name]: section[name] for name in found}
        names = ", ".join(f"`{'.'.join((*path, name))}`" for name in found)
        return f"{names}: {instead(given)}"
    return None


def instead(given: Mapping[str, Any]) -> str:
    """What to write instead of some of vLLM's arguments for speculation.

    Args:
        given: names of `OLDER`, `GONE` and `WHOLE`, with underscores, and their values.
    """
    gone = [name for name in given if name in GONE]
    without = f"Leave out {', '.join(f'`{name}`' for name in gone)}, which vLLM no longer has." if gone else ""
    if len(gone) == len(given):
        return without
    if {OLDER.get(name) for name in given if name not in GONE} == {"num_speculative_tokens"}:
        text = "the number of speculative tokens is `num_speculative_tokens` in the recipe's `serve.method`, or `-k` of `draftsmith serve`."
        return f"{text} {without}".rstrip()
    method = json.dumps(todays_method(given))
    text = f"the method of speculation is `serve.method` here, in the recipe or as `-s 'serve.method={method}'`."
    return f"{text} {without}".rstrip()


def todays_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """The section `serve.method` that means the same as vLLM's arguments, as far as names tell the method."""
    whole = given.get(WHOLE)
    if isinstance(whole, str):
        with suppress(ValueError):
            whole = json.loads(whole)
    method = {re.sub("-", "_", str(name)): value for name, value in whole.items()} if isinstance(whole, Mapping) else {}
    method |= {OLDER[name]: value for name, value in given.items() if name in OLDER}
    if method.get("model") in ("[ngram]", "ngram"):
        del method["model"]
        method["method"] = "ngram"
    if "method" not in method:
        method["method"] = method_by_name(str(method.get("model") or "")) or "draft_model"
    first = {name: method[name] for name in ("method", "model", "num_speculative_tokens") if name in method}
    return first | method


def method_by_name(model: str) -> str | None:
    """The method that a published drafter's name speaks of; None where it names none: a whole model, as a rule."""
    return next((method for method, pattern in _NAMED if re.search(pattern, model.lower())), None)
