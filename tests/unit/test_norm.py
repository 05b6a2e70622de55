"""The norm that keeps only its input, against torch's."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from draftsmith.drafters.norm import RMSNorm, _fused


def _on_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    norm = RMSNorm(weight.shape[0], eps)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def make_norms(dtype: torch.dtype) -> tuple[RMSNorm, nn.RMSNorm, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ours, reference = RMSNorm(24, 1e-5, dtype=dtype), nn.RMSNorm(24, 1e-5, dtype=dtype)
    weight = torch.randn(24, generator=generator, dtype=dtype)
    for norm in (ours, reference):
        norm.weight.data.copy_(weight)
    return ours, reference, torch.randn(7, 3, 24, generator=generator, dtype=dtype, requires_grad=True)


def test_equals_torchs() -> None:
    for dtype in (torch.float32, torch.float64):
        ours, reference, x = make_norms(dtype)
        assert torch.equal(ours(x), reference(x))
    found, expected = (torch.autograd.grad(norm(x).sin().sum(), [x, norm.weight]) for norm in (ours, reference))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (x,))


def test_other_devices_use_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for GPUs keeps only its input as well. The meta device stands for a GPU."""
    monkeypatch.setattr("draftsmith.drafters.norm._RMSNorm.apply", None)
    norm = RMSNorm(24, 1e-5, device="meta")
    assert norm(torch.zeros(7, 24, device="meta")).shape == (7, 24)
    with pytest.raises(TypeError):
        RMSNorm(24, 1e-5)(torch.zeros(7, 24))


@pytest.mark.filterwarnings("error:Mismatch dtype")  # torch's word for several kernels instead of one
@pytest.mark.parametrize("norm", [_on_cpu, _fused])
def test_input_of_a_narrower_dtype(norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> None:
    """Than the weight's, as under autocast; the call for GPUs is taken on the CPU as well."""
    _, reference, x = make_norms(torch.float64)
    narrow = x.detach().bfloat16().requires_grad_()
    weight = reference.weight.detach().float().requires_grad_()
    found = norm(narrow, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    expected = reference(narrow.double())
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    toward = torch.randn_like(expected)
    mine = torch.autograd.grad(found, [narrow, weight], toward.bfloat16())
    assert [one.dtype for one in mine] == [torch.bfloat16, torch.float32]
    exact = torch.autograd.grad(expected, [narrow, reference.weight], toward)
    for one, other in zip(mine, exact, strict=True):
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


def test_keeps_only_its_input() -> None:
    ours, _, x = make_norms(torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        ours(x)
    assert sorted(kept) == sorted([x.numel(), x.numel() // 24, 24])
