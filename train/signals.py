"""SIGUSR1 (save a snapshot) and SIGTERM (save one and stop) during training."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of every SIGUSR1 and SIGTERM, instead of ending by it.

    Changes nothing outside Python's main thread, which alone may set handlers.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            previous[number] = signal.signal(number, lambda number, frame: handle(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
