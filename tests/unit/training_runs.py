"""Runs of the trainer on a tiny store, in this process and in others, which tests watch, stop and kill."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run.errors import DraftsmithError
from draftsmith.train import train as trainer
from draftsmith.train.train import LOSSES, run_train
from tests.unit.tiny_run import make_recipe

# Processes are forked from a server that has imported torch.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["draftsmith.train.train", "tests.unit.tiny_run"])

EAGLE3 = {"drafter": {"kind": "eagle3", "draft_vocab_size": 60}, "epochs": 3, "lr": 3e-3, "muon_lr": 1e-2, "state_dropout": 0.1}  # fmt: skip
"""Twelve steps."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """So that the order of sums is fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_dir(folder: Path, name: str) -> Path:
    """A fresh run of this name on the store."""
    directory = folder / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "store").symlink_to(folder / "run" / "store")
    return directory


def train(folder: Path, directory: Path, **options: Any) -> dict[str, Any]:
    return run_train(make_recipe(folder, **options), directory)


def losses_of(directory: Path) -> list[float]:
    found: list[float] = json.loads((directory / "checkpoint" / LOSSES).read_text())
    return found


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return Checkpoint.load(directory).tensors


def at_step(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *, where: str = "_step") -> None:
    """Call `act` just before call number `number` (from 0) of the trainer's function `where`."""
    original = getattr(trainer, where)

    def wrapped(run: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number + 1:
            act()
        return original(run, *arguments, **named)

    calls: list[int] = []
    monkeypatch.setattr(trainer, where, wrapped)


def kill_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def half_saved(number: int, by: signal.Signals) -> Callable[[Any, BinaryIO], None]:
    """`torch.save` that gets the signal `by` when half of a file is written, after `number` whole files."""
    original = torch.save
    whole: list[BinaryIO] = []

    def save(value: Any, file: BinaryIO) -> None:
        original(value, file)
        if len(whole) == number:
            file.flush()
            os.truncate(file.fileno(), file.tell() // 2)
            kill_self(by)
        whole.append(file)

    return save


def process(
    rank: int,
    folder: Path,
    directory: Path,
    options: dict[str, Any],
    port: int,
    stop: tuple[int, int, signal.Signals, str] | None,
) -> None:
    """One of two training processes (the only one with port 0). The process of rank stop[0] gets the signal stop[2] when it calls
    the trainer's function stop[3], or is in the middle of `torch.save`, after stop[1] such calls."""
    torch.set_num_threads(1)
    if port:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
    with contextlib.ExitStack() as stack:
        if stop and stop[0] == rank:
            monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
            if stop[3] == "torch.save":
                monkeypatch.setattr(torch, "save", half_saved(stop[1], stop[2]))
            else:
                at_step(stop[1], lambda: kill_self(stop[2]), monkeypatch, where=stop[3])
        try:
            train(folder, directory, **options)
        except DraftsmithError as error:
            print(error)
            os._exit(error.exit_status)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(
    folder: Path, directory: Path, processes: int = 2, stop: Any = None, **options: Any
) -> list[ForkServerProcess]:
    port = free_port() if processes > 1 else 0
    started = [
        SERVER.Process(target=process, args=(rank, folder, directory, options, port, stop)) for rank in range(processes)
    ]
    for one in started:
        one.start()
    return started


def ended(started: list[ForkServerProcess]) -> list[int | None]:
    for one in started:
        one.join(120)
        one.kill()  # does nothing if it has ended
    return [one.exitcode for one in started]


def require_alike(one: Path, other: Path) -> None:
    """The same losses up to the order of sums. Weights may differ more: Muon and AdamW make full steps even of gradients that are
    nothing but rounding errors."""
    assert losses_of(one) == pytest.approx(losses_of(other), rel=2e-5)
