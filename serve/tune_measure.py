"""What tuning measures: step cost by batch size, acceptance by position, and wall-clock speedup by concurrency."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.config.methods import Suffix
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn
from draftsmith.engine.speculation import DEPENDING_ON_K, drafts_fixed_k
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.curve import non_decreasing
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated
from draftsmith.serve.evaluation.lineup import Lineup, engine_starter, find_placement, serves_every_k
from draftsmith.serve.evaluation.schema import AtStart, EngineSpeed, Ratio
from draftsmith.serve.evaluation.statistics import decoding_steps
from draftsmith.serve.evaluation.throughput import (
    at_start,
    engine_speed,
    least_requests,
    paired,
    request_schedule,
    run_load,
    speedup,
)
from draftsmith.serve.speculator import Ranges, Speculator
from draftsmith.target.info import TargetInfo

_COST_TOKENS = 24  # response tokens of an answer whose steps are timed
_COST_ANSWERS = 12
"""At least so many answers are timed at every batch size, in rounds of a batch; at least three rounds."""
_IDLE_DRAFTER, _BY_SCHEDULE, _BASELINE_AGAIN = -1, -2, -3
"""Keys of variants, beside K and 0 for the baseline: a drafter that proposes nothing, one that follows the schedule, and a second baseline
engine, whose distance from the first is the machine's noise."""


class MeasuredSpeedup(Ratio):
    """A wall-clock speedup, and both engines' figures as they ran side by side."""

    baseline: EngineSpeed
    speculative: EngineSpeed


class TuneEngines:
    """What tuning compares: the baseline, the drafter at each K, and an idle drafter."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, speculator: Speculator, prompts: Sequence[Turn], log_dir: Path
    ) -> None:
        self._recipe, self._target, self._speculator = recipe, target, speculator
        self.fixed_k = drafts_fixed_k(speculator.method)
        self.depends_on_k = speculator.method.method in DEPENDING_ON_K
        self.draws_on_earlier_answers = isinstance(speculator.method, Suffix)
        options, self._most = recipe.tune, max(recipe.tune.concurrency)
        assert options.k is not None  # `Speculator.measured`
        self.ks = sorted({*options.k})
        self._one_for_every_k = serves_every_k(speculator.method, recipe.engine)
        longest = max(len(turn.token_ids) for turn in prompts) + max(options.tokens, _COST_TOKENS)
        placement = find_placement(
            recipe.engine,
            target,
            [self.spec(k).speculative for k in (0, *self.ks)],
            dtypes=[recipe.target.dtype],
            room=(self._most, longest),
            at_least=(self._most, longest),
            smaller="tune.concurrency",
        )
        self.lineup: Lineup[int] = Lineup(placement, engine_starter(log_dir))

    def spec(self, key: int, schedule: Ranges = ()) -> EngineSpec:
        """The engine of a variant: K, 0 for the baseline, or one of the keys above; `_BY_SCHEDULE` with that schedule."""
        if key == 0:
            return self._spec("baseline")
        if key == _BASELINE_AGAIN:
            return self._spec("baseline-again")
        if self._one_for_every_k:
            shared = self._spec("drafter", ranges=((1, self._most, self.ks[-1]),))
            return replace(shared, k_by_load=schedule or ((1, self._most, max(key, 0)),))
        if key == _BY_SCHEDULE:
            return self._spec("schedule", ranges=schedule)
        if key == _IDLE_DRAFTER:
            never = ((1, self._most, 0), (self._most + 1, self._most + 1, 1))
            return self._spec("idle-drafter", ranges=never)
        return self._spec(f"k{key}", k=key)

    def _spec(self, name: str, *, k: int | None = None, ranges: Ranges | None = None) -> EngineSpec:
        """An engine; with the drafter if it has a number of tokens to draft."""
        speculative = None
        if k is not None or ranges is not None:
            split = self._recipe.engine.tensor_parallel_size
            speculative = self._speculator.config(self._target, split, k=k, ranges=ranges)
        return EngineSpec(
            name=name,
            target=str(self._target.path),
            dtype=self._recipe.target.dtype,
            engine=self._recipe.engine,
            trust_remote_code=self._target.trust_remote_code,
            speculative=speculative,
            max_num_seqs=self._most,
            sampling=self._recipe.evaluate.sampling,
        )

    def turns(self, keys: Sequence[int], schedule: Ranges = ()) -> Iterator[dict[int, EngineHost]]:
        """Groups of variants that are asked together, each with the baseline."""
        return self.lineup.turns(
            {key: self.spec(key, schedule if key == _BY_SCHEDULE else ()) for key in keys}, lambda k: 0
        )


def measure_steps(
    engines: TuneEngines, prompts: Sequence[Turn], recipe: Recipe
) -> tuple[dict[int, dict[int, float]], dict[int, list[float]]]:
    """Step cost by batch size and K, never less than at a smaller K; and by K the share of drafts accepted by position, which for most
    methods is measured at the highest alone: their first draft tokens are the same at every K."""
    options = recipe.tune
    costs: dict[int, dict[int, float]] = {batch: {} for batch in sorted(options.concurrency)}
    shares: dict[int, list[float]] = {}
    for group in engines.turns([0, *engines.ks, *([] if engines.fixed_k else [_IDLE_DRAFTER])]):
        for batch, of_group in _step_costs(group, prompts, options.concurrency).items():
            costs[batch] |= of_group
        for k in engines.ks if engines.depends_on_k else engines.ks[-1:]:
            if k in group:
                shares[k] = _acceptance(group[k], prompts, options.tokens)
    for of_batch in costs.values():
        if _IDLE_DRAFTER in of_batch:
            of_batch[0] = max(1.0, of_batch.pop(_IDLE_DRAFTER))
        in_order = sorted(of_batch)
        of_batch.update(zip(in_order, non_decreasing([of_batch[k] for k in in_order]), strict=True))
    highest = shares[engines.ks[-1]]
    return costs, {k: shares.get(k, highest[:k]) for k in engines.ks}


def _step_costs(
    engines: Mapping[int, EngineHost], prompts: Sequence[Turn], batch_sizes: Sequence[int]
) -> dict[int, dict[int, float]]:
    """By batch size and K: the median over rounds in which every engine ran the same batch."""
    rounds = {batch: max(3, math.ceil(_COST_ANSWERS / batch)) for batch in batch_sizes}
    order, done = list(engines), 0
    costs: dict[int, dict[int, float]] = {}
    with Bar("step cost", total=sum(rounds.values()) * len(order), unit="batches") as bar:
        for batch in sorted(batch_sizes):
            ratios: dict[int, list[float]] = {k: [] for k in order[1:]}
            for number in range(-1, rounds[batch]):  # the first warms up
                first = max(number, 0) * batch % (len(prompts) - batch + 1)
                inputs = [turn.token_ids for turn in prompts[first : first + batch]]
                shift = number % len(order)  # no engine is always first
                seconds = {}
                for k in order[shift:] + order[:shift]:
                    seconds[k] = _step_seconds(engines[k].generate(inputs, max_tokens=_COST_TOKENS)[0])
                    done += number >= 0
                    bar.update(done)
                if number >= 0 and all(seconds.values()):
                    for k in ratios:
                        ratios[k].append(seconds[k] / seconds[0])
            if not all(ratios.values()):
                raise UserError(
                    "The answers of the suite's first prompts are a single token long, too short to time a step. Name another "
                    "suite in tune.suite."
                )
            costs[batch] = {k: statistics.median(found) for k, found in ratios.items()}
    return costs


def _step_seconds(answers: Sequence[Generated]) -> float:
    """Seconds per step of the batch's first answer to end, during which the batch was whole; 0 if all have a single token."""
    longer = [answer for answer in answers if len(answer.token_ids) > 1]
    if not longer:
        return 0.0
    first = min(longer, key=lambda answer: answer.decode_seconds)
    return first.decode_seconds / decoding_steps(first)


