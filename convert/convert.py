"""The convert stage: checkpoint to `vllm/`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import save

from draftsmith import stage
from draftsmith.checkpoint import RECORD, WEIGHTS, Checkpoint
from draftsmith.convert.card import render
from draftsmith.convert.vllm import to_vllm
from draftsmith.errors import UserError
from draftsmith.progress import console
from draftsmith.recipe import Recipe, digest


def run_convert(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/vllm` from `run_dir/checkpoint`; nothing happens when it is finished for the same inputs.

    Raises:
        UserError: there is no finished checkpoint.
    """
    started = time.time()
    source, directory = run_dir / "checkpoint", run_dir / "vllm"
    if stage.read(source) is None:
        raise UserError(f"There is no finished checkpoint at {source}. Run `draftsmith train` with this recipe first.")
    dtype = recipe.convert.dtype or recipe.target.dtype
    inputs = converted_from(source, dtype)
    if stage.finished(directory, inputs):
        console.print(f"convert: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]

    checkpoint = Checkpoint.load(source)
    config, tensors = to_vllm(checkpoint, dtype)
    stage.claim(directory, fresh=True)
    stage.write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    stage.write_json(directory / "config.json", config)
    stage.write_bytes(directory / "README.md", render(checkpoint, recipe.target).encode())
    figures = {
        "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
        "bytes": (directory / "model.safetensors").stat().st_size,
    }
    sections = recipe.model_dump(mode="json", include={"convert"})
    stage.finish(directory, stage="convert", inputs=inputs, recipe=sections, figures=figures, started=started)
    console.print(f"convert: {directory} holds {figures['parameters'] / 1e6:.1f} M parameters for vLLM")
    return figures


def converted_from(checkpoint: Path, dtype: str) -> str:
    """Digest of what a conversion depends on: `inputs` of its record.

    Args:
        checkpoint: the directory.
        dtype: of the tensors for vLLM.
    """
    return digest([stage.sha256_of(checkpoint / WEIGHTS), stage.sha256_of(checkpoint / RECORD), dtype])
