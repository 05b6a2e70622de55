"""How a process uses its machine: freed memory, thread priorities, and ending with its parent."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def disable_malloc_trim() -> None:
    """Have glibc keep freed memory for the next tensors. Does nothing with another C library.

    By default glibc returns large blocks to the system, which zeroes every page of them when they are allocated again.
    """
    with suppress(OSError, AttributeError):
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1)):  # their maxima
            ctypes.CDLL("libc.so.6").mallopt(option, value)


def trim_malloc() -> None:
    """Return the memory that `disable_malloc_trim` kept to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def lower_priority() -> None:
    """Run this thread at nice 19.

    Writing states takes a percent or two of a core beside an engine. On a CPU the engine's threads wait for one another many
    times in a step, so time taken from one stops them all; but every step has moments in which one thread works alone and
    the other cores are idle.
    """
    if sys.platform == "linux":  # only there do threads have their own priorities
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
