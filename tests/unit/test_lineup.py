"""Which engines are up together: the baseline and one other, each variant beside the baseline it is compared with."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import AutoConfig

from draftsmith.config import recipe
from draftsmith.config.methods import AnyMethod, Method
from draftsmith.engine import environment
from draftsmith.engine.environment import Gpu
from draftsmith.engine.memory import GIB, EngineMemory
from draftsmith.engine.speculation import drafts_fixed_k
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import engine as engine_module
from draftsmith.serve.evaluation import lineup
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.lineup import Lineup, Placement, find_placement, groups, place, serves_every_k


def gpus(count: int, gib: float = 79) -> list[Gpu]:
    return [Gpu(f"GPU-{number}", int(gib * GIB)) for number in range(count)]


def need(gib: float) -> EngineMemory:
    return EngineMemory(target=int(gib * GIB), drafter=0, kv_cache=0, working=0)


def spec(name: str, *on: str, dtype: str = "bfloat16", k_by_load: Any = None) -> EngineSpec:
    return EngineSpec(name=name, target="t", dtype=dtype, engine=recipe.EngineConfig(), gpus=on, k_by_load=k_by_load)


@given(st.lists(st.tuples(st.sampled_from([16, 32]), st.booleans()), min_size=1, max_size=9))
def test_each_variant_is_beside_its_baseline_and_two_engines_are_up(others: list[tuple[int, bool]]) -> None:
    """Variants in one of two dtypes, each with an engine of its own or with one that those of its dtype share."""
    baseline = {dtype: (0, dtype) for dtype, _ in others}
    specs = {key: spec(f"baseline-{key[1]}") for key in baseline.values()}
    for number, (dtype, shares) in enumerate(others, start=1):
        specs[number, dtype] = spec(f"shared-{dtype}" if shares else f"own-{number}")
    found = groups(specs, lambda key: baseline[key[1]])
    assert sorted(key for group in found for key in group[1:]) == sorted(key for key in specs if key[0])
    for group in found:
        assert group[0] == baseline[group[0][1]]
        assert len({dtype for _, dtype in group}) == 1
        assert len({specs[key].name for key in group}) == 2
    assert len(found) == len({specs[key].name for key in specs if key[0]}), "what shares an engine is asked together"


@pytest.mark.parametrize(
    ("speculative", "gib"),
    [
        ({"method": "draft_model"}, 4),
        ({"method": "eagle", "draft_tensor_parallel_size": 1}, 8),
        ({"method": "eagle3", "draft_tensor_parallel_size": 2}, 4),
    ],
)
def test_each_gpu_holds_its_part_of_a_draft_model(
    speculative: dict[str, Any], gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM splits it as the target, unless it is whole on each, as an MLP speculator."""
    needs: list[EngineMemory] = []
    monkeypatch.setattr(environment, "gpus", lambda: gpus(4))
    monkeypatch.setattr(environment, "_cores", lambda: range(4))
    monkeypatch.setattr(lineup, "weight_bytes", lambda *_: 8 * GIB)
    monkeypatch.setattr(lineup, "place", lambda engine, found, of, **_: needs.extend(of))
    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    target: Any = SimpleNamespace(name="t", path=Path("t"), config=config)
    find_placement(
        recipe.EngineConfig(tensor_parallel_size=2),
        target,
        [None, speculative | {"model": "d", "num_speculative_tokens": 1}],
        dtypes=["bfloat16"],
        room=(1, 1),
        at_least=(1, 1),
        smaller="a key",
    )
    assert [need.drafter for need in needs] == [0, gib * GIB]
    # Its keys and values are as many as the target's, of which each GPU has half.
    assert needs[1].kv_cache == 2 * needs[0].kv_cache


