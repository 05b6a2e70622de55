"""Attention in tiles: every query meets its keys once, with little padding, in memory linear in the length of a document."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.drafters import tiles
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.tiles import Tiles, _blocks, _side_by_side
from draftsmith.train.packing import pack
from tests.unit.test_dflash import make_drafter as make_block_drafter
from tests.unit.test_eagle3 import HEADS, make_drafter, make_sequence
from tests.unit.test_loss import LargestTensor

lengths_and_queries = st.lists(st.lists(st.booleans(), min_size=1, max_size=400), min_size=1, max_size=12)


@given(lengths_and_queries, st.integers(100, 200_000), st.sampled_from([None, 1, 30, 500]))
def test_every_query_is_in_one_block_with_the_keys_it_sees(
    documents: list[list[bool]], most_area: int, window: int | None
) -> None:
    lengths = [len(document) for document in documents]
    queries = [row for row, predicted in enumerate(p for document in documents for p in document) if predicted]
    blocks = _blocks(queries, lengths, most=tiles._QUERIES_IN_BLOCK, window=window)
    assert [i for block in blocks for i in block.queries] == list(range(len(queries)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for block in blocks:
        rows = [queries[i] for i in block.queries]
        assert len(rows) <= tiles._QUERIES_IN_BLOCK
        assert block.keys[-1] == rows[-1]
        first = max(start for start in starts if start <= rows[0])
        assert first == max(s for s in starts if s <= rows[-1])
        assert block.keys[0] == (first if window is None else max(first, rows[0] - window + 1))
    groups = _side_by_side(blocks, most_area=most_area)
    assert sorted(b.queries[0] for group in groups for b in group) == [b.queries[0] for b in blocks]
    for group in groups:
        area = len(group) * max(len(b.queries) for b in group) * max(len(b.keys) for b in group)
        assert len(group) == 1 or area <= most_area
        assert area <= tiles._AREA_OVER_NEEDED * sum(len(b.queries) * len(b.keys) for b in group)


@pytest.mark.parametrize("window", [None, 20, 200])
def test_tiles_give_each_query_the_keys_of_its_document_up_to_itself(window: int | None) -> None:
    batch = pack([make_sequence(400, 150, 1), make_sequence(30, 9, 2), make_sequence(33, 10, 3)], steps=2)
    queries = (batch.loss_weights.sum(1) > 0).nonzero()[:, 0]
    made = Tiles(batch, queries, HEADS, window=window)
    assert window or len(made.tiles) == 3, (
        "two blocks of one document, of different lengths, and two documents side by side"
    )
    seen: dict[int, list[int]] = {}
    for tile in made.tiles:
        blocks, rows, _, _ = tile.masked.shape
        keys = tile.keys.view(blocks, -1)
        for s in range(blocks):
            for b in range(rows):
                query = int(queries[tile.queries[s * rows + b]])
                shown = keys[s][~tile.masked[s, b, 0]].tolist()
                assert seen.setdefault(query, shown) == shown
    for query in queries.tolist():
        same = (batch.documents == batch.documents[query]).nonzero()[:, 0]
        assert seen[query] == same[same <= query].tolist()[-(window or len(same)) :]


@pytest.mark.parametrize("make", [make_drafter, make_block_drafter], ids=["chains", "blocks"])
def test_memory_is_linear_in_the_length_of_a_document(
    make: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one document of 16k tokens, the largest tensor holds the scores of one block."""
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 1 << 16)
    drafter = make(num_attention_heads=1, num_key_value_heads=1, head_dim=2, max_position_embeddings=1 << 14).float()
    largest = []
    for tokens in (1 << 13, 1 << 14):
        sequence = make_sequence(tokens, tokens - 1024, 1)
        sequence = replace(sequence, hidden_states=sequence.hidden_states.float())
        with LargestTensor() as watched:
            steps = [step.normed.sum() for step in drafter.chain(pack([sequence], steps=2), steps=2)]
            torch.stack(steps).sum().backward()
        largest.append(watched.elements)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 1024 * (1 << 14) / 4
