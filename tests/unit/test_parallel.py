"""A target split over processes, GPUs and machines: what vLLM can do is asked of it, what it cannot is refused before it loads."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, LlamaConfig

from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.engine.environment import (
    memory_arguments,
    require_parallelism,
    share_of_machine,
    vllm_environment,
)
from draftsmith.engine.memory import GIB
from draftsmith.extract.job import engine_arguments
from draftsmith.run.errors import UserError
from draftsmith.target.info import describe_target
from tests.unit.fake_engine import pretend_gpu
from tests.unit.tiny_run import make_run

BIND = "VLLM_CPU_OMP_THREADS_BIND"
CONFIG = LlamaConfig(num_attention_heads=12, num_hidden_layers=4, hidden_size=96)
RAY = {"distributed_executor_backend": "ray"}


@pytest.fixture
def _six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 1, 2, 3, 5, 7}, raising=False)
    monkeypatch.delenv(BIND, raising=False)


def split(size: int = 1, **options: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=size, options=options)


# ---- processes on a CPU ----


def test_workers_on_other_machines_have_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    monkeypatch.delenv(name, raising=False)
    assert name not in vllm_environment(split())
    over_ray = split(2, **RAY)
    assert vllm_environment(over_ray)[name] == "TRITON_F32_DEFAULT,DRAFTSMITH_"
    monkeypatch.setenv(name, "MY_")
    assert vllm_environment(over_ray)[name] == "MY_,TRITON_F32_DEFAULT,DRAFTSMITH_"


@pytest.mark.usefixtures("_six_cores")
def test_processes_on_a_cpu_have_cores_and_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BIND not in vllm_environment(split())
    assert vllm_environment(split(2))[BIND] == "1,2,3|5,7,9"
    assert vllm_environment(split(2))["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert share_of_machine(0, 1, split(2)) == {}
    assert share_of_machine(1, 2, split()) == {BIND: "5,7,9"}
    assert share_of_machine(1, 3, split(2)) == {BIND: "3|5"}
    with pytest.raises(UserError, match=r"workers is 4 with 2 processes each, and this machine has 6 cores"):
        share_of_machine(0, 4, split(2))
    # vLLM gives each process a cache of the size that it is told.
    assert memory_arguments(split(2)) == {"kv_cache_memory_bytes": GIB}
    assert memory_arguments(split(2), share=0.5) == {"kv_cache_memory_bytes": GIB // 2}
    monkeypatch.setenv(BIND, "0|1")
    assert BIND not in vllm_environment(split(2)), "what the user has set is kept"


@pytest.mark.usefixtures("_six_cores")
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (split(5), "12 attention heads, which must divide by it: use one of 1, 2, 3, 4, 6, 12"),
        (split(12), "is 12, and this machine has 6 cores"),
        (split(2, **RAY), "vLLM 0.32 starts no engine on CPUs through Ray"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(engine: EngineConfig, said: str) -> None:
    with pytest.raises(UserError) as refused:
        require_parallelism(engine, CONFIG)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("_six_cores")
def test_key_value_heads_are_divided_or_copied() -> None:
    """Qwen2.5-7B's 28 and 4: vLLM asserts it at 7 and 14 processes."""
    grouped = AutoConfig.for_model("qwen2", num_attention_heads=28, num_key_value_heads=4)
    with pytest.raises(UserError, match=r"28 attention heads.* and 4 key/value heads, .*: use one of 1, 2, 4, 28\."):
        require_parallelism(split(7), grouped)
    for size in (2, 4):
        require_parallelism(split(size), grouped)
    latent = AutoConfig.for_model("deepseek_v3", num_attention_heads=6, num_key_value_heads=4, kv_lora_rank=8)
    require_parallelism(split(3), latent)
    of_some_layers = AutoConfig.for_model(
        "gemma4_text",
        attention_k_eq_v=True,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_global_key_value_heads=2,
    )
    with pytest.raises(UserError, match=r"6 attention heads.* and 2 key/value heads, .*: use one of 1, 6\."):
        require_parallelism(split(3), of_some_layers)


