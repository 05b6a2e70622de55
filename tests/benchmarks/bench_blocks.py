"""What a draft costs and brings, by kind: block drafters beside EAGLE-3, trained on the same store, in one run.

The drafters are those of the `learning_KIND` benchmarks (`runs/learn/KIND`), trained here where they are not there. All engines are
up at once beside a baseline, each prompt goes to each in turn, and engines are started more than once. Acceptance lengths are
those that training predicts on the tuning part, where its epoch was chosen; how far vLLM is from predictions is `learn.KIND.apart`. An estimated speedup is an acceptance
length over a step cost, one request at a time.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

from draftsmith.config.recipe import EngineConfig
from draftsmith.convert.convert import run_convert
from draftsmith.engine.speculation import speculative_config
from draftsmith.run import stage
from draftsmith.run.progress import console
from draftsmith.serve.evaluation.engine import EngineSpec, start_engines
from draftsmith.serve.evaluation.step_cost import StepRatios, step_ratios
from tests.benchmarks.bench_learn import RUNS, learn_recipe, learn_target, learn_text, train_in
from tests.benchmarks.bench_lookup import answer_of
from tests.benchmarks.figures import Figure, figure

DRAFTS = {"eagle3": (1, 3, 5), "p_eagle": (3,), "dflash": (3,), "dspark": (3, 5)}
"""K by kind."""
STARTS, TIMED, STEPS, LONG = 2, 12, 24, 100
"""Engine starts; prompts for timing in each, steps of each, and the fewest tokens of their answers."""
KV_CACHE_GIB = 2.0
"""Of all engines together."""


def block_drafts() -> dict[str, Figure]:
    """`drafts.KIND_kK_cost`: a decoding step over the baseline's; `drafts.KIND_kK_drafting`: the part of it that is the draft, and in
    `against` the part that is the check; `drafts.KIND_kK_speedup`: estimated, with the acceptance length and what is accepted by position in
    `against`."""
    text = learn_text()
    lengths: dict[str, list[float]] = {}
    for kind in DRAFTS:
        recipe = learn_recipe(kind)
        train_in(recipe, text, RUNS / kind)
        run_convert(recipe, RUNS / kind)
        lengths[kind] = predicted_lengths(RUNS / kind)
    prompts = [answer_of(one).prompt.tolist() for one in text.report if int(one.loss_mask.sum()) >= LONG]
    starts: list[StepRatios[str]] = []
    for start in range(STARTS):
        with tempfile.TemporaryDirectory() as folder:
            hosts = start_engines(engines(), Path(folder))
            try:
                by_name = {host.config.name: host for host in hosts}
                starts.append(step_ratios(by_name, "baseline", prompts[start::STARTS][:TIMED], STEPS))
            finally:
                for host in hosts:
                    host.close()
        told = ", ".join(f"{name} {statistics.fmean(ratios):.3f}" for name, ratios in starts[-1].steps.items())
        console.print(f"engine start {start + 1}: {told}", highlight=False, soft_wrap=True)
    figures: dict[str, Figure] = {}
    for kind, ks in DRAFTS.items():
        for k in ks:
            name = f"{kind}_k{k}"
            steps, drafts = [one.steps[name] for one in starts], [one.drafts[name] for one in starts]
            figures |= figures_of(name, steps, drafts, lengths[kind][: k + 1])
    return figures


def predicted_lengths(run_dir: Path) -> list[float]:
    """The acceptance length at K = 0, which is 1, and at every other K that training predicted, in order."""
    record = stage.read(run_dir / "checkpoint")
    assert record is not None
    by_k: dict[str, float] = record["figures"]["predicted_acceptance_length"]
    return [1.0, *(by_k[str(k)] for k in range(1, len(by_k) + 1))]


def figures_of(
    name: str, starts: list[list[float]], drafts: list[list[float]], lengths: list[float]
) -> dict[str, Figure]:
    """An engine's figures.

    Args:
        starts: in each engine start, of each prompt, a step over the baseline's.
        drafts: the same of the draft alone.
        lengths: acceptance lengths at K = 0, 1, and so on up to the engine's.
    """
    costs = [statistics.fmean(one) for one in starts]
    errors = np.sqrt(sum(np.var(one, ddof=1) / len(one) for one in starts)) / len(starts)
    by_start = ", ".join(f"{one:.3f}" for one in costs)
    gains = [1.0, *(after - before for before, after in pairwise(lengths))]
    shares = [now / then if then else 0.0 for then, now in pairwise(gains)]
    by_position = ", ".join(f"{one:.3f}" for one in shares)
    cost, drafting = statistics.fmean(costs), [statistics.fmean(one) for one in drafts]
    draft = statistics.fmean(drafting)
    return {
        f"drafts.{name}_cost": figure(
            [cost],
            "ratio",
            f"a step of the baseline; by start {by_start}, error over prompts {errors:.3f}",
            direction="lower",
        ),
        f"drafts.{name}_drafting": figure(
            [draft],
            "of a step of the baseline",
            f"by start {', '.join(f'{one:.3f}' for one in drafting)}; the check {cost - draft - 1:.3f}",
            direction="lower",
        ),
        f"drafts.{name}_speedup": figure(
            [lengths[-1] / cost],
            "ratio, estimated",
            f"the baseline; {lengths[-1]:.3f} tokens a step, accepted by position, given those before: {by_position}",
            direction="higher",
        ),
    }


def engines() -> list[EngineSpec]:
    """A baseline, and one for every kind and K."""
    recipe, target = learn_recipe("eagle3"), str(learn_target().path)
    drafters = {f"{kind}_k{k}": speculative_config(RUNS / kind / "vllm", k) for kind, ks in DRAFTS.items() for k in ks}
    return [
        EngineSpec(
            name=name,
            target=target,
            dtype=recipe.target.dtype,
            engine=EngineConfig(max_model_len=recipe.engine.max_model_len, kv_cache_gib=KV_CACHE_GIB),
            speculative=config,
            max_num_seqs=1,
            memory_share=1 / (1 + len(drafters)),
        )
        for name, config in {"baseline": None, **drafters}.items()
    ]
