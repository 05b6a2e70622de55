"""`engine.options`: what is refused, what the installed vLLM knows, what a stage sets itself, and that all stages take the same."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from draftsmith.config import engine_options
from draftsmith.config.loading import digest, load_recipe
from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.engine import options
from draftsmith.engine.environment import states_arguments
from draftsmith.extract import job, worker
from draftsmith.extract.extract import _say_options
from draftsmith.extract.job import engine_job, store_identity
from draftsmith.run.errors import UserError
from draftsmith.serve import vllm_server
from draftsmith.serve.evaluation.engine import EngineSpec, say_options
from draftsmith.serve.evaluation.machine import describe_engines
from draftsmith.store.format import MANIFEST, StoreIdentity, manifest_bytes, read_manifest
from draftsmith.target import family
from draftsmith.target.family import FAMILIES
from draftsmith.target.info import TargetInfo, describe_target
from tests.unit.test_store import identity
from tests.unit.tiny_run import make_run


def recipe_with(folder: Path, given: dict[str, Any], **sections: Any) -> Recipe:
    """A recipe for `folder/target` with engine options."""
    return Recipe.model_validate(
        {
            "name": "r", "target": {"model": str(folder / "target"), "dtype": "float32"}, "extract": {"prompts": {"path": "p"}},
            "engine": {"max_model_len": 128, "options": given}, **sections,
        }
    )  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> TargetInfo:
    make_run(tmp_path)
    return describe_target(tmp_path / "target")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_model_len": 8}, "`max_model_len` is set by `engine.max_model_len`"),
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` is set by `engine.tensor_parallel_size`"),
        ({"enforce_eager": True}, "`enforce_eager` is set by `engine.enforce_eager`"),
        ({"dtype": "float16"}, "`dtype` is set by `target.dtype`"),
        ({"trust_remote_code": True}, "`trust_remote_code` is set by `target.trust_remote_code`"),
        ({"kv_cache_memory_bytes": 1}, "`kv_cache_memory_bytes` is set by `engine.kv_cache_gib`"),
        ({"max_num_seqs": 8}, "`max_num_seqs` is set by `extract.max_num_seqs`"),
        ({"speculative_config": {}}, "`speculative_config` is set by `serve.method` and `evaluate.methods`"),
        (
            {"data_parallel_size": 2},
            "copies of extraction's engine are `extract.workers`, on several machines `extract.machines`",
        ),
        ({"decode_context_parallel_size": 2}, "context parallelism divides them"),
        ({"nnodes": 2}, "one engine on several machines is `distributed_executor_backend: ray`"),
        (
            {"pipeline_parallel_size": 2},
            "only from engines without pipeline stages. Split the target with `engine.tensor_parallel_size`",
        ),
        ({"distributed_executor_backend": "external_launcher"}, "must be one of mp, ray, uni"),
        ({"hf_token": "secret"}, "into the environment, as HF_TOKEN"),
        ({"hf_overrides": "callable"}, "must be a mapping"),
        ({"hf_overrides": {"num_hidden_layers": 2}}, "changes `num_hidden_layers`"),
        ({"hf_overrides": {"text_config": {"vocab_size": 2}}}, "changes `vocab_size`"),
        ({"hf_overrides": {"thinker_config": {"text_config": {"rms_norm_eps": 1e-4}}}}, "changes `rms_norm_eps`"),
        ({"hf_overrides": {"logits_scaling": 2.0}}, "changes `logits_scaling`"),
    ],
)
def test_what_another_key_sets_or_no_stage_can_use_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(options=given)
    assert said in str(caught.value)


def test_overrides_of_what_is_read_from_the_config_are_all_refused() -> None:
    """Every key that the facts of some family are read from; not what vLLM alone uses, nor the sizes of what sees images."""
    read = {key for one in FAMILIES.values() for key in (one.eps, one.multiplier, one.divisor, one.soft_cap)}
    assert {key for key in read if isinstance(key, str)} | {*family._OTHER_LOGITS} <= engine_options.READ_FROM_CONFIG
    allowed = {
        "rope_parameters": {"rope_type": "default"},
        "vision_config": {"hidden_size": 8},
        "max_position_embeddings": 64,
    }
    assert EngineConfig(options={"hf_overrides": allowed}).options == {"hf_overrides": allowed}


def test_the_transformers_backend_is_told_the_factor_of_logits() -> None:
    """By the name that it knows; it knows soft caps, and Cohere's factor has that name."""
    for kind, fields, backend, told in (
        ("granitemoe", {"logits_scaling": 8.0}, "TransformersMoEForCausalLM", {"logit_scale": 0.125}),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, "TransformersForCausalLM", {"logit_scale": 0.5}),
        ("cohere", {"logit_scale": 0.25}, "TransformersForCausalLM", {}),
        ("gemma2", {}, "TransformersForCausalLM", {}),
    ):
        found = states_arguments(AutoConfig.for_model(kind, **fields), {"hf_overrides": {"use_cache": False}})
        assert found == {"hf_overrides": {"use_cache": False, "architectures": [backend], **told}}, kind
    assert states_arguments(AutoConfig.for_model("granite", logits_scaling=8.0), {}) == {}


