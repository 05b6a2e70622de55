"""Attention by flex attention, which GPUs take: against tiles, which CPUs take. Its kernels need a GPU (`test_on_device.py`)."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from draftsmith.drafters import flex
from draftsmith.drafters.attention import _way_of
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.flex import FlexContext, _as_lists, _seen_blocks
from draftsmith.drafters.tiles import Tiles
from draftsmith.run.errors import UserError
from draftsmith.train.packing import pack
from draftsmith.train.train import run_train
from tests.unit.flex_on_cpu import use_flex
from tests.unit.test_eagle3 import make_sequence
from tests.unit.test_on_device import KINDS
from tests.unit.tiny_run import make_recipe, make_run

KV_HEADS, GROUP, SIZE, OWN = 2, 3, 16, 4


def attended(
    batch: Batch, queries: torch.Tensor, visible: Tiles | FlexContext, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Results and gradients for random queries, keys and values."""
    torch.manual_seed(0)
    rows, picked = len(batch.documents), len(queries)
    grouped, own = torch.randn(picked, KV_HEADS, GROUP, SIZE), torch.randn(picked, KV_HEADS, GROUP, OWN)
    own[: picked // 2, :, :, 1:] = -torch.inf  # as a causal block has them
    context = torch.randn(2, KV_HEADS, rows, SIZE)
    given = [x.to(dtype).requires_grad_() for x in (grouped, own, *context)]
    mixed, weights = visible.attend(given[0], given[1], (given[2], given[3]))
    total = (mixed * torch.randn(mixed.shape)).sum() + (weights * torch.randn(weights.shape)).sum()
    return [mixed, weights, *torch.autograd.grad(total, given)]


def some_rows(batch: Batch) -> torch.Tensor:
    return batch.loss_weights.sum(1).nonzero()[:, 0]


@pytest.mark.parametrize("window", [None, 1, 31, 150])
@pytest.mark.parametrize("lengths", [[(400, 150), (30, 9), (33, 10)], [(700, 20)], [(128, 1), (128, 1)], [(5, 2)]])
def test_flex_attends_as_tiles_do(
    lengths: list[tuple[int, int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_flex(monkeypatch)
    batch = pack([make_sequence(*each, seed) for seed, each in enumerate(lengths)], steps=2)
    for queries in (some_rows(batch), torch.arange(len(batch.documents))):
        found = attended(batch, queries, FlexContext(batch, queries, window=window))
        expected = attended(batch, queries, Tiles(batch, queries, KV_HEADS * GROUP, window=window))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_comparison_would_notice_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flex(monkeypatch)
    batch = pack([make_sequence(40, 15, 1), make_sequence(30, 9, 2)], steps=2)
    queries = some_rows(batch)
    expected, *_ = attended(batch, queries, Tiles(batch, queries, KV_HEADS * GROUP))
    one_document = pack([make_sequence(69, 15, 1)], steps=2)
    for wrong in (FlexContext(batch, queries - 1), FlexContext(one_document, queries)):
        found, *_ = attended(batch, queries, wrong)
        assert (found - expected).abs().max() > 0.1


def test_no_queries() -> None:
    batch = pack([make_sequence(9, 4, 1)], steps=2)
    FlexContext(batch, torch.arange(0))  # `attend` has nothing to ask it


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=400), min_size=1, max_size=8), st.integers(1, 500))
def test_blocks_of_the_mask(documents: list[list[bool]], window: int) -> None:
    """A block that is left out has nothing to see, and one that is taken without a mask has everything."""
    numbers = torch.tensor([number for number, rows in enumerate(documents) for _ in rows])
    queries = torch.tensor([row for row, asks in enumerate(one for rows in documents for one in rows) if asks])
    if not len(queries):
        return
    starts = torch.searchsorted(numbers, numbers[queries]).maximum(queries - window + 1)
    keys = torch.arange(len(numbers))
    sees = (numbers[queries, None] == numbers) & (keys <= queries[:, None]) & (keys > queries[:, None] - window)
    size, (down, right) = flex._BLOCK, (-(-len(queries) // flex._BLOCK), -(-len(numbers) // flex._BLOCK))
    some, everything = _seen_blocks(queries, starts, len(numbers))
    assert some.shape == everything.shape == (down, right)
    for i in range(down):
        for j in range(right):
            part = sees[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert some[i, j] or not part.any()
            assert part.all() == bool(everything[i, j])
            assert some[i, j] or not everything[i, j]
    counts, listed = _as_lists(some)
    for i in range(down):
        assert listed[0, 0, i, : counts[0, 0, i]].tolist() == some[i].nonzero()[:, 0].tolist()


def test_few_compilations_serve_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, up to the kernel: graphs forward and backward with sizes that vary."""
    use_flex(monkeypatch)
    torch._dynamo.reset()
    compiled = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "_compiled", lambda _: torch.compile(flex_attention, dynamic=True, backend=compiled))
    counts = []
    for lengths in ([(300, 40), (200, 30)], [(260, 30), (150, 20), (300, 20)], [(400, 90)], [(290, 10), (350, 60)]):
        batch = pack([make_sequence(*each, seed) for seed, each in enumerate(lengths)], steps=2)
        queries = torch.arange(7, 7 + 256 + 10 * len(lengths))
        found = attended(batch, queries, FlexContext(batch, queries), torch.float32)
        expected = attended(batch, queries, Tiles(batch, queries, KV_HEADS * GROUP), torch.float32)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        counts.append(compiled.frame_count)
    assert 1 <= counts[0] == counts[-1] <= 2, counts


def test_under_autocast_products_are_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flex(monkeypatch)
    batch = pack([make_sequence(40, 15, 1), make_sequence(30, 9, 2)], steps=2)
    queries = some_rows(batch)
    exact = attended(batch, queries, FlexContext(batch, queries))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attended(batch, queries, FlexContext(batch, queries), torch.float32)
    assert found[0].dtype == torch.bfloat16
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


def test_gpus_take_flex_and_the_environment_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTSMITH_ATTENTION", raising=False)
    assert _way_of("cuda", 64) == "flex"
    assert _way_of("cuda", 8) == "tiles", "narrower heads than kernels take"
    assert _way_of("cpu", 64) == "tiles"
    monkeypatch.setenv("DRAFTSMITH_ATTENTION", "tiles")
    assert _way_of("cuda", 64) == "tiles"
    monkeypatch.setenv("DRAFTSMITH_ATTENTION", "sdpa")
    with pytest.raises(UserError, match=r"'sdpa'\. It is `tiles` or `flex`; unset it for `flex`"):
        _way_of("cuda", 64)


@pytest.mark.parametrize("error", [RuntimeError, FailOnRecompileLimitHit])
def test_past_the_most_variants_too_the_way_out_is_named(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error("recompile_limit reached")

    monkeypatch.setenv("DRAFTSMITH_ATTENTION", "flex")
    monkeypatch.setattr(flex, "_compiled", lambda device: refuse)
    batch = pack([make_sequence(9, 4, 1)], steps=2)
    queries = some_rows(batch)
    with pytest.raises(UserError, match=r"recompile_limit reached.*DRAFTSMITH_ATTENTION=tiles"):
        attended(batch, queries, FlexContext(batch, queries))


def test_where_it_cannot_be_compiled_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on this machine, where flex attention has no kernel that returns what is needed."""
    monkeypatch.setenv("DRAFTSMITH_ATTENTION", "flex")
    batch = pack([make_sequence(9, 4, 1)], steps=2)
    queries = some_rows(batch)
    with pytest.raises(UserError, match=r"does not work on this machine.*DRAFTSMITH_ATTENTION=tiles"):
        attended(batch, queries, FlexContext(batch, queries))


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "dspark"])
def test_a_whole_training(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions, without gradients, too."""
    run = make_run(tmp_path)
    recipe = make_recipe(tmp_path, **KINDS[kind])
    by_tiles = run_train(recipe, run)["predicted_acceptance_length"]
    use_flex(monkeypatch)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "store").symlink_to(run / "store")
    found = run_train(recipe, tmp_path / "again")["predicted_acceptance_length"]
    assert found == pytest.approx(by_tiles, rel=1e-6)
    assert found["1"] > 1, "no draft token is right, so nothing is compared"
