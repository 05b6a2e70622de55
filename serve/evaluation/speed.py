"""Phase c: wall-clock speed of every configuration under several loads, and the fidelity of the timed answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation import fidelity
from draftsmith.serve.evaluation.configurations import (
    SIDE_BY_SIDE,
    Configuration,
    configurations,
    fastest_speculative,
    other_baseline,
    throughput,
    with_baselines,
)
from draftsmith.serve.evaluation.engine import EngineHost, Generated
from draftsmith.serve.evaluation.in_flight import Timing
from draftsmith.serve.evaluation.lineup import Lineup
from draftsmith.serve.evaluation.partial import PartialResults, TimedPrompt
from draftsmith.serve.evaluation.schema import AtStart, Difference, Fidelity, Throughput
from draftsmith.serve.evaluation.throughput import (
    PER_REQUEST_IN_FLIGHT,
    Asked,
    at_start,
    least_requests,
    request_schedule,
    run_load,
)
from draftsmith.serve.evaluation.variants import Variants


@dataclass(frozen=True)
class Load:
    """A constant number of requests in flight."""

    key: str
    """In `PartialResults.speeds`."""
    title: str
    """For the progress bar."""
    prompts: list[TimedPrompt]
    in_flight: int
    k: int
    """The drafter's."""

    def configurations(self, recipe: Recipe) -> list[Configuration]:
        return configurations(recipe, self.k, in_flight=self.in_flight)

    def requests(self, recipe: Recipe, *, noise: bool = False) -> Asked:
        """
        Args:
            noise: for two identical engines. In a single engine start nothing else depends on their ratio, so to save time a third of
                the requests do, but no fewer than 10 for each in flight; with several, its spread between starts widens every
                interval (`statistics.ratio`).
        """
        options = recipe.evaluate
        prompts = self.prompts[: max(least_requests(self.in_flight), options.timing_prompts)]
        found = request_schedule(prompts, self.in_flight, options.timing_tokens, seed=recipe.seed)
        if not noise or options.engine_starts > 1:
            return found
        counted = max(math.ceil((len(found) - self.in_flight) / 3), PER_REQUEST_IN_FLIGHT * self.in_flight)
        return found[: self.in_flight + counted]


def suite_load(name: str, partial: PartialResults, k: int) -> Load:
    """One request at a time on one suite."""
    return Load(name, name, partial.timed[name], 1, k)


def concurrent_load(in_flight: int, partial: PartialResults, k: int) -> Load:
    """Several requests in flight on the first suite."""
    return Load(f"{in_flight} at once", "load", partial.load_prompts, in_flight, k)


def measure_speeds(
    lineup: Lineup[Any], variants: Variants, loads: Sequence[Load], recipe: Recipe, partial: PartialResults
) -> None:
    """Measure the loads that are left, with engines started anew `engine_starts` times. The first time those that are up go on, unless
    that would give them answers to draft from that the other engine starts do not have."""
    starts = recipe.evaluate.engine_starts
    for number in range(starts):
        if number == len(partial.speeds):
            partial.speeds.append({})
        left = [load for load in loads if load.key not in partial.speeds[number]]
        if left:
            _restart(lineup, variants, number, starts)
            _measure_start(lineup, variants, left, number, recipe, partial)
    pairs = {load.key: _side_by_side(load, recipe, partial) for load in loads}
    for number in range(starts):
        left = [load for load in loads if not _has_pair(partial.speeds[number][load.key], pairs[load.key])]
        if left:
            _restart(lineup, variants, number, starts)
            for load in left:
                _measure_pair(lineup, variants, load, pairs[load.key], number, recipe, partial)


def _restart(lineup: Lineup[Any], variants: Variants, number: int, starts: int) -> None:
    if number or variants.draws_on_earlier_answers:
        lineup.restart(starts - 1 + number)


def _measure_start(
    lineup: Lineup[Any],
    variants: Variants,
    loads: Sequence[Load],
    number: int,
    recipe: Recipe,
    partial: PartialResults,
) -> None:
    """One engine start: every load on each group of engines."""
    every = dict.fromkeys(one for load in loads for one in load.configurations(recipe))
    measured: dict[str, dict[str, AtStart]] = {load.key: {} for load in loads}
    for engines in lineup.turns({one: variants.engine(one) for one in every}, lambda one: one.baseline):
        for load in loads:
            wanted = load.configurations(recipe)
            here = {one: engines[one] for one in wanted if one in engines}
            if len(here) < 2:  # the others come in another group
                continue
            requests = load.requests(recipe, noise=any(one.again for one in here))
            timings = run_load(here, requests, load.in_flight, load.title)
            partial.executions |= {one.name: engine.execution() for one, engine in here.items()}
            if number == 0:
                # The first start's alone: the control, which reads every answer of the baseline again piece by piece, would take as long
                # in each, and `fidelity.judge` takes differences for independent, while a near-tie comes up again in every start.
                judged, different = _judged(here, timings, requests, recipe, load)
                partial.fidelity[load.key] = partial.fidelity.get(load.key, {}) | judged
                partial.differences[load.key] = partial.differences.get(load.key, {}) | different
            at = {one: at_start(timing, requests) for one, timing in timings.items()}
            measured[load.key] = with_baselines(measured[load.key], at)
            if all(one.name in measured[load.key] for one in wanted):
                partial.speeds[number][load.key] = measured[load.key]
                partial.save()