def test_a_refusal_is_one_paragraph_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "name: r\ntarget: { model: a/b }\nextract: { prompts: { path: p } }\nengine: { options: { max_model_len: 8 } }\n"
    )
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert "`engine.options`: `max_model_len` is set by `engine.max_model_len`" in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded = load_recipe(tmp_path / "recipe.yaml", ["engine.options={kv_cache_dtype: fp8}"])
    assert loaded.engine.options == {"kv_cache_dtype": "fp8"}


def test_states_are_kept_in_the_target_s_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="also sets how vLLM keeps hidden states, which are float32 here"):
        recipe_with(tmp_path, {"kv_cache_dtype": "bfloat16"})
    recipe_with(tmp_path, {"kv_cache_dtype": "fp8"})
    recipe_with(tmp_path, {"kv_cache_dtype": "bfloat16"}, target={"model": "a/b", "dtype": "bfloat16"})


def test_names_are_those_of_the_installed_vllm() -> None:
    """Also those that are refused here: a name that vLLM does not have would be refused in vain."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    known = options.engine_arguments()
    assert known == {field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
    assert engine_options.KEYS.keys() | engine_options._REFUSED.keys() <= known


def test_a_wrong_name_is_told_the_nearest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "engine_arguments", lambda: frozenset({"kv_cache_dtype", "quantization"}))
    options.check_options(EngineConfig(options={"quantization": "fp8"}))
    with pytest.raises(
        UserError, match=r"`engine\.options\.kv_cache_dtpye`.*did you mean `kv_cache_dtype`\?.*`serve\.vllm_args`"
    ):
        options.check_options(EngineConfig(options={"kv_cache_dtpye": "fp8"}))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(options, "engine_arguments", lambda: None)
    options.check_options(EngineConfig(options={"kv_cache_dtpye": "fp8"}))
    assert "not checked, because vLLM is not installed" in capsys.readouterr().err


def test_names_are_read_without_importing_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    source = "class EngineArgs:\n    model: str = ''\n    _rank: int = 0\n    def method(self): pass\n\nclass AsyncEngineArgs(EngineArgs):\n    log: bool\n"
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(source)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "vllm")])
    monkeypatch.setattr(options, "find_spec", lambda name: found)
    assert options.engine_arguments.__wrapped__() == {"model"}
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert options.engine_arguments.__wrapped__() is None


# ---- what a stage sets itself ----

GIVEN = {
    "block_size": 32,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "kv_transfer_config": {"kv_connector": "Mine"},
}


def test_extraction_s_own_arguments_win_and_it_says_so(
    target: TargetInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with(tmp_path, GIVEN)
    made_from = store_identity(recipe, target, (1, 2))
    arguments = engine_job(recipe, target, made_from, 1 << 30).engine_arguments
    assert arguments["block_size"] == 32
    assert arguments["enable_prefix_caching"] is False
    assert arguments["async_scheduling"] is False
    _say_options(recipe, target, made_from)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "extract: engine.options.enable_prefix_caching is not used here; this stage needs `False`",
        "extract: engine.options.async_scheduling is not used here; this stage needs `False`",
        "extract: engine.options.kv_transfer_config is not used here; this stage needs its own",
    ]
    slow = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"backend": "transformers"})})
    _say_options(slow, target, made_from)
    assert "engine.options are not used by `backend: transformers`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "capabilities", "said"),
    [
        ("bfloat16", {"avx2": True}, True),
        ("bfloat16", {"avx512_bf16": True}, False),
        ("float32", {"avx2": True}, False),
    ],
)
def test_extraction_says_that_bfloat16_is_emulated(
    dtype: str,
    capabilities: dict[str, bool],
    said: bool,
    target: TargetInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    recipe = recipe_with(tmp_path, {})
    recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": dtype})})
    _say_options(recipe, target, store_identity(recipe, target, (1, 2)))
    expected = "extract: `target.dtype` is bfloat16. This processor emulates it, several times slower than float32: set `target.dtype: float32`."
    assert capsys.readouterr().err.splitlines() == [expected] * said


def test_a_machine_that_only_drives_others_needs_no_gpu(
    target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's CUDA build on a Ray cluster's head without GPUs."""

    def refuse() -> bool:
        raise UserError("On a machine without GPUs install the CPU build")

    monkeypatch.setattr(job, "is_cpu", refuse)
    recipe = recipe_with(tmp_path, GIVEN)
    recipe = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"machines": "all"})})
    _say_options(recipe, target, store_identity(recipe, target, (1, 2)))
    assert capsys.readouterr().err == ""


def test_extraction_s_connector_wins(target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **arguments: made.update(arguments)))
    monkeypatch.setattr(worker, "_work", lambda *arguments: None)
    recipe = recipe_with(tmp_path, GIVEN)
    job = engine_job(recipe, target, store_identity(recipe, target, (1, 2)), 1 << 30)
    worker._child(None, job, tmp_path, tmp_path)  # type: ignore[arg-type]
    assert made["kv_transfer_config"]["kv_connector"] == "HiddenStatesConnector"
    assert made["block_size"] == 32


