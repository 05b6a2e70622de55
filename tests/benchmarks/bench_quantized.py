"""What 8-bit weights cost in acceptance, and what they spare: the demo's drafter in vLLM, as it is and quantized.

vLLM has kernels for 8-bit weights alone (`int8`, `fp8`) on GPUs only. What those compute with are the dequantized weights, so
where there is no GPU these are served: the quantized checkpoint converted back. `int8-dynamic` is served as it is.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from draftsmith.config.loading import load_recipe
from draftsmith.convert.convert import convert_checkpoint
from draftsmith.convert.quantize import SCHEMES
from draftsmith.data.chat_template import Renderer
from draftsmith.data.prompts import training_and_held_out
from draftsmith.engine.speculation import speculative_config
from draftsmith.extract.extract import run_extract
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.target.prepare import prepare_target
from draftsmith.train.train import run_train
from tests.benchmarks.figures import Figure, figure

K, MAX_TOKENS, TIMED, ROUNDS = 3, 96, 2, 3


def quantized_drafters() -> dict[str, Figure]:
    """`convert.SCHEME_acceptance_ratio`: acceptance length (K=3) over that of the drafter in float32, on the demo's held-out
    prompts; `convert.int8_dynamic_time_ratio`: time of decoding, one prompt at a time.

    Makes `runs/demo` where it is not there.
    """
    recipe = load_recipe(Path("recipes/demo.yaml"))
    run_extract(recipe, Path("runs/demo"))
    run_train(recipe, Path("runs/demo"))
    target = prepare_target(recipe.target)
    renderer = Renderer(AutoTokenizer.from_pretrained(target))
    prompts = [renderer.prompt(prompt) for prompt in training_and_held_out(recipe.extract)[1]]
    with tempfile.TemporaryDirectory() as folder:
        drafters = {"float32": Path(folder) / "float32"}
        convert_checkpoint(Path("runs/demo/checkpoint"), drafters["float32"], to="vllm", dtype="float32")
        for scheme in SCHEMES:
            drafters[scheme] = out = Path(folder) / scheme
            convert_checkpoint(drafters["float32"], out, to="vllm", quantize=scheme)
            if SCHEMES[scheme].inputs is None:
                drafters[scheme] = Path(folder) / f"{scheme}-as-computed"
                convert_checkpoint(out, drafters[scheme], to="vllm")
        configs = [
            EngineSpec(
                name=name,
                target=str(target),
                dtype="float32",
                engine=recipe.engine,
                memory_share=1 / len(drafters),
                speculative=speculative_config(path, K),
            )
            for name, path in drafters.items()
        ]
        hosts = start_engines(configs, Path(folder))
        try:
            engines = dict(zip(drafters, hosts, strict=True))
            lengths = {name: _acceptance_length(engine, prompts) for name, engine in engines.items()}
            times: dict[str, list[float]] = {"float32": [], "int8-dynamic": []}
            for turn in range(ROUNDS + 1):
                for name in times if turn % 2 else reversed(times):
                    begun = time.perf_counter()
                    for prompt in prompts[:TIMED]:
                        engines[name].generate([prompt], max_tokens=MAX_TOKENS)
                    if turn:  # the first warms up
                        times[name].append(time.perf_counter() - begun)
        finally:
            for host in hosts:
                host.close()
    figures = {}
    for scheme in SCHEMES:
        ratio = lengths[scheme] / lengths["float32"]
        against = f"float32 weights; acceptance lengths {lengths[scheme]:.3f} and {lengths['float32']:.3f}"
        name = f"convert.{scheme.replace('-', '_')}_acceptance_ratio"
        figures[name] = figure([ratio], "ratio", against, direction="higher")
    ratios = [mine / other for mine, other in zip(times["int8-dynamic"], times["float32"], strict=True)]
    figures["convert.int8_dynamic_time_ratio"] = figure(
        ratios, "ratio", "decoding with the float32 drafter", direction="lower"
    )
    return figures


def _acceptance_length(engine: EngineHost, prompts: list[list[int]]) -> float:
    before = engine.counters()
    engine.generate(prompts, max_tokens=MAX_TOKENS)
    counted = engine.counters() - before
    return 1 + counted.accepted / counted.drafts
