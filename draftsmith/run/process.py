"""How this process and its threads use the machine: memory that is freed, cores that others need more."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def disable_malloc_trim() -> None:
    """Have glibc keep what tensors free for the next ones, where it is the C library.

    By default it hands large blocks back to the system, which zeroes every page of them when they are asked for again.
    """
    with suppress(OSError, AttributeError):
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1)):  # the most that they take
            ctypes.CDLL("libc.so.6").mallopt(option, value)


def trim_malloc() -> None:
    """Hand what `disable_malloc_trim` kept back to the system, for others to use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def lower_priority() -> None:
    """Give this thread what the cores have left over.

    Writing states takes a percent or two of a core beside an engine. On a CPU the engine's threads wait for
    one another many times in a step, so a moment taken from one stops them all; but in every step there are moments in which one
    thread works alone and the other cores are free.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
