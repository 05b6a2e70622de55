"""RMSNorm that keeps only its input for the backward pass, and the target's norm before its head.

On a CPU torch composes the norm of elementwise operations, each of which keeps a tensor as large as the input; on a GPU it
has a fused kernel, which is used there.
"""

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.target.tensors import TargetTensors


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, with a weight; the same results in less memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return _fused(x, self.weight, self.eps)
        normed: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed


def _fused(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """The norm in `x`'s dtype. Under autocast that is narrower than the weight's, and for two dtypes torch has no single kernel."""
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


class _RMSNorm(torch.autograd.Function):
    """y = w x / r for r = sqrt(mean(x^2) + eps): dx = (w g - u mean(w g u)) / r and dw = sum(g u), with u = x / r. In the wider of
    the two dtypes; under autocast `x` is narrower than the weight, and so are y and dx, as of the fused kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, weight.dtype))
        scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, unit = grads[0].to(scale.dtype), x * scale
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            weighted = grad * weight
            along = torch.linalg.vecdot(weighted, unit).div_(x.shape[-1])[..., None]
            d_x = weighted.sub_(unit.mul_(along)).mul_(scale).to(x.dtype)
        return d_x, d_weight, None


class FinalNorm(nn.Module):
    """The target's norm before its head, frozen, with a weight [H]: RMSNorm or, if it is `centered`, LayerNorm, which subtracts the
    mean and may have a bias [H]. Not part of state dicts."""

    def __init__(
        self, weight: torch.Tensor, *, eps: float, bias: torch.Tensor | None = None, centered: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.centered = eps, centered
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, tensors: TargetTensors, eps: float) -> Self:
        """The norm of the target with these tensors."""
        bias = None if tensors.final_norm_bias is None else tensors.final_norm_bias.float()
        return cls(tensors.final_norm_weight.float(), eps=eps, bias=bias, centered=tensors.centered_norm)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.centered:
            return F.layer_norm(states, states.shape[-1:], self.weight, self.bias, self.eps)
        return F.rms_norm(states, states.shape[-1:], self.weight, self.eps)
