"""Quantized targets and caches that vLLM does not run on this machine are refused in words, before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from draftsmith.cli.fit import check_fits
from draftsmith.config.recipe import EngineConfig, ExtractConfig, Recipe
from draftsmith.engine import quantization
from draftsmith.engine.fit import require_extraction
from draftsmith.engine.process import EngineProcess
from draftsmith.engine.quantization import require_quantization
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.evaluate import run_evaluate
from tests.unit.fake_engine import make_recipe_and_run, pretend_gpu
from tests.unit.test_fit import no_engine

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
W8A8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def fp8_by(strategy: str) -> dict[str, Any]:
    """As compressed-tensors states it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the processor seems to have; AVX-512 alone unless a test says more."""

    def has(*, amx: bool, avx512: bool) -> None:
        monkeypatch.setattr(quantization, "_has_amx", lambda: amx)
        monkeypatch.setattr(quantization, "_has_avx512", lambda: avx512)

    has(amx=False, avx512=True)
    return has


def require(stated: dict[str, Any] | None = None, *, dtype: str = "bfloat16", heads: int = 8, **options: Any) -> None:
    config = LlamaConfig(hidden_size=1024, num_attention_heads=heads)
    if stated is not None:
        config.quantization_config = stated
    require_quantization(EngineConfig(options=options), config, target="owner/target", dtype=dtype)


@pytest.mark.parametrize("stated", [None, AWQ, GPTQ, W8A8, fp8_by("channel")])
def test_what_vllm_runs_is_left_alone(stated: dict[str, Any] | None) -> None:
    require(stated)
    require(stated, kv_cache_dtype="fp8")
    if stated is None:
        require(quantization="fp8_per_channel")


@pytest.mark.parametrize(
    ("stated", "given", "said"),
    [
        (AWQ, {"dtype": "float32"}, r"owner/target is quantized \(awq\).*bfloat16 and float16 only\. Set `target\.dtype: bfloat16`"),
        (FP8, {"dtype": "float32"}, r"owner/target is quantized \(fp8\)"),
        (None, {"dtype": "float32", "quantization": "fp8_per_tensor"}, r"`engine\.options\.quantization` is fp8_per_tensor"),
        (None, {"quantization": "fp8"}, r"is for checkpoints in FP8, and owner/target is in floating point.*fp8_per_tensor"),
        (GPTQ | {"bits": 8}, {}, r"GPTQ in 4 bits, not in 8, so it does not run owner/target on this machine as the recipe asks\. Use a GPU"),
        (FP8, {}, r"FP8 with a scale for each row of a weight, not with one for all of it"),
        (fp8_by("tensor"), {}, r"a scale for each row of a weight, not with one for all of it"),
        (None, {"quantization": "fp8_per_tensor"}, r"a scale for each row of a weight, not with one for all of it"),
        (FP8 | {"weight_block_size": [128, 128]}, {}, r"each block of a weight on processors with AMX only"),
        (None, {"quantization": "fp8_per_block"}, r"each block of a weight on processors with AMX only"),
        (None, {"kv_cache_dtype": "nvfp4"}, r"kv_cache_dtype: nvfp4`: vLLM's CPU build has auto, .*fp8, fp8_e4m3"),
        (None, {"kv_cache_dtype": "fp8", "heads": 64}, r"heads that are a multiple of 32 wide, not 16"),
    ],
)  # fmt: skip
def test_what_it_does_not_run_is_refused(stated: dict[str, Any] | None, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        require(stated, **given)
    assert "\n" not in str(refused.value)


def test_heads_may_differ_between_layers() -> None:
    engine = EngineConfig(options={"kv_cache_dtype": "fp8"})
    right, wrong = (AutoConfig.for_model("gemma4_text", head_dim=32, global_head_dim=size) for size in (64, 16))
    require_quantization(engine, right, target="owner/target", dtype="bfloat16")
    with pytest.raises(UserError, match="heads that are a multiple of 32 wide, not 16"):
        require_quantization(engine, wrong, target="owner/target", dtype="bfloat16")


def test_processors_differ(processor: Any) -> None:
    processor(amx=True, avx512=True)
    require(FP8 | {"weight_block_size": [128, 128]})
    processor(amx=False, avx512=False)
    with pytest.raises(UserError, match="a processor with AVX-512 or AMX"):
        require(kv_cache_dtype="fp8_e5m2")
    require(W8A8)
    for stated, name in ((AWQ, "AWQ"), (GPTQ, "GPTQ")):
        with pytest.raises(UserError, match=f"{name} on processors with AVX-512 only") as refused:
            require(stated)
        assert "in 4 bits as AWQ" not in str(refused.value)


def test_gpus_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what no device does."""
    pretend_gpu(monkeypatch, gib=80)
    for stated in (GPTQ | {"bits": 8}, FP8, FP8 | {"weight_block_size": [128, 128]}):
        require(stated, kv_cache_dtype="nvfp4")
    with pytest.raises(UserError, match="bfloat16 and float16 only"):
        require(FP8, dtype="float32")


