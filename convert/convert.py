"""The convert stage: checkpoint to `vllm/`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import save

from draftsmith import stage
from draftsmith.checkpoint import RECORD, WEIGHTS, Checkpoint
from draftsmith.convert.vllm import to_vllm
from draftsmith.drafters import drafter_class
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
    inputs = digest([stage.sha256_of(source / WEIGHTS), stage.sha256_of(source / RECORD), dtype])
    if stage.finished(directory, inputs):
        console.print(f"convert: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]

    checkpoint = Checkpoint.load(source)
    config, tensors = to_vllm(checkpoint, dtype)
    stage.claim(directory, fresh=True)
    stage.write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    stage.write_json(directory / "config.json", config)
    stage.write_bytes(directory / "README.md", _model_card(checkpoint).encode())
    figures = {
        "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
        "bytes": (directory / "model.safetensors").stat().st_size,
    }
    sections = recipe.model_dump(mode="json", include={"convert"})
    stage.finish(directory, stage="convert", inputs=inputs, recipe=sections, figures=figures, started=started)
    console.print(f"convert: {directory} holds {figures['parameters'] / 1e6:.1f} M parameters for vLLM")
    return figures


def _model_card(checkpoint: Checkpoint) -> str:
    """A short card: whose drafter this is and how to serve it."""
    target = checkpoint.target["name"]
    predicted = checkpoint.training.get("predicted_acceptance_length") or {}
    rows = "\n".join(f"| {k} | {value:.2f} |" for k, value in predicted.items())
    table = (
        f"\nPredicted acceptance length on held-out text, greedy:\n\n| K | tokens per step |\n|---|---|\n{rows}\n"
        if rows
        else ""
    )
    method = drafter_class(checkpoint.kind).vllm_method
    serving = (
        f"""Serve it with vLLM:

```
python -m vllm.entrypoints.openai.api_server --model TARGET \\
    --speculative-config '{{"method": "{method}", "model": "THIS_DIRECTORY", "num_speculative_tokens": 3}}'
```
"""
        if method
        else "vLLM reads this layout, and cannot serve drafters of this kind yet.\n"
    )
    return f"""---
base_model: {target}
tags: [speculative-decoding, {checkpoint.kind}, vllm]
---
# Drafter ({checkpoint.kind}) for {target}

Trained with Draftsmith on hidden states of {target}, config hash
`{checkpoint.target["config_hash"][:16]}`. It drafts for this target only.
{table}
{serving}"""
