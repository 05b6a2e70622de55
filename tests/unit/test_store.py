"""The store: what goes in comes out, damage and foreign stores are refused, an interrupted one is continued."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import UserError
from draftsmith.store import Sequence, Store, StoreIdentity, StoreWriter

LAYERS, HIDDEN = 2, 4


def identity(**changes: object) -> StoreIdentity:
    fields: dict = {
        "target": "tiny", "target_revision": "r", "target_config_hash": "c", "tokenizer_hash": "t",
        "chat_template_hash": "h", "layer_ids": (1, 3), "hidden_size": HIDDEN, "dtype": "float32",
        "sampling": {"mode": "generate", "temperature": 0.0, "max_tokens": 8},
    }  # fmt: skip
    return StoreIdentity(**fields | changes)


def make_sequence(
    sample_id: int, prompt: int, response: int, *, last_has_state: bool, held_out: bool = False
) -> Sequence:
    generator = torch.Generator().manual_seed(sample_id)
    tokens = prompt + response
    return Sequence(
        sample_id=sample_id,
        held_out=held_out,
        token_ids=torch.randint(0, 50, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask=torch.arange(tokens) >= prompt,
        hidden_states=torch.randn(tokens - (not last_has_state), LAYERS, HIDDEN, generator=generator),
    )


sequences = st.builds(
    make_sequence,
    st.integers(0, 2**63 - 1), st.integers(1, 5), st.integers(1, 6), last_has_state=st.booleans(), held_out=st.booleans(),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=12, unique_by=lambda s: s.sample_id), st.integers(1, 40))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, written: list[Sequence], shard_tokens: int) -> None:
    directory = tmp_path_factory.mktemp("store")
    writer = StoreWriter(directory, identity(), shard_tokens=shard_tokens)
    for sequence in written:
        writer.append(sequence)
    counts = writer.close()

    store = Store(directory)
    assert store.identity == identity()
    assert len(store) == counts["sequences"] == len(written)
    for found, expected in zip(store, sorted(written, key=lambda s: s.sample_id), strict=True):
        assert (found.sample_id, found.held_out) == (expected.sample_id, expected.held_out)
        for name in ("token_ids", "loss_mask", "hidden_states"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert sorted(store.rows(held_out=True) + store.rows(held_out=False)) == list(range(len(written)))
    expected_counts = torch.zeros(50, dtype=torch.int64)
    for sequence in written:
        if not sequence.held_out:
            expected_counts += torch.bincount(sequence.token_ids[sequence.loss_mask].long(), minlength=50)
    assert torch.equal(store.token_counts(50), expected_counts)


def filled(directory: Path, sample_ids: range = range(6)) -> StoreWriter:
    writer = StoreWriter(directory, identity(), shard_tokens=10)
    for sample_id in sample_ids:
        writer.append(make_sequence(sample_id, 3, 3, last_has_state=False))
    return writer


def test_an_interrupted_store_is_continued(tmp_path: Path) -> None:
    filled(tmp_path)  # never closed: shards of two sequences, all six are in
    (tmp_path / "shard-00003.safetensors.tmp").write_bytes(b"half")
    writer = StoreWriter(tmp_path, identity(), shard_tokens=10)
    assert writer.sample_ids == set(range(6))
    writer.append(make_sequence(6, 3, 3, last_has_state=False))
    assert writer.close()["sequences"] == 7
    assert [s.sample_id for s in Store(tmp_path)] == list(range(7))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "other"}, "target is 'tiny' there and 'other' in this run"),
        ({"layer_ids": (1, 2)}, r"layer_ids is \(1, 3\) there and \(1, 2\)"),
        ({"tokenizer_hash": "x"}, "tokenizer_hash"),
        ({"chat_template_hash": None}, "chat_template_hash"),
    ],
)
def test_a_store_for_something_else_is_refused(tmp_path: Path, change: dict, said: str) -> None:
    filled(tmp_path).close()
    with pytest.raises(UserError, match=said):
        StoreWriter(tmp_path, identity(**change), shard_tokens=10)


@settings(max_examples=30, deadline=None)
@given(position=st.floats(0, 0.999), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, position: float, flip: int) -> None:
    directory = tmp_path_factory.mktemp("store")
    filled(directory).close()
    shard = directory / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[int(position * len(data))] ^= flip
    shard.write_bytes(data)
    with pytest.raises(UserError, match=r"shard-00001\.safetensors is damaged"):
        Store(directory)


def test_missing_and_newer_stores(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store"):
        Store(tmp_path)
    filled(tmp_path).close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    with pytest.raises(UserError, match="schema 99"):
        Store(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "shard-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard-00000\.safetensors, which is not there"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s.hidden_states[2].fill_(0), "all zeros"),
        (lambda s: s.hidden_states[1, 0, 0].fill_(float("nan")), "finite"),
    ],
)
def test_untrue_states_are_refused(tmp_path: Path, spoil, said: str) -> None:  # type: ignore[no-untyped-def]
    sequence = make_sequence(1, 3, 3, last_has_state=False)
    spoil(sequence)
    with pytest.raises(ValueError, match=said):
        StoreWriter(tmp_path, identity(), shard_tokens=10).append(sequence)


def test_wrong_lengths_are_refused(tmp_path: Path) -> None:
    good = make_sequence(1, 3, 3, last_has_state=False)
    short = Sequence(1, False, good.token_ids, good.loss_mask, good.hidden_states[:-1])
    with pytest.raises(ValueError, match="do not go together"):
        StoreWriter(tmp_path, identity(), shard_tokens=10).append(short)