def _side_by_side(load: Load, recipe: Recipe, partial: PartialResults) -> tuple[Configuration, ...]:
    """What is to be measured beside each other once more: a baseline, and what speculates in another dtype. Empty with one dtype."""
    starts, of = [start[load.key] for start in partial.speeds], load.configurations(recipe)
    other = other_baseline(starts, of)
    return () if other is None else (other, fastest_speculative(starts, of))


def _has_pair(measured: Mapping[str, AtStart], pair: Sequence[Configuration]) -> bool:
    return all(one.name + SIDE_BY_SIDE in measured for one in pair)


def _measure_pair(
    lineup: Lineup[Any],
    variants: Variants,
    load: Load,
    pair: Sequence[Configuration],
    number: int,
    recipe: Recipe,
    partial: PartialResults,
) -> None:
    for engines in lineup.turns({one: variants.engine(one) for one in pair}, lambda one: pair[0]):
        requests = load.requests(recipe)
        timings = run_load(engines, requests, load.in_flight, load.title)
        found = {one.name + SIDE_BY_SIDE: at_start(timing, requests) for one, timing in timings.items()}
        partial.speeds[number][load.key] = partial.speeds[number][load.key] | found
        partial.save()


def _judged(
    engines: Mapping[Configuration, EngineHost],
    timings: Mapping[Configuration, Sequence[Timing]],
    requests: Asked,
    recipe: Recipe,
    load: Load,
) -> tuple[dict[str, Fidelity], dict[str, list[Difference]]]:
    """Answers of speculative configurations against those of the baseline that they ran beside, of the same dtype. None of sampled ones.

    Of each prompt one answer counts, the first that both engines began: where the target is undecided, it is so in every answer to a prompt.
    """
    if not recipe.evaluate.sampling.greedy:
        return {}, {}
    by_request = {one: {timing.request: timing for timing in found} for one, found in timings.items()}
    baseline = next(one for one in engines if one == one.baseline)
    judged: dict[str, Fidelity] = {}
    different: dict[str, list[Difference]] = {}
    for one in [one for one in engines if one.speculation != 0]:
        own: dict[str, Generated] = {}
        other: dict[str, Generated] = {}
        asked: dict[str, list[int]] = {}
        for number, (prompt, request) in enumerate(requests):
            below, above = by_request[baseline].get(number), by_request[one].get(number)
            if prompt in own or below is None or above is None:
                continue
            asked[prompt] = request.prompt_token_ids
            own[prompt], other[prompt] = (Generated(tokens, None, 0.0) for tokens in _comparable(below, above))
        differing = fidelity.differences_with_margins(
            engines[baseline],
            asked,
            list(own.values()),
            list(other.values()),
            engines[one].config,
            one.speculation if isinstance(one.speculation, str) else None,
        )
        control = None
        if differing:
            piece = 1 + engines[one].config.num_speculative_tokens
            with Bar(f"{load.title}: control, {piece} tokens at once", total=len(asked), unit="answers") as bar:
                control = fidelity.control(
                    engines[baseline],
                    list(asked.values()),
                    list(own.values()),
                    piece=piece,
                    batch_size=load.in_flight,  # as many as speculation verifies side by side
                    max_model_len=recipe.engine.max_model_len,
                    on_batch=bar.update,
                )
        judged[one.name] = fidelity.judge(differing, list(own), list(own.values()), control)
        different[one.name] = differing[: fidelity.DIFFERENCES_KEPT]
    return judged, different


def _comparable(one: Timing, other: Timing) -> tuple[list[int], list[int]]:
    """Two answers as far as they can be compared: of one that had not ended when the clock stopped, the rest is not known."""
    length = min([len(each.token_ids) for each in (one, other) if not each.ended], default=None)
    return one.token_ids[:length], other.token_ids[:length]


def combined(load: Load, recipe: Recipe, partial: PartialResults) -> Throughput:
    """A load's figures over all engine starts."""
    return throughput(
        [start[load.key] for start in partial.speeds],
        load.configurations(recipe),
        in_flight=load.in_flight,
        requests=len(load.requests(recipe)) - load.in_flight,
        max_tokens=recipe.evaluate.timing_tokens,
        executions=partial.executions,
        fidelity=partial.fidelity.get(load.key, {}),
        differences=partial.differences.get(load.key, {}),
    )
