"""Acceptance and text as people serve, at a temperature and a top-p, with the demo's drafter, trained if `runs/demo` has none.

`sampled_acceptance`: the demo's held-out prompts are answered once more at the sampling parameters, into a store of their own
(`runs/demo-sampled`), from which acceptance is predicted; then an engine with the drafter samples several answers to each of them, and its
counters are what is predicted.

`sampled_fidelity`: the statistical tests of `evaluate.fidelity: sampling`, of the baseline's answers and the drafter's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.data.prompts import training_and_held_out
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated
from draftsmith.serve.evaluation.fidelity import LEVEL
from draftsmith.serve.evaluation.sampled_fidelity import compare_samples
from draftsmith.serve.evaluation.suites import turn_renderer
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.train.predict import predict
from draftsmith.train.train import run_train
from tests.benchmarks.figures import Figure, figure

RUNS = Path("runs")
TEMPERATURE, TOP_P = 0.8, 0.95
K, SAMPLES, AT_ONCE = 3, 4, 64
APART = 0.03
"""The bar: how far the prediction may be from what is measured, relative to it."""
_ASKED = [f"evaluate.temperature={TEMPERATURE}", f"evaluate.top_p={TOP_P}"]
_SAMPLED = [
    "name=demo-sampled", f"extract.temperature={TEMPERATURE}", f"extract.top_p={TOP_P}", "extract.prompts.limit=20",
    "extract.held_out.limit=null",
]  # fmt: skip


def sampled_acceptance() -> dict[str, Figure]:
    """`sampled.predicted`, `.measured` and `.apart`."""
    recipe = _demo()
    run_extract(_text(), RUNS / "demo-sampled")
    found = predict(recipe, RUNS / "demo", store_dir=RUNS / "demo-sampled" / "store")
    assert found["own_text"]
    predicted = found["predicted_acceptance_length"][str(K)]
    measured = _measured(recipe)
    how = f"temperature {TEMPERATURE}, top-p {TOP_P}, K = {K}, {found['sequences']} held-out prompts"
    apart = abs(predicted / measured - 1)
    return {
        "sampled.predicted": figure([predicted], "tokens per step", how),
        "sampled.measured": figure([measured], "tokens per step", f"{how}, {SAMPLES} answers each"),
        "sampled.apart": figure([apart], "relative", "predicted over measured, less 1", direction="lower", bar=APART),
    }


def sampled_fidelity() -> dict[str, Figure]:
    """`sampled.p_continuations` and `sampled.p_drafts`: the two tests' p-values. Either below half of the level fails."""
    recipe = _demo()
    target, speculative = _engine(recipe)
    prompts = _prompts(target, recipe)[: recipe.evaluate.fidelity_prompts]
    # Another seed, so that the two engines' answers are independent.
    baseline = _answers(replace(speculative, name="baseline", speculative=None, seed=1), prompts, recipe)
    found = compare_samples(baseline, _answers(speculative, prompts, recipe))
    how = (
        f"{found['answers']} answers of each engine to {found['prompts']} prompts, {found['tokens']} tokens with drafts; a bias from "
        f"{found['detectable_bias']} on would be found"
    )
    return {
        f"sampled.p_{test}": figure([value], "p-value", how, direction="higher", bar=LEVEL / 2)
        for test, value in (("continuations", found["continuations_p_value"]), ("drafts", found["drafts_p_value"]))
    }


def _demo() -> Recipe:
    """The demo's recipe at the sampling parameters; its drafter is there afterwards."""
    recipe = load_recipe(Path("recipes/demo.yaml"), _ASKED)
    for stage in (run_extract, run_train, run_convert):
        stage(recipe, RUNS / "demo")
    return recipe


def _text() -> Recipe:
    """The held-out text that acceptance is predicted on, sampled."""
    return load_recipe(Path("recipes/demo.yaml"), _SAMPLED)


def _engine(recipe: Recipe) -> tuple[TargetInfo, EngineSpec]:
    target = describe_target(prepare_target(recipe.target), recipe.target)
    method = own_drafter(RUNS / "demo" / "vllm").model_copy(update={"num_speculative_tokens": K})
    return target, EngineSpec(
        name="sampled", target=str(target.path), dtype=recipe.target.dtype, engine=recipe.engine, max_num_seqs=AT_ONCE,
        speculative=method_config(method, target, own_drafter=RUNS / "demo" / "vllm"), sampling=recipe.evaluate.sampling,
    )  # fmt: skip


def _prompts(target: TargetInfo, recipe: Recipe) -> list[list[int]]:
    """Of the held-out conversations."""
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    return [renderer.first(one).token_ids for one in training_and_held_out(_text().extract)[1]]


def _measured(recipe: Recipe) -> float:
    """vLLM's acceptance length on the held-out prompts, `SAMPLES` answers to each."""
    target, spec = _engine(recipe)
    prompts = _prompts(target, recipe)
    with EngineHost(spec, RUNS / "demo-sampled") as host:
        host.start().wait_ready()
        for _ in range(SAMPLES):
            host.generate(prompts, max_tokens=_text().extract.response_tokens(held_out=True))
        counters = host.counters()
    return 1 + counters.accepted / counters.drafts


def _answers(spec: EngineSpec, prompts: list[list[int]], recipe: Recipe) -> list[list[Generated]]:
    """By prompt: this engine's answers."""
    options = recipe.evaluate
    with EngineHost(spec, RUNS / "demo-sampled") as host:
        host.start().wait_ready()
        return [
            host.generate([prompt] * options.fidelity_answers, max_tokens=options.fidelity_tokens)[0]
            for prompt in prompts
        ]
