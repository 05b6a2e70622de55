"""Muon (Jordan et al., kellerjordan.github.io/posts/muon): orthogonalized momentum, for the hidden matrices.

torch.optim.Muon takes one matrix at a time, always in bf16, which CPUs without bf16 arithmetic emulate, and does not support
matrices that FSDP2 shards. This one computes in a given dtype and batches small matrices.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from draftsmith.train.distributed import shard_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at zero while singular values stay in (0.7, 1.2)
_ITERATIONS = 5
_BATCH_ELEMENTS = 1 << 22
"""Elements of Gram matrices that are batched: small ones gain speed by it, large ones would only take memory."""
_BANDS = 4
"""Bands of rows in which a CPU computes a symmetric product. They save (1 - 1 / bands) / 2 of it; narrow ones lose it again."""
_LEAST_ROWS = 128  # fewest rows in a band: with fewer, a product is bound by reading the other matrix


def orthogonalize(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Replace the singular values of matrices [a, b] by values near 1 (quintic Newton-Schulz).

    Below float32 this is Jordan's iteration, on the matrices themselves. In float32 and above it is the same iteration on their
    Gram matrices, which is less work where the long side is more than one and a half times the short one, but squares the
    condition number: rounding to bf16 or TF32 gives the Gram matrix negative eigenvalues, which grow by up to 3.4445^2 in each
    iteration. In float32 they are too small for five iterations to matter.

    Args:
        matrices: of one shape, or its transpose; in float32 and above only the shorter sides must be equal. They are batched,
            since one such product is too small to keep a processor busy.
        dtype: of the products; on a GPU, float32 must not mean TF32 (`run_train` sees to it).
    """
    wide = [(m if m.shape[0] <= m.shape[1] else m.T).to(dtype) for m in matrices]
    changed = _by_gram_matrix(wide) if dtype in (torch.float32, torch.float64) else _by_matrix(wide)
    return [(x if m.shape[0] <= m.shape[1] else x.T).to(m.dtype) for x, m in zip(changed, matrices, strict=True)]


def _by_matrix(wide: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Each iteration is X <- aX + (bG + cG^2) X, with G = X X^T."""
    a, b, c = _COEFFICIENTS
    x = torch.stack(wide)
    x /= x.norm(dim=(1, 2), keepdim=True) + 1e-7
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _by_gram_matrix(wide: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Each iteration is X <- P X for P = aI + bG + cG^2. P commutes with G, so G <- P G P, and the product of all P is
    applied to X once, at the end: only two products involve the long side. All that is multiplied between them is a polynomial in the
    first G, so every product is symmetric. What rounding makes of the null space is not, and copying halves spreads it: of a matrix of rank 1
    the result is off by 2% of its size (0.05% with whole products; 120% by `_by_matrix` in bfloat16), of one with a spectrum of 1/i by 0.04%."""
    a, b, c = _COEFFICIENTS
    # The small matrices on both sides of X are scaled, not X itself.
    scale = 1 / (torch.stack([x.norm() for x in wide]) + 1e-7)[:, None, None]
    gram = torch.cat([_symmetric_product(x[None], x.T[None]) for x in wide]).mul_(scale**2)
    product = gram
    for iteration in range(_ITERATIONS):
        polynomial = _symmetric_product(gram, gram, plus=gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        product = polynomial if iteration == 0 else _symmetric_product(polynomial, product)
        if iteration < _ITERATIONS - 1:
            gram = _symmetric_product(_symmetric_product(polynomial, gram), polynomial)
    return (each @ x for each, x in zip(product.mul_(scale), wide, strict=True))


def _symmetric_product(
    left: torch.Tensor, right: torch.Tensor, *, plus: torch.Tensor | None = None, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta * plus + alpha * left @ right [batch, s, s], which the caller knows to be symmetric: of each of `bands` what is on and right of
    the diagonal is computed, and the rest is copied from the bands above it."""
    size = left.shape[1]
    found = left.new_empty(len(left), size, size)
    for band in bands(size, left.device.type):
        here, right_of = left[:, band], right[:, :, band.start :]
        if plus is None:
            part = here @ right_of
        else:
            part = torch.baddbmm(plus[:, band, band.start :], here, right_of, beta=beta, alpha=alpha)
        if len(here[0]) == size:
            return part
        found[:, band, band.start :] = part
        found[:, band, : band.start] = found[:, : band.start, band].mT
    return found


def bands(size: int, device: str) -> list[slice]:
    """Bands of rows of a symmetric product [size, size] on a type of `device`, by torch's name: one on GPUs, where they were not measured."""
    count = max(1, min(_BANDS, size // _LEAST_ROWS)) if device == "cpu" else 1
    ends = [size * number // count for number in range(count + 1)]
    return [slice(*both) for both in pairwise(ends)]


def _batches(parameters: list[torch.Tensor], dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """Groups of parameters that `orthogonalize` takes in one batch."""
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        short, long = sorted(parameter.shape)
        key = (short,) if dtype == torch.float32 else (short, long)
        by_shape.setdefault(key, []).append(parameter)
    for (short, *_), members in by_shape.items():
        size = max(1, _BATCH_ELEMENTS // short**2)
        yield from (members[start : start + size] for start in range(0, len(members), size))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for 2-D parameters.

    The update has a root mean square of 0.2 * lr for every shape (Liu et al., arXiv 2502.16982, section 2.2), about that
    of AdamW, so learning rates mean the same for both.

    Where FSDP2 shards the matrices, momentum stays sharded, and every process gathers and orthogonalizes the whole matrix,
    whose singular values are not those of its shards.

    Args:
        params: 2-D; momentum is in their dtype.
        momentum: share of the old momentum that a step keeps.
        weight_decay: decoupled, as in AdamW.
        dtype: what `orthogonalize` computes in: float32 or bfloat16, on every device.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameters in _batches(with_gradient, self._dtype):
                directions = [self._direction(parameter, group["momentum"]) for parameter in parameters]
                for parameter, update in zip(parameters, orthogonalize(directions, self._dtype), strict=True):
                    if group["weight_decay"]:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    size = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
                    parameter.add_(shard_like(update, parameter), alpha=-size)

    def _direction(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """The update before it is orthogonalized, unsharded."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        direction = parameter.grad.lerp(state["momentum"], momentum)
        return direction.full_tensor() if isinstance(direction, DTensor) else direction
