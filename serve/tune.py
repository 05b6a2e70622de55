"""How many tokens to guess at which load: measured once, then arithmetic.

A step of `batch` sequences with K guesses each costs c(batch, K) plain steps of as many sequences, and yields
L(K) = 1 + a_1 + ... + a_K tokens a sequence, where a_i is the share of drafts whose token at position i was accepted: a chain's
first tokens do not depend on how far it goes on. So decoding should gain L(K) / c(batch, K); the best K at every batch size makes
vLLM's schedule `num_speculative_tokens_per_batch_size`. K = 0 there means that guessing does not pay at that load: checking the
guesses needs arithmetic that is idle no longer. It has a cost of its own, c(batch, 0): vLLM has the drafter read along.

Beside it stands a roofline: the time that bytes and FLOP of such steps must take on the hardware of the recipe's `plan`.

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/tune/{tune.json,stage.json}`, which `draftsmith serve` goes by.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from typing_extensions import TypedDict

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn
from draftsmith.engine.environment import resolved
from draftsmith.engine.speculation import FIXED_K, method_config, own_drafter, serving_spec
from draftsmith.engine.step_cost import EngineStep, target_sizes
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.curve import non_decreasing
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated, start_engines
from draftsmith.serve.evaluation.intervals import Ratio
from draftsmith.serve.evaluation.lineup import Lineup, Placement, find_placement
from draftsmith.serve.evaluation.suites import draw, load_suite, render_suite, turn_renderer
from draftsmith.serve.evaluation.throughput import REQUESTS_PER_SLOT, AtStart, at_start, run_load, schedule, speedup
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target

_COST_TOKENS = 24
"""Response tokens of an answer whose steps are timed."""
_COST_ANSWERS = 12
"""At least so many answers are timed at every batch size, in rounds of a batch; at least three rounds."""
_VERSION = 4
_READS_ALONG, _BY_SCHEDULE = -1, -2
"""Among engines numbered by K, 0 being the plain one: whose drafter guesses nothing, and which goes by the schedule."""

ByBatch = dict[str, dict[str, float]]
"""By number of sequences at once, then by K; both as strings."""


class Tuned(TypedDict):
    """`tune.json`."""

    target: str
    drafter_sha256: dict[str, str]
    acceptance_per_position: list[float]
    """Share of drafts whose token at position i was accepted, at the highest K."""
    acceptance_length: dict[str, float]
    """By K, from that."""
    step_cost: ByBatch
    """Seconds of a step over those of a plain engine's with as many sequences, no less than at a smaller K (isotonic regression
    where measurements say otherwise); K = 0: the drafter guesses nothing and reads along, which cannot cost less than 1."""
    speedup: ByBatch
    """What decoding should gain: acceptance length over step cost."""
    roofline: ByBatch | None
    """The same with step costs computed from bytes and FLOP; None where the recipe's `plan` has no `hardware`."""
    schedule: list[list[int]]
    """vLLM's `num_speculative_tokens_per_batch_size`: from, to, K."""
    pays: bool
    """Whether guessing gains anything at any of the loads."""
    measured: dict[str, dict[str, Ratio]] | None
    """Wall-clock speedup by requests in flight, then by K, as `evaluate` defines it (serve/evaluation/throughput.py); with `verify`."""
    schedule_measured: dict[str, Ratio] | None
    """The same of an engine that goes by the schedule."""
    engine_starts: int
    """How often engines were started anew for `measured`."""
    dtype: str
    versions: dict[str, str]
    machine: res.Machine
    engine: res.Engines


