"""Attention of draft chains and blocks over packed documents.

A query attends to the context, the step-0 keys of its document up to its own position, and to the keys of its own chain or block. The
context is attended to in tiles on CPUs (`tiles.py`) and by flex attention on GPUs (`flex.py`); neither has a [T, T] tensor.

Shape legend: T packed rows, Q rows that are predicted from (queries), N heads, M key/value heads, G = N / M, C head size,
k chain steps after the first.
"""

from __future__ import annotations

import math
import os

import torch
from torch import nn

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.flex import LEAST_HEAD_DIM, FlexContext
from draftsmith.drafters.norm import RMSNorm
from draftsmith.drafters.tiles import Tiles
from draftsmith.run.errors import UserError

CosSin = tuple[torch.Tensor, torch.Tensor]
"""RoPE's cosines and sines, [rows, C] each, or narrower where it turns part of each head."""
KeysValues = tuple[torch.Tensor, torch.Tensor]
Context = Tiles | FlexContext
"""Which of a batch's rows some others see, and the attention to them."""


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
    """RoPE on [rows, heads, C], where one row may stand for all; where it turns part of each head, the rest stays."""
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = rope
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    turned = turned * cos[:, None] + rotate_half(turned) * sin[:, None]
    return torch.cat([turned, rest.expand(len(turned), -1, -1)], dim=-1) if rest.shape[-1] else turned


def context_of(
    batch: Batch, queries: torch.Tensor, *, heads: int, head_dim: int, block: int = 1, window: int | None = None
) -> Context:
    """What some rows of a batch see of it: their document up to their own position.

    Args:
        queries: int64 [Q] ascending, rows of the batch.
        heads: N.
        head_dim: C.
        block: rows that each query stands for (`attend_in_blocks`).
        window: they see at most so many rows of it, the last ones; None: all.

    Raises:
        UserError: the environment asks for an attention that there is not.
    """
    if _way_of(queries.device.type, head_dim) == "flex":
        return FlexContext(batch, queries, window=window)
    return Tiles(batch, queries, heads, block=block, window=window)


def _way_of(device: str, head_dim: int) -> str:
    default = "flex" if device == "cuda" and head_dim >= LEAST_HEAD_DIM else "tiles"
    chosen = os.environ.get("DRAFTSMITH_ATTENTION") or default
    if chosen not in ("tiles", "flex"):
        raise UserError(f"DRAFTSMITH_ATTENTION is {chosen!r}. It is `tiles` or `flex`; unset it for `{default}`.")
    return chosen


def attend(queries: torch.Tensor, context: KeysValues, own: list[KeysValues], visible: Context) -> torch.Tensor:
    """Attention over the document's step-0 keys up to the row's position, and over the row's own chain.

    Args:
        queries: [Q, N, C].
        context: keys and values of step 0, [M, T, C].
        own: keys and values [Q, M, C] of each later chain step so far; a row sees only its own.
        visible: which of the T rows each of the Q sees.

    Returns [Q, N * C].
    """
    if not len(queries):
        return queries.flatten(1)
    kv_heads = context[0].shape[0]
    grouped = queries.unflatten(1, (kv_heads, -1)) / math.sqrt(queries.shape[-1])  # [Q, M, G, C]
    own_scores = torch.stack([(grouped * keys[:, :, None]).sum(-1) for keys, _ in own], dim=-1) if own else None
    mixed, own_weights = visible.attend(grouped, own_scores, context)
    if own:
        mixed = mixed + sum(own_weights[..., j, None] * values[:, :, None] for j, (_, values) in enumerate(own))
    return mixed.flatten(1)


def attend_in_blocks(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, visible: Context, *, causal: bool
) -> torch.Tensor:
    """Attention of blocks of rows that are drafted together: over the document's keys up to the block's row of the batch, and over the
    block's own.

    Args:
        queries: [Q, R, N, C], of the last R rows of each block.
        context: keys and values of the batch's rows, [M, T, C].
        own: keys and values of all S rows of each block, [Q, S, M, C].
        visible: which of the T rows each of the Q blocks sees.
        causal: a row sees no later row of its block.

    Returns [Q, R, N * C].
    """
    if not len(queries):
        return queries.flatten(2)
    keys, values = own
    rows, kv_heads = queries.shape[1], context[0].shape[0]
    # The rows of a block see the same context, so they are to it what the heads of a group are.
    by_head = queries.unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [Q, M, R, G, C]
    grouped = by_head.flatten(2, 3) / math.sqrt(queries.shape[-1])
    own_scores = grouped @ keys.permute(0, 2, 3, 1)  # [Q, M, R * G, S]
    if causal:
        earlier = keys.shape[1] - rows
        later = torch.ones(rows, keys.shape[1], dtype=torch.bool, device=keys.device).triu(earlier + 1)
        own_scores = own_scores.masked_fill(later.repeat_interleave(by_head.shape[3], dim=0), -torch.inf)
    mixed, own_weights = visible.attend(grouped, own_scores, context)
    mixed = mixed + own_weights @ values.transpose(1, 2)
    return mixed.unflatten(2, (rows, -1)).transpose(1, 2).flatten(2)
