"""Muon (Jordan et al., kellerjordan.github.io/posts/muon): momentum, orthogonalised, for the hidden matrices.

torch.optim.Muon does its products in bf16, which CPUs without bf16 arithmetic emulate. This one runs them
in the dtype it is given, and iterates on the small Gram matrix, so that each iteration multiplies [m, m] matrices (m the
shorter side) and the long side enters twice in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from draftsmith.train.parallel import split_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: steepest at zero while singular values stay in (0.7, 1.2)
_ITERATIONS = 5


def orthogonalise(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Replace the singular values of a matrix [a, b] by values near 1 (quintic Newton-Schulz).

    With X the scaled matrix and G = X X^T, each iteration is X <- P X for P = aI + bG + cG^2. P commutes with G,
    so G <- P G P, and the product of all P is applied to X once, at the end.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.to(dtype)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    gram = wide @ wide.T
    identity = torch.eye(len(gram), dtype=dtype, device=gram.device)
    product = identity
    for iteration in range(_ITERATIONS):
        polynomial = a * identity + b * gram + c * (gram @ gram)
        product = polynomial if iteration == 0 else polynomial @ product
        if iteration < _ITERATIONS - 1:
            gram = polynomial @ gram @ polynomial
    wide = product @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).to(matrix.dtype)


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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"])
                whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
                dtype = torch.bfloat16 if parameter.is_cuda else torch.float32
                update = split_like(orthogonalise(whole, dtype), parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))
