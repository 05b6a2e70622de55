"""Trainings whose settings are chosen on one part of the held-out text and reported on another.

A training is judged after each of its epochs on both parts at once, and only the counts are kept: which settings and which
epoch are taken depends on the tuning part alone, so that it does not matter that the report's counts are there already.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftsmith.config.loading import digest
from draftsmith.run.atomic_io import write_json
from draftsmith.run.progress import console

Counts = list[tuple[int, int]]
"""Of each sequence: tokens accepted, drafts made."""
T = TypeVar("T")

DRAWS = 2000


@dataclass(frozen=True)
class Outcome:
    """A training, epoch by epoch."""

    tuning: list[Counts]
    """After each epoch, of the tuning part's sequences."""
    report: list[Counts]
    """The same of the report part's."""
    more: dict[str, Any] = field(default_factory=dict)
    """What else is to be known of it."""

    @property
    def epoch(self) -> int:
        """The epoch, from 1, that is best on the tuning part; the first of equals."""
        return 1 + max(range(len(self.tuning)), key=lambda i: length(self.tuning[i]))

    @property
    def tuned(self) -> float:
        """Acceptance length on the tuning part, after the best epoch."""
        return length(self.tuning[self.epoch - 1])

    @property
    def reported(self) -> Counts:
        """Counts on the report part, after that same epoch."""
        return self.report[self.epoch - 1]


def length(counts: Iterable[tuple[int, int]]) -> float:
    """Acceptance length over all sequences: tokens of a verification step, the bonus token included."""
    accepted, drafts = (sum(column) for column in zip(*counts, strict=True))
    return 1 + accepted / max(drafts, 1)


def interval_of_difference(ours: Counts, theirs: Counts) -> tuple[float, float]:
    """The 95% bootstrap interval of our acceptance length less theirs, both on the same sequences, which are what is drawn."""
    mine, other = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, len(mine), (DRAWS, len(mine)), generator=generator)
    ratios = [sums[:, 0] / sums[:, 1].clamp(min=1) for sums in (mine[drawn].sum(1), other[drawn].sum(1))]
    low, high = (ratios[0] - ratios[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def best_of(ladder: Sequence[T], tried: Sequence[T], value: Callable[[T], float]) -> T:
    """The entry of an ordered ladder with the highest value. Those `tried` come first; while the best of what was tried is at its
    edge, the next entry beyond is tried too."""
    values = {one: value(one) for one in tried}
    while True:
        best = max(values, key=lambda one: values[one])
        at = ladder.index(best)
        further = [ladder[i] for i in (at - 1, at + 1) if 0 <= i < len(ladder) and ladder[i] not in values]
        if not further:
            return best
        values |= {one: value(one) for one in further}


def kept(file: Path, about: Any, train: Callable[[], Outcome]) -> Outcome:
    """What an earlier training with the same `about` left in the file; otherwise train, and leave it there."""
    made_from = digest(about)
    if file.is_file() and (found := json.loads(file.read_text()))["about"] == made_from:
        del found["about"]
        outcome = Outcome(**found)
    else:
        outcome = train()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"about": made_from, **asdict(outcome)})
    lengths = ", ".join(f"{length(counts):.3f}" for counts in outcome.tuning)
    told = f"{file.parent.name}/{file.stem}: tuning part, after each epoch: {lengths}"
    console.print(told, highlight=False, soft_wrap=True)
    return outcome
