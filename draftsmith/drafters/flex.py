"""Attention over a document's keys by torch's flex attention, for GPUs: one kernel where tiles take thousands of operations.

The context's part comes with its log-sum-exp, by which it is merged with the few keys of a row's own chain or block, whose scores are
dense (as in Flash-Decoding's merge of parts: Dao et al. 2023).

Shape legend: as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from draftsmith.drafters.batch import Batch
from draftsmith.run.errors import UserError

LEAST_HEAD_DIM = 16
"""Narrower heads have no kernel."""
_BLOCK = 128  # rows of a block of the mask, flex attention's own default
_KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}  # few queries would take a kernel for decoding, without a backward pass
_RECOMPILING: dict[str, Any] = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
"""Sizes that are 1, or equal to each other, are compiled for separately, and so is every number of heads. Past torch's limit of 8 it would
go on without a kernel, with all scores in memory, and only warn."""


class FlexContext:
    """Which rows see which, as the blocks of flex attention's mask.

    Args:
        queries: int64 [Q] ascending, rows of the batch.
        window: see `Tiles`.
    """

    def __init__(self, batch: Batch, queries: torch.Tensor, *, window: int | None = None) -> None:
        # The first row of each query's document. Nothing here decides on a size, so a GPU never waits.
        starts = torch.searchsorted(batch.documents, batch.documents[queries])
        if window is not None:
            starts = starts.maximum(queries - window + 1)

        def sees(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (starts[query] <= key) & (key <= queries[query])

        self._mask = None
        if len(queries):
            some, all_of_it = _seen_blocks(queries, starts, len(batch.documents))
            self._mask = BlockMask.from_kv_blocks(
                *_as_lists(some & ~all_of_it),
                *_as_lists(all_of_it),
                BLOCK_SIZE=_BLOCK,
                mask_mod=sees,
                seq_lengths=(len(queries), len(batch.documents)),
            )

    def attend(
        self, grouped: torch.Tensor, own_scores: torch.Tensor | None, context: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Tiles.attend`.

        Raises:
            UserError: flex attention cannot be compiled here.
        """
        keys, values = context
        device = keys.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else keys.dtype
        queries = grouped.permute(1, 2, 0, 3).flatten(0, 1)  # [M * G, Q, C]
        mixed, of_context = _flex(queries.to(dtype)[None], keys.to(dtype)[None], values.to(dtype)[None], self._mask)
        mixed = mixed[0].unflatten(0, grouped.shape[1:3]).permute(2, 0, 1, 3)
        if own_scores is None:
            return mixed, mixed[..., :0]
        of_context = of_context[0].unflatten(0, grouped.shape[1:3]).permute(2, 0, 1)
        own = own_scores.to(of_context.dtype)
        of_all = torch.logaddexp(of_context, own.logsumexp(-1))
        share = (of_context - of_all).exp()[..., None]
        return mixed * share.to(mixed.dtype), (own - of_all[..., None]).exp().to(own_scores.dtype)


def _seen_blocks(queries: torch.Tensor, starts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each block of queries, in which blocks of keys some of them may see some, and in which all see all; bool [Q / 128, T / 128].

    Both first and last rows that queries see ascend, so the ends of a block say it.
    """
    firsts = torch.arange(0, len(queries), _BLOCK, device=queries.device)
    lasts = (firsts + _BLOCK - 1).clamp(max=len(queries) - 1)
    keys = torch.arange(0, rows, _BLOCK, device=queries.device)
    ends = (keys + _BLOCK - 1).clamp(max=rows - 1)
    some = (starts[firsts, None] <= ends) & (keys <= queries[lasts, None])
    return some, (starts[lasts, None] <= keys) & (ends <= queries[firsts, None])


def _as_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks are true in each row, and their numbers, first in each row; int32 [1, 1, ...]."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None]


def _flex(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixed values [1, N, Q, C] of scaled queries, and the log of the sum of each one's exponential scores [1, N, Q], at least float32."""
    device = queries.device.type
    try:
        with torch.autocast(device, enabled=False), torch._dynamo.config.patch(**_RECOMPILING):
            mixed, more = _compiled(device)(
                queries,
                keys,
                values,
                block_mask=mask,
                scale=1.0,
                enable_gqa=True,
                return_aux=AuxRequest(lse=True),
                kernel_options=_KERNEL,
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, FailOnRecompileLimitHit) as error:
        raise UserError(
            f"Flex attention does not work on this machine ({type(error).__name__}: {error}). It needs Triton and a C compiler; "
            "`draftsmith doctor` says whether they are there. With DRAFTSMITH_ATTENTION=tiles in the environment training needs neither, and "
            "is slower."
        ) from error
    return mixed, more.lse


@cache
def _compiled(device: str) -> Callable[..., Any]:
    # One kernel for all sizes, since every batch has others. What a CPU takes, in tests, is flex attention's own plain arithmetic.
    if device == "cuda":
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
        return compiled
    return flex_attention
