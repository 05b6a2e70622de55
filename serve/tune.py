"""The tune stage: how many tokens to draft at which load.

A step of `batch` sequences with K draft tokens each costs c(batch, K) baseline steps of as many sequences and yields
L(K) = 1 + a_1 + ... + a_K tokens per sequence, where a_i is the share of drafts whose token at position i was accepted. It is measured at
the highest K for all, since a chain's first tokens do not depend on its length; where those of a block do, at each K. The estimated speedup is L(K) / c(batch, K), and the best K at every batch size makes
vLLM's schedule `num_speculative_tokens_per_batch_size`. K = 0 means that speculation does not pay at that load: verifying drafts
needs arithmetic that is no longer idle. It costs c(batch, 0), because vLLM still feeds the idle drafter.

The roofline (`roofline.py`) puts arithmetic beside the measurement: steps as long as their bytes and FLOP take on the hardware of the
recipe's `plan`.

Answers are sampled as in `evaluate` (`evaluate.temperature`, `top_p`, `top_k`). A recipe that trains no drafter is tuned for its method
(`speculator.py`).

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/tune/{tune.json,stage.json}`, which `draftsmith serve` uses.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.table import Table
from typing_extensions import TypedDict

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine.environment import resolved
from draftsmith.engine.options import check_options
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_json
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.run.stage import StageRun
from draftsmith.serve.evaluation.engine import say_options
from draftsmith.serve.evaluation.machine import describe_engines, describe_machine
from draftsmith.serve.evaluation.schema import Engines, Machine, Ratio, Sampled
from draftsmith.serve.evaluation.suites import asks_texts, draw, load_suite, render_suite, turn_renderer
from draftsmith.serve.roofline import roofline
from draftsmith.serve.schedule import make_schedule
from draftsmith.serve.speculator import speculator
from draftsmith.serve.tune_measure import MeasuredSpeedup, TuneEngines, measure_speedups, measure_steps
from draftsmith.target.info import describe_target
from draftsmith.target.prepare import prepare_target

_VERSION = 10
_FILE = "tune.json"

ByBatch = dict[str, dict[str, float]]
"""By number of sequences at once, then by K; both as strings."""


class Tuned(TypedDict):
    """`tune.json`."""

    target: str
    drafter: str
    """What speculated: the run's drafter, or the method in its place."""
    drafter_sha256: dict[str, str]
    """SHA-256 of the drafter's files by name; if it is not the run's own, of the method's options too."""
    sampling: Sampled
    """Of all answers."""
    acceptance_per_position: list[float]
    """Share of drafts whose token at position i was accepted, at the highest K."""
    acceptance_length: dict[str, float]
    """By K: from that, or measured at each K if the drafter's tokens depend on how many it drafts."""
    step_cost: ByBatch
    """Seconds of a step over those of a baseline step with as many sequences; no less than at a smaller K (isotonic regression). K = 0:
    with an idle drafter, which cannot cost less than 1."""
    speedup: ByBatch
    """Estimated: acceptance length over step cost."""
    roofline: ByBatch | None
    """The same with step costs computed from bytes and FLOP; None if the recipe's `plan` has no `hardware`."""
    schedule: list[list[int]]
    """vLLM's `num_speculative_tokens_per_batch_size`: from, to, K."""
    pays: bool
    """Whether speculation gains anything at any of the loads."""
    measured: dict[str, dict[str, MeasuredSpeedup]] | None
    """Wall-clock speedup by requests in flight, then by K, as `evaluate` defines it (`evaluation/throughput.py`), with both engines' tokens per
    second, time to the first token and time per token after it; with `verify`."""
    schedule_measured: dict[str, MeasuredSpeedup] | None
    """The same of an engine that follows the schedule."""
    noise: dict[str, Ratio] | None
    """A second baseline engine over the first, by requests in flight; with `verify`."""
    engine_starts: int
    """How often engines were started anew for `measured`."""
    dtype: str
    versions: dict[str, str]
    machine: Machine
    engine: Engines


