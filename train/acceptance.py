"""Predicted acceptance length: what greedy speculative decoding would accept on held-out text, without an engine.

A chain's guess at step k is only looked at when all guesses before it were right, and then the tokens before it
are the true ones; so running the chain on true tokens and comparing each argmax with what the target wrote tells
exactly which drafts would be accepted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from draftsmith.drafters.base import Drafter
from draftsmith.store import Sequence
from draftsmith.train.packing import pack


@torch.no_grad()
def predict_acceptance(
    drafter: Drafter, sequences: Iterable[Sequence], columns: list[int], *, k: int
) -> dict[int, float]:
    """Predicted acceptance length for every number of speculative tokens from 1 to `k`.

    Args:
        drafter: the module.
        sequences: held-out conversations that the target answered greedily.
        columns: which of the sequences' states the drafter reads.
        k: longest chain.

    Returns:
        {K: tokens per verification step of the target, the bonus token included}.
    """
    device = drafter.draft_token_ids.device
    training = drafter.training
    drafter.eval()
    accepted = {length: [0, 0] for length in range(1, k + 1)}  # K: [tokens accepted, drafts made]
    for sequence in sequences:
        batch = pack([sequence], steps=k).with_layers(columns).to(device)
        rows = batch.counts.sum(1).nonzero()[:, 0]
        right = torch.stack(
            [
                (drafter.draft_token_ids[F.linear(step.normed, step.head).argmax(-1)] == batch.following[rows, j + 1])
                & (step.counts > 0)
                for j, step in enumerate(drafter.chain(batch, steps=k))
            ],
            dim=1,
        )
        # Rows from which a response token is predicted at once; the others only reach one later in the chain.
        at_once = batch.counts[rows, 0] > 0
        run = right[at_once].int().cumprod(1).cpu()  # [rows, k]: 1 while every guess so far is right
        for response in _responses(rows[at_once].tolist()):
            for length, totals in accepted.items():
                for hits in _walk(run[response, :length].sum(1).tolist()):
                    totals[0] += hits
                    totals[1] += 1
    drafter.train(training)
    return {length: 1 + hits / max(drafts, 1) for length, (hits, drafts) in accepted.items()}


def _responses(rows: list[int]) -> Iterable[slice]:
    """The answers of a conversation: stretches of consecutive rows."""
    ends = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    return (slice(start, end) for start, end in zip([0, *ends], [*ends, len(rows)], strict=True))


def _walk(accepted_from: list[int]) -> Iterable[int]:
    """Visit the positions that serving would draft from: each draft moves on by its accepted tokens and one more."""
    # The first row predicts the first response token, which serving gets from prefill: it drafts from the next.
    position = 1
    while position < len(accepted_from):
        yield accepted_from[position]
        position += accepted_from[position] + 1
