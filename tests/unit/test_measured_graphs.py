"""CUDA graphs of the engines that are compared, as vLLM itself plans them, as far as its CPU build goes: its config is made, and what this
platform would change of it is left alone."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment
from draftsmith.serve.evaluation.engine import EngineSpec, graph_sizes
from tests.unit.tiny_run import make_run


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes vLLM's config of an engine that measures on a GPU, with K speculative tokens."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    make_run(tmp_path)
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(CpuPlatform, "support_static_graph_mode", classmethod(lambda cls: True))

    def plan(k: int, *, without: tuple[str, ...] = (), **options: Any) -> Any:
        speculative = {"method": "ngram", "num_speculative_tokens": k} if k else None
        spec = EngineSpec(
            name="e",
            target=str(tmp_path / "target"),
            dtype="float32",
            engine=EngineConfig(max_model_len=128, options=options),
            speculative=speculative,
        )
        arguments = spec.arguments()
        for name in ("use_tqdm_on_load", *without):
            arguments.pop(name, None)
        return EngineArgs(**arguments).create_engine_config().compilation_config

    return plan


def test_baseline_and_drafter_have_graphs_of_as_many_tokens(planned: Any) -> None:
    """By themselves vLLM's engines of 32 sequences capture up to 64 tokens, and 256 where they draft three."""
    sizes = ("cudagraph_capture_sizes",)
    assert [planned(k, without=sizes).max_cudagraph_capture_size for k in (0, 3)] == [64, 256]
    for k in (0, 3, 4):
        own, measured = planned(k, without=sizes), planned(k)
        assert measured.max_cudagraph_capture_size == 512
        assert {*own.cudagraph_capture_sizes} <= {*measured.cudagraph_capture_sizes}
        assert {n * (1 + k) for n in (1, 2, 4, 8, 16, 24, 32)} <= {*measured.cudagraph_capture_sizes}


def test_sizes_that_users_choose_are_kept(planned: Any) -> None:
    assert planned(0, cudagraph_capture_sizes=[1, 8]).cudagraph_capture_sizes == [1, 8]
    assert planned(3, max_cudagraph_capture_size=16).max_cudagraph_capture_size == 16


def test_where_there_are_no_graphs_no_sizes_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(**engine: Any) -> bool:
        spec = EngineSpec(name="e", target="a/b", dtype="float32", engine=EngineConfig(**engine))
        return "cudagraph_capture_sizes" in spec.arguments()

    assert not given()
    assert not given(enforce_eager=False)
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    assert given()
    assert not given(enforce_eager=True)


def test_steps_of_a_schedule_have_sizes_of_their_own() -> None:
    found = graph_sizes(200, {6, 3})
    assert {3 * 8, 3 * 168, 6 * 4, 6 * 80} <= {*found}
    assert max(found) == 512
    assert found == sorted({*found})
    assert found[0] == 1