def _acceptance(engine: EngineHost, prompts: Sequence[Turn], tokens: int) -> list[float]:
    """Share of steps whose draft token was accepted, by position, over all prompts; a lookup method drafts in some steps only."""
    before = engine.counters()
    with Bar("acceptance", total=1, unit="batches") as bar:
        answers, _ = engine.generate([turn.token_ids for turn in prompts], max_tokens=tokens)
        bar.update(1)
    steps = max(1, sum(map(decoding_steps, answers)))
    return [count / steps for count in (engine.counters() - before).accepted_per_position]


def measure_speedups(
    engines: TuneEngines, schedule: list[list[int]] | None, prompts: Sequence[Turn], recipe: Recipe
) -> tuple[dict[int, dict[int, MeasuredSpeedup]], dict[int, MeasuredSpeedup], dict[int, Ratio]]:
    """Wall-clock speedup by requests in flight and K, with engines started anew `tune.engine_starts` times; of the schedule, by requests
    in flight, empty if there is none; and so of a second baseline engine over the first."""
    options = recipe.tune
    keys = [_BASELINE_AGAIN, *engines.ks, *([] if schedule is None else [_BY_SCHEDULE])]
    ranges = tuple((first, last, k) for first, last, k in schedule or ())
    # By requests in flight and K, in every engine start: the baseline as it ran beside it, and itself.
    starts: dict[int, dict[int, list[tuple[AtStart, AtStart]]]] = {
        in_flight: {k: [] for k in keys} for in_flight in sorted(options.concurrency)
    }
    for number in range(options.engine_starts):
        # The first goes on with the engines that step costs were measured with, unless it would draft from answers that the others do not have.
        if number or engines.draws_on_earlier_answers:
            engines.lineup.restart(number)
        for group in engines.turns([0, *keys], ranges):
            for k in [k for k in group if k != 0]:
                for in_flight, found in starts.items():
                    asked = prompts[: max(least_requests(in_flight), options.prompts)]
                    ids = [(turn.id, turn.token_ids) for turn in asked]
                    requests = request_schedule(ids, in_flight, options.tokens, seed=recipe.seed)
                    timings = run_load({0: group[0], k: group[k]}, requests, in_flight, "measured")
                    at = {k: at_start(timing, requests) for k, timing in timings.items()}
                    found[k].append((at[0], at[k]))
    speedups: dict[int, dict[int, MeasuredSpeedup]] = {}
    noise: dict[int, Ratio] = {}
    for in_flight, found in starts.items():
        pairs = {k: ([baseline for baseline, _ in both], [own for _, own in both]) for k, both in found.items()}
        again = pairs.pop(_BASELINE_AGAIN)
        noise[in_flight] = speedup(*again)
        speedups[in_flight] = {
            k: {
                **speedup(baseline, own, noise=paired(*again)),
                "baseline": engine_speed(baseline),
                "speculative": engine_speed(own),
            }
            for k, (baseline, own) in pairs.items()
        }
    of_schedule = {n: found.pop(_BY_SCHEDULE) for n, found in speedups.items() if schedule is not None}
    return speedups, of_schedule, noise
