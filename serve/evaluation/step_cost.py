"""Phase a: the time of a decoding step at each K over that of a baseline step, and how much of it is drafting."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost
from draftsmith.serve.evaluation.lineup import Lineup
from draftsmith.serve.evaluation.partial import PartialResults
from draftsmith.serve.evaluation.schema import Variant
from draftsmith.serve.evaluation.suites import SuiteInput, draw
from draftsmith.serve.evaluation.variants import Variants

Name = TypeVar("Name", bound=Hashable)
_STEPS = 6
"""Timed steps of an answer."""


@dataclass
class StepRatios(Generic[Name]):
    """Medians of an answer's steps over the baseline's, on each prompt, by engine."""

    steps: dict[Name, list[float]] = field(default_factory=dict)
    drafts: dict[Name, list[float]] = field(default_factory=dict)
    """Of these, the time of the drafts; no ratios where that cannot be told."""


def measure_step_costs(
    lineup: Lineup[Variant], variants: Variants, suite: SuiteInput, recipe: Recipe, partial: PartialResults
) -> None:
    """Measure step costs at each K, with engines started anew each time; the last ones stay up for phase b."""
    starts = recipe.evaluate.engine_starts
    prompts = [one.token_ids for one in draw(suite.prompts, recipe.evaluate.step_cost_prompts, seed=recipe.seed)]
    while (number := len(partial.step_costs)) < starts:
        lineup.restart(number)
        costs: dict[str, list[float]] = {}
        drafting: dict[str, list[float]] = {}
        for engines in lineup.turns(variants.engines([0, *variants.ks]), lambda variant: 0):
            ks = [k for k in variants.ks if k in engines]
            found = step_ratios({k: engines[k] for k in (0, *ks)}, 0, prompts)
            if not all(found.steps.values()):
                raise UserError(
                    f"The answers to {len(prompts)} prompts of the suite `{suite.name}` are a single token long, too short to time a step. "
                    "Raise evaluate.step_cost_prompts, or put a suite with longer answers first."
                )
            costs |= {str(k): ratios for k, ratios in found.steps.items()}
            drafting |= {str(k): ratios for k, ratios in found.drafts.items()}
        partial.step_costs.append(costs)
        partial.drafting.append(drafting)
        partial.save()


def step_ratios(
    engines: Mapping[Name, EngineHost], baseline: Name, prompts: Sequence[Sequence[int]], steps: int = _STEPS
) -> StepRatios[Name]:
    """Time a few decoding steps of each engine, the baseline's among them.

    Every prompt goes to every engine in turn for a few steps, of which the median counts: a disturbance of the machine, short or long,
    spoils few steps or few ratios, which medians ignore. As many steps are timed at every K, and each drafts and verifies K tokens.
    """
    order = list(engines)
    others = [name for name in order if name != baseline]
    ratios: StepRatios[Name] = StepRatios({name: [] for name in others}, {name: [] for name in others})
    with Bar("step cost", total=len(prompts) * len(order), unit="answers") as bar:
        for index, prompt in enumerate(prompts):
            times = {}
            shift = index % len(order)  # no engine is always first
            for name in order[shift:] + order[:shift]:
                times[name] = engines[name].step_times(prompt, steps)
                bar.step()
            if not times[baseline].steps:
                continue
            unit = statistics.median(times[baseline].steps)
            for name in others:
                for seconds, into in ((times[name].steps, ratios.steps), (times[name].drafts, ratios.drafts)):
                    if seconds:
                        into[name].append(statistics.median(seconds) / unit)
    return ratios
