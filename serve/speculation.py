"""How vLLM is told to use a drafter: the one place where evaluation and serving agree on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError


def speculative_config(drafter_dir: Path, k: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter directory.

    Args:
        drafter_dir: `runs/NAME/vllm`.
        k: number of speculative tokens.

    Raises:
        UserError: the directory holds no drafter that this version can serve.
    """
    architectures = _config(drafter_dir).get("architectures") or ["none"]
    if "eagle3" not in architectures[0].lower():
        raise UserError(f"{drafter_dir} holds a drafter of the architecture {architectures[0]}, which is not EAGLE-3.")
    return {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": k}


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
