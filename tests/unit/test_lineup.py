"""Which engines are up together: on a CPU all, on GPUs those that fit, each beside the baseline it is compared with."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.config import recipe
from draftsmith.engine import environment
from draftsmith.engine.environment import Gpu
from draftsmith.engine.memory import GIB, EngineMemory
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import engine as engine_module
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.lineup import Lineup, Placement, groups, place


def gpus(count: int, gib: float = 79) -> list[Gpu]:
    return [Gpu(f"GPU-{number}", int(gib * GIB)) for number in range(count)]


def need(gib: float) -> EngineMemory:
    return EngineMemory(target=int(gib * GIB), drafter=0, kv_cache=0, working=0)


@given(st.lists(st.sampled_from([16, 32]), min_size=1, max_size=9), st.one_of(st.none(), st.integers(2, 5)))
def test_every_engine_is_up_once_beside_its_baseline(dtypes: list[int], at_once: int | None) -> None:
    baseline = {dtype: (0, dtype) for dtype in dtypes}
    keys = [*baseline.values(), *((number, dtype) for number, dtype in enumerate(dtypes, start=1))]
    found = groups(keys, lambda key: baseline[key[1]], at_once)
    assert sorted(key for group in found for key in dict.fromkeys(group) if key[0]) == sorted(keys[len(baseline) :])
    if at_once is None or len(keys) <= at_once:
        assert found == [keys]
    else:
        for group in found:
            assert len(group) <= at_once
            assert group[0] == baseline[group[0][1]]
            assert len({dtype for _, dtype in group}) == 1


def test_engines_are_placed_on_as_few_gpus_as_hold_them() -> None:
    two_sets = Placement((("0", "1"), ("2", "3")), on_each=2)
    assert two_sets.at_once == 4
    pair, again = two_sets.places(2), two_sets.places(2, start=1)
    assert [(one.gpus, one.memory_share) for one in pair] == [(("0", "1"), 0.5)] * 2
    assert [one.gpus for one in again] == [("2", "3")] * 2, "the next start is on the other GPUs"
    assert [one.gpus for one in two_sets.places(3)] == [("0", "1"), ("0", "1"), ("2", "3")]
    one_each = Placement((("0",), ("1",), ("2",)), on_each=1)
    assert [(one.gpus, one.memory_share) for one in one_each.places(3, start=2)] == [
        (("2",), 1.0), (("0",), 1.0), (("1",), 1.0),
    ]  # fmt: skip
    on_a_cpu = Placement()
    assert on_a_cpu.at_once is None
    assert [(one.gpus, one.memory_share) for one in on_a_cpu.places(5)] == [((), 0.2)] * 5


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_shares_of_a_gpu_add_up_to_at_most_one(sets: int, on_each: int, data: Any) -> None:
    placement = Placement(tuple((str(number),) for number in range(sets)), on_each)
    count = data.draw(st.integers(1, sets * on_each))
    places = placement.places(count, start=data.draw(st.integers(0, 5)))
    for gpu in {one.gpus for one in places}:
        there = [one.memory_share for one in places if one.gpus == gpu]
        assert len(there) <= on_each
        assert math.fsum(there) <= 1 + 1e-9
    assert len({one.memory_share for one in places}) == 1, "engines that are compared have the same share"


def test_what_does_not_fit_is_an_error_before_anything_starts() -> None:
    engine = recipe.EngineConfig()  # 0.85 of a GPU
    assert place(engine, gpus(1), [need(20), need(22)], target="t", smaller="x").at_once == 3
    assert place(engine, gpus(8), [need(22)], target="t", smaller="x").at_once == 24
    four = engine.model_copy(update={"tensor_parallel_size": 4})
    assert place(four, gpus(7), [need(30)], target="t", smaller="x").sets == (("GPU-0", "GPU-1", "GPU-2", "GPU-3"),)
    with pytest.raises(UserError, match=r"t and an engine that speculates beside it.* 40\.0 GiB.*target 40\.0.*67\.1 of 79\.0 GiB on the one GPU"
                       r".*Lower evaluate\.acceptance_batch_size or engine\.max_model_len"):  # fmt: skip
        place(engine, gpus(1), [need(40)], target="t", smaller="evaluate.acceptance_batch_size")
    assert place(engine, gpus(2), [need(40)], target="t", smaller="x").at_once == 2
    with pytest.raises(UserError, match=r"each of the 2 GPUs"):
        place(engine, gpus(2), [need(70)], target="t", smaller="x")
    with pytest.raises(UserError, match=r"tensor_parallel_size is 4, and 3 GPUs are visible"):
        place(four, gpus(3), [need(1)], target="t", smaller="x")


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
    assert environment.share_of_machine(1, 2, 1) == {"CUDA_VISIBLE_DEVICES": names[1]}
    with pytest.raises(UserError, match=r"2 with 2 GPUs each, and 2 GPUs are visible"):
        environment.share_of_machine(0, 2, 2)


@dataclass
class Host:
    config: EngineSpec
    up: set[str]

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

    def config(name: str) -> EngineSpec:
        return EngineSpec(name=name, target="t", dtype="bfloat16", engine=recipe.EngineConfig())

    configs = {number: config(name) for number, name in enumerate(["baseline", "k1", "k2", "k3"])}
    lineup: Lineup[int] = Lineup(Placement((("0",), ("1",)), on_each=1), start, number=1)
    seen = [sorted(host.config.name for host in engines.values()) for engines in lineup.turns(configs, lambda key: 0)]
    assert seen == [["baseline", "k1"], ["baseline", "k2"], ["baseline", "k3"]]
    assert [one.name for one in started] == ["baseline", "k1", "k2", "k3"]
    assert [one.gpus for one in started] == [("1",), ("0",), ("0",), ("0",)]
    assert up == {"baseline", "k3"}, "the last group stays up"
    # K = 3 is there already; of a group that needs neither of those, both make room.
    assert [sorted(engines) for engines in lineup.turns({key: configs[key] for key in (0, 3)}, lambda key: 0)] == [
        [0, 3]
    ]
    assert len(started) == 4
    lineup.close()
    assert not up


def test_engines_on_different_gpus_load_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    for what in ("start", "wait_ready"):
        monkeypatch.setattr(
            engine_module.EngineHost, what, lambda host, what=what: said.append(f"{what} {host.config.name}")
        )

    def config(name: str, *on: str) -> EngineSpec:
        return EngineSpec(name=name, target="t", dtype="bfloat16", engine=recipe.EngineConfig(), gpus=on)

    engine_module.start_engines([config("a", "0"), config("b", "0"), config("c", "1"), config("d", "1")], tmp_path)
    assert said == [
        "start a", "start c", "wait_ready a", "wait_ready c", "start b", "start d", "wait_ready b", "wait_ready d",
    ]  # fmt: skip
    said.clear()
    engine_module.start_engines([config("a"), config("b")], tmp_path)
    assert said == ["start a", "wait_ready a", "start b", "wait_ready b"]