def test_placing_counts_no_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[EngineMemory] = []
    monkeypatch.setattr(environment, "gpus", lambda: gpus(1))
    monkeypatch.setattr(lineup, "weight_bytes", lambda *_: 8 * GIB)
    monkeypatch.setattr(lineup, "place", lambda engine, found, of, **_: needs.extend(of))
    config = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    target: Any = SimpleNamespace(name="t", path=Path("t"), config=config)
    room = (2, 1 << 20)
    find_placement(
        recipe.EngineConfig(), target, [None], dtypes=["bfloat16"], room=room, at_least=room, smaller="a key"
    )
    # In the layer with a window, that and a prefill step of each sequence.
    tokens = 2 * ((1 << 20) + config.sliding_window + 16384)
    assert needs[0].kv_cache == tokens * 2 * config.num_key_value_heads * config.head_dim * 2


@pytest.mark.parametrize(
    ("method", "every_k"),
    [
        ({"method": "eagle3"}, True),
        ({"method": "ngram"}, True),
        ({"method": "p_eagle"}, False),
        ({"method": "eagle3", "parallel_drafting": True}, False),
        ({"method": "draft_model", "model": "amd/PARD", "parallel_drafting": True}, False),
        ({"method": "draft_model", "model": "a/b"}, True),
    ],
)
def test_one_engine_drafts_at_every_k_unless_it_always_drafts_the_most(method: dict[str, Any], every_k: bool) -> None:
    found: Method = TypeAdapter(AnyMethod).validate_python(method)
    assert serves_every_k(found, recipe.EngineConfig(enforce_eager=True)) == every_k


def test_on_gpus_a_draft_model_always_drafts_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """So tuning finds one K for it, and an engine of its own measures each."""
    found: Method = TypeAdapter(AnyMethod).validate_python({"method": "draft_model", "model": "a/b"})
    assert not drafts_fixed_k(found)
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    assert drafts_fixed_k(found)
    assert not serves_every_k(found, recipe.EngineConfig(enforce_eager=True))
    assert not drafts_fixed_k(TypeAdapter(AnyMethod).validate_python({"method": "eagle3"}))


def test_engines_are_placed_on_as_few_gpus_as_hold_them() -> None:
    two_sets = Placement((("0", "1"), ("2", "3")), together=True)
    pair, again = two_sets.places(), two_sets.places(start=1)
    assert [(one.gpus, one.memory_share) for one in pair] == [(("0", "1"), 0.5)] * 2
    assert [one.gpus for one in again] == [("2", "3")] * 2, "the next start is on the other GPUs"
    one_each = Placement((("0",), ("1",), ("2",)), together=False)
    assert [(one.gpus, one.memory_share) for one in one_each.places(start=2)] == [(("2",), 1.0), (("0",), 1.0)]
    assert [(one.gpus, one.memory_share) for one in Placement().places()] == [((), 0.5)] * 2


def test_what_does_not_fit_is_an_error_before_anything_starts() -> None:
    engine = recipe.EngineConfig()  # 0.85 of a GPU
    assert place(engine, gpus(1), [need(30), need(33)], target="t", smaller="x").together
    assert place(engine, gpus(8), [need(33)], target="t", smaller="x").together
    four = engine.model_copy(update={"tensor_parallel_size": 4})
    assert place(four, gpus(7), [need(30)], target="t", smaller="x").sets == (("GPU-0", "GPU-1", "GPU-2", "GPU-3"),)
    with pytest.raises(
        UserError,
        match=r"t and an engine that speculates beside it.* 40\.0 GiB.*target 40\.0.*67\.1 of 79\.0 GiB on the one GPU"
        r".*Lower evaluate\.acceptance_batch_size or engine\.max_model_len",
    ):
        place(engine, gpus(1), [need(40)], target="t", smaller="evaluate.acceptance_batch_size")
    assert not place(engine, gpus(2), [need(40)], target="t", smaller="x").together
    with pytest.raises(UserError, match=r"each of the 2 GPUs"):
        place(engine, gpus(2), [need(70)], target="t", smaller="x")


