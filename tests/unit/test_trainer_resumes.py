"""The trainer ends like an uninterrupted run, bit for bit, after it was killed at any moment, stopped by a signal, or out of memory."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.train import tracking
from draftsmith.train import train as trainer
from draftsmith.train.snapshot import SNAPSHOT
from draftsmith.train.tracking import RUN_ID
from tests.soak import kill_cases
from tests.unit.training_runs import (
    EAGLE3,
    at_step,
    ended,
    kill_self,
    losses_of,
    run_dir,
    start,
    train,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("single_thread")


class Killed(BaseException):
    """Stands for the end of the process."""


def killed() -> None:
    raise Killed


MOMENTS = ("_step", "finish_epoch", "write_snapshot", "remove_epochs", "torch.save")
KILLS = kill_cases(6)
"""Of each test; `make soak` asks for more."""


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Uninterrupted runs in a process of their own, and their options."""
    eagle = {"drafter": {"kind": "eagle"}, "epochs": 3, "lr": 3e-3, "muon_lr": 1e-2}  # with noise
    made = {}
    for name, options in {"eagle3": {**EAGLE3, "ema": 0.9}, "eagle": eagle}.items():
        made[name] = run_dir(folder, f"unbroken-{name}"), options
        assert ended(start(folder, made[name][0], processes=1, **options)) == [0]
    return made


def require_identical(directory: Path, original: Path) -> None:
    """Weights and losses are bit-identical, and no snapshot is left."""
    assert losses_of(directory) == losses_of(original)
    weights = weights_of(directory / "checkpoint")
    for name, value in weights_of(original / "checkpoint").items():
        assert torch.equal(value, weights[name]), name
    assert not (directory / "checkpoint" / SNAPSHOT).exists()
    assert not list((directory / "checkpoint").glob("epoch-*"))


