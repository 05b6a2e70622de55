"""Training in processes of its own, one for each GPU: `draftsmith run` evaluates when they have ended.

A process frees its GPU memory only when it ends, and the evaluation's engines need all of it. The processes find each other as
those of `accelerate launch` on one machine do. torch's elastic launcher, which `accelerate launch` uses, kills a process 30
seconds after a signal; this one waits for a process that is saving.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from draftsmith.config.recipe import Recipe
from draftsmith.run.cuda import require_usable_gpus
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.run.process import end_at_once, end_with_parent
from draftsmith.run.progress import console
from draftsmith.train.signals import on_signal, without_saving
from draftsmith.train.train import finished_training, run_train


def process_count() -> int:
    """Number of training processes on this machine: one per visible GPU, or one.
    Raises UserError: torch cannot use this machine's GPUs."""
    require_usable_gpus()
    return max(1, torch.cuda.device_count())


def train_in_processes(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """`run_train` in `process_count()` processes, which print its progress. SIGTERM and SIGUSR1 are passed on to them.

    Raises:
        UserError, DraftsmithError, Stopped: from `run_train` in any of the processes; the others are ended.
        DraftsmithError: a process was killed, or failed in a way that is not foreseen; then its traceback is printed.
        KeyboardInterrupt: Ctrl-C; all processes have ended.
    """
    if (done := finished_training(recipe, run_dir)) is not None:
        console.print(f"train: {run_dir / 'checkpoint'} is up to date", highlight=False, soft_wrap=True)
        return done
    count = process_count()
    port = get_free_port() if count > 1 else 0
    shared: dict[str, int] = {}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:  # torch reads it when it is imported
        shared = {"OMP_NUM_THREADS": max(1, torch.get_num_threads() // count)}
    # It warns of each process that it ends after an error.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        _pass_on(context.processes, number)

    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder)
        with patch_environment(**shared), without_saving():
            context = start_processes(_process, (count, port, recipe, run_dir, errors), count, join=False, daemon=True)
        try:
            with on_signal(handle):
                while not context.join():
                    pass
        except KeyboardInterrupt:
            _end(context.processes)
            raise
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise _error_of(error, errors) from None
    done = finished_training(recipe, run_dir)
    if done is None:  # a process that alone gets Ctrl-C ends without an error
        raise DraftsmithError(
            f"Training ended without a checkpoint at {run_dir / 'checkpoint'}. Run the same command again to continue."
        )
    if signal.SIGTERM in received:  # after the last step, where training only finishes
        raise Stopped("Stopped by SIGTERM; training is finished. Run the same command again to go on.")
    return done


def _process(rank: int, count: int, port: int, recipe: Recipe, run_dir: Path, errors: Path) -> None:
    """One of `count` processes. Its error goes into the folder `errors`, in a file named by its rank."""
    end_with_parent()
    if count > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    status = 0
    try:
        run_train(recipe, run_dir)
    except DraftsmithError as error:
        (errors / str(rank)).write_text(json.dumps([error.exit_status, str(error)]))
        status = error.exit_status
    if count == 1:
        sys.exit(status)
    end_at_once(status)


def _pass_on(processes: Sequence[BaseProcess], number: int) -> None:
    """Send the signal to the processes that are running."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # it may have ended, and its status be just being read
                os.kill(process.pid, number)


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the processes after Ctrl-C, which a terminal sends to them too: by themselves first, then by signals."""
    for number in (None, signal.SIGINT, signal.SIGKILL):
        if number is not None:
            _pass_on(processes, number)
        for process in processes:
            process.join(3)


def _error_of(ended: ProcessExitedException | ProcessRaisedException, errors: Path) -> DraftsmithError:
    """The error of the process that ended first, or of another one that left its error."""
    for file in (errors / str(ended.error_index), *sorted(errors.iterdir())):
        if file.is_file():
            status, message = json.loads(file.read_text())
            kind = next(kind for kind in (UserError, Stopped, DraftsmithError) if kind.exit_status == status)
            return kind(message)
    again = "Run the same command again to continue from the last snapshot."
    if isinstance(ended, ProcessRaisedException):
        traceback = ended.msg.strip()
        console.print(traceback, markup=False, highlight=False, soft_wrap=True)
        return DraftsmithError(
            f"Training process {ended.error_index} failed: {traceback.splitlines()[-1]}. Its traceback is above. {again}"
        )
    if ended.signal_name == "SIGTERM":
        return Stopped(f"Stopped by SIGTERM before there was anything to save. {again}")
    how = ended.signal_name or f"exit status {ended.exit_code}"
    why = "What it printed is above."
    if ended.signal_name == "SIGKILL":
        why = "The usual reason is that memory is used up: `draftsmith run RECIPE --plan` estimates how much training needs."
    return DraftsmithError(f"Training process {ended.error_index} ended with {how}. {why} {again}")
