"""What extraction asks of vLLM on a CPU and on a GPU, and that vLLM takes it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.config.recipe import Recipe
from draftsmith.extract.extract import _ran_on
from draftsmith.extract.job import engine_arguments
from draftsmith.target.info import describe_target
from tests.unit.tiny_run import make_run


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments on a machine with or without a GPU."""
    make_run(tmp_path)
    target = describe_target(tmp_path / "target")

    def ask(on_gpu: bool, **extract: Any) -> dict[str, Any]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        sections = {"extract": {"prompts": {"path": "p"}, **extract}, "engine": {"max_model_len": 128}}
        recipe = Recipe.model_validate(
            {"name": "r", "target": {"model": str(target.path), "dtype": "float32"}} | sections
        )
        return engine_arguments(recipe, target, (1, 2))

    return ask


def test_a_cpu_s_engine_has_our_scheduler(asked: Any) -> None:
    found = asked(False, workers=2)
    assert found["scheduler_cls"] == "draftsmith.extract.scheduler.ExtractionScheduler"
    assert found["async_scheduling"] is False
    assert found["enforce_eager"] is True
    assert "num_speculative_tokens_per_batch_size" not in found["speculative_config"]
    assert found["kv_cache_memory_bytes"] == 2**30


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_record_says_what_the_machine_decided(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    recipe = Recipe.model_validate({"name": "r", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "p"}}})
    assert _ran_on(recipe) == (
        {"gpus": ["GPU 0", "GPU 1"], "enforce_eager": False, "scheduler": "vllm"}
        if on_gpu
        else {"gpus": [], "enforce_eager": True, "scheduler": "draftsmith"}
    )


def test_a_gpu_s_engine_has_vllm_s_scheduler_and_full_graphs(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as vLLM's CPU build goes: its config is made with what this platform would change left alone."""
    pytest.importorskip("vllm")
    from vllm.config import CUDAGraphMode, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    arguments = asked(True, max_num_seqs=48, workers=2)
    assert not {"scheduler_cls", "async_scheduling"} & arguments.keys()
    assert arguments["enforce_eager"] is False
    assert arguments["gpu_memory_utilization"] == 0.85, "workers have GPUs of their own"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # as on GPUs, where this method has model runner V2
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda cls: True))
    connector = KVTransferConfig(
        kv_connector="HiddenStatesConnector",
        kv_connector_module_path="draftsmith.extract.connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"handoff_directory": "/nowhere"},
    )
    config = EngineArgs(**arguments, kv_transfer_config=connector).create_engine_config()
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling is True
    assert config.scheduler_config.get_scheduler_cls() is AsyncScheduler
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert {1, 2, 40, 48} <= {*config.compilation_config.cudagraph_capture_sizes}, "a row for every sequence"
    speculative = config.speculative_config
    assert speculative is not None
    assert speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids == [1, 2]
    lookup = build_dynamic_sd_schedule_lookup(
        speculative.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=48,
        vllm_num_speculative_tokens=config.num_speculative_tokens,
    )
    assert lookup == [0] * 49, "at no load a draft is checked"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_server_of_the_documents_is_started_with_the_same(on_gpu: bool, asked: Any) -> None:
    """Its command for this device, by vLLM's own parser."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    page = (Path(__file__).parents[2] / "docs" / "extraction-server.md").read_text()
    commands = re.findall(r"^python -m vllm\.entrypoints\.openai\.api_server (.*?)^```", page, flags=re.M | re.S)
    assert len(commands) == 2, "for CPUs, for GPUs"
    arguments = shlex.split(commands[on_gpu].replace("\\\n", "").replace("--port 8000", ""))
    typed = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments))
    expected = asked(on_gpu, max_num_seqs=256)
    for name in ("scheduler_cls", "async_scheduling", "enforce_eager", "enable_prefix_caching"):
        assert typed[name] == expected.get(name, getattr(EngineArgs, name)), name
    assert typed["max_num_seqs"] == (256 if on_gpu else None)
    for config in (typed["speculative_config"], expected["speculative_config"]):
        layer_ids = config.pop("draft_model_config")["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        assert len(layer_ids) > 1
    assert typed["speculative_config"] == expected["speculative_config"]
    assert typed["kv_transfer_config"].kv_connector_module_path == "draftsmith.extract.connector"