def run_tune(recipe: Recipe, run_dir: Path, *, verify: bool = False) -> Tuned:
    """Measure step costs and acceptance and choose K by load; or return the figures of an earlier run.

    Args:
        recipe: `target`, `engine`, `tune`, `plan` and the suite that `tune` names are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/`.
        verify: also measure wall-clock speedups, at every batch size and K, and with the schedule.

    Raises:
        UserError: there is no drafter, or the suite has too few prompts.
        DraftsmithError: an engine failed.
    """
    check_options(recipe.engine)
    run = StageRun("tune", run_dir / recipe.tune.output)
    speculates_with = speculator(recipe, run_dir)
    recipe = speculates_with.measured(recipe)
    target = describe_target(prepare_target(recipe.target), recipe.target)
    output, drafter_hashes = run.directory, dict(speculates_with.sha256)
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    every, prompts = _prompts(recipe, renderer)
    sections = {
        "engine": resolved(recipe.engine).model_dump(mode="json"),
        "tune": recipe.tune.model_dump(mode="json"),
        "plan": recipe.plan.model_dump(mode="json") if recipe.plan else None,
        "sampling": recipe.evaluate.sampling.record(),
        "dtype": recipe.target.dtype,
    }
    about = {
        "version": _VERSION, "target": [target.revision, target.config_hash], "drafter": drafter_hashes,
        "prompts": renderer.identity(prompts), "most": recipe.extract.max_num_seqs, **sections,
    }  # fmt: skip
    inputs, verified = (
        digest(about | {"verify": one}) for one in (verify, True)
    )  # with `verify` there is all that there is without
    if (figures := run.finished(inputs) or run.finished(verified)) is not None:
        print_tuned(cast("Tuned", figures))
        return cast("Tuned", figures)
    # It refuses what cannot run, while earlier figures are still there.
    engines = TuneEngines(recipe, target, speculates_with, every, output)
    run.claim(fresh=True, keep=(_FILE, stage.MARKER))  # the earlier schedule serves until there is another
    say_options("tune", recipe.engine)
    with closing(engines.lineup):
        costs, shares = measure_steps(engines, prompts, recipe)
        lengths = {0: 1.0} | {k: 1 + sum(of_k) for k, of_k in shares.items()}
        speedups = {
            batch: {k: lengths[k] / cost for k, cost in sorted(of_batch.items())} for batch, of_batch in costs.items()
        }
        # A method with a fixed K is tuned for the smallest load.
        loads = {min(speedups): speedups[min(speedups)]} if engines.fixed_k else speedups
        schedule = make_schedule(loads, most=recipe.extract.max_num_seqs)
        pays = any(k for _, _, k in schedule)
        measured: dict[int, dict[int, MeasuredSpeedup]] = {}
        schedule_measured: dict[int, MeasuredSpeedup] = {}
        noise: dict[int, Ratio] = {}
        if verify:
            shuffled = draw(every, len(every), seed=recipe.seed)
            measured, schedule_measured, noise = measure_speedups(engines, schedule if pays else None, shuffled, recipe)
    sampling = recipe.evaluate.sampling
    by_arithmetic = roofline(recipe, target, speculates_with, prompts, {k: lengths[k] for k in engines.ks})
    found: Tuned = {
        "target": target.name,
        "drafter": speculates_with.name,
        "drafter_sha256": drafter_hashes,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
        "acceptance_per_position": shares[max(shares)],
        "acceptance_length": {str(k): length for k, length in lengths.items()},
        "step_cost": _as_text(costs),
        "speedup": _as_text(speedups),
        "roofline": _as_text(by_arithmetic) if by_arithmetic else None,
        "schedule": schedule,
        "pays": pays,
        "measured": _as_text(measured) if measured else None,
        "schedule_measured": {str(batch): one for batch, one in schedule_measured.items()} or None,
        "noise": {str(batch): one for batch, one in noise.items()} or None,
        "engine_starts": recipe.tune.engine_starts,
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": describe_machine(),
        "engine": describe_engines(recipe.engine, engines.lineup.peak),
    }
    write_json(output / _FILE, found)
    run.finish(inputs, dict(found), recipe=sections, files=(_FILE,))
    print_tuned(found)
    return found


