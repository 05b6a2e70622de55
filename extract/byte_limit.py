"""A limit on the bytes that wait for something, for threads that go on when some have been dealt with."""

from __future__ import annotations

import threading


class ByteLimit:
    """A semaphore that counts bytes. More than the limit are let through alone, when nothing else is waiting.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Block until there is room for `size` bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + size <= self._limit)
            self._taken += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._taken -= size
            self._changed.notify_all()
