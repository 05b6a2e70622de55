"""How far evaluations of one and the same drafter are apart, and whether `--compare` tells a slower one from them.

All are of the demo's drafter on its held-out prompts, at one K, each with engines started anew. Nothing else should run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation import engine, lineup
from draftsmith.serve.evaluation.compare import compare
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, SharedEngine
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.evaluation.schema import Ratio, Results
from draftsmith.serve.evaluation.step_cost import step_ratios
from draftsmith.serve.evaluation.suites import draw, load_suite, render_suite, turn_renderer
from draftsmith.target.info import describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.train.train import run_train
from tests.benchmarks.figures import Figure, figure

RUN = Path("runs/demo")
K, STARTS, EVALUATIONS, SLOW_EVALUATIONS = 2, 3, 5, 2
SLOWDOWN = 0.10
"""Planted: how many of the drafter's tokens per second are lost."""
SLEEP_COSTS = 1.29
"""What a step's sleep costs over the time that it lasts: 0.10 of it once cost 0.129 (docs/log.md). Threads that were idle start the next step late."""


def load_noise() -> dict[str, Figure]:
    """`evaluate.load_noise`: half the width of the speedup's 95% interval over its value, four requests in flight, on MT-Bench's first
    turns; and the same with one in flight, and of the baseline over itself.

    Makes `runs/demo` where it is not there.
    """
    found = _evaluated(  # answers as long as they are, and more prompts than the 45 that are held out
        "eval-noise", "evaluate.concurrency=[4]", "evaluate.timing_tokens=96", "evaluate.only=[mt_bench]"
    )
    load = found["load"]["4"]
    one = found["suites"]["mt_bench"]["throughput"]
    said = f"{STARTS} engine starts, K = {K}, {load['requests']} requests a start"
    return {
        "evaluate.load_noise": figure(
            [_half_width(load["speedup"])], "of the speedup", f"speedup {_shown(load['speedup'])}, four in flight; {said}",
            direction="lower", bar=0.05,
        ),
        "evaluate.noise_of_one": figure(
            [_half_width(one["speedup"])], "of the speedup", f"speedup {_shown(one['speedup'])}, one in flight"
        ),
        "evaluate.baseline_noise": figure(
            [_half_width(load["noise"])], "of the ratio", f"baseline over baseline {_shown(load['noise'])}, four in flight"
        ),
    }  # fmt: skip


def shared_engine() -> dict[str, Figure]:
    """`evaluate.shared_engine`: by how much the steps of one engine at every K differ from those of engines that were started with each
    K, at the K where it is most; all alternate. `evaluate.peak_engines`: engines that an evaluation holds at a time, with three methods.
    """
    lookup = "{method: ngram, num_speculative_tokens: %d, prompt_lookup_min: 2, prompt_lookup_max: 5}"
    methods = ", ".join(f"m{k}: {lookup % k}" for k in (2, 3, 5))
    peak = _evaluated(
        "eval-peak", "evaluate.k=[1,2,3,4]", f"evaluate.methods={{{methods}}}", "evaluate.engine_starts=1"
    )["engine"]["peak_engines"]

    recipe = load_recipe(Path("recipes/demo.yaml"))
    target = describe_target(prepare_target(recipe.target), recipe.target)
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    suite = render_suite(
        renderer, "held_out", load_suite(recipe, "held_out"), recipe.extract.response_tokens(held_out=True)
    )
    ks = sorted(recipe.evaluate.k)

    def spec(name: str, **changes: Any) -> EngineSpec:
        method = own_drafter(RUN / "vllm").model_copy(update=changes)
        return EngineSpec(
            name=name,
            target=str(target.path),
            dtype=recipe.target.dtype,
            engine=recipe.engine,
            max_num_seqs=1,
            memory_share=1 / (len(ks) + 2),
            speculative=method_config(method, target, own_drafter=RUN / "vllm") if changes else None,
        )

    every_k = spec("every-k", num_speculative_tokens_per_batch_size=((1, 1, ks[-1]),))
    specs = [spec("baseline"), *(spec(f"k{k}", num_speculative_tokens=k) for k in ks), every_k]
    ratios: dict[int, list[float]] = {k: [] for k in ks}
    for _ in range(STARTS):
        baseline, *own, shared = engine.start_engines(specs, RUN / "eval-shared")
        try:
            # Labels beyond the largest K for the shared engine's variants.
            engines = {0: baseline, **dict(zip(ks, own, strict=True))}
            engines |= {100 + k: SharedEngine(shared, replace(every_k, k_by_load=((1, 1, k),))) for k in ks}
            prompts = draw(suite.prompts, recipe.evaluate.step_cost_prompts, seed=recipe.seed)
            found = step_ratios(engines, 0, [one.token_ids for one in prompts]).steps
        finally:
            for host in (baseline, *own, shared):
                host.close()
        for k in ks:
            of_prompts = [a / b for a, b in zip(found[100 + k], found[k], strict=True)]
            ratios[k].append(statistics.median(of_prompts))
    said = "; ".join(f"K = {k}: {', '.join(f'{one:.3f}' for one in starts)}" for k, starts in ratios.items())
    apart = max(abs(statistics.fmean(starts) - 1) for starts in ratios.values())
    return {
        "evaluate.shared_engine": figure(
            [apart], "of a step", f"its steps over those of engines started with each K, by engine start: {said}"
        ),
        "evaluate.peak_engines": figure(
            [float(peak)], "engines", "k [1, 2, 3, 4] and three methods", direction="lower", bar=2
        ),
    }  # fmt: skip


