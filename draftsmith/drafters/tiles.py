"""Attention over a document's keys in tiles of bounded size, for CPUs.

Scores are computed tile by tile, so memory grows linearly with the length of a document.

Shape legend: as in `attention.py`. A tile has S blocks of B queries and E keys.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.batch import Batch

_QUERIES_IN_BLOCK = 128
"""A block computes the scores of all keys up to its last query: shorter blocks compute fewer that are masked."""
_SCORES_IN_TILE = 1 << 21  # scores computed at once, where blocks are small enough: 8 MiB in float32
_SCORES_KEPT = 1 << 24
"""Scores that one attention keeps for the backward pass; where there are more, they are recomputed."""
_AREA_OVER_NEEDED = 1.1  # padding may add a tenth to the scores of a tile


def _attend_tile(
    tile: _Tile, queries: torch.Tensor, own_scores: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile's part of `Tiles.attend`: the softmax over all scores, and the values of the shared keys.

    Args:
        queries: [M, Q, G, C], scaled.
        own_scores: [M, Q, G, k], or None at the first step.
        keys, values: [M, T, C].

    Returns mixed values [M, S * B, G, C], and the attention weights of the row's own chain [M, S * B, G, k].
    """
    kv_heads, _, group, size = queries.shape
    blocks, rows, _, length = tile.masked.shape
    q = queries.index_select(1, tile.queries).view(kv_heads * blocks, rows * group, size)
    k = keys.index_select(1, tile.keys).view(kv_heads * blocks, length, size)
    v = values.index_select(1, tile.keys).view(kv_heads * blocks, length, size)
    scores = (q @ k.transpose(1, 2)).view(kv_heads, blocks, rows, group, length).masked_fill(tile.masked, -torch.inf)
    if own_scores is not None:
        own = own_scores.index_select(1, tile.queries).view(kv_heads, blocks, rows, group, -1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype).flatten(2, 3)
    mixed, shape = weights[..., :length].flatten(0, 1) @ v, (kv_heads, blocks * rows, group)
    return mixed.view(*shape, size), weights[..., length:].reshape(*shape, -1)


class _Block(NamedTuple):
    """Consecutive queries of a document, and the keys that they see."""

    queries: range
    keys: range


@dataclass
class _Tile:
    """S blocks side by side, of B queries and E keys each, padded."""

    queries: torch.Tensor  # int64 [S * B], among the Q queries
    keys: torch.Tensor  # int64 [S * E], among the T rows
    masked: torch.Tensor  # bool [S, B, 1, E]: keys that a query does not see


class Tiles:
    """Which rows see which, as tiles that together hold every query once.

    A document of L rows needs no [L, L] tensor, and documents of different lengths need little padding.

    Args:
        queries: int64 [Q] ascending, rows of the batch.
        heads: N.
        block: rows that each query stands for (`attend_in_blocks`).
        window: a query sees at most so many keys, the last; None: all of its document up to itself.
    """

    def __init__(
        self, batch: Batch, queries: torch.Tensor, heads: int, *, block: int = 1, window: int | None = None
    ) -> None:
        self.queries, self.window = queries, window
        rows, lengths = queries.tolist(), torch.bincount(batch.documents).tolist()
        blocks = _blocks(rows, lengths, most=max(1, _QUERIES_IN_BLOCK // block), window=window)
        groups = _side_by_side(blocks, most_area=_SCORES_IN_TILE // (heads * block))
        self.tiles = [self._tile(group, len(batch.documents)) for group in groups]
        self.recompute = heads * block * sum(tile.masked.numel() for tile in self.tiles) > _SCORES_KEPT
        cells = torch.cat([queries[:0], *(tile.queries for tile in self.tiles)])
        # Padding repeats a block's last query. All of its cells hold the same, so it does not matter which is written last.
        self._cell = torch.empty_like(queries).index_copy(0, cells, torch.arange(len(cells), device=cells.device))

    def attend(
        self, grouped: torch.Tensor, own_scores: torch.Tensor | None, context: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The softmax over the context's and a row's own scores.

        Args:
            grouped: scaled queries [Q, M, G, C].
            own_scores: [Q, M, G, k], or None for k = 0.
            context: keys and values [M, T, C].

        Returns the context's mixed values [Q, M, G, C], and the weights of the row's own keys [Q, M, G, k].
        """
        by_head = grouped.transpose(0, 1).contiguous()
        own_by_head = None if own_scores is None else own_scores.transpose(0, 1).contiguous()
        attend_tile: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _attend_tile
        if self.recompute and torch.is_grad_enabled():
            attend_tile = partial(checkpoint, _attend_tile, use_reentrant=False, preserve_rng_state=False)
        parts = [attend_tile(tile, by_head, own_by_head, *context) for tile in self.tiles]
        mixed = self._join([mixed for mixed, _ in parts])
        return mixed, mixed[..., :0] if own_scores is None else self._join([weights for _, weights in parts])

    def _tile(self, blocks: list[_Block], rows: int) -> _Tile:
        device = self.queries.device
        ends = [(b.queries[0], b.queries[-1], b.keys[0]) for b in blocks]
        first_query, last_query, first_key = torch.tensor(ends, device=device)[:, :, None].unbind(1)  # [S, 1] each
        queries = first_query + torch.arange(max(len(b.queries) for b in blocks), device=device)
        queries = queries.minimum(last_query)  # [S, B]
        keys = first_key + torch.arange(max(len(b.keys) for b in blocks), device=device)  # [S, E]
        # Rows of a document are in the order of their positions, and the padding of its keys comes after all of its queries.
        rows_of_queries = self.queries[queries][:, :, None]
        masked = keys[:, None] > rows_of_queries
        if self.window is not None:
            masked |= keys[:, None] <= rows_of_queries - self.window
        return _Tile(queries.flatten(), keys.flatten().clamp(max=rows - 1), masked[:, :, None])

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Each tile's [M, S * B, ...] to [Q, M, ...]"""
        return torch.cat(parts, dim=1).index_select(1, self._cell).transpose(0, 1)


def _blocks(queries: list[int], lengths: list[int], *, most: int, window: int | None = None) -> list[_Block]:
    """Cut each document's queries (ascending rows) into blocks of about equal size, at most `most` each; `lengths` are the documents', in
    rows. A block begins with the first key that a `window` leaves its first query."""
    blocks = []
    first_key, place = 0, 0
    for length in lengths:
        end_place = bisect_left(queries, first_key + length, lo=place)
        count = math.ceil((end_place - place) / most)
        cuts = [place + (end_place - place) * i // count for i in range(count + 1)] if count else []
        for ends in pairwise(cuts):
            first = first_key if window is None else max(first_key, queries[ends[0]] - window + 1)
            blocks.append(_Block(range(*ends), range(first, queries[ends[1] - 1] + 1)))
        first_key, place = first_key + length, end_place
    return blocks


def _side_by_side(blocks: list[_Block], *, most_area: int) -> list[list[_Block]]:
    """Group blocks of about the same shape; the padded area of a group is at most `most_area`, or it is a single block."""
    groups: list[list[_Block]] = []
    needed = 0
    for block in sorted(blocks, key=lambda block: (len(block.keys), len(block.queries)), reverse=True):
        area = len(block.queries) * len(block.keys)
        together = [*groups[-1], block] if groups else [block]
        padded = len(together) * max(len(b.queries) for b in together) * len(together[0].keys)
        if groups and padded <= min(most_area, _AREA_OVER_NEEDED * (needed + area)):
            groups[-1] = together
            needed += area
        else:
            groups.append([block])
            needed = area
    return groups
