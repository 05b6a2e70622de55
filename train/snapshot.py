"""The snapshot that an interrupted training run resumes from, whatever the number of processes then."""

from pathlib import Path
from typing import Any

import torch

from draftsmith.train import distributed
from draftsmith.train.setup import Run

SNAPSHOT = "resume.pt"
"""Beside the checkpoint while training runs."""


def write_snapshot(run: Run) -> None:
    """Replace the snapshot. All processes gather, the main one writes; tensors are unsharded and in full precision."""
    main = run.accelerator.is_main_process
    state = {
        "inputs": run.inputs,
        "progress": vars(run.progress),
        "drafter": distributed.gather(run.loss.drafter.state_dict(), keep=main),
        "optimizers": [distributed.gather_optimizer(optimizer, keep=main) for optimizer in run.optimizers],
        "average": distributed.gather(run.average.weights, keep=main),
    }
    if main:
        temporary = run.directory / (SNAPSHOT + ".tmp")
        torch.save(state, temporary)
        temporary.replace(run.directory / SNAPSHOT)


def read_snapshot(directory: Path, inputs: str) -> dict[str, Any] | None:
    """The last snapshot in a checkpoint's folder; None where there is none of a run with these inputs."""
    path = directory / SNAPSHOT
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state if state["inputs"] == inputs else None
