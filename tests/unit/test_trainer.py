"""The trainer: the same losses on any number of processes, and bit-identical results after an interruption."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.train import data, epochs, packing
from draftsmith.train import setup as training_setup
from draftsmith.train import train as trainer
from draftsmith.train.data import TrainingData
from draftsmith.train.optimizers import learning_rate_factor
from draftsmith.train.snapshot import SNAPSHOT
from draftsmith.train.train import LOSSES, run_train
from tests.unit.tiny_run import make_recipe, make_run

# Processes are forked from a server that has imported torch.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["draftsmith.train.train", "tests.unit.tiny_run"])

EAGLE3 = {"drafter": {"kind": "eagle3", "draft_vocab_size": 60}, "epochs": 3, "lr": 3e-3, "muon_lr": 1e-2, "state_dropout": 0.1}  # fmt: skip
"""Twelve steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer")
    make_run(path)
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So that the order of sums is fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
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


def half_saved(number: int, by: signal.Signals) -> Callable[[Any, Path], None]:
    """`torch.save` that gets the signal `by` when half of a file is written, after `number` whole files."""
    original = torch.save
    whole: list[Path] = []

    def save(value: Any, path: Path) -> None:
        original(value, path)
        if len(whole) == number:
            os.truncate(path, path.stat().st_size // 2)
            kill_self(by)
        whole.append(path)

    return save


def process(
    rank: int, folder: Path, directory: Path, options: dict[str, Any], port: int,
    stop: tuple[int, int, signal.Signals, str] | None,
) -> None:  # fmt: skip
    """One of two training processes (the only one with port 0). The process of rank stop[0] gets the signal stop[2] when it calls
    the trainer's function stop[3], or is in the middle of `torch.save`, after stop[1] such calls."""
    torch.set_num_threads(1)
    if port:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
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


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """One process, never stopped."""
    directory = run_dir(folder, "whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(folder, directory, **EAGLE3)
    torch.set_num_threads(threads)
    return directory


def require_alike(one: Path, other: Path) -> None:
    """The same losses up to the order of sums. Weights may differ more: Muon and AdamW make full steps even of gradients that are
    nothing but rounding errors."""
    assert losses_of(one) == pytest.approx(losses_of(other), rel=2e-5)


# ---- one process or several ----


def test_two_processes_train_like_one(folder: Path, whole: Path) -> None:
    """With DDP and with FSDP2; and with steps of one sequence, where the second process has none."""
    ddp, split = run_dir(folder, "ddp"), run_dir(folder, "split")
    lonely, lonely_two = run_dir(folder, "lonely"), run_dir(folder, "lonely-two")
    running = start(folder, ddp, **EAGLE3)
    assert ended(running) == [0, 0]
    running = start(folder, split, fsdp=True, ema=0.9, **EAGLE3)
    assert ended(running) == [0, 0]
    few = {**EAGLE3, "tokens_per_step": 20, "epochs": 1}
    running = start(folder, lonely_two, **few)
    assert ended(running) == [0, 0]
    train(folder, lonely, **few)
    require_alike(whole, ddp)
    require_alike(lonely, lonely_two)
    require_alike(whole, split)


def test_accelerate_launch(folder: Path, whole: Path) -> None:
    """The command that the README gives, on two processes without a GPU."""
    directory = run_dir(folder, "launched")
    (folder / "launched.yaml").write_text(
        make_recipe(folder, **EAGLE3).model_copy(update={"name": "launched"}).model_dump_json()
    )
    launch = [
        Path(sys.executable).with_name("accelerate"),
        "launch",
        "--multi_gpu",
        "--num_processes=2",
        "--main_process_port=0",
    ]
    command = [*launch, "-m", "draftsmith.cli", "train", folder / "launched.yaml", "--runs", folder]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    record = stage.read(directory / "checkpoint")
    assert record is not None
    assert record["figures"]["processes"] == 2
    require_alike(whole, directory)


def test_micro_batches_change_nothing(folder: Path, whole: Path) -> None:
    for accumulate in (2, 3):
        directory = run_dir(folder, f"accumulate-{accumulate}")
        figures = train(folder, directory, gradient_accumulation_steps=accumulate, **EAGLE3)
        require_alike(whole, directory)
        assert figures["tokens"] == stage.read(whole / "checkpoint")["figures"]["tokens"]  # type: ignore[index]


def test_two_processes_stop_together_and_any_number_resumes(folder: Path, whole: Path) -> None:
    """SIGTERM reaches one of two: both save the same step, and one process resumes from their sharded weights. And back."""
    directory = run_dir(folder, "two-then-one")
    running = start(folder, directory, stop=(1, 5, signal.SIGTERM, "_step"), fsdp=True, save_every_steps=100, **EAGLE3)
    assert ended(running) == [143, 143]
    snapshot = torch.load(directory / "checkpoint" / SNAPSHOT, weights_only=True)
    assert snapshot["progress"]["step"] == 6
    train(folder, directory, **EAGLE3)
    require_alike(whole, directory)
    assert losses_of(directory)[:6] == snapshot["progress"]["losses"]

    back = run_dir(folder, "one-then-two")
    assert ended(start(folder, back, processes=1, stop=(0, 6, signal.SIGTERM, "_step"), **EAGLE3)) == [143]
    assert ended(start(folder, back, fsdp=True, gradient_accumulation_steps=2, **EAGLE3)) == [0, 0]
    require_alike(whole, back)
    assert losses_of(back)[:7] == losses_of(whole)[:7]


def with_a_slow_start(
    rank: int, folder: Path, directory: Path, port: int, may_wait: timedelta | None, seconds: float
) -> None:
    """One of two processes, the first of which takes `seconds` for the initialization; torch's default timeout is shorter."""
    shortened = pytest.MonkeyPatch()
    shortened.setattr(torch.distributed.distributed_c10d, "default_pg_timeout", timedelta(seconds=seconds / 2))
    if may_wait is not None:
        shortened.setattr(training_setup, "_PROCESS_TIMEOUT", may_wait)
    original = Eagle3Drafter.init_from_target

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        original(*arguments)

    shortened.setattr(Eagle3Drafter, "init_from_target", slowly)
    process(rank, folder, directory, EAGLE3, port, None)


@pytest.mark.parametrize(
    "seconds", [6.0, pytest.param(60.0, marks=pytest.mark.skipif("DRAFTSMITH_SOAK" not in os.environ, reason="`make soak`"))]
)  # fmt: skip
def test_initialization_may_take_longer_than_the_default_timeout(folder: Path, whole: Path, seconds: float) -> None:
    """With a timeout of half the time that an initialization takes, both processes fail without our timeout, none with it."""
    for may_wait, statuses in ((timedelta(seconds=seconds / 2), {1}), (None, {0})):
        directory = run_dir(folder, "slow-start")
        port = free_port()
        started = [
            SERVER.Process(target=with_a_slow_start, args=(rank, folder, directory, port, may_wait, seconds))
            for rank in range(2)
        ]
        for one in started:
            one.start()
        assert set(ended(started)) == statuses
    require_alike(whole, directory)


# ---- held-out text ----


def test_held_out_states_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten held-out conversations, at most two are in memory at once, one of which is being packed."""
    make_run(tmp_path, sequences=60)
    living: list[int] = []
    most: list[int] = []
    original = Store.__getitem__

    def watched(store: Store, index: int) -> Sequence:
        sequence = original(store, index)
        if sequence.held_out:
            living.append(index)
            most.append(len(living))
            weakref.finalize(sequence.hidden_states, living.remove, index)
        return sequence

    monkeypatch.setattr(Store, "__getitem__", watched)
    monkeypatch.setattr(packing, "_TOKENS_IN_BATCH", 1)
    for ahead, at_once in (
        (False, 2),
        (True, 7),
    ):  # with a GPU some are read early: two done, two being read, one due
        monkeypatch.setattr(data, "_loads_ahead", lambda device, ahead=ahead: ahead)
        directory = run_dir(tmp_path, f"ahead-{ahead}")
        most.clear()
        figures = train(tmp_path, directory, predict_temperature=0.7, **{**EAGLE3, "epochs": 1})
        assert list(figures["predicted_acceptance_length"]) == ["1", "2", "3", "4", "5"]
        assert len(most) == 2 * 10, "each is read once for either prediction"
        assert max(most) <= at_once


def with_watched_reading(rank: int, folder: Path, directory: Path, port: int, options: dict[str, Any]) -> None:
    """One of two processes. In `read-RANK` each line is a held-out sequence that it reads: the steps done, its row, and how many of
    them it then holds."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(packing, "_TOKENS_IN_BATCH", 1)
    original, step = Store.__getitem__, trainer._step
    holds: list[int] = []
    steps: list[int] = []

    def watched(store: Store, index: int) -> Sequence:
        sequence = original(store, index)
        if sequence.held_out:
            holds.append(index)
            weakref.finalize(sequence.hidden_states, holds.remove, index)
            with (directory / f"read-{rank}").open("a") as file:
                print(len(steps), index, len(holds), file=file)
        return sequence

    def counted(*arguments: Any) -> Any:
        done = step(*arguments)
        steps.append(1)
        return done

    monkeypatch.setattr(Store, "__getitem__", watched)
    monkeypatch.setattr(trainer, "_step", counted)
    process(rank, folder, directory, options, port, None)


def test_processes_read_their_parts_of_the_held_out_text_when_they_predict(tmp_path: Path) -> None:
    """Of ten conversations two processes read five each, after the last step of every epoch, and hold at most two at once. The main
    process alone predicts at a temperature."""
    make_run(tmp_path, sequences=60)
    directory, options = run_dir(tmp_path, "watched"), {**EAGLE3, "predict_temperature": 0.7, "epochs": 2}
    port = free_port()
    started = [
        SERVER.Process(target=with_watched_reading, args=(rank, tmp_path, directory, port, options))
        for rank in range(2)
    ]
    for one in started:
        one.start()
    assert ended(started) == [0, 0]
    reads = [
        [tuple(map(int, line.split())) for line in (directory / f"read-{r}").read_text().splitlines()] for r in (0, 1)
    ]
    held_out = Store(directory / "store").rows(held_out=True)
    last_steps = (len(losses_of(directory)) // 2, len(losses_of(directory)))
    by_rank = [[(step, row) for step in last_steps for row in held_out[rank::2]] for rank in (0, 1)]
    by_rank[0] += [(last_steps[-1], row) for row in held_out]
    assert [[(step, row) for step, row, _ in of_rank] for of_rank in reads] == by_rank
    assert max(held for of_rank in reads for _, _, held in of_rank) <= 2


# ---- interrupted and resumed ----


class Killed(BaseException):
    """Stands for the end of the process."""


def killed() -> None:
    raise Killed


MOMENTS = ("_step", "finish_epoch", "write_snapshot", "remove_epochs", "torch.save")
KILLS = int(os.environ.get("DRAFTSMITH_KILL_CASES", "6"))
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


# ---- options of the recipe ----


def test_a_loss_that_is_not_finite_stops_with_its_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingData.batch

    def broken(reader: TrainingData, rows: list[int], **named: Any) -> Any:
        batch = original(reader, rows, **named)
        if training and len(calls) >= 4 and 7 in rows:  # not in the initialization, nor in the first step
            batch.hidden_states[:] = math.inf
        calls.append(1)
        return batch

    def checked(run: Any, *arguments: Any) -> None:
        runs.append(run)
        check(run, *arguments)

    def fit(*arguments: Any) -> None:
        calls.clear()
        training.append(1)
        original_fit(*arguments)

    check, original_fit = trainer._require_finite, trainer._fit
    monkeypatch.setattr(trainer, "_fit", fit)
    training: list[int] = []
    calls: list[int] = []
    runs: list[Any] = []
    directory = run_dir(folder, "nan")
    monkeypatch.setattr(TrainingData, "batch", broken)
    monkeypatch.setattr(trainer, "_require_finite", checked)
    few = {**EAGLE3, "tokens_per_step": 50, "state_dropout": 0, "gradient_accumulation_steps": 2, "save_every_steps": 1}
    with pytest.raises(
        DraftsmithError, match=r"The loss is nan in step (\d+) .* samples of .*: 7\. Training"
    ) as raised:
        train(folder, directory, **few)
    assert raised.value.exit_status == 1
    step = int(str(raised.value).split("in step ")[1].split()[0])
    snapshot = torch.load(directory / "checkpoint" / SNAPSHOT, weights_only=True)
    assert snapshot["progress"]["step"] == step - 1
    for name, value in runs[-1].loss.drafter.state_dict().items():
        assert torch.equal(value, snapshot["drafter"][name]), "the step that failed changes no weight"
    assert all(value.isfinite().all() for value in snapshot["drafter"].values())


def test_a_gradient_that_is_not_finite_stops(folder: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"(The gradient's norm|The loss) is (nan|inf) in step \d+ \(epoch"):
        train(folder, run_dir(folder, "inf"), **{**EAGLE3, "lr": 1e30, "muon_lr": 1e30})


def test_the_best_epoch_is_published_and_the_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter([1.2, 1.5, 1.3] * 2)
    monkeypatch.setattr(epochs, "predict_acceptance", lambda *_, k, add_up: {1: 1.9, k: next(lengths)})
    best, last = run_dir(folder, "best"), run_dir(folder, "last")
    figures = train(folder, best, keep_last_epochs=2, **EAGLE3)
    assert figures["published_epoch"] == 2
    assert figures["predicted_acceptance_length"] == {"1": 1.9, "5": 1.5}
    assert sorted(path.name for path in (best / "checkpoint").glob("epoch-*")) == ["epoch-2", "epoch-3"]
    assert train(folder, last, publish_epoch="last", **EAGLE3)["published_epoch"] == 3
    assert not list((last / "checkpoint").glob("epoch-*"))
    published, third = weights_of(best / "checkpoint"), weights_of(best / "checkpoint" / "epoch-3")
    second = weights_of(best / "checkpoint" / "epoch-2")
    for name, value in weights_of(last / "checkpoint").items():
        assert torch.equal(published[name], second[name])
        assert torch.equal(value, third[name])
    assert not torch.equal(published["fc.weight"], third["fc.weight"])


def test_averaged_weights_are_published_and_do_not_affect_training(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history: list[torch.Tensor] = []
    original = trainer._step

    def watched(run: Any, *arguments: Any) -> Any:
        if not history:
            history.append(run.loss.drafter.fc.weight.detach().clone())
        done = original(run, *arguments)
        history.append(run.loss.drafter.fc.weight.detach().clone())
        return done

    monkeypatch.setattr(trainer, "_step", watched)
    directory = run_dir(folder, "ema")
    train(folder, directory, ema=0.7, publish_epoch="last", **EAGLE3)
    average = history[0]
    for step, weight in enumerate(history[1:]):
        decay = min(0.7, (step + 1) / (step + 10))
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(weights_of(directory / "checkpoint")["fc.weight"], average)
    assert losses_of(directory) == losses_of(whole)


def test_recomputed_activations_are_the_same(folder: Path, whole: Path) -> None:
    medusa = {"drafter": {"kind": "medusa", "num_heads": 2}, "epochs": 1, "lr": 3e-3}
    kept = run_dir(folder, "medusa-kept")
    train(folder, kept, **medusa)
    for name, options, same in (("again", EAGLE3, whole), ("medusa-again", medusa, kept)):
        directory = run_dir(folder, name)
        train(folder, directory, activation_checkpointing=True, **options)
        assert losses_of(directory) == losses_of(same)


def test_precision_depends_on_the_device_unless_the_recipe_sets_it(folder: Path, whole: Path) -> None:
    options = make_recipe(folder).train
    assert options.precision is None
    assert (options.precision_on("cuda"), options.precision_on("cpu")) == ("bfloat16", "float32")
    said = make_recipe(folder, precision="float32").train
    assert said.precision_on("cuda") == "float32"
    record = stage.read(whole / "checkpoint")
    assert record is not None
    assert record["recipe"]["train"]["precision"] == "float32", (
        "the precision that was used, not that the recipe left it open"
    )


def test_a_device_that_prefers_bfloat16_trains_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the checkpoint is then up to date on any device."""
    directory = run_dir(folder, "prefers")
    monkeypatch.setattr(type(make_recipe(folder).train), "precision_on", lambda options, device: "bfloat16")
    train(folder, directory, **EAGLE3)
    found = run_dir(folder, "asked")
    train(folder, found, precision="bfloat16", **EAGLE3)
    assert losses_of(directory) == losses_of(found)
    monkeypatch.undo()
    record = stage.read(directory / "checkpoint")
    assert record is not None
    assert record["recipe"]["train"]["precision"] == "bfloat16"
    assert trainer.finished_training(make_recipe(folder, **EAGLE3), directory) == record["figures"]


def test_bfloat16_products_on_float32_weights(folder: Path, whole: Path) -> None:
    directory = run_dir(folder, "bfloat16")
    train(folder, directory, precision="bfloat16", **EAGLE3)
    found = losses_of(directory)
    assert found != losses_of(whole)
    assert found == pytest.approx(losses_of(whole), rel=2e-2)
    assert {value.dtype for value in weights_of(directory / "checkpoint").values()} == {torch.float32}


def test_bfloat16_learns_like_float32(tmp_path: Path) -> None:
    """With induction heads, linear fit, Muon's iteration and all products in bf16, acceptance is within 2%."""
    make_run(tmp_path, sequences=72, tokens=40)
    predicted = {}
    for precision in ("float32", "bfloat16"):
        directory = run_dir(tmp_path, precision)
        options = {**EAGLE3, "drafter": {"kind": "eagle3", "draft_vocab_size": 80}, "tokens_per_step": 400}
        predicted[precision] = train(tmp_path, directory, precision=precision, **options)["predicted_acceptance_length"]
    assert predicted["float32"]["3"] > 1.1, "else the comparison means little"
    assert predicted["bfloat16"] == pytest.approx(predicted["float32"], rel=0.02)


def test_loading_ahead_changes_nothing(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data._loads_ahead(torch.device("cuda"))
    assert not data._loads_ahead(torch.device("cpu"))
    monkeypatch.setattr(data, "_loads_ahead", lambda device: True)
    directory = run_dir(folder, "ahead")
    train(folder, directory, **EAGLE3)
    assert losses_of(directory) == losses_of(whole)


def test_schedules() -> None:
    for schedule, half, last in (("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1.0, 1.0)):
        factors = [learning_rate_factor(step, 110, 10 / 110, schedule) for step in range(110)]
        assert factors[:11] == pytest.approx([*(n / 10 for n in range(1, 11)), 1])
        assert factors[60] == pytest.approx(half)
        assert factors[-1] == pytest.approx(last, abs=0.011)
        assert min(factors) > 0
    assert learning_rate_factor(35, 110, 10 / 110, "cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert learning_rate_factor(35, 110, 10 / 110, "linear") == pytest.approx(0.75)


def test_a_missing_tracker_is_an_error_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_dir(folder, "tracker")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"`train.tracker: trackio` needs the package trackio.*draftsmith\[trackers\]"):
        train(folder, directory, tracker="trackio", **EAGLE3)
    assert not (directory / "checkpoint").exists()