def run_tune(recipe: Recipe, run_dir: Path, *, verify: bool = False) -> Tuned:
    """Measure what steps cost and what is accepted, and choose; or return what was found before.

    Args:
        recipe: `target`, `engine`, `tune`, `plan` and the suite that `tune` names are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/`.
        verify: measure wall-clock speedups, too, at every batch size and K, and with the schedule.

    Raises:
        UserError: there is no drafter, or the suite has too few prompts.
        DraftsmithError: an engine failed.
    """
    started = time.time()
    options = recipe.tune
    target = describe_target(prepare_target(recipe.target), recipe.target)
    drafter_dir = run_dir / "vllm"
    method = own_drafter(drafter_dir)
    suite = options.suite or next(iter(recipe.evaluate.suites), None)
    if suite is None:
        raise UserError("There are no prompts to tune on: `evaluate.suites` is empty. Give it a suite.")
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    every = render_suite(renderer, suite, load_suite(recipe, suite), options.tokens).prompts
    prompts = draw(every, options.prompts, seed=recipe.seed)
    if len(prompts) < max(options.concurrency):
        raise UserError(
            f"The suite `{suite}` has {len(prompts)} prompts, too few for {max(options.concurrency)} at once. Lower "
            "tune.concurrency, raise tune.prompts, or name a larger suite in tune.suite."
        )
    sections = {
        "engine": resolved(recipe.engine).model_dump(mode="json"), "tune": options.model_dump(mode="json"),
        "plan": recipe.plan.model_dump(mode="json") if recipe.plan else None, "dtype": recipe.target.dtype,
    }  # fmt: skip
    drafter_sha256 = {file: stage.sha256_of(drafter_dir / file) for file in ("config.json", "model.safetensors")}
    inputs = digest(
        {
            "version": _VERSION, "target": [target.revision, target.config_hash], "drafter": drafter_sha256,
            "prompts": [prompt.token_ids for prompt in prompts], "most": recipe.extract.max_num_seqs, "verify": verify, **sections,
        }
    )  # fmt: skip
    output = run_dir / options.output
    if stage.finished(output, inputs):
        record = stage.read(output)
        assert record is not None
        found: Tuned = record["figures"]
        console.print(f"tune: finished before, see {output / 'tune.json'}", highlight=False, soft_wrap=True)
        print_tuned(found)
        return found
    stage.claim(output, fresh=True)

    def speculative(**changes: Any) -> dict[str, Any] | None:
        return method_config(
            method.model_copy(update=changes), target, own_drafter=drafter_dir,
            tensor_parallel_size=recipe.engine.tensor_parallel_size,
        )  # fmt: skip

    ks, most = sorted(options.k), max(options.concurrency)
    configs = {0: None} | {k: speculative(num_speculative_tokens=k) for k in ks}
    if method.method not in FIXED_K:
        idle_drafter = speculative(num_speculative_tokens_per_batch_size=((1, most, 0), (most + 1, most + 1, 1)))
        configs[_READS_ALONG] = idle_drafter
    tokens = most * (max(len(prompt.token_ids) for prompt in every) + max(options.tokens, _COST_TOKENS))
    placement = find_placement(
        recipe.engine, target, list(configs.values()), dtypes=[recipe.target.dtype], tokens=tokens, at_least=tokens,
        smaller="tune.concurrency",
    )  # fmt: skip
    costs: dict[int, dict[int, float]] = {batch: {} for batch in sorted(options.concurrency)}
    shares: list[float] = []
    lineup = _lineup(placement, output)
    try:
        for engines in _turns(lineup, recipe, target, configs):
            for batch, of_group in _step_costs(engines, prompts, options.concurrency).items():
                costs[batch] |= of_group
            if ks[-1] in engines:
                shares = _acceptance(engines[ks[-1]], prompts, options.tokens)
    finally:
        lineup.close()
    for of_batch in costs.values():
        if _READS_ALONG in of_batch:
            of_batch[0] = max(1.0, of_batch.pop(_READS_ALONG))
        in_order = sorted(of_batch)
        of_batch.update(zip(in_order, non_decreasing([of_batch[k] for k in in_order]), strict=True))
    lengths = {k: 1 + sum(shares[:k]) for k in (0, *ks)}
    speedups = {
        batch: {k: lengths[k] / cost for k, cost in sorted(of_batch.items())} for batch, of_batch in costs.items()
    }  # fmt: skip
    if method.method in FIXED_K:  # the best of the smallest load, where that pays
        smallest = {min(speedups): speedups[min(speedups)]}
        best_k = make_schedule(smallest, most=recipe.extract.max_num_seqs)
    else:
        best_k = make_schedule(speedups, most=recipe.extract.max_num_seqs)
    pays = any(k for _, _, k in best_k)
    measured = schedule_measured = None
    if verify:
        timed = {k: config for k, config in configs.items() if k != _READS_ALONG}
        if pays:
            timed[_BY_SCHEDULE] = speculative(num_speculative_tokens_per_batch_size=tuple(map(tuple, best_k)))
        measured = _measure(recipe, target, placement, timed, draw(every, len(every), seed=recipe.seed), output)
        if pays:
            schedule_measured = {str(batch): of_batch.pop(_BY_SCHEDULE) for batch, of_batch in measured.items()}
    found = {
        "target": target.name,
        "drafter_sha256": drafter_sha256,
        "acceptance_per_position": shares,
        "acceptance_length": {str(k): length for k, length in lengths.items()},
        "step_cost": _as_text(costs),
        "speedup": _as_text(speedups),
        "roofline": _roofline(recipe, target, drafter_dir, prompts, {k: lengths[k] for k in ks}),
        "schedule": best_k,
        "pays": pays,
        "measured": {str(n): {str(k): one for k, one in of_n.items()} for n, of_n in measured.items()}
        if measured
        else None,
        "schedule_measured": schedule_measured,
        "engine_starts": options.engine_starts,
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": res.machine(),
        "engine": res.engines(recipe.engine, placement.at_once),
    }
    stage.write_json(output / "tune.json", found)
    stage.finish(
        output, stage="tune", inputs=inputs, recipe=sections, figures=dict(found), started=started, files=("tune.json",)
    )
    print_tuned(found)
    return found


