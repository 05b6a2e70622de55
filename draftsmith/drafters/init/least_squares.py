"""Least squares on the target's hidden states, for the initialization of drafters.

It runs on the drafter's device. Rows only enter sums of products, some at a time, so memory is that of the Gram matrix and its
factor and a little more, regardless of the number of rows.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from draftsmith.drafters.batch import Batch
from draftsmith.run.errors import DraftsmithError

ROWS_TO_FIT = 65_536
"""Rows to fit on; up to here more rows still help."""
ROWS_AT_ONCE = 2048
"""Rows to multiply at once."""
RIDGE = 3e-3
"""Ridge, relative to the mean of the diagonal."""
_RIDGES = (RIDGE, 10 * RIDGE, 100 * RIDGE)


def unit_rms(x: torch.Tensor, *, centered: bool = False) -> torch.Tensor:
    """RMS norm without a weight; centered, LayerNorm without a weight."""
    x = x - x.mean(-1, keepdim=True) if centered else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def factor(gram: torch.Tensor) -> torch.Tensor:
    """Lower Cholesky factor L [n, n] of a Gram matrix, to which the ridge is added in place.

    Rounding errors of the smallest eigenvalues are relative to the largest one, and at n = 40,000 they may exceed the ridge,
    which is then made ten or a hundred times as large.

    Raises DraftsmithError: no ridge is enough, for instance where a value is not finite.
    """
    mean, added = gram.diagonal().mean(), 0.0
    for ridge in _RIDGES:
        gram.diagonal().add_((ridge - added) * mean)
        lower, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            return lower
        del lower  # before the next one
        added = ridge
    raise DraftsmithError(
        "The drafter is initialized by least squares on the target's hidden states, and these states do not allow it: some "
        "are not finite, or so large that their products are not. `draftsmith inspect` tells whether the store is damaged."
    )


def solve(lower: torch.Tensor, right_side: torch.Tensor) -> torch.Tensor:
    """X [n, m] with L L^T X = `right_side`."""
    half = torch.linalg.solve_triangular(lower, right_side, upper=False)
    return torch.linalg.solve_triangular(lower.T, half, upper=True, out=half)


def reduced_rank_fit(
    gram: torch.Tensor, cross: torch.Tensor, *, rank: int, lower: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ridge regression of W [rows, H] on R [rows, n*H + H], with the rank of the part of R's last H columns limited to `rank` <= H.
    `gram` is R^T R, contiguous, and overwritten; `cross` is R^T W; `lower` is `factor(gram)`, if that is there already.

    Returns A [n*H, H], B [H, rank], C [rank, H] with W ~ R[:, :-H] @ A + R[:, -H:] @ B @ C.
    """
    split = len(gram) - cross.shape[1]
    lower = factor(gram) if lower is None else lower
    full = solve(lower, cross)
    # The part of embeddings that states do not explain has the covariance L L^T of this corner L; keep the directions in which it
    # explains most.
    explained = lower[split:, split:].T @ full[split:]
    kept = torch.linalg.eigh(explained.T @ explained).eigenvectors[:, -rank:].T
    to_values = full[split:] @ kept.T
    del full
    unexplained = cross[:split] - gram[:split, split:] @ to_values @ kept
    return solve(leading_factor(gram, lower, split), unexplained), to_values, kept


def leading_factor(gram: torch.Tensor, lower: torch.Tensor, size: int) -> torch.Tensor:
    """The factor [size, size] of the Gram matrix of the first columns alone, in the memory of the whole, which is overwritten: a solver
    copies a factor that is part of a matrix."""
    return gram.view(-1)[: size**2].view(size, size).T.copy_(lower[:size, :size])


def flop_of_solve(n: int, m: int) -> float:
    """FLOP of `factor` and `solve` for a Gram matrix [n, n] and m columns."""
    return n**3 / 3 + 2.0 * n * n * m


def flop_of_eigenvectors(n: int) -> float:
    """Approximate FLOP of all eigenvectors of a symmetric matrix [n, n]."""
    return 9.0 * n**3


def rows_to_fit(batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """The first `ROWS_TO_FIT` rows that a token is predicted from, some at a time, with their batch; row p + 1 is in it too."""
    count = 0
    for batch in batches:
        for rows in (batch.loss_weights[:-1, 0] > 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
            yield batch, rows
            count += len(rows)
        if count >= ROWS_TO_FIT:
            break


def fit_next_states(
    norm: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[Batch], *, steps: int
) -> list[torch.Tensor]:
    """Ridge regression of the last state at p+1+k, after the target's final norm, on that at p, for k from 0 to `steps` - 1.
    Returns A_k [H, H] with z_{p+1+k} ~ A_k z_p; the identity where no sequence is long enough."""
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
            # Where x_{p+2+k} is predicted from row p, row p+1+k, which the target predicts it from, is in the batch.
            for rows in (batch.loss_weights[:, k] > 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
                grams[k].addmm_(states[rows].T, states[rows])
                crosses[k].addmm_(states[rows].T, states[rows + 1 + k])
        used += int((batch.loss_weights[:, 0] > 0).sum())
        if used >= ROWS_TO_FIT:
            break
    return [
        solve(factor(gram), cross).T if gram.any() else torch.eye(len(gram), device=gram.device)
        for gram, cross in zip(grams, crosses, strict=True)
    ]


def rows_until(wanted: int, *, rows: int, answered: int) -> int:
    """Rows to read to get `wanted` rows that a token is predicted from, if `answered` of `rows` are such."""
    return round(min(wanted, answered) * rows / max(answered, 1))


def cost_of_fit_next_states(hidden: int, *, answered: int, steps: int) -> tuple[float, int]:
    """FLOP of `fit_next_states`, and the number of values that it holds at once."""
    rows = min(answered, ROWS_TO_FIT)
    flop = steps * (4.0 * rows * hidden**2 + flop_of_solve(hidden, hidden))
    return flop, (3 * steps + 1) * hidden**2 + 3 * min(rows, ROWS_AT_ONCE) * hidden
