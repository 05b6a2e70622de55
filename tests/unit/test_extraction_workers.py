"""The driver of several engines, with workers that are no engines: what is asked is answered once, whoever dies."""

import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import process
from draftsmith.extract import worker
from draftsmith.extract.handoff import HandoffWriter, handoff_file
from draftsmith.extract.job import Job
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import Progress, run_engines
from draftsmith.run.errors import DraftsmithError
from draftsmith.store import writer as store_writer
from draftsmith.store.codec import encode_states
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from tests.unit.test_store import identity

JOB = Job(
    engine_arguments={"model": "/target", "trust_remote_code": False, "dtype": "float32"},
    generate=True,
    sampling={},
    seed=0,
    window=5,
    max_model_len=64,
    identity=identity(layer_ids=(1,), hidden_size=1),
    compression="lossless",
    shard_tokens=20,
    max_unstored_bytes=1,
)
"""Every file is larger than what may wait, so one waits at a time."""

OURS: list[Connection] = []
"""The driver's ends of all pipes."""


def answers(pipe: Connection, job: Job, handoff: Path, store: Path) -> None:
    """A worker that answers every prompt with its length, in random order, and stores that as workers do."""
    for ours in OURS:
        ours.close()
    chooser = random.Random(os.getpid())
    waiting: list[ExtractRequest] = []
    failures: list[BaseException] = []
    send = worker._sender(pipe)
    storage = worker._Storage(job, handoff, store, send, failures.append)
    writer = HandoffWriter(handoff, reuse_files=True)
    send(worker._Room(job.window))
    while True:
        while not waiting or pipe.poll():
            if not waiting:
                storage.flush()
                while not pipe.poll(0.01):
                    if failures:
                        raise failures[0]
            try:
                waiting += pipe.recv()
            except (EOFError, OSError):
                storage.close()
                return
        request = waiting.pop(chooser.randrange(len(waiting)))
        prompt = request.prompt_token_ids
        if prompt == [0]:
            os._exit(3)
        time.sleep(0.001)
        turn = worker._Turn(request, 0, prompt, None, [len(prompt)])
        writer.write(turn.file, prompt, encode_states(torch.ones(len(prompt), 1, 1), job.compression))
        storage.store(turn, [False] * len(prompt))
        send(worker._Room(1))


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


def requests(count: int) -> list[ExtractRequest]:
    return [ExtractRequest(n, False, [1] * (1 + n % 7), 4) for n in range(count)]


def run(asked: Iterable[ExtractRequest | None], folder: Path, *, num_workers: int) -> Iterator[Progress]:
    for name in ("handoff", "store"):
        (folder / name).mkdir(exist_ok=True)
    return run_engines(
        JOB,
        asked,
        EngineConfig(),
        num_workers=num_workers,
        logs=folder,
        handoff=folder / "handoff",
        store=folder / "store",
    )


def stored(progress: Iterable[Progress], folder: Path) -> list[int]:
    """Sample ids of the store that adopts the shards, after looking at each sequence."""
    (folder / "store").mkdir(exist_ok=True)
    writer = StoreWriter(folder / "store", JOB.identity, shard_tokens=JOB.shard_tokens, compression=JOB.compression)
    for shard, sequences, tokens in progress:
        assert min(sequences, tokens) >= 0
        if shard is not None:
            writer.adopt(shard)
    writer.close()
    found = []
    for sequence in Store(folder / "store"):
        assert sequence.token_ids.tolist() == [1] * (1 + sequence.sample_id % 7) + [1 + sequence.sample_id % 7]
        assert sequence.loss_mask.tolist() == [False] * (1 + sequence.sample_id % 7) + [True]
        found.append(sequence.sample_id)
    return found


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 4, 60])
def test_everything_is_stored_once(workers: int, count: int, tmp_path: Path) -> None:
    assert stored(run(iter(requests(count)), tmp_path, num_workers=workers), tmp_path) == list(range(count))
    assert not [path for path in (tmp_path / "handoff").rglob("*") if path.is_file()], "handoff files are taken"


