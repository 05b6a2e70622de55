"""What tuning measures: step cost by batch size, acceptance by position, and wall-clock speedup by concurrency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn
from draftsmith.engine.speculation import FIXED_K, method_config, own_drafter
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.curve import non_decreasing
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated
from draftsmith.serve.evaluation.lineup import Lineup, engine_starter, find_placement
from draftsmith.serve.evaluation.schema import AtStart, Ratio
from draftsmith.serve.evaluation.statistics import acceptance
from draftsmith.serve.evaluation.throughput import REQUESTS_PER_SLOT, at_start, request_schedule, run_load, speedup
from draftsmith.target.info import TargetInfo

_COST_TOKENS = 24
"""Response tokens of an answer whose steps are timed."""
_COST_ANSWERS = 12
"""At least so many answers are timed at every batch size, in rounds of a batch; at least three rounds."""
_IDLE_DRAFTER, _BY_SCHEDULE = -1, -2
"""Keys of engines, beside K and 0 for the baseline: one whose drafter proposes nothing, and one that follows the schedule."""


class TuneEngines:
    """The engines that tuning compares: the baseline, the drafter at each K, and an idle drafter."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, drafter_dir: Path, prompts: Sequence[Turn], log_dir: Path
    ) -> None:
        self._recipe, self._target, self._drafter_dir = recipe, target, drafter_dir
        self._method = own_drafter(drafter_dir)
        self.fixed_k = self._method.method in FIXED_K
        """Whether vLLM drafts the same number of tokens at every load."""
        options, most = recipe.tune, max(recipe.tune.concurrency)
        self.configs: dict[int, dict[str, Any] | None] = {0: None}
        """vLLM's `speculative_config` by K."""
        for k in sorted(options.k):
            self.configs[k] = self.speculative_config(num_speculative_tokens=k)
        self.idle_drafter: dict[int, dict[str, Any] | None] = {}
        """The same of the idle drafter; empty for a method with a fixed K."""
        if not self.fixed_k:
            ranges = ((1, most, 0), (most + 1, most + 1, 1))
            self.idle_drafter[_IDLE_DRAFTER] = self.speculative_config(num_speculative_tokens_per_batch_size=ranges)
        tokens = most * (max(len(turn.token_ids) for turn in prompts) + max(options.tokens, _COST_TOKENS))
        self.placement = find_placement(
            recipe.engine, target, [*self.configs.values(), *self.idle_drafter.values()], dtypes=[recipe.target.dtype],
            tokens=tokens, at_least=tokens, smaller="tune.concurrency",
        )  # fmt: skip
        self._start = engine_starter(log_dir)

    def speculative_config(self, **changes: Any) -> dict[str, Any] | None:
        return method_config(
            self._method.model_copy(update=changes), self._target, own_drafter=self._drafter_dir,
            tensor_parallel_size=self._recipe.engine.tensor_parallel_size,
        )  # fmt: skip

    def turns(
        self, configs: Mapping[int, dict[str, Any] | None], number: int = 0
    ) -> Generator[dict[int, EngineHost], None, None]:
        """Groups of engines that are up together, each with the baseline, in one engine start."""
        names = {0: "baseline", _IDLE_DRAFTER: "idle-drafter", _BY_SCHEDULE: "schedule"}
        specs = {
            k: EngineSpec(
                name=names.get(k, f"k{k}"), target=str(self._target.path), dtype=self._recipe.target.dtype, engine=self._recipe.engine,
                speculative=config, max_num_seqs=max(self._recipe.tune.concurrency),
            )
            for k, config in configs.items()
        }  # fmt: skip
        lineup: Lineup[int] = Lineup(self.placement, self._start, number)
        with closing(lineup):
            yield from lineup.turns(specs, lambda k: 0)


def measure_steps(
    engines: TuneEngines, prompts: Sequence[Turn], recipe: Recipe
) -> tuple[dict[int, dict[int, float]], list[float]]:
    """Step cost by batch size and K, never less than at a smaller K; and the share of drafts accepted by position."""
    options = recipe.tune
    costs: dict[int, dict[int, float]] = {batch: {} for batch in sorted(options.concurrency)}
    shares: list[float] = []
    with closing(engines.turns(engines.configs | engines.idle_drafter)) as turns:
        for group in turns:
            for batch, of_group in _step_costs(group, prompts, options.concurrency).items():
                costs[batch] |= of_group
            if max(options.k) in group:
                shares = _acceptance(group[max(options.k)], prompts, options.tokens)
    for of_batch in costs.values():
        if _IDLE_DRAFTER in of_batch:
            of_batch[0] = max(1.0, of_batch.pop(_IDLE_DRAFTER))
        in_order = sorted(of_batch)
        of_batch.update(zip(in_order, non_decreasing([of_batch[k] for k in in_order]), strict=True))
    return costs, shares


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
    # Prefill gives the first token; after that every step of a speculative engine verifies a draft.
    return first.decode_seconds / (len(first.drafted) or len(first.token_ids) - 1)


def _acceptance(engine: EngineHost, prompts: Sequence[Turn], tokens: int) -> list[float]:
    """Share of drafts accepted by position, over all prompts."""
    before = engine.counters()
    with Bar("acceptance", total=1, unit="batches") as bar:
        engine.generate([turn.token_ids for turn in prompts], max_tokens=tokens)
        bar.update(1)
    return acceptance(engine.counters() - before)["acceptance_per_position"]


def measure_speedups(
    engines: TuneEngines, schedule: list[list[int]] | None, prompts: Sequence[Turn], recipe: Recipe
) -> tuple[dict[int, dict[int, Ratio]], dict[int, Ratio]]:
    """Wall-clock speedup by requests in flight and K, with engines started anew `tune.engine_starts` times.

    Args:
        schedule: also measured; None for none.

    Returns:
        By requests in flight and K; and of the schedule, by requests in flight, empty if there is none.
    """
    options = recipe.tune
    configs = dict(engines.configs)
    if schedule is not None:
        ranges = tuple(map(tuple, schedule))
        configs[_BY_SCHEDULE] = engines.speculative_config(num_speculative_tokens_per_batch_size=ranges)
    # By requests in flight and K, in every engine start: the baseline as it ran beside it, and itself.
    starts: dict[int, dict[int, list[tuple[AtStart, AtStart]]]] = {
        in_flight: {k: [] for k in configs if k != 0} for in_flight in sorted(options.concurrency)
    }
    for number in range(options.engine_starts):
        with closing(engines.turns(configs, number)) as turns:
            for group in turns:
                for in_flight, found in starts.items():
                    asked = prompts[: max(REQUESTS_PER_SLOT * in_flight, options.prompts)]
                    ids = [(turn.id, turn.token_ids) for turn in asked]
                    requests = request_schedule(ids, in_flight, options.tokens, seed=recipe.seed)
                    timings = run_load(group, requests, in_flight, "measured")
                    at = {k: at_start(timing, requests) for k, timing in timings.items()}
                    for k in [k for k in group if k != 0]:
                        found[k].append((at[0], at[k]))
    speedups = {
        in_flight: {
            k: speedup([baseline for baseline, _ in both], [own for _, own in both]) for k, both in found.items()
        }
        for in_flight, found in starts.items()
    }
    of_schedule = {n: found.pop(_BY_SCHEDULE) for n, found in speedups.items() if schedule is not None}
    return speedups, of_schedule
