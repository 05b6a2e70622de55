"""How a process uses its machine, freed memory and thread priorities; and how it ends."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_MMAP_THRESHOLD, _TRIM_THRESHOLD = 32 << 20, 2**31 - 1
"""Bytes, both at their maximum: glibc's allocator then keeps freed memory for the next tensors. By default it returns large
blocks to the system, which zeroes every page of them when they are allocated again: in an engine, thousands of times a step.
Whether it does depends on where the heap happens to end, so that of two equal engines one may be slower for all its life."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def disable_malloc_trim() -> None:
    """Have glibc keep freed memory, from now on. Does nothing with another C library."""
    with suppress(OSError, AttributeError):
        for option, value in ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)):
            ctypes.CDLL("libc.so.6").mallopt(option, value)


def malloc_environment() -> dict[str, str]:
    """Environment variables by which glibc keeps freed memory in a child process from its start. The user's own win."""
    values = {"MALLOC_MMAP_THRESHOLD_": _MMAP_THRESHOLD, "MALLOC_TRIM_THRESHOLD_": _TRIM_THRESHOLD}
    return {name: os.environ.get(name, str(value)) for name, value in values.items()}


def lower_priority() -> None:
    """Run this thread at nice 19.

    Writing states takes a percent or two of a core beside an engine. On a CPU the engine's threads wait for one another many
    times in a step, so time taken from one stops them all; but every step has moments in which one thread works alone and
    the other cores are idle.
    """
    if sys.platform == "linux":  # only there do threads have their own priorities
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def end_with_parent() -> None:
    """Have this child process exit as soon as its parent is gone, whatever it is doing; with its process group, if it leads one."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def launched_together() -> bool:
    """Whether a launcher such as `accelerate launch` started this process with others, to train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def end_at_once(status: int) -> NoReturn:
    """End this process, which has trained together with others, without taking down the interpreter. That would wait for other processes,
    which may be gone; and a thread of Gloo that lets go of a tensor only then aborts the process, after all is done (torch 2.11 and 2.13: the
    destructor of a finished broadcast asks for the interpreter's lock)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