def make_schedule(speedups: Mapping[int, Mapping[int, float]], *, most: int) -> list[list[int]]:
    """The best K by number of sequences, as vLLM takes it: `[[from, to, K], ...]`.

    Between two batch sizes the larger one's K holds: there guessing pays least. Where no load gains anything, K is 0 at all.

    Args:
        speedups: by batch size and K; K = 0 guesses nothing, 1 where it is not among them.
        most: sequences that an engine runs at once; the last range goes on to there.
    """
    if all(speedup <= 1 for of_batch in speedups.values() for k, speedup in of_batch.items() if k):
        return [[1, max(most, *speedups), 0]]
    ranges: list[list[int]] = []
    for batch in sorted(speedups):
        of_batch = {0: 1.0} | dict(speedups[batch])
        k = max(sorted(of_batch), key=lambda k: of_batch[k])
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = batch
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, batch, k])
    ranges[-1][1] = max(ranges[-1][1], most)
    return ranges


def schedule_of(run_dir: Path, output: str) -> list[list[int]] | None:
    """What tuning chose for the drafter that is in the run now, K = 0 where it does not pay; None where it was not tuned."""
    record = stage.read(run_dir / output) if (run_dir / output).is_dir() else None
    if record is None or record.get("stage") != "tune":
        return None
    tuned = record["figures"]
    if any(stage.sha256_of(run_dir / "vllm" / file) != of_file for file, of_file in tuned["drafter_sha256"].items()):
        return None
    return list(tuned["schedule"])


def _lineup(placement: Placement, log_dir: Path, number: int = 0) -> Lineup[int]:
    """Engines of one engine start, by K."""

    def start(configs: Sequence[EngineSpec]) -> list[EngineHost]:
        with Bar("start engines", total=len(configs), unit="engines") as bar:
            return start_engines(configs, log_dir, on_ready=bar.update)

    return Lineup(placement, start, number)


def _turns(
    lineup: Lineup[int], recipe: Recipe, target: TargetInfo, configs: Mapping[int, dict[str, Any] | None]
) -> Iterator[dict[int, EngineHost]]:
    engines = {
        k: EngineSpec(
            name={0: "plain", _READS_ALONG: "reads-along", _BY_SCHEDULE: "schedule"}.get(k, f"k{k}"), target=str(target.path),
            dtype=recipe.target.dtype, engine=recipe.engine, speculative=config, max_num_seqs=max(recipe.tune.concurrency),
        )
        for k, config in configs.items()
    }  # fmt: skip
    return lineup.turns(engines, lambda k: 0)


def _step_seconds(answers: Sequence[Generated]) -> float:
    """Of the answer of a batch that ended first: all its steps had the whole batch. 0 where none is longer than a token."""
    longer = [answer for answer in answers if len(answer.token_ids) > 1]
    if not longer:
        return 0.0
    first = min(longer, key=lambda answer: answer.decode_seconds)
    # Prefill gives the first token; from there every step of a speculative engine checks a draft.
    return first.decode_seconds / (len(first.drafted) or len(first.token_ids) - 1)


def _step_costs(
    engines: Mapping[int, EngineHost], prompts: Sequence[Turn], batch_sizes: Sequence[int]
) -> dict[int, dict[int, float]]:
    """By batch size and K: the median over rounds in which every engine had the same batch, in turns."""
    rounds = {batch: max(3, math.ceil(_COST_ANSWERS / batch)) for batch in batch_sizes}
    order, done = list(engines), 0
    costs: dict[int, dict[int, float]] = {}
    with Bar("step cost", total=sum(rounds.values()) * len(order), unit="batches") as bar:
        for batch in sorted(batch_sizes):
            ratios: dict[int, list[float]] = {k: [] for k in order[1:]}
            for number in range(-1, rounds[batch]):  # the first warms up
                first = max(number, 0) * batch % (len(prompts) - batch + 1)
                inputs = [prompt.token_ids for prompt in prompts[first : first + batch]]
                shift = number % len(order)  # nobody is always first
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


def _acceptance(engine: EngineHost, prompts: Sequence[Turn], tokens: int) -> list[float]:
    """Share of drafts accepted by position, over all prompts."""
    before = engine.counters()
    with Bar("acceptance", total=1, unit="batches") as bar:
        engine.generate([prompt.token_ids for prompt in prompts], max_tokens=tokens)
        bar.update(1)
    return res.acceptance(engine.counters() - before)["acceptance_per_position"]