def test_ray_places_engines_on_gpus_of_their_own() -> None:
    engine = recipe.EngineConfig(tensor_parallel_size=8, options={"distributed_executor_backend": "ray"})
    found = place(engine, gpus(2), [need(30)], target="t", smaller="x")
    assert [(one.gpus, one.memory_share) for one in found.places(start=1)] == [((), 1.0)] * 2
    with pytest.raises(UserError, match=r"40\.0 GiB on each of its GPUs"):
        place(engine, gpus(2, gib=40), [need(40)], target="t", smaller="x")
    assert environment.share_of_machine(1, 2, engine) == {}


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("3, GPU-ab", ["3", "GPU-ab"]), ("5,1,7", ["5", "1"])]
)
def test_gpus_have_the_names_that_children_are_given(
    visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    memory = {0: 80 * 10**9, 1: 24 * 10**9}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=memory[index]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.gpus() == [Gpu(names[0], memory[0]), Gpu(names[1], memory[1])]
    assert environment.share_of_machine(1, 2, recipe.EngineConfig()) == {"CUDA_VISIBLE_DEVICES": names[1]}
    with pytest.raises(UserError, match=r"2 with 2 GPUs each, and 2 GPUs are visible"):
        environment.share_of_machine(0, 2, recipe.EngineConfig(tensor_parallel_size=2))


@dataclass
class Host:
    config: EngineSpec
    up: set[str]
    log = Path()

    def close(self) -> None:
        self.up.remove(self.config.name)


def test_the_baseline_stays_and_the_others_come_and_go() -> None:
    up: set[str] = set()
    started: list[EngineSpec] = []

    def start(configs: list[EngineSpec]) -> Any:
        started.extend(configs)
        up.update(config.name for config in configs)
        assert len(up) <= 2, "no engine starts before the one it replaces has ended"
        return [Host(config, up) for config in configs]

    every = lambda k: ((1, 8, k),)  # noqa: E731
    specs: dict[Any, EngineSpec] = {
        0: spec("baseline"),
        **{k: spec("drafter", k_by_load=every(k)) for k in (1, 2, 3)},
        "lookup": spec("lookup"),
        (0, 16): spec("baseline-16"),
        (1, 16): spec("drafter-16", k_by_load=every(1)),
        "other": spec("other"),
    }
    baseline_of = lambda key: (0, 16) if isinstance(key, tuple) else 0  # noqa: E731
    lineup: Lineup[Any] = Lineup(Placement((("0",), ("1",)), together=False), start)
    lineup.restart(1)
    assert [sorted(map(str, engines)) for engines in lineup.turns(specs, baseline_of)] == [
        ["0", "1", "2", "3"],
        ["0", "lookup"],
        ["0", "other"],
        ["(0, 16)", "(1, 16)"],
    ]
    assert [one.name for one in started] == ["baseline", "drafter", "lookup", "other", "baseline-16", "drafter-16"]
    assert [one.gpus for one in started] == [("1",), ("0",), ("0",), ("0",), ("1",), ("0",)]
    assert all(one.k_by_load is None for one in started), "an engine is started with the highest K"
    assert up == {"baseline-16", "drafter-16"}, "the last group stays up"
    # What is up comes first, and its baseline's other groups before those of another baseline.
    seen = []
    for engines in lineup.turns(specs, baseline_of):
        seen.append([key for key in engines if key != baseline_of(key)])
        for key, host in engines.items():
            assert host.config is specs[key] or key in (0, (0, 16), "lookup", "other"), "each K is a variant of its own"
    assert seen == [[(1, 16)], [1, 2, 3], ["lookup"], ["other"]]
    assert [one.name for one in started[6:]] == ["baseline", "drafter", "lookup", "other"]
    assert lineup.peak == 2
    lineup.close()
    assert not up


def test_engines_on_different_gpus_load_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    for what in ("start", "wait_ready"):
        monkeypatch.setattr(
            engine_module.EngineHost, what, lambda host, what=what: said.append(f"{what} {host.config.name}")
        )

    engine_module.start_engines([spec("a", "0"), spec("b", "0"), spec("c", "1"), spec("d", "1")], tmp_path)
    assert said == [
        "start a",
        "start c",
        "wait_ready a",
        "wait_ready c",
        "start b",
        "start d",
        "wait_ready b",
        "wait_ready d",
    ]
    said.clear()
    engine_module.start_engines([spec("a"), spec("b")], tmp_path)
    assert said == ["start a", "wait_ready a", "start b", "wait_ready b"]