@pytest.mark.usefixtures("_six_cores")
def test_what_a_cpu_can_do_is_not() -> None:
    for size in (1, 2, 6):
        require_parallelism(split(size), CONFIG)


def test_vllm_refuses_ray_on_cpus() -> None:
    """What the refusal says."""
    cpu = pytest.importorskip("vllm.platforms.cpu")
    assert cpu.CpuPlatform.ray_device_key == ""


# ---- GPUs ----


def test_an_engine_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, gib=80)  # one
    require_parallelism(split(), CONFIG)
    require_parallelism(split(4, **RAY), CONFIG)
    with pytest.raises(UserError, match=r"size is 4, and 1 GPUs are visible.*distributed_executor_backend: ray"):
        require_parallelism(split(4), CONFIG)
    assert share_of_machine(1, 2, split(2, **RAY)) == {}
    with pytest.raises(UserError, match="2 with 4 GPUs each, and 1 GPUs are visible"):
        share_of_machine(1, 2, split(4))


def test_vllm_extracts_from_no_pipeline_stages(tmp_path: Path) -> None:
    """What the refusal says. With a vLLM that does, let recipes have them."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    make_run(tmp_path)
    target = describe_target(tmp_path / "target")
    recipe = Recipe.model_validate(
        {"name": "r", "target": {"model": str(target.path), "dtype": "float32"}, "extract": {"prompts": {"path": "p"}}}
    )
    arguments = engine_arguments(recipe, target, (1, 2)) | {"max_model_len": 128}
    with pytest.raises(NotImplementedError, match="Pipeline parallelism is not supported for this model"):
        EngineArgs(**arguments, pipeline_parallel_size=2).create_engine_config()


# ---- several machines ----


def test_an_engine_over_machines_is_not_one_on_each() -> None:
    fields: dict[str, Any] = {
        "name": "r", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "p"}, "machines": "all"}, "engine": {"options": RAY},
    }  # fmt: skip
    with pytest.raises(ValidationError, match="lets one engine span several"):
        Recipe.model_validate(fields)
    del fields["extract"]["machines"]
    assert Recipe.model_validate(fields).engine.on_ray


# ---- who writes ----


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_one_rank_writes(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = pytest.importorskip("draftsmith.extract.connector")
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: rank)
    layer = SimpleNamespace(num_heads=3, head_size=8, kv_cache_torch_dtype=torch.float32)
    monkeypatch.setattr(connector, "get_layers_from_vllm_config", lambda config, kind, names: {"states": layer})
    made = object.__new__(connector.HiddenStatesConnector)
    made._vllm_config, made._names_from_requests, made._running, made._as_vllm = None, True, {}, False
    made._writer = made._pool = made._copier = None
    made._blocks, made._block_size, made._directory = 2, 4, str(tmp_path)
    made.register_kv_caches({"attention": torch.zeros(1), "states": torch.zeros(1)})
    made.take(torch.tensor([0]), torch.ones(1, 3, 8))
    assert (made._writer is not None) == (made._pool is not None) == (rank == 0)
    made._connector_metadata = connector._Metadata([connector._Save("a", "a.safetensors", [1], [0], None)], [])
    with mock.patch.object(connector.HiddenStatesConnector, "_start_writing") as started:
        assert made.get_finished({"a"}) == (({"a"}, None) if rank == 0 else (None, None))
    assert started.called == (rank == 0)


def test_the_connector_refuses_divided_texts() -> None:
    connector = pytest.importorskip("draftsmith.extract.connector")
    config = mock.MagicMock()
    config.cache_config.enable_prefix_caching = False
    config.parallel_config = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=2)
    with pytest.raises(UserError, match=r"context parallelism.*--tensor-parallel-size"):
        connector.HiddenStatesConnector(config, mock.MagicMock(), mock.MagicMock())