def _measure(
    recipe: Recipe,
    target: TargetInfo,
    placement: Placement,
    configs: Mapping[int, dict[str, Any] | None],
    prompts: Sequence[Turn],
    log_dir: Path,
) -> dict[int, dict[int, Ratio]]:
    """Wall-clock speedup by requests in flight and K, with engines started anew `tune.engine_starts` times."""
    options = recipe.tune
    # By requests in flight and K, in every engine start: plain decoding as it was beside it, and itself.
    starts: dict[int, dict[int, list[tuple[AtStart, AtStart]]]] = {
        in_flight: {k: [] for k in configs if k != 0} for in_flight in sorted(options.concurrency)
    }
    for number in range(options.engine_starts):
        lineup = _lineup(placement, log_dir, number)
        try:
            for engines in _turns(lineup, recipe, target, configs):
                for in_flight, found in starts.items():
                    asked = prompts[: max(REQUESTS_PER_SLOT * in_flight, options.prompts)]
                    ids = [(prompt.id, prompt.token_ids) for prompt in asked]
                    requests = schedule(ids, in_flight, options.tokens, seed=recipe.seed)
                    timings = run_load(engines, requests, in_flight, "measured")
                    at = {k: at_start(timing, requests) for k, timing in timings.items()}
                    for k in [k for k in engines if k != 0]:
                        found[k].append((at[0], at[k]))
        finally:
            lineup.close()
    return {
        in_flight: {k: speedup([plain for plain, _ in both], [own for _, own in both]) for k, both in found.items()}
        for in_flight, found in starts.items()
    }


def _roofline(
    recipe: Recipe,
    target: TargetInfo,
    drafter_dir: Path,
    prompts: Sequence[Turn],
    lengths: Mapping[int, float],
) -> ByBatch | None:
    """Speed-ups with steps as long as their bytes or FLOP take (Williams et al., 2009), whichever is more."""
    hardware = recipe.plan.hardware if recipe.plan else None
    if hardware is None:
        return None
    sizes = target_sizes(target.config)
    number = getattr(torch, recipe.target.dtype).itemsize
    context = statistics.mean(len(prompt.token_ids) for prompt in prompts) + recipe.tune.tokens / 2
    weights = (drafter_dir / "model.safetensors").stat().st_size / (hardware.memory_gb_per_second * 1e9)
    # Heads of their own for every position are read once; one module that goes round is read every time.
    readings = (lambda k: 1) if serving_spec(drafter_dir).single_pass else (lambda k: k)
    found: dict[int, dict[int, float]] = {}
    for batch in recipe.tune.concurrency:

        def seconds(tokens: int, batch: int = batch) -> float:
            step = EngineStep(sizes, number, recipe.engine.tensor_parallel_size, batch, context, tokens=tokens)
            return step.seconds(hardware)

        found[batch] = {
            k: length * seconds(1) / (seconds(1 + k) + readings(k) * weights / hardware.decode_utilization)
            for k, length in lengths.items()
        }
    return _as_text(found)


def _as_text(found: Mapping[int, Mapping[int, float]]) -> ByBatch:
    return {str(batch): {str(k): value for k, value in of_batch.items()} for batch, of_batch in found.items()}


def print_tuned(tuned: Tuned) -> None:
    """What was found, on screen."""
    table = Table(title=f"{tuned['target']}: what guessing K tokens gains, by sequences at once", box=SIMPLE_HEAD)
    for heading in ("at once", "K", "acceptance length", "step cost", "speed-up", "measured", "roofline"):
        table.add_column(heading, justify="right")
    for batch, of_batch in tuned["speedup"].items():
        for k, value in of_batch.items():
            measured = tuned["measured"][batch].get(k) if tuned["measured"] else None
            shown = (
                f"{measured['value']:.2f} ({measured['interval'][0]:.2f} to {measured['interval'][1]:.2f})"
                if measured
                else ""
            )
            roofline = tuned["roofline"][batch].get(k) if tuned["roofline"] else None
            table.add_row(
                batch if k == next(iter(of_batch)) else "", k, f"{tuned['acceptance_length'][k]:.3f}",
                f"{tuned['step_cost'][batch][k]:.2f}", f"{value:.2f}", shown,
                f"{roofline:.2f}" if roofline else "",
            )  # fmt: skip
    console.print(table)
    for batch, one in (tuned["schedule_measured"] or {}).items():
        low, high = one["interval"]
        console.print(
            f"{batch} at once, with the schedule: {one['value']:.2f} ({low:.2f} to {high:.2f}), wall-clock",
            highlight=False,
        )
    if tuned["pays"]:
        console.print(
            f"tune: num_speculative_tokens_per_batch_size = {json.dumps(tuned['schedule'])}; `draftsmith serve` goes by it",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        console.print("tune: speculation does not pay here at any of these loads; `draftsmith serve` goes without it")
