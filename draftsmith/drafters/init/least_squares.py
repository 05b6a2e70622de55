"""Least squares on the target's states: what a drafter is before it is trained.

All of it runs where the drafter is. Rows enter by their products' sums, some at a time, so that memory is that of a few
square matrices, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from draftsmith.drafters.batch import Batch
from draftsmith.run.errors import DraftsmithError

ROWS_TO_FIT = 65_536
"""Rows that a start is fitted on; on small stores every row still helps."""
ROWS_AT_ONCE = 2048
"""Rows that are multiplied at once."""
RIDGE = 3e-3
"""Ridge of the least squares, relative to the mean diagonal."""
_RIDGES = (RIDGE, 10 * RIDGE, 100 * RIDGE)


def unit_rms(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def factor(gram: torch.Tensor) -> torch.Tensor:
    """Cholesky factor L [n, n], lower, of a Gram matrix, to which the ridge is added in place.

    Rounding takes from the smallest eigenvalues what is small beside the largest one, and at n = 40,000 that may be more than
    the ridge: it is then ten times as large, or a hundred times.

    Raises:
        DraftsmithError: no ridge helps, as where a number is not finite.
    """
    mean, added = gram.diagonal().mean(), 0.0
    for ridge in _RIDGES:
        gram.diagonal().add_((ridge - added) * mean)
        lower, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            return lower
        added = ridge
    raise DraftsmithError(
        "The start of training fits the drafter to the target's states by least squares, and these states do not allow it: some "
        "are not finite, or so large that their products are not. `draftsmith inspect` says whether the store is damaged."
    )


def solve(lower: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """X [n, m] with L L^T X = `wanted`."""
    half = torch.linalg.solve_triangular(lower, wanted, upper=False)
    return torch.linalg.solve_triangular(lower.T, half, upper=True)


def flop_of_solve(n: int, m: int) -> float:
    """FLOP of `factor` and `solve` for a Gram matrix [n, n] and m columns."""
    return n**3 / 3 + 2.0 * n * n * m


def flop_of_eigenvectors(n: int) -> float:
    """FLOP of all eigenvectors of a symmetric matrix [n, n], about."""
    return 9.0 * n**3


def fit_next_states(
    norm: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[Batch], *, steps: int
) -> list[torch.Tensor]:
    """Ridge regression of the normed last state at p+1+k on that at p, for each k.

    Args:
        norm: the target's final norm.
        batches: of the store, with `last_states` and loss weights of `steps` steps.
        steps: matrices wanted.

    Returns:
        A_k [H, H] with z_{p+1+k} ~ A_k z_p; the identity for a k that no sequence reaches.
    """
    grams: list[torch.Tensor] = []
    crosses: list[torch.Tensor] = []
    used = 0
    for batch in batches:
        assert batch.last_states is not None
        states = norm(batch.last_states)
        if not grams:
            size = states.shape[1]
            grams, crosses = ([states.new_zeros(size, size) for _ in range(steps)] for _ in range(2))
        for k in range(steps):
            # x_{p+2+k} is predicted from row p, so row p+1+k, which the target predicts it from, is in the batch.
            for rows in (batch.loss_weights[:, k] > 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
                grams[k].addmm_(states[rows].T, states[rows])
                crosses[k].addmm_(states[rows].T, states[rows + 1 + k])
        used += int((batch.loss_weights[:, 0] > 0).sum())
        if used >= ROWS_TO_FIT:
            break
    fitted = []
    for gram, cross in zip(grams, crosses, strict=True):
        fitted.append(solve(factor(gram), cross).T if gram.any() else torch.eye(len(gram), device=gram.device))
    return fitted


def rows_until(wanted: int, *, rows: int, answered: int) -> int:
    """Rows to read for so many that a token is predicted from, where `answered` of `rows` are such."""
    return round(min(wanted, answered) * rows / max(answered, 1))


def cost_of_fit_next_states(hidden: int, *, answered: int, steps: int) -> tuple[float, int]:
    """FLOP of `fit_next_states`, and numbers that it holds at once."""
    rows = min(answered, ROWS_TO_FIT)
    flop = steps * (4.0 * rows * hidden**2 + flop_of_solve(hidden, hidden))
    return flop, (3 * steps + 2) * hidden**2 + 3 * min(rows, ROWS_AT_ONCE) * hidden
