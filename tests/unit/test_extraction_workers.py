"""The driver of several engines, with workers that are no engines: what is asked is answered once, whoever dies."""

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import process
from draftsmith.extract import worker
from draftsmith.extract.handoff import HandoffWriter, handoff_file
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import Job, run_engines
from draftsmith.run.errors import DraftsmithError
from draftsmith.store.codec import encode_states

JOB = Job(engine_arguments={}, generate=True, sampling={}, seed=0, compression="lossless", window=5, max_model_len=64)


OURS: list[Connection] = []
"""The driver's ends of all pipes."""


def answers(pipe: Connection, job: Job, handoff: Path) -> None:
    """A worker that answers every prompt with its length, in random order."""
    for ours in OURS:
        ours.close()
    chooser = random.Random(os.getpid())
    waiting: list[ExtractRequest] = []
    writer = HandoffWriter(handoff, reuse_files=True)
    pipe.send(job.window)
    while True:
        while not waiting or pipe.poll():
            try:
                waiting += pipe.recv()
            except (EOFError, OSError):
                return
        request = waiting.pop(chooser.randrange(len(waiting)))
        if request.prompt_token_ids == [0]:
            os._exit(3)
        time.sleep(0.001)
        file = handoff_file(str(request.sample_id))
        states = encode_states(torch.ones(len(request.prompt_token_ids), 1, 1), job.compression)
        writer.write(file, request.prompt_token_ids, states)
        pipe.send((request.sample_id, file, None, None, [len(request.prompt_token_ids)]))
        pipe.send(1)


FORK = multiprocessing.get_context("fork")


def pipe() -> tuple[Connection, Connection]:
    ours, theirs = FORK.Pipe()
    OURS.append(ours)
    return ours, theirs


@pytest.fixture(autouse=True)
def workers_that_are_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, they start in milliseconds. A fork holds its elder siblings' pipes open, so it closes them first."""
    OURS.clear()
    monkeypatch.setattr(worker, "_child", answers)
    monkeypatch.setattr(process.multiprocessing, "Pipe", pipe)
    monkeypatch.setattr(process, "engine_context", lambda: FORK)
    monkeypatch.setattr(process.environment, "vllm_environment", lambda options: {})
    monkeypatch.setattr(worker, "share_of_machine", lambda number, count, tensor_parallel: {})


def handoff_in(folder: Path) -> Path:
    (folder / "handoff").mkdir()
    return folder / "handoff"


def requests(count: int) -> list[ExtractRequest]:
    return [ExtractRequest(n, False, [1] * (1 + n % 7), 4) for n in range(count)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 4, 60])
def test_everything_is_answered_once(workers: int, count: int, tmp_path: Path) -> None:
    found = list(
        run_engines(
            JOB,
            iter(requests(count)),
            EngineConfig(),
            num_workers=workers,
            directory=tmp_path,
            handoff=handoff_in(tmp_path),
        )
    )
    assert sorted(extracted.request.sample_id for extracted in found) == list(range(count))
    for extracted in found:
        assert extracted.response_token_ids == [len(extracted.saved_token_ids)]
    assert not [path for path in (tmp_path / "handoff").rglob("*") if path.is_file()], "handoff files are taken"


def test_prompts_are_read_as_they_are_needed(tmp_path: Path) -> None:
    read = 0

    def counted():
        nonlocal read
        for request in requests(500):
            read += 1
            yield request

    running = run_engines(
        JOB, counted(), EngineConfig(), num_workers=2, directory=tmp_path, handoff=handoff_in(tmp_path)
    )
    for _ in range(10):
        next(running)
    assert read <= 10 + 2 * (JOB.window + 1) + 10, "a data set is not read ahead of the engines"
    running.close()


