"""How vLLM is told to use a drafter: the one place where evaluation and serving agree on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith import vllm_env
from draftsmith.drafters import drafter_class, kinds
from draftsmith.drafters.mlp_speculator import SERVED_ARCHITECTURE
from draftsmith.errors import UserError


def speculative_config(drafter_dir: Path, k: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter directory.

    Args:
        drafter_dir: `runs/NAME/vllm`.
        k: number of speculative tokens.

    Raises:
        UserError: the directory holds no drafter that this version can serve, or one that guesses fewer tokens.
    """
    config = _config(drafter_dir)
    architecture = (config.get("architectures") or ["none"])[0]
    methods = sorted({drafter_class(kind).vllm_method for kind in kinds()}, key=len, reverse=True)
    # A method is part of its architectures' names, and the longest that fits is meant: `eagle3`, not `eagle`.
    method = next((method for method in methods if method in architecture.lower()), None)
    if method is None:
        raise UserError(
            f"{drafter_dir} holds a drafter of the architecture {architecture}, which is none of those that can be "
            f"served: {', '.join(methods)}. If it is a drafter in another layout, `draftsmith convert DIR --to vllm --out OUT` writes ours."
        )
    for field in ("num_heads", "n_predict"):  # vLLM would serve the rest untrained and not say so, or fail
        if k > config.get(field, k):
            raise UserError(
                f"{drafter_dir} guesses {config[field]} tokens ahead, and {k} were asked for. Ask for fewer, or train it for "
                f"more (train.drafter.{field})."
            )
    if vllm_env.is_cpu() and "quantization_config" in config and not rounds_inputs(drafter_dir):
        raise UserError(
            f"The drafter in {drafter_dir} has 8-bit weights to be computed with in floating point, and vLLM has that on GPUs "
            "only. On a CPU serve one converted with `int8-dynamic`, or without --quantize (convert.quantize)."
        )
    return {"method": method, "model": str(drafter_dir), "num_speculative_tokens": k}


def needs_plugin(drafter_dir: Path) -> bool:
    """Whether vLLM serves it with our plugin alone (`plugin.py`)."""
    return bool(_config(drafter_dir).get("architectures") == [SERVED_ARCHITECTURE])


def rounds_inputs(drafter_dir: Path) -> bool:
    """Whether the drafter's weights are quantised such that what its layers read is rounded too."""
    groups = _config(drafter_dir).get("quantization_config", {}).get("config_groups", {}).values()
    return any(group.get("input_activations") for group in groups)


def drafter_name(drafter_dir: Path) -> str:
    """The drafter for people: its kind and its run."""
    architecture = (_config(drafter_dir).get("architectures") or ["drafter"])[0]
    return f"{architecture} ({drafter_dir.resolve().parent.name})"


def _config(drafter_dir: Path) -> dict[str, Any]:
    try:
        config = json.loads((drafter_dir / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"There is no readable config.json in {drafter_dir}. Run `draftsmith convert` first.")
    return config
