"""SIGUSR1 (save a snapshot) and SIGTERM (save one and stop) during training."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of every SIGUSR1 and SIGTERM, instead of ending by it.

    Changes nothing outside Python's main thread, which alone may set handlers.
    """
    with _handled(dict.fromkeys((signal.SIGUSR1, signal.SIGTERM), lambda number, frame: handle(number))):
        yield


@contextmanager
def without_saving() -> Iterator[None]:
    """Ignore SIGUSR1, which would end the process, while there is nothing to save. Processes that are started meanwhile ignore it from their
    first moment on. In threads as `on_signal`."""
    with _handled({signal.SIGUSR1: signal.SIG_IGN}):
        yield


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
