"""Copy each step's states from a GPU into ordinary memory while the model goes on computing.

Pinned memory is never given back to the system. So there is one ring buffer of a fixed size: a step that finds no room waits until
earlier ones are in the pool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.engine.memory import copy_buffer_bytes
from draftsmith.extract.states_pool import StatesPool

_ALIGNMENT = 256
"""Regions begin at multiples of this many bytes."""


class Ring:
    """A ring buffer whose regions are handed out in order.

    Args:
        buffer: uint8 [N].
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._taken: deque[Region] = deque()  # oldest first; one given back stays until all before it are
        self._changed = threading.Condition()

    def take(self, size: int) -> Region:
        """A region of `size` bytes; blocks until there is room.

        Raises:
            ValueError: the whole buffer is smaller.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._buffer):
            raise ValueError(f"{size} bytes do not fit a buffer of {len(self._buffer)}")
        with self._changed:
            while (start := self._room(size)) is None:
                self._changed.wait()
            self._taken.append(Region(self, start, self._buffer[start : start + size]))
            return self._taken[-1]

    def give_back(self, region: Region) -> None:
        with self._changed:
            region.free = True
            while self._taken and self._taken[0].free:
                self._taken.popleft()
            self._changed.notify_all()

    def _room(self, size: int) -> int | None:
        """Where `size` bytes are free, after the newest region or at the buffer's start."""
        if not self._taken:
            return 0
        oldest, end = self._taken[0].start, self._taken[-1].end
        if end > oldest:  # no wrap-around: the end and the beginning are free
            return end if end + size <= len(self._buffer) else 0 if size <= oldest else None
        return end if end + size <= oldest else None


@dataclass(eq=False)
class Region:
    """A region of a ring buffer."""

    ring: Ring
    start: int
    memory: torch.Tensor
    """uint8"""
    free: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.memory)

    def give_back(self) -> None:
        self.ring.give_back(self)


class GpuCopier:
    """Copies steps, one after the other, into a pool.

    Args:
        pool: what receives them.
        step_bytes: states of the largest step, which always fits.
        step_tokens: its tokens.
        cuda: provides `Event` as `torch.cuda` does.
        pinned: allocates the buffer, given its bytes.
    """

    def __init__(
        self,
        pool: StatesPool,
        step_bytes: int,
        step_tokens: int,
        cuda: Any = torch.cuda,
        pinned: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._pool, self._cuda = pool, cuda
        self._ring = Ring(pinned(copy_buffer_bytes(step_bytes + 2 * _ALIGNMENT, step_tokens)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-states")
        self.last: Future[None] | None = None
        """Done when all steps so far are in the pool; raises what went wrong with any of them."""

    def start(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Start copying a step's states [N, L, H] and slots int64 [N]; waits until the ring has room for them.

        The copy takes its turn on the model's stream: the next step writes over both.
        """
        first = -(-slots.nbytes // _ALIGNMENT) * _ALIGNMENT
        region = self._ring.take(first + states.nbytes)
        slots_here = region.memory[: slots.nbytes].view(slots.dtype)
        states_here = region.memory[first : first + states.nbytes].view(states.dtype).view(states.shape)
        slots_here.copy_(slots, non_blocking=True)
        states_here.copy_(states, non_blocking=True)
        # Waiting for a blocking event sleeps instead of spinning: the engine's thread needs the interpreter.
        copied = self._cuda.Event(blocking=True)
        copied.record()
        self.last = self._thread.submit(self._put, self.last, copied, region, slots_here, states_here)

    def release(self, block_ids: Sequence[int]) -> None:
        """Forget the states of some blocks, once all steps so far are in the pool: they may be on their way to these blocks."""
        self.last = self._thread.submit(self._release, self.last, block_ids)

    def _release(self, before: Future[None] | None, block_ids: Sequence[int]) -> None:
        if before is not None:
            before.result()
        self._pool.release(block_ids)

    def _put(
        self, before: Future[None] | None, copied: Any, region: Region, slots: torch.Tensor, states: torch.Tensor
    ) -> None:
        try:
            if before is not None:
                before.result()
            copied.synchronize()
            self._pool.put(slots, states)
        finally:
            region.give_back()
