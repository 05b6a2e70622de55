"""Acceptance as people serve: predicted at a temperature and a top-p, and measured by vLLM's counters, on the same held-out prompts.

The demo's drafter, trained if `runs/demo` has none. Its held-out prompts are answered once more at the sampling parameters, into a store of
their own (`runs/demo-sampled`), from which acceptance is predicted; then an engine with the drafter samples several answers to each of
them, and its counters are what is predicted.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.data.prompts import training_and_held_out
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec
from draftsmith.serve.evaluation.suites import turn_renderer
from draftsmith.target.info import describe_target
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
_SAMPLED = [f"extract.temperature={TEMPERATURE}", f"extract.top_p={TOP_P}"]


def sampled_acceptance() -> dict[str, Figure]:
    """`sampled.predicted`, `.measured` and `.apart`."""
    recipe = load_recipe(Path("recipes/demo.yaml"), _ASKED)
    for stage in (run_extract, run_train, run_convert):
        stage(recipe, RUNS / "demo")
    text = load_recipe(
        Path("recipes/demo.yaml"),
        [*_SAMPLED, "name=demo-sampled", "extract.prompts.limit=20", "extract.held_out.limit=null"],
    )
    run_extract(text, RUNS / "demo-sampled")
    found = predict(recipe, RUNS / "demo", store_dir=RUNS / "demo-sampled" / "store")
    assert found["own_text"]
    predicted = found["predicted_acceptance_length"][str(K)]
    measured = _measured(recipe, text)
    how = f"temperature {TEMPERATURE}, top-p {TOP_P}, K = {K}, {found['sequences']} held-out prompts"
    apart = abs(predicted / measured - 1)
    return {
        "sampled.predicted": figure([predicted], "tokens per step", how),
        "sampled.measured": figure([measured], "tokens per step", f"{how}, {SAMPLES} answers each"),
        "sampled.apart": figure([apart], "relative", "predicted over measured, less 1", direction="lower", bar=APART),
    }


def _measured(recipe: Recipe, text: Recipe) -> float:
    """vLLM's acceptance length on the prompts that `text` holds out, `SAMPLES` answers to each."""
    target = describe_target(prepare_target(recipe.target), recipe.target)
    method = own_drafter(RUNS / "demo" / "vllm").model_copy(update={"num_speculative_tokens": K})
    spec = EngineSpec(
        name="sampled", target=str(target.path), dtype=recipe.target.dtype, engine=recipe.engine, max_num_seqs=AT_ONCE,
        speculative=method_config(method, target, own_drafter=RUNS / "demo" / "vllm"), sampling=recipe.evaluate.sampling,
    )  # fmt: skip
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    prompts = [renderer.first(one).token_ids for one in training_and_held_out(text.extract)[1]]
    with EngineHost(spec, RUNS / "demo-sampled") as host:
        host.start().wait_ready()
        for _ in range(SAMPLES):
            host.generate(prompts, max_tokens=text.extract.response_tokens(held_out=True))
        counters = host.counters()
    return 1 + counters.accepted / counters.drafts
