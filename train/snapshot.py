"""The snapshot that an interrupted training run resumes from, whatever the number of processes then."""

from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from draftsmith.run.atomic_io import new_file
from draftsmith.run.errors import UserError
from draftsmith.train import distributed
from draftsmith.train.setup import Run

SNAPSHOT = "resume.pt"
"""Beside the checkpoint while training runs."""


def write_snapshot(run: Run) -> None:
    """Replace the snapshot. All processes gather, the main one writes; tensors are unsharded and in full precision.
    Raises DraftsmithError: the disk is full. The snapshot before is kept."""
    main = run.accelerator.is_main_process
    state = {
        "inputs": run.inputs,
        "precision": run.recipe.train.precision,
        "progress": vars(run.progress),
        "drafter": distributed.gather(run.loss.drafter.state_dict(), keep=main),
        "optimizers": [distributed.gather_optimizer(optimizer, keep=main) for optimizer in run.optimizers],
        "average": distributed.gather(run.average.weights, keep=main),
    }
    if main:
        size = sum(leaf.nbytes for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor))
        with new_file(run.directory / SNAPSHOT, size=size) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # on some failed writes torch says only that its file is not as it should be
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def read_snapshot(directory: Path, inputs: str) -> dict[str, Any] | None:
    """The last snapshot in a checkpoint's folder; None where there is none of a run with these inputs.
    Raises UserError: it is damaged."""
    path = directory / SNAPSHOT
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return state if state["inputs"] == inputs else None
    except Exception as error:  # a damaged archive can raise anything
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}, from which training would continue, cannot be read ({type(error).__name__}: {why}). If it is damaged, get it "
            "again, or remove it: without it the same command trains from the beginning."
        ) from None
