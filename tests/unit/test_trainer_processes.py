"""The trainer has the same losses on any number of processes, which stop together, and with any micro-batches."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.run import stage
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train import setup as training_setup
from draftsmith.train.snapshot import SNAPSHOT
from tests.soak import in_soak
from tests.unit.tiny_run import make_recipe, make_run
from tests.unit.training_runs import (
    EAGLE3,
    SERVER,
    ended,
    free_port,
    losses_of,
    process,
    require_alike,
    run_dir,
    start,
    train,
)

pytestmark = pytest.mark.usefixtures("single_thread")


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


def test_a_process_whose_sequences_have_nothing_to_train(tmp_path: Path) -> None:
    """Answers of one token have none of DFlash's blocks, whose process must not leave the others waiting."""
    store = make_run(tmp_path) / "store"
    sequences = [
        replace(one, loss_mask=torch.arange(len(one.token_ids)) >= len(one.token_ids) - 1) if one.sample_id % 3 else one
        for one in Store(store)
    ]
    identity = Store(store).identity
    shutil.rmtree(store)
    stage.claim(store, fresh=True)
    with StoreWriter(store, identity, shard_tokens=100) as writer:
        for one in sequences:
            writer.append(one)
        writer.close()
    stage.StageRun("extract", store).finish("short", {}, recipe={})
    few = {"drafter": {"kind": "dflash", "draft_vocab_size": 60}, "tokens_per_step": 46, "epochs": 2}
    one, two, split = (run_dir(tmp_path, name) for name in ("one", "two", "split"))
    train(tmp_path, one, **few)
    assert 0 in losses_of(one)
    assert any(losses_of(one))
    for directory, options in ((two, {}), (split, {"fsdp": True})):
        assert ended(start(tmp_path, directory, **few, **options)) == [0, 0]
        require_alike(one, directory)


def test_accelerate_launch(folder: Path, whole: Path) -> None:
    """The command that the README gives, on two processes without a GPU. They end at once: a thread of Gloo may abort one that takes down the
    interpreter (one run in three, where both cores are free)."""
    directory = run_dir(folder, "launched")
    trace = folder / "taken-down"
    (folder / "sitecustomize.py").write_text(
        f"import atexit, os\n'RANK' in os.environ and atexit.register(lambda: open({str(trace)!r}, 'w'))\n"
    )
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
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not trace.exists()
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


@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=in_soak)])
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