def test_no_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run_dir = make_recipe_and_run(tmp_path)
    monkeypatch.setattr(EngineProcess, "__init__", no_engine)
    config = LlamaConfig()
    config.quantization_config = GPTQ
    with pytest.raises(UserError, match=r"target is quantized \(gptq\)"):
        require_extraction(
            EngineConfig(),
            ExtractConfig.model_validate({"prompts": {"path": "p.jsonl"}}),
            config,
            target="target",
            target_bytes=1,
            dtype="float32",
            layers=4,
        )
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": GPTQ}))
    recipe = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"max_tokens": 20})})
    with pytest.raises(UserError, match=r"target is quantized \(gptq\)"):
        run_evaluate(recipe, run_dir)


def test_a_dtype_of_the_evaluation_is_refused_before_extraction() -> None:
    """Not after the training, when the evaluation starts its engines."""
    loaded = Recipe.model_validate(
        {"name": "r", "target": {"model": "owner/target", "dtype": "bfloat16"}, "extract": {"prompts": {"path": "p"}}}
    )
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8, vocab_size=100
    )
    config.quantization_config = AWQ
    check_fits(loaded, config)
    asked = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"dtypes": ("float32",)})})
    with pytest.raises(UserError, match=r"owner/target is quantized \(awq\).*leave float32 out of `evaluate\.dtypes`"):
        check_fits(asked, config)
    check_fits(asked, config, evaluation=False)


def test_no_float32_for_8_bit_drafters_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before extraction, and before the engines of an evaluation start."""
    loaded, run_dir = make_recipe_and_run(tmp_path)
    short = loaded.extract.model_copy(update={"max_tokens": 20})
    in_8_bits = loaded.convert.model_copy(update={"quantize": "int8"})
    loaded = loaded.model_copy(update={"convert": in_8_bits, "extract": short})
    config = AutoConfig.from_pretrained(tmp_path / "target")
    check_fits(loaded, config, extraction=False)
    monkeypatch.setattr(EngineProcess, "__init__", no_engine)
    pretend_gpu(monkeypatch, gib=80)
    said = r"has quantized weights, and on GPUs.*`target\.dtype: bfloat16`"
    with pytest.raises(UserError, match=r"The drafter with `convert\.quantize: int8` " + said):
        check_fits(loaded, config, extraction=False)
    in_half = loaded.model_copy(update={"target": loaded.target.model_copy(update={"dtype": "bfloat16"})})
    check_fits(in_half, config, extraction=False)

    with pytest.raises(AssertionError, match="engine"):
        run_evaluate(loaded, run_dir)  # this drafter's weights are in floating point
    drafter = run_dir / "vllm" / "config.json"
    drafter.write_text(json.dumps(json.loads(drafter.read_text()) | {"quantization_config": W8A8}))
    with pytest.raises(UserError, match=rf"The drafter in {drafter.parent} " + said):
        run_evaluate(loaded, run_dir)
