"""An engine ends with all processes that it has started, and with the program. Engines here are forks without vLLM; a shell is their worker."""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import process
from draftsmith.engine.process import EngineFailed, EngineProcess
from draftsmith.serve.proposals import record

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "engine_context", lambda: FORK)
    monkeypatch.setattr(process.environment, "vllm_environment", lambda options: {})


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def child(pipe: Connection, fifo: Path, does: str) -> None:
    """An engine with a worker, which alone holds the FIFO open for writing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background of a shell
    subprocess.Popen(["sh", "-c", f"exec sleep 120 > {fifo}"])
    if does != "load":
        pipe.send("ready")
        assert pipe.recv() == "go on"
    if does == "die":
        os._exit(3)
    if does != "end":
        time.sleep(120)


def start(fifo: Path, does: str) -> EngineProcess:
    log = fifo.with_name("log")
    return EngineProcess(child, (fifo, does), name="fake", engine=EngineConfig(), log=log)


@contextmanager
def worker_ends(fifo: Path) -> Iterator[None]:
    """What runs here must end the worker, which is up."""
    with fifo.open("rb", buffering=0) as reading:  # waits for the worker
        yield
        assert select.select([reading], [], [], 30)[0], "the worker outlives its engine"
        assert reading.read(1) == b""


def test_a_worker_ends_with_an_engine_that_is_closed(fifo: Path) -> None:
    """While it loads, and after it has ended by itself."""
    loading = start(fifo, "load")
    with worker_ends(fifo):
        loading.close()
    assert loading.process.exitcode == -signal.SIGKILL
    ready = start(fifo, "end")
    assert ready.receive() == "ready"
    ready.send("go on")
    with worker_ends(fifo):
        ready.close()
    assert ready.process.exitcode == 0


def test_an_engine_is_closed_once(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later its id may be another process's."""
    engine = start(fifo, "load")
    with worker_ends(fifo):
        engine.close()
    monkeypatch.setattr(os, "killpg", mock.Mock(side_effect=AssertionError))
    engine.close()


def test_a_worker_ends_with_an_engine_that_dies(fifo: Path) -> None:
    engine = start(fifo, "die")
    assert engine.receive() == "ready"
    with worker_ends(fifo):
        engine.send("go on")
        with pytest.raises(EngineFailed, match="status 3"):
            engine.receive()


def test_ctrl_c_reaches_an_engine_that_is_waited_for(fifo: Path) -> None:
    engine = start(fifo, "work")
    assert engine.receive() == "ready"
    engine.send("go on")
    with worker_ends(fifo):
        interrupted = mock.Mock(side_effect=KeyboardInterrupt)
        with mock.patch.object(engine, "pipe", recv=interrupted), pytest.raises(KeyboardInterrupt):
            engine.receive()
        with pytest.raises(EngineFailed, match="KeyboardInterrupt"):
            engine.receive()


def test_an_engine_that_is_interrupted_as_it_starts_ends(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has it yet who could close it, and multiprocessing waits for it when the program ends."""
    up: list[FileIO] = []

    def interrupted(_: Callable[[], None]) -> None:
        up.append(fifo.open("rb", buffering=0))
        raise KeyboardInterrupt

    monkeypatch.setattr(process.atexit, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(fifo, "load")
    with up[0] as reading:
        assert select.select([reading], [], [], 30)[0]
    assert not multiprocessing.active_children()


def test_engines_can_be_started_where_importing_vllm_fails(tmp_path: Path) -> None:
    """They import it themselves then, and say why they cannot; the process that they are forked from must be there."""
    (tmp_path / "vllm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    command = [sys.executable, "-c", "import draftsmith.engine.preload"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True, timeout=300)


def worker_ends_with(program: Callable[[], None], fifo: Path, number: int) -> None:
    """Run `program` in a process, send it a signal once the worker is there, and wait for both to end."""
    parent = FORK.Process(target=program)
    parent.start()
    with worker_ends(fifo):
        assert parent.pid is not None
        os.kill(parent.pid, number)
    parent.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("does", ["load", "work"])
def test_a_worker_ends_with_the_program(fifo: Path, does: str, number: int) -> None:
    """Which waits for its engine: after Ctrl-C that is closed, after other signals nothing is."""

    def program() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = None
        try:
            engine = start(fifo, does)
            while True:
                engine.receive()
                engine.send("go on")
        except KeyboardInterrupt:
            if engine is not None:
                engine.close()

    worker_ends_with(program, fifo, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_recorded_engine_ends_with_the_program(
    fifo: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`convert --verify`, whose engine is a fork of another program. In the place of vLLM's, it holds the FIFO open."""
    (tmp_path / "vllm.py").write_text(
        "import time\nSamplingParams = None\n"
        f"class LLM:\n    def __init__(self, **_):\n        with open({str(fifo)!r}, 'w'):\n            time.sleep(120)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))

    def program() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        record([(tmp_path, "eagle3")], tmp_path / "target", [[1]], k=1, max_tokens=1)

    worker_ends_with(program, fifo, number)
