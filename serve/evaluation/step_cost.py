"""Phase a: the time of a decoding step at each K over that of a baseline step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost
from draftsmith.serve.evaluation.lineup import Lineup
from draftsmith.serve.evaluation.partial import PartialResults
from draftsmith.serve.evaluation.schema import Variant
from draftsmith.serve.evaluation.suites import SuiteInput, draw
from draftsmith.serve.evaluation.variants import Variants

_STEPS = 6
"""Timed steps of an answer."""


def measure_step_costs(
    lineup: Lineup[Variant], variants: Variants, suite: SuiteInput, recipe: Recipe, partial: PartialResults
) -> None:
    """Measure step costs at each K, with engines started anew each time; the last ones stay up for phase b."""
    starts = recipe.evaluate.engine_starts
    while (number := len(partial.step_costs)) < starts:
        lineup.restart(number)
        found: dict[str, list[float]] = {}
        for engines in lineup.turns(variants.engines([0, *variants.ks]), lambda variant: 0):
            ks = [k for k in variants.ks if k in engines]
            found |= {str(k): ratios for k, ratios in step_costs(engines, ks, suite, recipe).items()}
        partial.step_costs.append(found)
        partial.save()


def step_costs(
    engines: Mapping[Variant, EngineHost], ks: Sequence[int], suite: SuiteInput, recipe: Recipe
) -> dict[int, list[float]]:
    """Seconds of a decoding step over those of a baseline step, by K, for each of a few prompts.

    Every prompt goes to every engine in turn for a few steps, of which the median counts: a disturbance of the machine, short or long,
    spoils few steps or few ratios, which medians ignore. As many steps are timed at every K, and each drafts and verifies K tokens.

    Raises:
        UserError: the answers are too short.
    """
    order = [0, *ks]
    ratios: dict[int, list[float]] = {k: [] for k in ks}
    prompts = draw(suite.prompts, recipe.evaluate.step_cost_prompts, seed=recipe.seed)
    with Bar("step cost", total=len(prompts) * len(order), unit="answers") as bar:
        for index, prompt in enumerate(prompts):
            seconds: dict[int, float] = {}
            shift = index % len(order)  # no engine is always first
            for k in order[shift:] + order[:shift]:
                if steps := engines[k].step_seconds(prompt.token_ids, _STEPS):
                    seconds[k] = statistics.median(steps)
                bar.step()
            for k in ks:
                if 0 in seconds and k in seconds:
                    ratios[k].append(seconds[k] / seconds[0])
    if not all(ratios.values()):
        raise UserError(
            f"The answers to {len(prompts)} prompts of the suite `{suite.name}` are a single token long, too short to time a step. "
            "Raise evaluate.step_cost_prompts, or put a suite with longer answers first."
        )
    return ratios
