"""Training in processes of its own, one for each GPU: `draftsmith run` goes on to evaluate when they have ended.

What a process has allocated on a GPU is free again only when the process ends, and an evaluation's engines need all of it. The
processes find one another as those of `accelerate launch` on one machine do. torch's elastic launcher, which that uses, kills
a process 30 seconds after a signal; here one that is saving is waited for.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, start_processes

from draftsmith.config.recipe import Recipe
from draftsmith.run.cuda import require_usable_gpus
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.run.process import end_with_parent
from draftsmith.run.progress import console
from draftsmith.train.train import finished_training, run_train


def process_count() -> int:
    """Training processes on this machine: one for each GPU that is visible, one where there is none.

    Raises:
        UserError: torch cannot use the GPUs that are here.
    """
    require_usable_gpus()
    return max(1, torch.cuda.device_count())


def train_in_processes(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """`run_train` in `process_count()` processes. They print its progress; SIGTERM and SIGUSR1 are passed on to them.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError, DraftsmithError, Stopped: as `run_train` does, in any of the processes; those that are left are ended.
        DraftsmithError: a process was killed.
        KeyboardInterrupt: Ctrl-C; all processes have ended.
    """
    if (done := finished_training(recipe, run_dir)) is not None:
        console.print(f"train: {run_dir / 'checkpoint'} is up to date")
        return done
    count = process_count()
    port = get_free_port() if count > 1 else 0
    shared: dict[str, int] = {}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:  # torch reads it when it is imported
        shared = {"OMP_NUM_THREADS": max(1, torch.get_num_threads() // count)}
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it says whom it ends after an error
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder)
        with patch_environment(**shared):
            context = start_processes(_process, (count, port, recipe, run_dir, said), count, join=False, daemon=True)
        try:
            with _signals_passed_on(context.processes):
                while not context.join():
                    pass
        except KeyboardInterrupt:
            _end(context.processes)
            raise
        except ProcessExitedException as error:
            raise _what_happened(error, said) from None
    done = finished_training(recipe, run_dir)
    if done is None:  # a process that Ctrl-C reaches alone ends without an error
        raise DraftsmithError(
            f"Training ended without a checkpoint at {run_dir / 'checkpoint'}. Run the same command again to continue."
        )
    return done


def _process(rank: int, count: int, port: int, recipe: Recipe, run_dir: Path, said: Path) -> None:
    """One of `count` processes. What it fails of is left in the folder `said`, in a file named by its rank."""
    end_with_parent()
    if count > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    status = 0
    try:
        run_train(recipe, run_dir)
    except DraftsmithError as error:
        (said / str(rank)).write_text(json.dumps([error.exit_status, str(error)]))
        status = error.exit_status
    if count == 1:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # At an orderly end, the process group waits for others that may be gone, and gloo's threads now and then abort it.
    os._exit(status)


@contextmanager
def _signals_passed_on(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """SIGTERM and SIGUSR1 are the processes' business meanwhile; in Python's main thread only."""

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _end(processes: Sequence[BaseProcess]) -> None:
    """After Ctrl-C, which a terminal sends to the processes too: let them end by themselves, and insist where they do not."""
    for number in (None, signal.SIGINT, signal.SIGKILL):
        for process in processes:
            if number is not None and process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)
        for process in processes:
            process.join(3)


def _what_happened(ended: ProcessExitedException, said: Path) -> DraftsmithError:
    """The error of the process that ended first, or of another one that said what it was."""
    for file in (said / str(ended.error_index), *sorted(said.iterdir())):
        if file.is_file():
            status, message = json.loads(file.read_text())
            kind = next(kind for kind in (UserError, Stopped, DraftsmithError) if kind.exit_status == status)
            return kind(message)
    again = "Run the same command again to continue from the last snapshot."
    if ended.signal_name == "SIGTERM":
        return Stopped(f"Stopped by SIGTERM before there was anything to save. {again}")
    how = ended.signal_name or f"exit status {ended.exit_code}"
    why = "What it printed is above."
    if ended.signal_name == "SIGKILL":
        why = (
            "Most often that is the system's answer to memory that is used up: `draftsmith run RECIPE --plan` says what training "
            "needs."
        )
    return DraftsmithError(f"Training process {ended.error_index} ended with {how}. {why} {again}")
