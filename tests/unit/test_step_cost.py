"""Times of steps and of the drafts in them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.serve.evaluation import draft_clock
from draftsmith.serve.evaluation.draft_clock import DraftClock
from draftsmith.serve.evaluation.engine import EngineHost, StepTimes
from draftsmith.serve.evaluation.step_cost import step_ratios


class _Host(EngineHost):
    """An engine whose steps take as long as they are told, but for one in a while."""

    def __init__(self, seconds: float, draft: float = 0.0) -> None:
        self.seconds, self.draft = seconds, draft

    def step_times(self, prompt: Any, steps: int) -> StepTimes:
        slow = [100.0] if prompt[0] else []
        drafts = [self.draft] * (steps - 1) + slow if self.draft else []
        return StepTimes([self.seconds * prompt[0] for _ in range(steps - 1) if prompt[0]] + slow, drafts)


def test_steps_over_the_baseline_s() -> None:
    hosts = {"chain": _Host(3.0, 0.5), "plain": _Host(2.0), "block": _Host(2.5, 0.25)}
    found = step_ratios(hosts, "plain", [[1], [0], [4]], 6)  # the second answer is a single token long
    assert found.steps == {"chain": [1.5, 1.5], "block": [1.25, 1.25]}
    assert found.drafts == {"chain": [0.25, 0.0625], "block": [0.125, 0.03125]}


class _First:
    """The first model runner: the drafts are its own method's."""

    device = torch.device("cpu")
    drafter = object()

    def propose_draft_token_ids(self, number: int, *, more: int) -> int:
        return number + more


class _Speculator(torch.nn.Module):
    def propose(self, number: int, *, more: int) -> int:
        return number + more


def _llm(runner: Any) -> Any:
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    return SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)))
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a second passes between two looks at it."""
    ticks = itertools.count(1.0)
    monkeypatch.setattr(draft_clock.time, "perf_counter", lambda: next(ticks))


@pytest.mark.usefixtures("clock")
def test_drafts_of_the_first_runner() -> None:
    runner = _First()
    timed = DraftClock(_llm(runner))
    for calls in (2, 3):
        with timed.running():
            assert [runner.propose_draft_token_ids(i, more=1) for i in range(calls)] == list(range(1, calls + 1))
        assert timed.seconds() == [1.0] * calls
        assert runner.propose_draft_token_ids(1, more=1) == 2
        assert len(timed.seconds()) == calls, "nothing is timed afterwards"


@pytest.mark.usefixtures("clock")
def test_drafts_of_the_second_runner() -> None:
    runner = SimpleNamespace(device=torch.device("cpu"), speculator=_Speculator())
    timed = DraftClock(_llm(runner))
    with timed.running():
        assert runner.speculator.propose(1, more=1) == 2
    assert timed.seconds() == [1.0]
    assert runner.speculator.propose(1, more=1) == 2
    assert timed.seconds() == [1.0]


@pytest.mark.parametrize(
    "llm",
    [
        _llm(SimpleNamespace(device=torch.device("cpu"), speculator=None)),  # the second runner's baseline
        _llm(SimpleNamespace(device=torch.device("cpu"))),  # the first's
        SimpleNamespace(
            llm_engine=SimpleNamespace(
                engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=object()))
            )
        ),
    ],
)
def test_without_a_drafter_within_reach(llm: Any) -> None:
    timed = DraftClock(llm)
    with timed.running():
        pass
    assert timed.seconds() == []


def test_a_gpu_s_drafts_are_timed_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Of a device that reaches the event only when it is waited for: half a second after the one before."""

        recorded, waited = 0, False

        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert device.type == "cuda"
            assert enable_timing

        def record(self) -> None:
            Event.recorded += 1
            self.at = Event.recorded

        def synchronize(self) -> None:
            assert self.at == Event.recorded, "the last one"
            Event.waited = True

        def elapsed_time(self, later: "Event") -> float:
            assert Event.waited
            return 500.0 * (later.at - self.at)

    monkeypatch.setattr(draft_clock.torch, "Event", Event)
    runner = _First()
    runner.device = torch.device("cuda")
    timed = DraftClock(_llm(runner))
    with timed.running():
        runner.propose_draft_token_ids(1, more=1)
        runner.propose_draft_token_ids(1, more=1)
    assert timed.seconds() == [0.5, 0.5]