def test_prompts_may_come_later(tmp_path: Path) -> None:
    under_way = 0

    def now_and_then():
        nonlocal under_way
        for number, request in enumerate(requests(60)):
            if number % 7 == 6:
                while under_way:
                    yield None
            under_way += 1
            yield request

    found = []
    for extracted in run_engines(
        JOB, now_and_then(), EngineConfig(), num_workers=2, directory=tmp_path, handoff=handoff_in(tmp_path)
    ):
        under_way -= 1
        found.append(extracted.request.sample_id)
    assert sorted(found) == list(range(60))


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_workers_share_is_taken_over(seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    running = run_engines(
        JOB, iter(requests(120)), EngineConfig(), num_workers=3, directory=tmp_path, handoff=handoff_in(tmp_path)
    )
    found = [next(running) for _ in range(chooser.randrange(1, 60))]
    victims = chooser.sample(multiprocessing.active_children(), 2)
    threading.Timer(chooser.uniform(0, 0.05), os.kill, (victims[1].pid, signal.SIGKILL)).start()
    os.kill(victims[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    found += running
    assert Counter(extracted.request.sample_id for extracted in found) == Counter(range(120))


def test_when_the_last_worker_dies_the_run_stops_and_says_why(tmp_path: Path) -> None:
    poisoned = [*requests(6), ExtractRequest(6, False, [0], 4)]
    with pytest.raises(DraftsmithError, match=r"ended with status 3.*run the stage again to continue"):
        list(
            run_engines(
                JOB, iter(poisoned), EngineConfig(), num_workers=2, directory=tmp_path, handoff=handoff_in(tmp_path)
            )
        )


class Clock:
    """Time that passes only where somebody waits for it, and then quickly."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.1)


class SlowEngine:
    """An engine that answers everything in its first step and then hands over a file of states every 50 s, as far as it goes.
    With the last file the driver has nothing more to ask."""

    def __init__(self, clock: Clock, handoff: Path, hands_over: int) -> None:
        self.clock, self.handoff, self.left = clock, handoff, hands_over
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.due = 50.0
        self.llm_engine = self

    def read(self, pipe: Connection, inbox: queue.SimpleQueue[list[ExtractRequest] | None]) -> None:
        self.inbox = inbox
        inbox.put(requests(5))

    def get_tokenizer(self) -> None:
        pass

    def add_request(self, name: str, prompt: object, sampling: object) -> None:
        self.asked.append(name)

    def step(self) -> list[Any]:
        if self.asked:
            self.answered, self.asked = self.asked, []
            answer = [SimpleNamespace(token_ids=[5])]
            return [SimpleNamespace(request_id=name, finished=True, outputs=answer) for name in self.answered]
        if self.clock.now >= self.due and self.left:
            self.due, self.left = self.clock.now + 50, self.left - 1
            (self.handoff / handoff_file(self.answered.pop())).touch()
            if not self.answered:
                self.inbox.put(None)
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(worker, "_Conversations", lambda *given: SimpleNamespace(next_turn=lambda turn: None))
    monkeypatch.setattr(worker, "_sampling", lambda *given: None)
    return clock


def finished(pipe: Connection) -> list[Any]:
    """What a worker said of requests, so far."""
    said = []
    while pipe.poll():
        said.append(pipe.recv())
    return [one for one in said if isinstance(one, tuple)]


@pytest.mark.parametrize("hands_over", [5, 3])
def test_the_last_states_are_waited_for_as_long_as_some_come(
    hands_over: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five take 250 s together, and 60 s without any is too long."""
    ours, theirs = FORK.Pipe()
    slow: Any = SlowEngine(clock, tmp_path, hands_over)
    monkeypatch.setattr(worker, "_read", slow.read)
    if hands_over == 5:
        worker._work(slow, theirs, JOB, tmp_path)
        assert clock.now > 4 * 50
    else:
        with pytest.raises(TimeoutError, match=r"states of 2 requests, and none came in 60\.0 s"):
            worker._work(slow, theirs, JOB, tmp_path)
    assert len(finished(ours)) == hands_over


def test_a_driver_that_takes_its_time_is_no_engine_that_hangs(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes two files every 500 s, and the engine steps only when there are fewer."""
    ours, theirs = FORK.Pipe()
    heard: list[Any] = []
    untaken: list[Path] = []

    def driver_too(seconds: float) -> None:
        clock.now += max(seconds, 0.1)
        new = finished(ours)
        heard.extend(new)
        untaken.extend(tmp_path / file for _, file, *_ in new)
        if len(untaken) == 2:
            clock.now += 500
            while untaken:
                untaken.pop().unlink()

    monkeypatch.setattr(clock, "sleep", driver_too)
    monkeypatch.setattr(worker, "_MAX_UNTAKEN", 2)
    slow: Any = SlowEngine(clock, tmp_path, 5)
    monkeypatch.setattr(worker, "_read", slow.read)
    worker._work(slow, theirs, JOB, tmp_path)
    assert len(heard) + len(finished(ours)) == 5
    assert clock.now > 1000
