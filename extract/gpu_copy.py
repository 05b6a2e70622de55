"""Copy finished requests' states out of a GPU's cache while the model goes on computing.

Pinned memory is never given back to the system, and hundreds of requests may finish in one engine step. So there is one
ring buffer of a fixed size: a copy that finds no room waits until the oldest copies have been written. States are gathered on the
GPU in pieces: vLLM's budget leaves little memory there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_MIN_BUFFER = 1 << 30
"""Bytes of the buffer: about 50 answers of 650 tokens with the default layers of an 8B target."""
_ALIGNMENT = 256
"""Regions begin at multiples of this many bytes."""
_GATHERED_AT_ONCE = 64 << 20
"""Bytes on the GPU; one token's may be more."""


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


@dataclass(frozen=True)
class Copy:
    """A copy in progress."""

    states: torch.Tensor
    """[M, L, H] in pinned memory, valid after `copied`."""
    copied: Any
    """A CUDA event."""
    region: Region
    """Give it back when the states are no longer needed."""


class GpuCopier:
    """Copies states from one GPU's cache.

    Args:
        cache: [blocks, L, block size, H], in any memory layout.
        longest: tokens of the longest sequence, which always fits.
        cuda: provides `Stream`, `Event`, `stream` and `current_stream` as `torch.cuda` does.
        pinned: allocates the buffer, given its bytes.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        longest: int,
        cuda: Any = torch.cuda,
        pinned: Callable[[int], torch.Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._cache, self._cuda = cache, cuda
        needed = max(_MIN_BUFFER, longest * (self._token_bytes() + 8) + 2 * _ALIGNMENT)
        self._ring = Ring(pinned(1 << (needed - 1).bit_length()))  # torch pins powers of two anyway
        self._stream = cuda.Stream(cache.device)

    def start(self, block_ids: list[int], count: int) -> Copy:
        """Start copying the first `count` tokens of some blocks; waits until the ring has room for them.

        The copy runs on its own stream, after the writes of the model's stream, which never waits for it.
        """
        size = self._cache.shape[2]
        first = -(-8 * count // _ALIGNMENT) * _ALIGNMENT
        region = self._ring.take(first + count * self._token_bytes())
        slots = region.memory[: 8 * count].view(torch.int64)
        blocks = torch.tensor(block_ids)
        slots.copy_((blocks[:, None] * size + torch.arange(size)).flatten()[:count])
        shape = (count, self._cache.shape[1], self._cache.shape[3])
        states = region.memory[first : first + count * self._token_bytes()].view(self._cache.dtype).view(shape)
        self._stream.wait_stream(self._cuda.current_stream(self._cache.device))
        with self._cuda.stream(self._stream):
            on_gpu = slots.to(self._cache.device, non_blocking=True)
            at_once = max(1, _GATHERED_AT_ONCE // self._token_bytes())
            for some, to in zip(on_gpu.split(at_once), states.split(at_once), strict=True):
                to.copy_(self._cache[some // size, :, some % size], non_blocking=True)
            # Waiting for a blocking event sleeps instead of spinning: the engine's thread needs the interpreter.
            copied = self._cuda.Event(blocking=True)
            copied.record()
        return Copy(states, copied, region)

    def _token_bytes(self) -> int:
        return int(self._cache.shape[1] * self._cache.shape[3] * self._cache.element_size())
