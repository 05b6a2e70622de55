"""What a draft costs and brings, by kind: block drafters beside EAGLE-3, trained on the same store, in one run.

The drafters are those of the `learning_KIND` benchmarks (`runs/learn/KIND`), trained here where they are not there. All engines are
up at once beside a baseline, each prompt goes to each in turn, and engines are started more than once. An estimated
speedup is an acceptance length over a step cost, one request at a time. Last, what 8 bits cost a block drafter in acceptance.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config.recipe import EngineConfig
from draftsmith.convert.convert import convert_checkpoint, run_convert
from draftsmith.engine.speculation import speculative_config
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.store.format import Sequence
from tests.benchmarks.bench_learn import RUNS, learn_recipe, learn_target, learn_text, train_ours
from tests.benchmarks.figures import Figure, figure

BLOCKS, MOST = ("p_eagle", "dflash", "dspark"), 5
DRAFTS = {"eagle3": (1, 3, MOST)} | dict.fromkeys(BLOCKS, (3, MOST))
"""K by kind."""
STARTS, TIMED, STEPS, LONG = 2, 12, 24, 100
"""Engine starts; prompts for timing in each, steps of each, and the fewest tokens of their answers."""
TOKENS, AT_ONCE = 128, 24
"""For acceptance: longest answer, and how many at once."""
KV_CACHE_GIB = 6.0
"""Of all engines together."""

Costs = dict[str, list[list[float]]]
"""By engine: in each start, of each prompt, the median step over the baseline's."""


def block_drafts() -> dict[str, Figure]:
    """`drafts.KIND_kK_cost` (a step over the baseline's), `_length` (acceptance length in vLLM on the report part, by position in
    `against`) and `_speedup` (estimated); `drafts.KIND_int8_dynamic_ratio`: acceptance length in 8 bits over that in float32."""
    text = learn_text()
    for kind in DRAFTS:
        recipe = learn_recipe(kind)
        train_ours(recipe, text, RUNS / kind)
        run_convert(recipe, RUNS / kind)
    target = str(learn_target().path)
    prompts = [prompt_of(one) for one in text.report]
    timed = [prompt_of(one) for one in text.report if int(one.loss_mask.sum()) >= LONG]
    drafters = {f"{kind}_k{k}": speculative_config(RUNS / kind / "vllm", k) for kind, ks in DRAFTS.items() for k in ks}
    costs: Costs = {name: [] for name in drafters}
    accepted: dict[str, list[int]] = {}
    for start in range(STARTS):
        with tempfile.TemporaryDirectory() as folder:
            hosts = start_engines(engines(target, {"baseline": None, **drafters}), Path(folder))
            try:
                for name, ratios in step_costs(hosts, timed[start::STARTS][:TIMED]).items():
                    costs[name].append(ratios)
                if start == 0:
                    accepted = {host.config.name: accepted_by_position(host, prompts) for host in hosts[1:]}
            finally:
                for host in hosts:
                    host.close()
    figures: dict[str, Figure] = {}
    for engine, starts in costs.items():
        figures |= figures_of(engine, starts, accepted[engine])
    return figures | in_8_bits(target, prompts, accepted)


def in_8_bits(target: str, prompts: Many[Many[int]], accepted: dict[str, list[int]]) -> dict[str, Figure]:
    """The block drafters' acceptance with `int8-dynamic`, over that with float32."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        drafters = {}
        for kind in BLOCKS:
            out = Path(folder) / kind
            convert_checkpoint(RUNS / kind / "checkpoint", out, to="vllm", dtype="float32", quantize="int8-dynamic")
            drafters[kind] = speculative_config(out, MOST)
        hosts = start_engines(engines(target, drafters), Path(folder))
        try:
            for kind, host in zip(BLOCKS, hosts, strict=True):
                short, full = (
                    length_of(one) for one in (accepted_by_position(host, prompts), accepted[f"{kind}_k{MOST}"])
                )
                figures[f"drafts.{kind}_int8_dynamic_ratio"] = figure(
                    [short / full],
                    "ratio",
                    f"float32; acceptance lengths {short:.4f} and {full:.4f}, K = {MOST}",
                    direction="higher",
                )
        finally:
            for host in hosts:
                host.close()
    return figures


def prompt_of(sequence: Sequence) -> list[int]:
    return [int(token) for token in sequence.token_ids[: int(sequence.loss_mask.int().argmax())]]


def figures_of(engine: str, starts: list[list[float]], accepted: list[int]) -> dict[str, Figure]:
    """An engine's figures, from `step_costs` at each start and from `accepted_by_position`."""
    made, *by_position = accepted
    costs = [statistics.fmean(one) for one in starts]
    errors = np.sqrt(sum(np.var(one, ddof=1) / len(one) for one in starts)) / len(starts)
    against = (
        f"a step of the baseline; by start {', '.join(f'{one:.3f}' for one in costs)}, error over prompts {errors:.3f}"
    )
    before = [made, *by_position]
    shares = ", ".join(f"{now / then:.3f}" for now, then in zip(by_position, before, strict=False))
    cost = statistics.fmean(costs)
    name = f"drafts.{engine}"
    return {
        f"{name}_cost": figure([cost], "ratio", against, direction="lower"),
        f"{name}_length": figure(
            [length_of(accepted)],
            "tokens a step",
            f"accepted by position, given those before: {shares}",
            direction="higher",
        ),
        f"{name}_speedup": figure([length_of(accepted) / cost], "ratio", "the baseline, estimated", direction="higher"),
    }


def step_costs(hosts: Many[EngineHost], prompts: Many[Many[int]]) -> dict[str, list[float]]:
    """By engine, the first being the baseline: of each prompt, the median of its first steps over the baseline's."""
    found: dict[str, list[float]] = {host.config.name: [] for host in hosts[1:]}
    with Bar("step cost", total=len(prompts) * len(hosts), unit="answers") as bar:
        for number, prompt in enumerate(prompts):
            shift = number % len(hosts)  # no engine is always first
            seconds = {}
            for host in [*hosts[shift:], *hosts[:shift]]:
                seconds[host.config.name] = statistics.median(host.step_seconds(prompt, STEPS))
                bar.step()
            for name, ratios in found.items():
                ratios.append(seconds[name] / seconds["baseline"])
    return found


def accepted_by_position(host: EngineHost, prompts: Many[Many[int]]) -> list[int]:
    """The number of drafts, and of those whose token at each position was accepted."""
    before = host.counters()
    host.generate(prompts, max_tokens=TOKENS)
    counted = host.counters() - before
    return [counted.drafts, *counted.accepted_per_position]


def length_of(accepted: list[int]) -> float:
    """The acceptance length, from `accepted_by_position`."""
    return 1 + sum(accepted[1:]) / accepted[0]


def engines(target: str, speculative: Mapping[str, dict[str, Any] | None]) -> list[EngineSpec]:
    """By name, engines that are up at the same time; None for the baseline."""
    recipe = learn_recipe("eagle3")
    return [
        EngineSpec(
            name=name,
            target=target,
            dtype=recipe.target.dtype,
            engine=EngineConfig(max_model_len=recipe.engine.max_model_len, kv_cache_gib=KV_CACHE_GIB),
            speculative=config,
            max_num_seqs=AT_ONCE,
            memory_share=1 / len(speculative),
        )
        for name, config in speculative.items()
    ]
