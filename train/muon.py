"""Muon (Jordan et al., kellerjordan.github.io/posts/muon): momentum, orthogonalised, for the hidden matrices.

torch.optim.Muon does its products in bf16, which CPUs without bf16 arithmetic emulate. This one runs them
in the dtype it is given, and iterates on the small Gram matrix, so that each iteration multiplies [m, m] matrices (m the
shorter side) and the long side enters twice in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from draftsmith.train.parallel import split_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steepest at zero while singular values stay in (0.7, 1.2)
_ITERATIONS = 5
_AT_ONCE = 1 << 22
"""Elements of Gram matrices that are multiplied together: small ones gain by it, large ones would only take memory."""


def orthogonalise(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Replace the singular values of matrices [a, b] by values near 1 (quintic Newton-Schulz).

    With X a scaled matrix and G = X X^T, each iteration is X <- P X for P = aI + bG + cG^2. P commutes with G,
    so G <- P G P, and the product of all P is applied to X once, at the end.

    Args:
        matrices: of one shorter side, so that their Gram matrices are multiplied together: one such product is too small
            to keep a processor busy.
        dtype: of the products.
    """
    a, b, c = _COEFFICIENTS
    wide = []
    for matrix in matrices:
        x = matrix.to(dtype)
        wide.append(x if x.shape[0] <= x.shape[1] else x.T)
    # Scaled are the small matrices on both sides of X, not X itself.
    scale = 1 / (torch.stack([x.norm() for x in wide]) + 1e-7)[:, None, None]
    gram = torch.stack([x @ x.T for x in wide]).mul_(scale**2)
    product = gram
    for iteration in range(_ITERATIONS):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        product = polynomial if iteration == 0 else polynomial @ product
        if iteration < _ITERATIONS - 1:
            gram = polynomial @ gram @ polynomial
    changed = (each @ x for each, x in zip(product.mul_(scale), wide, strict=True))
    return [(x if m.shape[0] <= m.shape[1] else x.T).to(m.dtype) for x, m in zip(changed, matrices, strict=True)]


def _alike(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Those that `orthogonalise` takes together."""
    by_side: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        by_side.setdefault(min(parameter.shape), []).append(parameter)
    for side, members in by_side.items():
        size = max(1, _AT_ONCE // side**2)
        yield from (members[start : start + size] for start in range(0, len(members), size))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for 2-D parameters.

    The update has root mean square 0.2 * lr for every shape (Liu et al., arXiv 2502.16982, section 2.2), about that
    of AdamW, so learning rates mean the same for both.

    Where FSDP2 splits the matrices, momentum stays split, and every process gathers and orthogonalises each whole matrix:
    its singular values are not those of its parts.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for parameters in _alike([parameter for parameter in group["params"] if parameter.grad is not None]):
                directions = [self._direction(parameter, group["momentum"]) for parameter in parameters]
                dtype = torch.bfloat16 if parameters[0].is_cuda else torch.float32
                for parameter, update in zip(parameters, orthogonalise(directions, dtype), strict=True):
                    if group["weight_decay"]:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    size = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
                    parameter.add_(split_like(update, parameter), alpha=-size)

    def _direction(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        """The whole matrix's, where it is split."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        direction = parameter.grad.lerp(state["momentum"], momentum)
        return direction.full_tensor() if isinstance(direction, DTensor) else direction