def comparisons() -> dict[str, Figure]:
    """`evaluate.false_alarms`: of the pairs of evaluations of the same drafter, in both orders, how many `--compare` finds worse.
    `evaluate.slowdowns_found`: the share of pairs in which it finds a planted slowdown; `evaluate.slowdown_planted`: how large that was,
    which must not be far above what it is said to be."""
    same = [_evaluated(f"eval-same-{number}") for number in range(EVALUATIONS)]
    with mock.patch.object(lineup, "start_engines", _start_slow_drafters):
        slow = [_evaluated(f"eval-slow-{number}") for number in range(SLOW_EVALUATIONS)]
    alarms = [_is_worse(a, b) for a, b in itertools.permutations(same, 2)]
    found = [_is_worse(a, b) for a, b in itertools.product(same, slow)]
    speedups = ", ".join(f"{one['suites']['held_out']['speedup']:.3f}" for one in (*same, *slow))
    return {
        "evaluate.false_alarms": figure(
            [float(sum(alarms))], f"of {len(alarms)} pairs", f"the same drafter, engines started anew: {speedups}",
            direction="lower", bar=len(alarms) / 20,
        ),
        "evaluate.slowdowns_found": figure(
            [sum(found) / len(found)], f"of {len(found)} pairs", f"a drafter slowed down by {SLOWDOWN:.0%}: {speedups}",
            direction="higher", bar=0.8,
        ),
        "evaluate.slowdown_planted": figure(
            [1 - _mean_speedup(slow) / _mean_speedup(same)], "share of tokens per second", f"{SLOWDOWN:.0%} was to be planted; {speedups}",
            direction="lower", bar=1.1 * SLOWDOWN,
        ),
    }  # fmt: skip


def _evaluated(output: str, *overrides: str) -> Results:
    recipe = load_recipe(
        Path("recipes/demo.yaml"),
        [
            f"evaluate.output={output}",
            f"evaluate.k=[{K}]",
            f"evaluate.acceptance_k={K}",
            f"evaluate.engine_starts={STARTS}",
            "evaluate.step_cost_prompts=1",
            "evaluate.examples=0",
            "evaluate.dtypes=[float32]",
            *overrides,
        ],
    )
    _make_drafter(recipe)
    return run_evaluate(recipe, RUN)


def _make_drafter(recipe: Recipe) -> None:
    for stage in (run_extract, run_train, run_convert):
        stage(recipe, RUN)


def _half_width(ratio: Ratio) -> float:
    low, high = ratio["interval"]
    return (high - low) / 2 / ratio["value"]


def _shown(ratio: Ratio) -> str:
    starts = ", ".join(f"{one:.3f}" for one in ratio["by_start"])
    return f"{ratio['value']:.3f} [{ratio['interval'][0]:.3f}, {ratio['interval'][1]:.3f}] (starts {starts})"


def _mean_speedup(found: Sequence[Results]) -> float:
    return statistics.fmean(one["suites"]["held_out"]["speedup"] for one in found)


def _is_worse(a: Results, b: Results) -> bool:
    return any(one["verdict"] == "worse" for one in compare(a, b))


# ---- the planted slowdown ----


def _start_slow_drafters(
    configs: Sequence[EngineSpec], log_directory: Path, on_ready: Callable[[int], None]
) -> list[EngineHost]:
    """As `start_engines`, with every speculative engine slowed down."""
    hosts = []
    for ready, config in enumerate(configs, start=1):
        with mock.patch.object(engine, "_child", _slow_child if config.speculative else engine._child):
            hosts.append(EngineHost(config, log_directory).start())
        on_ready(ready)
    return [host.wait_ready() for host in hosts]


def _slow_child(pipe: Connection, arguments: dict[str, Any]) -> None:
    """An engine whose steps take longer, by as much as costs the planted share of its tokens per second."""
    from vllm.v1.engine.llm_engine import LLMEngine

    step = LLMEngine.step

    def slow_step(self: LLMEngine) -> Any:
        started = time.perf_counter()
        outputs = step(self)
        time.sleep((time.perf_counter() - started) * (1 / (1 - SLOWDOWN / SLEEP_COSTS) - 1))
        return outputs

    LLMEngine.step = slow_step
    engine._child(pipe, arguments)
