"""What an evaluation has measured so far, in `partial.json`: a stopped evaluation resumes from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.turns import Turn
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_json
from draftsmith.run.progress import console
from draftsmith.serve.evaluation.curve import fastest
from draftsmith.serve.evaluation.machine import describe_machine
from draftsmith.serve.evaluation.schema import (
    AtStart,
    CurvePoint,
    Difference,
    Example,
    Execution,
    Fidelity,
    MethodAcceptance,
    Rate,
    SampledFidelity,
    SuiteAcceptance,
)

TimedPrompt = tuple[str, list[int]]
"""A prompt's id and token ids."""


class MeasuredSuite(SuiteAcceptance):
    """A suite without its speeds."""

    methods: dict[str, MethodAcceptance]
    """By their names in the recipe."""


@dataclass
class PartialResults:
    """The figures of all phases so far. Keys that are numbers are strings, as in JSON."""

    path: Path
    """Of `partial.json`."""
    inputs: str
    """Digest of what the evaluation depends on."""
    step_costs: list[dict[str, list[float]]] = field(default_factory=list)
    """By engine start, then K: step time over the baseline's, on each prompt."""
    drafting: list[dict[str, list[float]]] = field(default_factory=list)
    """The same of the drafts in them alone; no ratios where these cannot be timed."""
    k_curve: dict[str, CurvePoint] = field(default_factory=dict)
    suites: dict[str, MeasuredSuite] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    timed: dict[str, list[TimedPrompt]] = field(default_factory=dict)
    """By suite: the prompts drawn for timing."""
    load_prompts: list[TimedPrompt] = field(default_factory=list)
    """Those of the first suite for several requests in flight."""
    load_k: dict[str, int] = field(default_factory=dict)
    """The drafter's K by requests in flight; kept so that tuning in the meantime changes nothing."""
    tuned_k: dict[str, int] = field(default_factory=dict)
    """What tuning had chosen, likewise; empty if it had not run."""
    speeds: list[dict[str, dict[str, AtStart]]] = field(default_factory=list)
    """By engine start, then load (`speed.Load.key`), then configuration."""
    executions: dict[str, Execution] = field(default_factory=dict)
    """By configuration."""
    fidelity: dict[str, dict[str, Fidelity]] = field(default_factory=dict)
    """By load, then configuration."""
    differences: dict[str, dict[str, list[Difference]]] = field(default_factory=dict)
    """The first few, likewise."""
    peak_engines: int = 0
    """Most engines that were up at a time."""
    rates: dict[str, Rate] = field(default_factory=dict)
    sampled_fidelity: dict[str, SampledFidelity] = field(default_factory=dict)
    measured_on: dict[str, Any] = field(default_factory=lambda: measured_on())
    """The machine and the versions."""

    @classmethod
    def read(cls, path: Path, inputs: str) -> PartialResults | None:
        """What a stopped evaluation of the same inputs left on a machine like this one; None if there is nothing."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("inputs") != inputs:
            return None
        partial = cls(path=path, **found)
        if changed := [name for name, value in measured_on().items() if partial.measured_on.get(name) != value]:
            console.print(
                f"evaluate: {path} was measured with another {' and '.join(changed)}; beginning anew, since speeds would not compare",
                highlight=False,
                soft_wrap=True,
            )
            return None
        partial.timed = {name: _pairs(prompts) for name, prompts in partial.timed.items()}
        partial.load_prompts = _pairs(partial.load_prompts)
        return partial

    def save(self) -> None:
        write_json(self.path, {name: value for name, value in vars(self).items() if name != "path"})

    def best_k(self, choices: Iterable[int]) -> int:
        """The K with the highest estimated speedup."""
        return fastest({k: self.k_curve[str(k)] for k in choices if str(k) in self.k_curve})


def measured_on() -> dict[str, Any]:
    """What speeds depend on beside the inputs, by its name for people."""
    machine = describe_machine()
    return {
        "processor": machine["processor"],
        "number of cores": machine["cores"],
        "set of GPUs": list(machine["gpus"]),
        "set of package versions": stage.versions(),
    }


def timed_prompts(turns: Sequence[Turn]) -> list[TimedPrompt]:
    return [(turn.id, turn.token_ids) for turn in turns]


def _pairs(prompts: Sequence[Sequence[Any]]) -> list[TimedPrompt]:
    return [(name, token_ids) for name, token_ids in prompts]