def test_resumes_bit_identically_when_killed_while_writing(
    folder: Path, unbroken: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    """Killed before a step, at the end of an epoch, before or after a snapshot, and in the middle of writing one."""
    draw = random.Random(4)
    for number in range(KILLS):
        original, options = unbroken[draw.choice(list(unbroken))]
        options = {**options, "save_every_steps": draw.choice([2, 3, 100])}
        directory = run_dir(folder, "killed")
        where = MOMENTS[number % len(MOMENTS)]
        stop = (0, draw.randrange(12 if where == "_step" else 3), signal.SIGKILL, where)
        assert ended(start(folder, directory, processes=1, stop=stop, **options)) == [-signal.SIGKILL], where
        assert stage.read(directory / "checkpoint") is None
        assert ended(start(folder, directory, processes=1, **options)) == [0], where
        require_identical(directory, original)


def test_resumes_bit_identically_when_killed_at_any_moment(
    folder: Path, unbroken: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    """Another process sends SIGKILL at a random moment of the run, and again when it resumes. Every step is saved, so that much
    of the time is spent on snapshots."""
    draw = random.Random(5)
    killed = 0
    original, options = unbroken["eagle3"]
    options = {**options, "save_every_steps": 1}
    timed = run_dir(folder, "timed")
    begun = time.perf_counter()
    assert ended(start(folder, timed, processes=1, **options)) == [0]
    seconds = time.perf_counter() - begun
    while killed < KILLS:
        directory = run_dir(folder, "killed")
        statuses: list[int | None] = []
        for _ in range(2):
            (running,) = start(folder, directory, processes=1, **options)
            running.join(seconds * draw.random())
            running.kill()
            statuses += ended([running])
        killed += statuses.count(-signal.SIGKILL)
        if 0 in statuses:  # it finished before the kill: runs are faster now than the timed one
            seconds *= 0.9
        assert set(statuses) <= {-signal.SIGKILL, 0}
        assert ended(start(folder, directory, processes=1, **options)) == [0]
        require_identical(directory, original)


def test_signals_save(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_dir(folder, "signals")
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        at_step(2, lambda: kill_self(signal.SIGUSR1), patch)
        at_step(3, killed, patch)
        with pytest.raises(Killed):
            train(folder, directory, save_every_steps=100, **EAGLE3)
    assert torch.load(directory / "checkpoint" / SNAPSHOT, weights_only=True)["progress"]["step"] == 3
    with monkeypatch.context() as patch:
        at_step(2, lambda: kill_self(signal.SIGTERM), patch)
        with pytest.raises(Stopped, match=r"after step 6 of 12, which is saved"):
            train(folder, directory, save_every_steps=100, **EAGLE3)
    assert signal.getsignal(signal.SIGTERM) == before
    train(folder, directory, **EAGLE3)
    assert losses_of(directory) == losses_of(whole)


@pytest.mark.parametrize("recorded", [True, False])
def test_goes_on_in_the_precision_that_it_began_in(
    recorded: bool, folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another processor, where the recipe leaves it open; and from a snapshot of 0.1.0, which does not record it."""
    directory, options = run_dir(folder, "moved"), {"precision": None, "save_every_steps": 4, **EAGLE3}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "native_bfloat16", lambda device: False)
        at_step(5, killed, patch)
        with pytest.raises(Killed):
            train(folder, directory, **options)
    if not recorded:
        snapshot = torch.load(directory / "checkpoint" / SNAPSHOT, weights_only=True)
        del snapshot["precision"]
        torch.save(snapshot, directory / "checkpoint" / SNAPSHOT)
    monkeypatch.setattr(trainer, "native_bfloat16", lambda device: True)
    train(folder, directory, **options)
    assert losses_of(directory) == losses_of(whole)
    record = stage.read(directory / "checkpoint")
    assert record is not None
    assert record["recipe"]["train"]["precision"] == "float32"


@pytest.mark.parametrize(("writing", "expected"), [(1, [3, 4, 7, 8, 11, 12]), (7, [3, 4, 8, 12])])
def test_snapshots_by_the_clock(
    writing: float, expected: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 200 seconds here, of which there are four an epoch; and a snapshot so long that it is a hundredth of five minutes at most,
    or more."""
    now, found, step = [0.0], [], trainer._step

    def slow(*arguments: Any) -> Any:
        now[0] += 200
        return step(*arguments)

    def write(run: Any) -> None:
        now[0] += writing
        found.append(run.progress.step)

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer, "_step", slow)
    monkeypatch.setattr(trainer, "write_snapshot", write)
    train(folder, run_dir(folder, "clock"), **EAGLE3, save_every_steps=None)
    assert found == expected


def test_a_request_to_save_changes_nothing_where_there_is_nothing_to_save(folder: Path, whole: Path) -> None:
    """During set-up and after the last step."""
    for moment in ("set_up", "requested_predictions"):
        directory = run_dir(folder, "early")
        stop = (0, 0, signal.SIGUSR1, moment)
        assert ended(start(folder, directory, processes=1, stop=stop, **EAGLE3)) == [0], moment
        assert losses_of(directory) == losses_of(whole)


def test_a_resumed_training_goes_on_in_its_run_of_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    directory, options = run_dir(folder, "tracked"), {**EAGLE3, "tracker": "wandb"}
    with monkeypatch.context() as patch:
        at_step(4, lambda: pytest.fail("stopped"), patch)
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            train(folder, directory, **options)
    assert wandb.run is None, "it was told that the run has ended"
    train(folder, directory, **options)
    # By its file: wandb adds "-1" to a folder's name where two start within one second.
    runs = [path.stem for path in (directory / "wandb").glob("offline-run-*/run-*.wandb")]
    assert len(runs) == 2
    assert len(set(runs)) == 1
    assert not (directory / "checkpoint" / RUN_ID).exists()


@pytest.mark.parametrize(("server", "logged_in"), [(None, False), ("https://wandb.example.com:8080", True)])
def test_an_account_on_a_server_of_one_s_own(
    server: str | None, logged_in: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / ".netrc").write_text("machine wandb.example.com login user password key")
    (tmp_path / ".netrc").chmod(0o600)
    if server is not None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    assert tracking._logged_in_to_wandb() is logged_in


FULL = """
import resource, sys
from pathlib import Path
from draftsmith.run.errors import DraftsmithError
from tests.unit.training_runs import EAGLE3, train
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        train(Path(sys.argv[1]), Path(sys.argv[2]), save_every_steps=3, **EAGLE3)
    except DraftsmithError as error:
        print(error)
"""


def interrupted(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run that ended after two steps, and its snapshot."""
    directory = run_dir(folder, name)
    with monkeypatch.context() as patch:
        at_step(2, killed, patch)
        with pytest.raises(Killed):
            train(folder, directory, save_every_steps=2, **EAGLE3)
    return directory, directory / "checkpoint" / SNAPSHOT


def test_no_room_for_a_snapshot_stops_cleanly_and_continues(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own error, while different parts of the file are written; the snapshot before is kept."""
    directory, snapshot = interrupted(folder, "no-room", monkeypatch)
    kept, size = snapshot.read_bytes(), snapshot.stat().st_size
    limits = [str(int(size * part)) for part in (0.02, 0.5, 0.9, 0.999)]
    command = [sys.executable, "-c", FULL, str(folder), str(directory), *limits]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said in done.stdout.splitlines():
        assert said.startswith(f"There is no room for {snapshot} ({size / 1e6:.1f} MB): File too large."), said
    assert len(done.stdout.splitlines()) == len(limits)
    assert snapshot.read_bytes() == kept
    assert not list(snapshot.parent.glob("*.tmp"))
    train(folder, directory, **EAGLE3)
    assert losses_of(directory) == losses_of(whole)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_damaged_snapshot_is_named(folder: Path, whole: Path, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, snapshot = interrupted(folder, "damaged", monkeypatch)
    os.truncate(snapshot, int(snapshot.stat().st_size * part))
    with pytest.raises(
        UserError, match=r"resume\.pt, from which training would continue, cannot be read .* or remove it"
    ) as raised:
        train(folder, directory, **EAGLE3)
    assert "\n" not in str(raised.value)
    snapshot.unlink()
    train(folder, directory, **EAGLE3)
    assert losses_of(directory) == losses_of(whole)


def test_out_of_memory_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, after which training resumes with smaller micro-batches; and in the initialization."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nmore")

    directory = run_dir(folder, "full")
    with monkeypatch.context() as patch:
        at_step(5, full, patch)
        with pytest.raises(DraftsmithError, match=r"= 70 tokens at once.*Tried to allocate 8 GiB\.$") as raised:
            train(folder, directory, save_every_steps=1, **EAGLE3)
    assert raised.value.exit_status == 1
    assert train(folder, directory, gradient_accumulation_steps=2, **EAGLE3)["steps"] == 12
    monkeypatch.setattr(Eagle3Drafter, "init_from_target", full)
    with pytest.raises(DraftsmithError, match=r"`train\.gradient_accumulation_steps`"):
        train(folder, run_dir(folder, "full-start"), **EAGLE3)
