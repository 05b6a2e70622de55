"""Attention of a draft chain over packed documents, in tiles of bounded size.

A query attends to the step-0 keys of its document up to its own position, and to the keys of its own chain. Scores are
computed tile by tile, so memory grows linearly with the length of a document.

Shape legend: T packed rows, Q rows that are predicted from (queries), N heads, M key/value heads, G = N / M, C head size,
k chain steps after the first. A tile has S blocks of B queries and E keys.
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
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.norm import RMSNorm

_QUERIES_IN_BLOCK = 128
"""A block computes the scores of all keys up to its last query: shorter blocks compute fewer that are masked."""
_SCORES_IN_TILE = 1 << 21  # scores computed at once, where blocks are small enough: 8 MiB in float32
_SCORES_KEPT = 1 << 24
"""Scores that one attention keeps for the backward pass; where there are more, they are recomputed."""
_AREA_OVER_NEEDED = 1.1  # padding may add a tenth to the scores of a tile

CosSin = tuple[torch.Tensor, torch.Tensor]
"""RoPE's cosines and sines, [rows, C] each, or narrower where it turns part of each head."""
KeysValues = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Projections of grouped-query attention with RoPE; `attend` does the rest.

    Args:
        input_size: width of what queries, keys and values are projected from.
        output_size: H.
        heads: N.
        kv_heads: M.
        head_dim: C.
        bias: queries, keys and values have one.
        output_bias: the output has one.
        qk_norm: epsilon of an RMSNorm on each head of queries and keys, before RoPE (Qwen3's); None for none.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        output_bias: bool = False,
        qk_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, output_size, bias=output_bias)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm)
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm)

    def queries(self, x: torch.Tensor, rope: CosSin) -> torch.Tensor:
        """[Q, N, C]"""
        queries = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return _rotate(queries if self.q_norm is None else self.q_norm(queries), rope)

    def keys_values(self, x: torch.Tensor, rope: CosSin) -> KeysValues:
        """[T, M, C] each"""
        keys = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        keys = _rotate(keys if self.k_norm is None else self.k_norm(keys), rope)
        return keys, self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))


def _rotate(x: torch.Tensor, rope: CosSin) -> torch.Tensor:
    """RoPE on [rows, heads, C]; where it turns part of each head, the rest stays."""
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = rope
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    turned = turned * cos[:, None] + rotate_half(turned) * sin[:, None]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def attend(queries: torch.Tensor, context: KeysValues, own: list[KeysValues], tiles: Tiles) -> torch.Tensor:
    """Attention over the document's step-0 keys up to the row's position, and over the row's own chain.

    Args:
        queries: [Q, N, C].
        context: keys and values of step 0, [M, T, C].
        own: keys and values [Q, M, C] of each later chain step so far; a row sees only its own.
        tiles: which of the T rows each of the Q sees.

    Returns [Q, N * C].
    """
    if not len(queries):
        return queries.flatten(1)
    kv_heads = context[0].shape[0]
    grouped = queries.unflatten(1, (kv_heads, -1)) / math.sqrt(queries.shape[-1])  # [Q, M, G, C]
    own_scores = torch.stack([(grouped * keys[:, :, None]).sum(-1) for keys, _ in own], dim=-1) if own else None
    mixed, own_weights = _attend_to_context(grouped, own_scores, context, tiles)
    if own:
        mixed = mixed + sum(own_weights[..., j, None] * values[:, :, None] for j, (_, values) in enumerate(own))
    return mixed.flatten(1)


def attend_in_blocks(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, tiles: Tiles, *, causal: bool
) -> torch.Tensor:
    """Attention of blocks of rows that are drafted together: over the document's keys up to the block's row of the batch, and over the
    block's own.

    Args:
        queries: [Q, R, N, C], of the last R rows of each block.
        context: keys and values of the batch's rows, [M, T, C].
        own: keys and values of all S rows of each block, [Q, S, M, C].
        tiles: which of the T rows each of the Q blocks sees.
        causal: a row sees no later row of its block.

    Returns [Q, R, N * C].
    """
    if not len(queries):
        return queries.flatten(2)
    keys, values = own
    rows, kv_heads = queries.shape[1], context[0].shape[0]
    # The rows of a block see the same context, so they are to a tile what the heads of a group are.
    by_head = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [Q, M, R, G, C]
    grouped = by_head.flatten(2, 3) / math.sqrt(queries.shape[-1])
    own_scores = grouped @ keys.permute(0, 2, 3, 1)  # [Q, M, R * G, S]
    if causal:
        earlier = keys.shape[1] - rows
        later = torch.ones(rows, keys.shape[1], dtype=torch.bool, device=keys.device).triu(earlier + 1)
        own_scores = own_scores.masked_fill(later.repeat_interleave(by_head.shape[3], dim=0), -torch.inf)
    mixed, own_weights = _attend_to_context(grouped, own_scores, context, tiles)
    mixed = mixed + own_weights @ values.transpose(1, 2)
    return mixed.unflatten(2, (rows, -1)).transpose(1, 2).flatten(2)


