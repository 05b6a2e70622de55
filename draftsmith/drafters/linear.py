"""Least squares on the target's states: what a drafter is before it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from draftsmith.drafters.batch import Batch

ROWS_TO_FIT = 65_536
"""Rows that a start is fitted on; on small stores every row still helps."""
RIDGE = 3e-3
"""Ridge of the least squares, relative to the mean diagonal."""


def unit_rms(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def fit_ahead(
    norm: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[tuple[Batch, torch.Tensor]], *, steps: int
) -> list[torch.Tensor]:
    """Ridge regression of the normed last state at p+1+k on that at p, for each k.

    Args:
        norm: the target's final norm.
        batches: packed rows of the store, with counts for `steps` steps, and the target's last states [T, H].
        steps: matrices wanted.

    Returns:
        A_k [H, H] with z_{p+1+k} ~ A_k z_p; the identity for a k that no sequence reaches.
    """
    grams: list[torch.Tensor] = []
    crosses: list[torch.Tensor] = []
    used = 0
    for batch, last_states in batches:
        states = norm(last_states)
        if not grams:
            size = states.shape[1]
            grams, crosses = ([states.new_zeros(size, size) for _ in range(steps)] for _ in range(2))
        for k in range(steps):
            # x_{p+2+k} is predicted from row p, so row p+1+k, which the target predicts it from, is in the batch.
            rows = (batch.counts[:, k] > 0).nonzero()[:, 0]
            grams[k] += states[rows].T @ states[rows]
            crosses[k] += states[rows].T @ states[rows + 1 + k]
        used += int((batch.counts[:, 0] > 0).sum())
        if used >= ROWS_TO_FIT:
            break
    fitted = []
    for gram, cross in zip(grams, crosses, strict=True):
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        fitted.append(torch.linalg.solve(gram, cross).T if gram.any() else torch.eye(len(gram)))
    return fitted
