"""Throughput under a constant load: N requests always in flight, counting, and alternating engines."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.serve.evaluation import engine_child, throughput
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.in_flight import ConstantLoad, Request
from draftsmith.serve.evaluation.throughput import (
    at_start,
    least_requests,
    request_schedule,
    run_load,
    tokens_per_second,
)


class SlowWhenFull:
    """Stands in for vLLM's `LLMEngine`: every running request has a token a step; a step takes 1 s, and 0.5 s for each new
    request."""

    def __init__(self) -> None:
        self.now = 0.0
        self.new = 0
        self.running: dict[str, tuple[int, int]] = {}
        self.sizes: list[int] = []
        self.aborted: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], longest: int) -> None:
        self.running[name] = (0, longest)
        self.new += 1

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        self.sizes.append(len(self.running))
        self.now += 1 + 0.5 * self.new
        self.new = 0
        outputs = []
        for name, (tokens, longest) in list(self.running.items()):
            self.running[name] = (tokens + 1, longest)
            if tokens + 1 == longest:
                del self.running[name]
            answer = SimpleNamespace(token_ids=list(range(tokens + 1)), spec_decode_metrics=None)
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=tokens + 1 == longest))
        return outputs


def load(requests: list[Request], in_flight: int) -> tuple[ConstantLoad, SlowWhenFull]:
    engine = SlowWhenFull()
    return ConstantLoad(engine, requests, in_flight, lambda longest: longest, lambda: engine.now), engine


def test_one_at_a_time_by_hand() -> None:
    """One uncounted request, then answers of 3 and 2 tokens: each takes half a second more for its first step."""
    found, engine = load(
        [Request([1], 2, counted=False), Request([1], 3, counted=True), Request([1], 2, counted=True)], 1
    )
    assert found.advance(1000)
    first, second = found.timings()
    assert (first.request, first.tokens, first.seconds) == (1, 3, 3.5)
    assert (second.request, second.tokens, second.seconds) == (2, 2, 2.5)
    assert (first.first_token_seconds, first.seconds_per_token) == (1.5, 1.0)
    assert first.token_ids == [0, 1, 2]
    assert engine.now == 2.5 + 3.5 + 2.5
    assert engine.aborted == []


@given(
    st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=40), st.lists(st.integers(1, 60), max_size=5)
)
def test_n_are_always_in_flight_while_the_clock_runs(in_flight: int, lengths: list[int], pauses: list[int]) -> None:
    ramp = [Request([0], number + 1, counted=False) for number in range(in_flight)]
    requests = [*ramp, *(Request([0], length, counted=True) for length in lengths)]
    found, engine = load(requests, in_flight)
    for tokens in itertools.accumulate(pauses):  # pauses change nothing
        found.advance(tokens)
    assert found.advance(10**6)
    assert set(engine.sizes) == {in_flight}
    timings = found.timings()
    # The clock's time is divided among the requests without rest, and no step of the ramp is in it.
    steps = sum(one.seconds for one in timings) - 0.5 * (len(requests) - in_flight)
    assert sum(one.seconds for one in timings) <= engine.now
    assert sum(one.tokens for one in timings) <= sum(lengths)
    assert steps <= len(engine.sizes)
    if timings:  # as many tokens as requests in flight, in every step that is counted
        assert sum(one.tokens for one in timings) % in_flight == 0
    whole = [one for one in timings if one.seconds_per_token is not None]
    assert all(len(one.token_ids) == requests[one.request].max_tokens for one in whole)


def test_the_figure_is_tokens_per_wall_second() -> None:
    """Answers of 20 tokens, four at once: a step that takes in a request is half a second longer, one in five."""
    prompts = [(f"p{n}", [1]) for n in range(7)]
    requests = request_schedule(prompts, 4, 20, seed=0)
    assert len(requests) == 4 + least_requests(4)
    found, _ = load([request for _, request in requests], 4)
    found.advance(10**6)
    figures = at_start(found.timings(), requests)
    assert tokens_per_second([figures]) == pytest.approx(4 / (1 + 0.5 * 4 / 20), rel=0.01)
    assert set(figures["by_prompt"]) == {name for name, _ in prompts}


def test_requests_are_staggered_and_every_prompt_is_asked_equally_often() -> None:
    prompts = [(f"p{n}", [n]) for n in range(9)]
    requests = request_schedule(prompts, 4, 64, seed=3)
    assert [request.max_tokens for _, request in requests[:4]] == [1, 16, 32, 48]
    assert [request.counted for _, request in requests[:5]] == [False] * 4 + [True]
    counts = [sum(name == one for one, _ in requests[4:]) for name, _ in prompts]
    assert sorted(set(counts)) == [7, 8]
    assert requests == request_schedule(prompts, 4, 64, seed=3)
    assert requests != request_schedule(prompts, 4, 64, seed=4)
    assert len(request_schedule(prompts * 20, 4, 64, seed=3)) == 184


class Wall:
    """The clock on the wall."""

    now = 0.0


class Device:
    """A GPU: when it will be idle."""

    free = 0.0


class Overlapping:
    """Stands in for an engine with asynchronous scheduling: a step begins the next batch before it returns the one before."""

    def __init__(self, wall: Wall, device: Device, seconds: float, tokens: int) -> None:
        self.wall, self.device, self.seconds, self.tokens = wall, device, seconds, tokens
        self.name, self.answer, self.ends = "", 0, list[float]()

    def add_request(self, name: str, prompt: dict[str, list[int]], longest: int) -> None:
        self.name, self.longest, self.answer = name, longest, 0

    def abort_request(self, names: list[str]) -> None:
        pass

    def step(self) -> list[Any]:
        self.device.free = max(self.wall.now, self.device.free) + self.seconds
        self.ends.append(self.device.free)
        if len(self.ends) < 2:
            return []
        self.wall.now = max(self.wall.now, self.ends.pop(0))
        self.answer = min(self.longest, self.answer + self.tokens)
        answer = SimpleNamespace(token_ids=list(range(self.answer)), spec_decode_metrics=None)
        return [SimpleNamespace(request_id=self.name, outputs=[answer], finished=self.answer == self.longest)]

    def settle(self) -> None:
        self.wall.now = max(self.wall.now, self.device.free)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("settles", [True, False])
def test_a_step_that_is_running_when_the_clock_stops_is_counted(settles: bool, apart: bool) -> None:
    """A baseline, and an engine with three tokens a step that takes 1.3 times as long, on one GPU or one each. If the clock does not wait
    for what was begun, a turn of few steps gets a larger part of its work for nothing."""
    requests = [("p", Request([1], 1, counted=False)), *[("p", Request([1], 4800, counted=True))] * 2]
    wall, device, hosts = Wall(), Device(), dict[str, Any]()
    for name, seconds, tokens in (("baseline", 1.0, 1), ("speculative", 1.3, 3)):
        engine = Overlapping(wall, Device() if apart else device, seconds, tokens)
        settle = engine.settle if settles else lambda: None
        asked = [request for _, request in requests]
        load = ConstantLoad(engine, asked, 1, lambda longest: longest, lambda: wall.now, settle)
        hosts[name] = SimpleNamespace(begin_load=lambda *_: None, advance_load=load.advance, end_load=load.timings)
    found = {name: at_start(timings, requests) for name, timings in run_load(hosts, requests, 1, "test").items()}
    ratio = tokens_per_second([found["speculative"]]) / tokens_per_second([found["baseline"]])
    assert (ratio == pytest.approx(3 / 1.3, rel=0.01)) == settles, ratio


def test_an_engine_settles() -> None:
    """Worker processes are waited for too: this process has none of their devices."""
    waited: list[str] = []
    queue = [(SimpleNamespace(result=lambda: waited.append("step")), None, None)]
    engine = engine_child._Engine.__new__(engine_child._Engine)
    core = SimpleNamespace(batch_queue=queue, model_executor=SimpleNamespace(collective_rpc=waited.append))
    within = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    engine._llm = SimpleNamespace(llm_engine=within)  # type: ignore[assignment]
    engine._settle()
    assert waited == ["step", "synchronize_device"]
    core.batch_queue = None  # type: ignore[assignment]
    engine._settle()
    assert waited.count("step") == 1
    pytest.importorskip("vllm")
    from vllm.v1.worker.worker_base import WorkerBase

    assert callable(WorkerBase.synchronize_device)


@pytest.mark.parametrize(("on_cpu", "turns"), [(True, [24, 48, 72, 96, 120]), (False, [192])])
def test_turns_last_about_a_second(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, turns: list[int]) -> None:
    monkeypatch.setattr(throughput, "is_cpu", lambda: on_cpu)
    asked: list[int] = []
    host: Any = SimpleNamespace(
        begin_load=lambda requests, in_flight: None,
        advance_load=lambda tokens: asked.append(tokens) or tokens >= 100,
        end_load=list,
    )
    run_load({"one": host}, [("p", Request([1], 100, counted=True))], 1, "test")
    assert asked == turns


def test_engines_alternate() -> None:
    """A slow engine and a fast one are never more than a turn apart, and none is always first."""
    order: list[tuple[str, int]] = []

    class Host:
        def __init__(self, name: str, longest: int) -> None:
            self.name, self.longest = name, longest
            self.config = EngineSpec.__new__(EngineSpec)

        def begin_load(self, requests: Any, in_flight: int) -> None:
            order.append((self.name, 0))

        def advance_load(self, tokens: int) -> bool:
            order.append((self.name, tokens))
            return tokens >= self.longest

        def end_load(self) -> list[Any]:
            return [self.name]

    hosts: Any = {name: Host(name, longest) for name, longest in (("a", 100), ("b", 100), ("c", 60))}
    assert run_load(hosts, [("p", Request([1], 100, counted=True))], 1, "test") == {"a": ["a"], "b": ["b"], "c": ["c"]}
    turns = [list(group) for _, group in itertools.groupby(order[3:], key=lambda one: one[1])]
    assert [len(turn) for turn in turns] == [3, 3, 3, 2, 2]
    assert len({turn[0][0] for turn in turns}) > 1
