"""Child processes that run vLLM: the environment they need, and how they behave. Imports vLLM itself nowhere.

Two of these settings work only when they are there as the process starts (`LD_PRELOAD` is read by the
dynamic linker, `KMP_BLOCKTIME` when OpenMP is loaded), so they are given to a child process, not set late.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import EngineConfig
from draftsmith.run.errors import UserError

_GIB = 1024**3


def is_cpu() -> bool:
    """Whether engines will run on the CPU.

    Raises:
        UserError: vLLM is built for CUDA, and torch cannot use a GPU; the driver may be missing or too old.
    """
    import torch

    from draftsmith.run.cuda import require_gpus_for_vllm

    if torch.cuda.is_available():
        return False
    require_gpus_for_vllm()
    return True


def resolved(engine: EngineConfig) -> EngineConfig:
    """The recipe's engine with what it leaves to the device filled in: `enforce_eager` is True or False."""
    if engine.enforce_eager is not None:
        return engine
    return engine.model_copy(update={"enforce_eager": is_cpu()})


def vllm_environment(engine: EngineConfig) -> dict[str, str]:
    """Variables for the environment of a child process that will import vLLM.

    What the user has set already is kept, except the two variables that decide how the engine is driven.
    The memory of an engine is not among them: pass `memory_arguments` to the engine itself.

    Args:
        engine: how the recipe runs vLLM.

    Returns:
        Names and values, to be laid over `os.environ`.
    """
    values = {
        # One engine is one process. More than one GPU needs vLLM's own worker processes, which it starts itself.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Ours serves MLP speculators and mends sampling on CPUs. Other packages' may be made for another vLLM.
        "VLLM_PLUGINS": "draftsmith",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if engine.tensor_parallel_size > 1:
        values["VLLM_WORKER_MULTIPROC_METHOD"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if is_cpu():
        values |= openmp_environment() | _malloc_environment()
    return values


def openmp_environment() -> dict[str, str]:
    """Variables that make vLLM fast on a CPU: Intel's OpenMP in front of torch's own, where it is installed."""
    values = {
        # Milliseconds that a thread spins after its work. The default, 200, steals the cores from whatever runs next.
        "KMP_BLOCKTIME": os.environ.get("KMP_BLOCKTIME", "5"),
    }
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # where the package intel-openmp puts it
    preloaded = os.environ.get("LD_PRELOAD", "")
    if library.is_file() and "libiomp" not in preloaded:
        values["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
    return values


def _malloc_environment() -> dict[str, str]:
    """Variables that let glibc keep the memory of a step's activations for the next step.

    Left to itself it hands it back to the kernel and faults it in again, page by page, thousands of times a step; whether it
    does depends on where the heap happens to end, so of two engines alike one is slower for all its life.
    """
    values = {"MALLOC_MMAP_THRESHOLD_": 2**25, "MALLOC_TRIM_THRESHOLD_": 2**31}  # the first at its highest
    return {name: os.environ.get(name, str(value)) for name, value in values.items()}


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees."""

    name: str
    """As CUDA_VISIBLE_DEVICES has it."""
    memory_bytes: int


def gpus() -> list[Gpu]:
    """Those that are visible, in their order; none on a CPU."""
    import torch

    if is_cpu():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    # CUDA ends the list at the first name that it does not know.
    return [Gpu(name, torch.cuda.get_device_properties(index).total_memory) for index, name in enumerate(names[:count])]


def only_these_gpus(names: Sequence[str]) -> dict[str, str]:
    """Variables for a child process that is to see these GPUs; none of them: what this process sees."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


def share_of_machine(number: int, count: int, tensor_parallel_size: int) -> dict[str, str]:
    """Variables that give engine `number` of `count` its own cores, or its own `tensor_parallel_size` GPUs.

    Raises:
        UserError: there are not enough cores or GPUs.
    """
    if count == 1:
        return {}
    if is_cpu():
        cores = sorted(os.sched_getaffinity(0))
        if count > len(cores):
            raise UserError(f"extract.workers is {count} and this machine has {len(cores)} cores; use fewer workers.")
        mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}
    devices = [gpu.name for gpu in gpus()]
    if count * tensor_parallel_size > len(devices):
        raise UserError(
            f"extract.workers is {count} with {tensor_parallel_size} GPUs each, and {len(devices)} GPUs are visible; use fewer."
        )
    return only_these_gpus(devices[number * tensor_parallel_size : (number + 1) * tensor_parallel_size])


def memory_arguments(engine: EngineConfig, *, share: float = 1.0) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that bound an engine's memory.

    Args:
        engine: how the recipe runs vLLM.
        share: this engine's part of what the recipe grants, for engines that run side by side.
    """
    if is_cpu():
        # An argument, not VLLM_CPU_KVCACHE_SPACE: that one takes whole GiB only.
        return {"kv_cache_memory_bytes": int(engine.kv_cache_gib * share * _GIB)}
    return {"gpu_memory_utilization": engine.gpu_memory_utilization * share}


def engine_context() -> multiprocessing.context.BaseContext:
    """How engines' processes are made: on a CPU from one process that has imported vLLM already, elsewhere from nothing.

    Importing vLLM is most of a small model's start, and a run starts half a dozen engines.
    """
    if sys.platform != "linux" or not is_cpu():
        return multiprocessing.get_context("spawn")  # a forked process must not inherit a GPU driver's state
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.engine.preload"])
    return context


def start_engine_process(
    child: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    name: str,
    engine: EngineConfig,
    share: dict[str, str] | None = None,
) -> BaseProcess:
    """Start a process for an engine, in the environment that vLLM needs.

    Not a daemon process, because vLLM starts children of its own for tensor parallelism: the caller ends it.

    Args:
        child: what it runs, with `arguments`; both are pickled.
        engine: how the recipe runs vLLM.
        share: from `share_of_machine`, where several engines run side by side.
    """
    context, values = engine_context(), vllm_environment(engine)
    if isinstance(context, multiprocessing.context.ForkServerContext):
        with _environment(values):
            ensure_running()  # before there is a share: what one engine forked from it must not see is another's share
    values |= share or {}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    # mypy: every concrete context has Process, the base class has not.
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_begin, args=(values, cores, child, arguments), name=name
    )
    with _environment(values):
        process.start()
    return process


def _begin(
    values: dict[str, str], cores: set[int] | None, child: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # A forked process has the environment and cores that its server was started with, perhaps for another engine.
    os.environ.update(values)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    child(*arguments)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Lay variables over `os.environ` while a child is started, and put the old ones back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_with_parent() -> None:
    """Leave at once when the parent is gone, even while generating."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def print_into(log: str) -> None:
    """Send what this process and its libraries print to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