def _prompts(recipe: Recipe, renderer: TurnRenderer) -> tuple[list[Turn], list[Turn]]:
    """The suite's prompts: all, and those drawn for step costs and acceptance."""
    options = recipe.tune
    suite = options.suite or next(iter(recipe.evaluate.suites), None)
    if suite is None:
        raise UserError("There are no prompts to tune on: `evaluate.suites` is empty. Give it a suite.")
    held_out, texts = recipe.evaluate.suites[suite].prompts == "held_out", asks_texts(recipe, suite)
    found = load_suite(recipe, suite)
    every = render_suite(renderer, suite, found, options.tokens, held_out=held_out, texts=texts).prompts
    prompts = draw(every, options.prompts, seed=recipe.seed)
    if len(prompts) < max(options.concurrency):
        raise UserError(
            f"The suite `{suite}` has {len(prompts)} prompts, too few for {max(options.concurrency)} at once. Lower "
            "tune.concurrency, raise tune.prompts, or name a larger suite in tune.suite."
        )
    return every, prompts


def _as_text(found: Mapping[int, Mapping[int, Any]]) -> dict[str, dict[str, Any]]:
    return {str(batch): {str(k): value for k, value in of_batch.items()} for batch, of_batch in found.items()}


def print_tuned(tuned: Tuned) -> None:
    """The figures on screen."""
    table = Table(title=f"{tuned['target']}: speedup with K draft tokens, by concurrency", box=SIMPLE_HEAD)
    for heading in ("at once", "K", "acceptance length", "step cost", "est. speedup", "measured", "roofline"):
        table.add_column(heading, justify="right")
    for batch, of_batch in tuned["speedup"].items():
        for k, value in of_batch.items():
            measured = tuned["measured"][batch].get(k) if tuned["measured"] else None
            arithmetic = tuned["roofline"][batch].get(k) if tuned["roofline"] else None
            table.add_row(
                batch if k == next(iter(of_batch)) else "",
                k,
                f"{tuned['acceptance_length'][k]:.3f}",
                f"{tuned['step_cost'][batch][k]:.2f}",
                f"{value:.2f}",
                _with_interval(measured) if measured else "",
                f"{arithmetic:.2f}" if arithmetic else "",
            )
    console.print(table)
    for batch, one in (tuned["schedule_measured"] or {}).items():
        baseline, speculative = one["baseline"], one["speculative"]
        console.print(
            f"{batch} at once, with the schedule: {_with_interval(one)}, wall-clock; baseline to speculative: "
            f"{1000 * baseline['seconds_per_token']:.0f} to {1000 * speculative['seconds_per_token']:.0f} ms per token; first token after "
            f"{baseline['first_token_seconds']:.2f} and {speculative['first_token_seconds']:.2f} s",
            highlight=False,
            soft_wrap=True,
        )
    for batch, noise in (tuned["noise"] or {}).items():
        console.print(
            f"{batch} at once, baseline over baseline: {_with_interval(noise)}: the machine's noise", highlight=False
        )
    if tuned["measured"]:
        starts = tuned["engine_starts"]
        over = (
            f"prompts and {starts} engine starts"
            if starts > 1
            else "prompts alone, of one engine start (tune.engine_starts)"
        )
        console.print(
            f"Measured: wall-clock over the baseline, its 95% interval over {over}, and the median of starts.",
            highlight=False,
        )
    if tuned["pays"]:
        console.print(
            f"tune: num_speculative_tokens_per_batch_size = {json.dumps(tuned['schedule'])}; `draftsmith serve` uses it",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print("tune: speculation does not pay at any of these loads; `draftsmith serve` does not speculate")


def _with_interval(ratio: Ratio) -> str:
    low, high = ratio["interval"]
    return f"{ratio['value']:.2f} ({low:.2f} to {high:.2f}; {ratio['median']:.2f})"
