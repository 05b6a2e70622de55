"""A vLLM engine in a child process, and the pipe to it.

One engine is one process, because a process can hold one set of vLLM counters, and because an engine that dies must not take
the program with it. The child talks only to its parent. What it prints goes to a log file, whose last lines are shown if it
fails. It ends with its parent, however the parent ends. It leads a session of its own, whose processes end with it: vLLM's workers for
tensor parallelism notice that their engine is gone only once they have loaded the model (vllm/v1/executor/multiproc_executor.py).
"""

import atexit
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.process import end_with_parent

_LOG_LINES = 15  # lines of a log that an error shows
_SECONDS_TO_CLOSE = 10.0
_TOO_LITTLE_FOR_KV_CACHE = "on kv cache allocation is less than requested memory"
"""How vLLM's CPU worker says it. It names options of its own, and counts one node, which the check before (`fit.py`) does not: virtual
machines that get memory as they run have more."""


class EngineFailed(DraftsmithError):
    """An engine's process ended, or reported why it could not go on."""


class EngineProcess:
    """The parent's side of an engine's process. Returns as soon as the process is started; the caller must `close` it.

    Args:
        child: what the process runs, as `child(pipe, *arguments)`; pickled with its arguments. An exception that it raises is
            reported to the parent.
        name: for people: appears in errors.
        engine: how the recipe runs vLLM.
        log: the file for what the process prints; overwritten.
        variables: more environment variables, from `share_of_machine` or `only_these_gpus`.
        advice: what to do when the engine fails, for the error's text.
    """

    def __init__(
        self,
        child: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        name: str,
        engine: EngineConfig,
        log: Path,
        variables: dict[str, str] | None = None,
        advice: str = "",
    ) -> None:
        self._name, self._log, self._advice = name, log, advice
        self._ready = self._closed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.pipe, childs_end = multiprocessing.Pipe()
        context, values = prepare_engines(engine), environment.vllm_environment(engine) | (variables or {})
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        # Not a daemon process, because vLLM starts child processes for tensor parallelism.
        # mypy: every concrete context has Process, the base class has not.
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run, args=(values, cores, childs_end, child, arguments, str(log)), name=f"engine-{name}"
        )
        try:
            with mock.patch.dict(os.environ, values):
                self.process.start()
            childs_end.close()
            atexit.register(self.close)
        except BaseException:
            # Ctrl-C: the caller has nothing to close yet, and the program would wait for the process before it ends.
            if self.process.pid is not None:
                self.close()
            raise

    def send(self, message: Any) -> None:
        """Send a message to the child. If it has ended, the next `receive` raises."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self, when: str = "") -> Any:
        """Wait for the child's next message; `when` is for the error's text, as in `while starting`.
        Raises EngineFailed: the child reported an error or ended; it is closed then."""
        try:
            message = self.pipe.recv()
        except KeyboardInterrupt:
            self._signal_all(signal.SIGINT)  # which the terminal does not send to other sessions
            raise
        except (EOFError, OSError):
            self.process.join(_SECONDS_TO_CLOSE)
            self.close()
            reason = f"its process ended with status {self.process.exitcode}"
            if self.process.exitcode == -9:
                reason += " (killed: perhaps the machine ran out of memory; lower engine.kv_cache_gib or run fewer engines at once)"
            raise self._failed(reason, when) from None
        if isinstance(message, _Failure):
            self.close()
            reason = message.reason
            if _TOO_LITTLE_FOR_KV_CACHE in reason:
                reason += " (on a CPU vLLM counts the memory of the first NUMA node alone; in a recipe, lower engine.kv_cache_gib)"
            raise self._failed(reason, when)
        self._ready = True
        return message

    def close(self) -> None:
        """End the process: it leaves when its pipe ends, and is killed if it does not, with what it has started and left. Safe to call
        twice."""
        if self._closed:
            return  # its id may be another process's by now
        self.pipe.close()
        self.process.join(_SECONDS_TO_CLOSE if self._ready else 0)  # an engine that is still loading does not listen
        self._signal_all(signal.SIGKILL)
        self._closed = True
        self.process.kill()  # it has no session yet if it has only just been started
        self.process.join()
        atexit.unregister(self.close)

    def _signal_all(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # on macOS a group of ended processes is not permitted
            os.killpg(self.process.pid, number)

    def _failed(self, reason: str, when: str) -> EngineFailed:
        tail = log_tail(self._log)
        return EngineFailed(
            f"The vLLM engine `{self._name}` failed{when and f' {when}'}: {reason}. {self._advice and f'{self._advice} '}"
            f"Its log is {self._log}" + (f"; the last lines are:\n{tail}" if tail else ", which is empty.")
        )


def log_tail(log: Path) -> str:
    """The last lines of a log; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-_LOG_LINES:])


def engine_context() -> multiprocessing.context.BaseContext:
    """How engines' processes start: on a CPU forked from a process that has imported vLLM, elsewhere spawned.

    Importing vLLM is most of a small model's start, and a run starts half a dozen engines.
    """
    if sys.platform != "linux" or not environment.is_cpu():
        return multiprocessing.get_context("spawn")  # a forked process must not inherit a GPU driver's state
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.engine.preload"])
    return context


def prepare_engines(engine: EngineConfig) -> multiprocessing.context.BaseContext:
    """`engine_context()`, with the process that imports vLLM started if engines are forked; does not wait for it."""
    context = engine_context()
    if isinstance(context, multiprocessing.context.ForkServerContext):
        with mock.patch.dict(os.environ, environment.vllm_environment(engine)):
            ensure_running()  # engines forked from it must not see one another's variables, so it has none of theirs
    return context


# --- the child's side ---


@dataclass(frozen=True)
class _Failure:
    """Why the child cannot go on. Child to parent."""

    reason: str


def _run(
    values: dict[str, str],
    cores: set[int] | None,
    pipe: Connection,
    child: Callable[..., None],
    arguments: tuple[Any, ...],
    log: str,
) -> None:
    # A forked process has the environment and cores with which its server was started, perhaps for another engine.
    os.environ.update(values)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    os.setsid()
    end_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    try:
        child(pipe, *arguments)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()  # the parent reads the log once it has the message
        with suppress(OSError):
            message = str(error).strip()[:500].removesuffix(".")
            pipe.send(_Failure(message if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {message}"))