def test_prompts_are_read_as_they_are_needed(tmp_path: Path) -> None:
    read = 0

    def counted():
        nonlocal read
        for request in requests(500):
            read += 1
            yield request

    running = run(counted(), tmp_path, num_workers=2)
    for _ in range(10):
        next(running)
    most = 10 + 2 * (JOB.window + 1 + 1) + 10
    assert read <= most < 500, "a data set is not read ahead of the engines"
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

    def counted() -> Iterator[Progress]:
        nonlocal under_way
        for progress in run(now_and_then(), tmp_path, num_workers=2):
            if progress.shard is not None:
                under_way -= progress.shard.sequences
            yield progress

    assert stored(counted(), tmp_path) == list(range(60))


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_workers_share_is_taken_over(seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)

    def with_deaths() -> Iterator[Progress]:
        running = run(iter(requests(120)), tmp_path, num_workers=3)
        for _ in range(chooser.randrange(1, 60)):
            yield next(running)
        victims = chooser.sample(multiprocessing.active_children(), 2)
        threading.Timer(chooser.uniform(0, 0.05), os.kill, (victims[1].pid, signal.SIGKILL)).start()
        os.kill(victims[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
        yield from running

    assert stored(with_deaths(), tmp_path) == list(range(120))
    assert len(list((tmp_path / "store").glob("shard-*"))) == len(Store(tmp_path / "store")._shards), "no leftovers"


def test_when_the_last_worker_dies_the_run_stops_and_says_why(tmp_path: Path) -> None:
    poisoned = [*requests(6), ExtractRequest(6, False, [0], 4)]
    with pytest.raises(DraftsmithError, match=r"ended with status 3.*run the stage again to continue"):
        list(run(iter(poisoned), tmp_path, num_workers=2))


def refused_by_vllm(pipe: Connection, *arguments: Any) -> None:
    """A worker whose first NUMA node has less memory than the KV cache takes, as vLLM finds out itself."""
    from vllm.v1.worker import cpu_worker

    asking = SimpleNamespace(
        _should_warm_up_model=lambda: False, cache_config=SimpleNamespace(kv_cache_memory_bytes=6 << 30)
    )
    node = SimpleNamespace(available_memory=5 << 30, total_memory=8 << 30)
    with mock.patch.object(cpu_worker, "get_memory_node_info", return_value=node):
        cpu_worker.CPUWorker.determine_available_memory(asking)  # type: ignore[arg-type]


def test_too_little_memory_on_the_first_node_names_the_recipes_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_child", refused_by_vllm)
    with pytest.raises(DraftsmithError, match=r"\(5.0/8.0 GiB\).*in a recipe, lower engine\.kv_cache_gib"):
        list(run(iter(requests(2)), tmp_path, num_workers=1))


def test_a_shard_that_cannot_be_written_fails_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one too, when nothing is asked any more."""

    def no_room(path: Path, *parts: bytes) -> None:
        raise DraftsmithError("There is no room.")

    monkeypatch.setattr(store_writer, "write_bytes", no_room)
    with pytest.raises(DraftsmithError, match=r"failed: There is no room\. What was extracted so far is kept"):
        list(run(iter(requests(2)), tmp_path, num_workers=1))


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
    With the last file the driver has nothing more to ask. It has no tokenizer: the driver's renders all turns."""

    def __init__(self, clock: Clock, handoff: Path, hands_over: int) -> None:
        self.clock, self.handoff, self.left = clock, handoff, hands_over
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.due = 50.0
        self.llm_engine = self

    def read(self, pipe: Connection, inbox: queue.SimpleQueue[list[ExtractRequest] | None]) -> None:
        self.inbox = inbox
        inbox.put(requests(5))

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
    monkeypatch.setattr(worker, "tokenizer_of", lambda directory, trust_remote_code: directory)

    def conversations(tokenizer: Path, max_model_len: int) -> mock.Mock:
        assert tokenizer == Path("/target")
        return mock.Mock(next_turn=lambda turn: None)

    monkeypatch.setattr(worker, "_Conversations", conversations)
    monkeypatch.setattr(worker, "_sampling", lambda *given: None)
    return clock


@pytest.mark.parametrize("hands_over", [5, 3])
def test_the_last_states_are_waited_for_as_long_as_some_come(
    hands_over: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five take 250 s together, and 60 s without any is too long."""
    _, theirs = FORK.Pipe()
    slow: Any = SlowEngine(clock, tmp_path, hands_over)
    storage = mock.Mock()
    monkeypatch.setattr(worker, "_Storage", lambda *given: storage)
    monkeypatch.setattr(worker, "_read", slow.read)
    if hands_over == 5:
        worker._work(slow, theirs, JOB, tmp_path, tmp_path)
        assert clock.now > 4 * 50
    else:
        with pytest.raises(TimeoutError, match=r"states of 2 requests, and none came in 60\.0 s"):
            worker._work(slow, theirs, JOB, tmp_path, tmp_path)
    assert storage.store.call_count == hands_over


def test_storing_that_takes_its_time_is_no_engine_that_hangs(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 s for each file."""
    _, theirs = FORK.Pipe()

    def store(*given: object) -> None:
        clock.now += 500

    storage = mock.Mock(store=mock.Mock(side_effect=store))
    monkeypatch.setattr(worker, "_Storage", lambda *given: storage)
    slow: Any = SlowEngine(clock, tmp_path, 5)
    monkeypatch.setattr(worker, "_read", slow.read)
    worker._work(slow, theirs, JOB, tmp_path, tmp_path)
    assert storage.store.call_count == 5
    assert clock.now > 2500
