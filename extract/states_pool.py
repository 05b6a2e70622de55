"""States of running requests in ordinary memory, addressed as vLLM addresses keys and values: by block and slot.

In vLLM's KV cache they would be expensive. Blocks of all groups of layers have one size, a block of states fills only part of one
beside sliding-window attention, and every GPU of a split target would hold the same states (`make bench ONLY=tokens_at_once`).
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence

import numpy as np
import torch

_MAP_NORESERVE = 0x4000
"""Linux's flag, which Python's `mmap` has since 3.13: more may be reserved than the machine has, since not all of it is used."""


class StatesPool:
    """A place for each block of the KV cache that is in use.

    Its memory is what the requests that ran at once have needed at most: a place is taken when a block's first states come, and
    is free for any other block once the block is released. Safe to use from several threads.

    Args:
        blocks: number of the KV cache's blocks.
        block_size: tokens of a block.
        layers: L, number of layers whose states are kept.
        hidden_size: H.
        dtype: of the states.
    """

    def __init__(self, blocks: int, block_size: int, layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        shape = (blocks, block_size, layers, hidden_size)
        reserved = mmap.mmap(
            -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        self._states = torch.frombuffer(reserved, dtype=dtype).view(
            shape
        )  # by place; the system gives pages as they are used
        self._block_size = block_size
        self._places = np.full(blocks, -1)  # by block
        self._known = np.zeros((blocks, block_size), bool)  # by place
        self._free = list(range(blocks - 1, -1, -1))  # the last is taken first: its memory is in use already
        self._lock = threading.Lock()

    def put(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep the states of a step.

        Args:
            slots: int64 [N], block times block size plus the token's offset in it; negative in rows that are padding.
            states: [N, L, H]
        """
        if (slots < 0).any():
            rows = torch.nonzero(slots >= 0).squeeze(1)
            slots, states = slots[rows], states[rows]
        blocks, offsets = np.divmod(slots.numpy(), self._block_size)
        with self._lock:
            for block in np.unique(blocks[self._places[blocks] < 0]):
                self._places[block] = self._free.pop()
            places = self._places[blocks]
            self._known[places, offsets] = True
        self._states[torch.from_numpy(places), torch.from_numpy(offsets)] = states

    def get(self, block_ids: Sequence[int], count: int) -> torch.Tensor:
        """The states [M, L, H] of the first M = `count` tokens of some blocks; of a single block, without a copy.

        Raises:
            ValueError: some of them never came.
        """
        needed = -(-count // self._block_size)
        with self._lock:
            places = self._places[list(block_ids[:needed])]
            if len(places) < needed or (places < 0).any() or not self._known[places].reshape(-1)[:count].all():
                raise ValueError(f"vLLM did not hand over the states of all {count} tokens")
        parts = [
            self._states[place, : count - at]
            for at, place in zip(range(0, count, self._block_size), places, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def release(self, block_ids: Sequence[int]) -> None:
        """Forget the states of some blocks."""
        with self._lock:
            blocks = np.unique(np.array(block_ids, int))
            places = self._places[blocks]
            places = places[places >= 0]
            self._places[blocks] = -1
            self._known[places] = False
            self._free.extend(places.tolist())