def test_measurements_own_arguments_win_and_they_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineConfig(options={**GIVEN, "logprobs_mode": "processed_logits"})
    arguments = EngineSpec(name="k1", target="t", dtype="float32", engine=engine).arguments()
    assert arguments["block_size"] == 32
    assert arguments["async_scheduling"] is True
    assert arguments["kv_transfer_config"] == {"kv_connector": "Mine"}
    assert arguments["enable_prefix_caching"] is False
    say_options("tune", engine)
    assert capsys.readouterr().err.splitlines() == [
        "tune: engine.options.enable_prefix_caching is not used here; this stage needs `False`",
        "tune: engine.options.logprobs_mode is not used here; this stage needs `raw_logprobs`",
    ]


def test_the_server_s_own_options_win(tmp_path: Path) -> None:
    given = {"block_size": 32, "kv_cache_dtype": "fp8", "enable_prefix_caching": True}
    recipe = recipe_with(tmp_path, given, serve={"vllm_args": {"block-size": 64, "enable_prefix_caching": False}})
    command = vllm_server.server_command(recipe, tmp_path / "target", None, name="n", host="127.0.0.1", port=1)
    assert command[command.index("--block-size") + 1] == "64"
    assert command.count("--block-size") == 1
    assert command[command.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--no-enable-prefix-caching" in command
    assert "--enable-prefix-caching" not in command


EVERYWHERE: dict[str, Any] = {
    "block_size": 32, "kv_cache_dtype": "fp8", "enable_expert_parallel": True, "distributed_executor_backend": "mp",
    "quantization": "fp8", "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "kv_cache_dtype_skip_layers": ["0", "1"], "limit_mm_per_prompt": {"image": 0}, "long_prefill_token_threshold": 64,
}  # fmt: skip


def test_all_stages_give_vllm_the_same(target: TargetInfo, tmp_path: Path) -> None:
    """The server's flags, parsed by vLLM's own parser, are the values that the other stages' engines get."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    recipe = recipe_with(tmp_path, EVERYWHERE)
    command = vllm_server.server_command(recipe, target.path, None, name="n", host="127.0.0.1", port=1)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[4:])
    spec = EngineSpec(name="baseline", target=str(target.path), dtype="float32", engine=recipe.engine)
    job = engine_job(recipe, target, store_identity(recipe, target, (1, 2)), 1 << 30)
    served = AsyncEngineArgs.from_cli_args(parsed)
    measured, extracted = (
        EngineArgs(**{name: value for name, value in arguments.items() if name != "use_tqdm_on_load"})
        for arguments in (spec.arguments(), job.engine_arguments)
    )
    for name, value in EVERYWHERE.items():
        assert [getattr(one, name) for one in (served, measured, extracted)] == [value] * 3, name


def test_options_reach_the_resolved_config_of_every_engine(target: TargetInfo, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {"block_size": 32, "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}}
    recipe = recipe_with(tmp_path, given)
    spec = EngineSpec(name="baseline", target=str(target.path), dtype="float32", engine=recipe.engine)
    job = engine_job(recipe, target, store_identity(recipe, target, (1, 2)), 1 << 30)
    connector = KVTransferConfig(
        kv_connector="HiddenStatesConnector",
        kv_connector_module_path="draftsmith.extract.connector",
        kv_role="kv_producer",
    )
    for arguments in (spec.arguments(), job.engine_arguments | {"kv_transfer_config": connector}):
        config = EngineArgs(**arguments).create_engine_config()
        assert config.cache_config.block_size == 32
        assert config.model_config.hf_config.rope_parameters["rope_theta"] == 100.0


# ---- what is recorded ----


def test_runs_without_options_have_the_digests_of_before() -> None:
    before = {
        "max_model_len": 2048, "enforce_eager": None, "kv_cache_gib": 2.0, "gpu_memory_utilization": 0.85, "tensor_parallel_size": 1,
    }  # fmt: skip
    assert EngineConfig().model_dump(mode="json") == before
    assert digest(EngineConfig(options={"block_size": 32}).model_dump(mode="json")) != digest(before)
    assert "options" not in describe_engines(EngineConfig(enforce_eager=True), None)
    assert describe_engines(EngineConfig(enforce_eager=True, options={"a": 1}), None)["options"] == {"a": 1}


def test_a_store_knows_its_options_and_old_stores_have_none(tmp_path: Path) -> None:
    plain = identity()
    assert plain.recorded() == {name: value for name, value in _json(vars(plain)).items() if name != "engine_options"}
    with_options = dataclasses.replace(plain, engine_options={"quantization": "fp8"})
    assert digest(plain.recorded()) != digest(with_options.recorded())
    for one in (plain, with_options):
        (tmp_path / MANIFEST).write_bytes(manifest_bytes(one, []))
        read: StoreIdentity = read_manifest(tmp_path)[0]
        assert read == one
    with pytest.raises(UserError, match=r"engine_options\.quantization is 'fp8' there and None in this run"):
        with_options.require(plain, tmp_path)


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))
