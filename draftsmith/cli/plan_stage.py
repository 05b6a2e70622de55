"""An estimate of a stage's cost, and what the estimates of several stages have in common.

Units: FLOP (floating-point operations, two per weight and token of a matrix product), bytes, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config.hardware import Assumptions, Hardware
from draftsmith.config.recipe import Recipe
from draftsmith.config.sources import Prompts
from draftsmith.run.errors import UserError


@dataclass(frozen=True)
class StagePlan:
    """The estimated cost of a stage."""

    tokens: int
    """Tokens that it processes, in all epochs together."""
    disk_bytes: int
    """Upper bound of its output on disk."""
    memory_bytes: dict[str, int]
    """Memory that one device (on a CPU: the machine) needs at a time, by purpose."""
    memory_limit: int | None
    """Memory of a device; None on a CPU and without `plan.hardware`."""
    flop: float
    """Floating-point operations of all devices together."""
    seconds: dict[str, float]
    """Time of each part of its work; empty without `plan.hardware`."""
    hours: float | None
    """Total time, in which concurrent parts count once; None without `plan.hardware`."""
    more: dict[str, Any] = field(default_factory=dict)
    """Figures specific to the stage."""


def devices_of(hardware: Hardware | None, work: str, gpus: int) -> dict[str, str]:
    """The GPUs that a stage uses, for its `more`; empty on CPUs."""
    if hardware is None or hardware.memory_gib is None:
        return {}
    where = "GPU 0" if gpus == 1 else f"GPUs 0 to {gpus - 1}"
    beyond = f", which is MORE than the {hardware.count} of `plan.hardware`" if gpus > hardware.count else ""
    return {"devices": f"{work} on {where}{beyond}"}


def hours_of(hardware: Hardware | None, seconds: dict[str, float], *, beside: str | None = None) -> float | None:
    """Hours of all parts together.

    Args:
        beside: the part that runs concurrently with the others, except on a CPU.
    """
    if hardware is None:
        return None
    together = sum(seconds.values())
    if beside and hardware.memory_gib is not None:
        together = max(seconds[beside], together - seconds[beside])
    return together / 3600


def planned_prompts(recipe: Recipe, assumed: Assumptions) -> int:
    """Number of training and held-out prompts of `extract.prompts`: as many as assumed, but no more than its source can have.

    Raises:
        UserError: neither the source nor `plan.conversations` says how many there are.
    """
    known = [assumed.conversations, rows_at_most(recipe.extract.training_prompts)]
    if known == [None, None]:
        raise UserError(
            "The number of prompts is unknown before they are read: set `plan.conversations`, or limit it with "
            "`extract.prompts.limit`."
        )
    return min(number for number in known if number is not None)


def conversation_counts(recipe: Recipe, assumed: Assumptions) -> tuple[int, int]:
    """Number of sequences in the training part and in the held-out part.

    Raises:
        UserError: as `planned_prompts`, or all prompts are held out.
    """
    options, prompts = recipe.extract, planned_prompts(recipe, assumed)
    # At least one: extraction refuses to hold out none.
    held_out = max(1, round(prompts * options.held_out_fraction)) if options.held_out_fraction else 0
    training = prompts - held_out
    if options.held_out is not None:
        training, held_out = prompts, prompt_count(options.held_out, assumed)
    if training < 1:
        raise UserError(
            f"`extract.held_out_fraction: {options.held_out_fraction:g}` of {counted(prompts, 'prompt')} leaves none to train on. Lower it, or "
            "use more prompts (`plan.conversations`, `extract.prompts.limit`)."
        )
    return training * options.samples, held_out


def prompt_count(source: Prompts, assumed: Assumptions) -> int:
    """Prompts for evaluation: what is assumed if the source does not say how many."""
    rows = rows_at_most(source)
    return assumed.suite_prompts if rows is None else rows


def rows_at_most(source: Prompts) -> int | None:
    """The rows of a local file of JSON lines, no more than the limit; None if neither is known."""
    known = [source.limit] if source.limit else []
    if source.path and source.path.endswith(".jsonl") and Path(source.path).is_file():
        with open(source.path, "rb") as file:
            known.append(sum(not line.isspace() for line in file))
    return min(known, default=None)


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"