def _attend_to_context(
    grouped: torch.Tensor, own_scores: torch.Tensor | None, context: KeysValues, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax over the context's and a row's own scores, tile by tile.

    Args:
        grouped: scaled queries [Q, M, G, C].
        own_scores: [Q, M, G, k], or None for k = 0.
        context: [M, T, C].

    Returns the context's mixed values [Q, M, G, C], and the weights of the row's own keys [Q, M, G, k].
    """
    by_head = grouped.transpose(0, 1).contiguous()
    own_by_head = None if own_scores is None else own_scores.transpose(0, 1).contiguous()
    attend_tile: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _attend_tile
    if tiles.recompute and torch.is_grad_enabled():
        attend_tile = partial(checkpoint, _attend_tile, use_reentrant=False, preserve_rng_state=False)
    parts = [attend_tile(tile, by_head, own_by_head, *context) for tile in tiles.tiles]
    mixed = tiles.join([mixed for mixed, _ in parts])
    return mixed, mixed[..., :0] if own_scores is None else tiles.join([weights for _, weights in parts])


def _attend_tile(
    tile: _Tile, queries: torch.Tensor, own_scores: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile's part of `attend`: the softmax over all scores, and the values of the shared keys.

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
    """

    def __init__(self, batch: Batch, queries: torch.Tensor, heads: int, *, block: int = 1) -> None:
        self.queries = queries
        rows, lengths = queries.tolist(), torch.bincount(batch.documents).tolist()
        blocks = _blocks(rows, lengths, most=max(1, _QUERIES_IN_BLOCK // block))
        groups = _side_by_side(blocks, most_area=_SCORES_IN_TILE // (heads * block))
        self.tiles = [self._tile(group, len(batch.documents)) for group in groups]
        self.recompute = heads * block * sum(tile.masked.numel() for tile in self.tiles) > _SCORES_KEPT
        cells = torch.cat([queries[:0], *(tile.queries for tile in self.tiles)])
        # Padding repeats a block's last query. All of its cells hold the same, so it does not matter which is written last.
        self._cell = torch.empty_like(queries).index_copy(0, cells, torch.arange(len(cells), device=cells.device))

    def _tile(self, blocks: list[_Block], rows: int) -> _Tile:
        device = self.queries.device
        ends = [(b.queries[0], b.queries[-1], b.keys[0]) for b in blocks]
        first_query, last_query, first_key = torch.tensor(ends, device=device)[:, :, None].unbind(1)  # [S, 1] each
        queries = first_query + torch.arange(max(len(b.queries) for b in blocks), device=device)
        queries = queries.minimum(last_query)  # [S, B]
        keys = first_key + torch.arange(max(len(b.keys) for b in blocks), device=device)  # [S, E]
        # Rows of a document are in the order of their positions, and the padding of its keys comes after all of its queries.
        masked = keys[:, None] > self.queries[queries][:, :, None]
        return _Tile(queries.flatten(), keys.flatten().clamp(max=rows - 1), masked[:, :, None])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Each tile's [M, S * B, ...] to [Q, M, ...]"""
        return torch.cat(parts, dim=1).index_select(1, self._cell).transpose(0, 1)


def _blocks(queries: list[int], lengths: list[int], *, most: int) -> list[_Block]:
    """Cut each document's queries (ascending rows) into blocks of about equal size, at most `most` each; `lengths` are the documents', in
    rows."""
    blocks = []
    first_key, place = 0, 0
    for length in lengths:
        end_place = bisect_left(queries, first_key + length, lo=place)
        count = math.ceil((end_place - place) / most)
        cuts = [place + (end_place - place) * i // count for i in range(count + 1)] if count else []
        blocks += [_Block(range(*ends), range(first_key, queries[ends[1] - 1] + 1)) for ends in pairwise(cuts)]
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
