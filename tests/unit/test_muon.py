"""Muon in each precision, which depends on the recipe and not on the device, against float64."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.store.format import Sequence
from draftsmith.train.loss import ChainLoss
from draftsmith.train.muon import Muon, _symmetric_product, bands, orthogonalize
from draftsmith.train.optimizers import make_optimizers
from draftsmith.train.packing import pack
from tests.unit.test_eagle3 import make_drafter
from tests.unit.tiny_run import make_recipe

LARGEST = 1.25
"""Bound of the singular values: Jordan's quintic maps (0, 1) to at most 1.203 (its maximum on a fine grid); bf16 rounds by 0.4%."""
ALIKE = 0.99
"""Least cosine of an update in bf16 with the one in float64. For torch.optim.Muon, which computes in bf16, it is 0.9993 to 0.9999 on a
spectrum of 1/i, and 0.993 to 0.9999 on these gradients, whose smallest singular values are below bf16's resolution."""


def jordan(matrix: torch.Tensor) -> torch.Tensor:
    """Jordan's iteration, on the whole matrix, in float64."""
    x = matrix.double()
    x = x / (x.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        return jordan(matrix.T).T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def with_spectrum(shape: tuple[int, int], of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """float32 [shape] with singular values of(1), of(2), ... in random directions."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    rank = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=torch.float64)).Q for side in shape
    )
    return ((left * of(torch.arange(1, rank + 1).double())) @ right.T).float()


def assert_orthogonalized(found: torch.Tensor, matrix: torch.Tensor, *, alike: float) -> None:
    """`found` is `matrix` orthogonalized in float64, up to a cosine of `alike` and 5% in size."""
    found, exact = found.double(), jordan(matrix)
    assert torch.linalg.matrix_norm(found, 2) <= LARGEST
    assert F.cosine_similarity(found.flatten(), exact.flatten(), dim=0) >= alike
    assert 0.95 <= found.norm() / exact.norm() <= 1.05


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_the_iteration_is_jordans(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found, again) = orthogonalize([matrix, -3 * matrix], torch.float64)
    torch.testing.assert_close(again, -found)
    torch.testing.assert_close(found, jordan(matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (192, 64), (24, 300), (576, 1728)])
def test_a_wide_spectrum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Singular values of 1/i: two of a hundred are above a third of the largest, and half are below a fiftieth."""
    matrix = with_spectrum(shape, lambda i: 1 / i)
    (found,) = orthogonalize([matrix], dtype)
    assert found.dtype == torch.float32
    assert_orthogonalized(found, matrix, alike=ALIKE if dtype == torch.bfloat16 else 0.99999)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_low_rank_in_float32(rank: int) -> None:
    """Where products are computed by halves, rounding errors of the null space come into the result."""
    matrix = with_spectrum((576, 1024), lambda i: (i <= rank).double())
    (found,) = orthogonalize([matrix], torch.float32)
    exact = jordan(matrix)
    assert len(bands(576, "cpu")) > 1
    assert (found - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("size", [0, 1, 128, 255, 256, 300, 576])
def test_a_symmetric_product_is_computed_by_halves(size: int) -> None:
    """Below 256 rows it is one product; above, what is left of a band is copied."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, size, 40, generator=generator, dtype=torch.float64)
    gram, whole = _symmetric_product(x, x.mT), x @ x.mT
    torch.testing.assert_close(gram, whole)
    for band in bands(size, "cpu"):
        assert torch.equal(gram[:, band.stop :, band], gram[:, band, band.stop :].mT)
    found = _symmetric_product(gram, gram, plus=gram, beta=-2.0, alpha=3.0)
    torch.testing.assert_close(found, -2 * whole + 3 * whole @ whole)
    computed = sum((band.stop - band.start) * (size - band.start) for band in bands(size, "cpu"))
    assert computed <= size**2 * (0.63 if size >= 512 else 1)
    assert bands(size, "cuda") == [slice(0, size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_equals_single_matrices(dtype: torch.dtype) -> None:
    matrices = [with_spectrum(shape, lambda i: 1 / i) for shape in ((24, 40), (40, 24), (24, 40))]
    for found, matrix in zip(orthogonalize(matrices, dtype), matrices, strict=True):
        (alone,) = orthogonalize([matrix], dtype)
        assert found.shape == matrix.shape
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def make_sequence(drafter: Eagle3Drafter, tokens: int, seed: int) -> Sequence:
    """States like a target's: most of their variance is in few directions, and each is similar to the one before."""
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    sizes = torch.arange(1, config.hidden_size + 1) ** -0.5
    states = torch.randn(tokens - 1, 3, config.hidden_size, generator=generator) * sizes
    for position in range(1, tokens - 1):
        states[position] = 0.9 * states[position - 1] + 0.4 * states[position]
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=generator)
    return Sequence(seed, False, ids, torch.arange(tokens) >= 8, states)


@pytest.fixture(scope="module")
def drafter() -> Eagle3Drafter:
    """An EAGLE-3 drafter after one backward pass."""
    hidden, vocab = 192, 500
    drafter = make_drafter(
        hidden_size=hidden,
        intermediate_size=512,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=vocab,
        draft_vocab_size=vocab,
    ).float()
    drafter.embedding = torch.randn(vocab, hidden)
    drafter.draft_token_ids = torch.arange(vocab)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    loss = ChainLoss(
        drafter,
        teacher_norm=nn.RMSNorm(hidden, 1e-5),
        teacher_head=torch.randn(vocab, hidden) * 0.1,
        ttt_steps=3,
        ttt_loss_decay=0.8,
    )
    batch = pack([make_sequence(drafter, 100, seed) for seed in range(4)], steps=3).with_layers([0, 1, 2], 2)
    loss(batch).loss.backward()
    return drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_drafter(drafter: Eagle3Drafter, dtype: torch.dtype) -> None:
    matrices = {name: p for name, p in drafter.named_parameters() if p.ndim == 2 and "lm_head" not in name}
    assert len(matrices) == 8, "fc, and q, k, v, o, gate, up and down of the layer"
    for parameter in matrices.values():
        gradient = parameter.grad
        assert gradient is not None
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        # In the first step the momentum has the direction of the gradient, and the weight is nothing but the update.
        Muon([weight], lr=1.0, dtype=dtype).step()
        update = -weight.detach() / (0.2 * math.sqrt(max(gradient.shape)))
        assert_orthogonalized(update, gradient, alike=ALIKE if dtype == torch.bfloat16 else 0.9999)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_has_about_a_fifth_of_the_learning_rate(dtype: torch.dtype) -> None:
    for shape in ((12, 30), (30, 12), (16, 16)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        Muon([weight], lr=0.1, dtype=dtype).step()
        size = weight.detach().pow(2).mean().sqrt()
        assert 0.6 < float(size / (0.1 * 0.2)) < 1.3, "whatever the shape"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_has_the_recipes_precision(tmp_path: Path, drafter: Eagle3Drafter, precision: str) -> None:
    """On every device, so that a CPU can reproduce a GPU's arithmetic."""
    muon = make_optimizers(make_recipe(tmp_path, precision=precision).train, drafter)[-1]
    assert isinstance(muon, Muon)
    assert muon._dtype == getattr(torch, precision)
