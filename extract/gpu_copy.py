"""Copies of finished requests' states out of a GPU's cache, beside the model's own work.

Pinned memory is taken from the machine for good, and an engine may have hundreds of requests end in one step. So it is one buffer
of a known size, used round and round: who finds no room waits until what was copied first has been written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_AT_LEAST = 1 << 30
"""Bytes of the buffer: of 8B targets' usual states some 50 answers of 650 tokens."""
_ALIGNED = 256
"""Regions begin at multiples of so many bytes."""


class Ring:
    """Room in one buffer, handed out in order.

    Args:
        buffer: uint8 [N].
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._taken: deque[Region] = deque()  # oldest first; those given back wait there for the ones before them
        self._changed = threading.Condition()

    def take(self, size: int) -> Region:
        """A region of so many bytes; blocks until there is one.

        Raises:
            ValueError: the whole buffer is smaller.
        """
        size = -(-size // _ALIGNED) * _ALIGNED
        if size > len(self._buffer):
            raise ValueError(f"{size} bytes are asked of a buffer of {len(self._buffer)}")
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
        """Where so many bytes are free, after the newest region or at the buffer's start."""
        if not self._taken:
            return 0
        oldest, end = self._taken[0].start, self._taken[-1].end
        if end > oldest:  # what is taken does not go round: free are the end and the beginning
            return end if end + size <= len(self._buffer) else 0 if size <= oldest else None
        return end if end + size <= oldest else None


@dataclass(eq=False)
class Region:
    """A part of a ring."""

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


@dataclass(frozen=True)
class Copy:
    """A copy under way."""

    states: torch.Tensor
    """[M, L, H] in pinned memory, there after `copied`."""
    copied: Any
    """A CUDA event."""
    region: Region
    """To be given back when the states are no longer needed."""


class GpuCopier:
    """Copies states from one GPU's cache.

    Args:
        cache: [blocks, L, block size, H], in whatever order it lies in memory.
        longest: tokens of the longest sequence, for which there is always room.
        cuda: what has `Stream`, `Event`, `stream` and `current_stream` of `torch.cuda`.
        pinned: makes the buffer of so many bytes.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        longest: int,
        cuda: Any = torch.cuda,
        pinned: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._cache, self._cuda = cache, cuda
        needed = max(_AT_LEAST, longest * (self._token_bytes() + 8) + 2 * _ALIGNED)
        self._ring = Ring(pinned(1 << (needed - 1).bit_length()))  # torch pins powers of two whatever is asked
        self._stream = cuda.Stream(cache.device)

    def start(self, block_ids: list[int], count: int) -> Copy:
        """Begin to copy the first `count` tokens of some blocks; blocks while there is no room for them.

        On a stream of its own, so that the model's never waits; that one's writes are waited for.
        """
        size = self._cache.shape[2]
        first = -(-8 * count // _ALIGNED) * _ALIGNED
        region = self._ring.take(first + count * self._token_bytes())
        slots = region.memory[: 8 * count].view(torch.int64)
        blocks = torch.tensor(block_ids)
        slots.copy_((blocks[:, None] * size + torch.arange(size)).flatten()[:count])
        shape = (count, self._cache.shape[1], self._cache.shape[3])
        states = region.memory[first : first + count * self._token_bytes()].view(self._cache.dtype).view(shape)
        self._stream.wait_stream(self._cuda.current_stream(self._cache.device))
        with self._cuda.stream(self._stream):
            there = slots.to(self._cache.device, non_blocking=True)
            states.copy_(self._cache[there // size, :, there % size], non_blocking=True)
            copied = self._cuda.Event(
                blocking=True
            )  # who waits for it sleeps: the engine's thread needs the interpreter
            copied.record()
        return Copy(states, copied, region)

    def _token_bytes(self) -> int:
        return int(self._cache.shape[1] * self._cache.shape[3] * self._cache.element_size())
