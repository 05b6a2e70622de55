"""Handoff files: what an engine writes is what the driver takes, and files are written over."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftsmith.extract import handoff
from draftsmith.extract.handoff import HandoffWriter, handoff_file, take_handoff_file
from draftsmith.store.codec import EncodedStates, Form, checksum_of, encode_states


def states_of(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(length, 2, 8, generator=torch.Generator().manual_seed(length)).to(dtype)


def encoded(length: int, form: Form = "lossless") -> EncodedStates:
    return encode_states(states_of(length), form)


def same(found: EncodedStates, expected: EncodedStates) -> None:
    assert bytes(found.data) == bytes(expected.data)
    assert {k: v for k, v in vars(found).items() if k != "data"} == {
        k: v for k, v in vars(expected).items() if k != "data"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_others_read_it_as_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    HandoffWriter(tmp_path, reuse_files=True).write("one.safetensors", [3, 1, 2], states_of(3, dtype))
    tensors = load_file(tmp_path / "one.safetensors")
    assert set(tensors) == {"token_ids", "hidden_states"}
    assert tensors["token_ids"].dtype == torch.int64, "as vLLM's example connector: clients compare it with torch.equal"
    assert tensors["token_ids"].tolist() == [3, 1, 2]
    assert tensors["hidden_states"].dtype == dtype
    assert torch.equal(tensors["hidden_states"], states_of(3, dtype))


@pytest.mark.parametrize("form", ["none", "lossless", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_encoded_states_arrive(tmp_path: Path, dtype: torch.dtype, form: Form) -> None:
    written = encode_states(states_of(5, dtype), form)
    HandoffWriter(tmp_path, reuse_files=True).write("one.safetensors", [3, 1, 2, 7, 7], written)
    assert set(load_file(tmp_path / "one.safetensors")) == {"token_ids", "encoded"}, (
        "the format is safetensors here too"
    )
    token_ids, found = take_handoff_file(tmp_path / "one.safetensors")
    assert token_ids.dtype == torch.int32
    assert token_ids.tolist() == [3, 1, 2, 7, 7]
    same(found, written)
    assert checksum_of(found.data) == found.checksum


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), behind=st.integers(0, 5))
def test_what_is_written_over_is_whole(
    lengths: list[int], behind: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Longer over shorter and shorter over longer, with some files not taken yet; never more files than that."""
    directory = tmp_path_factory.mktemp("handoff")
    writer = HandoffWriter(directory, reuse_files=True)

    def take(number: int) -> None:
        token_ids, states = take_handoff_file(directory / handoff_file(str(number)))
        assert token_ids.tolist() == [number] * lengths[number]
        same(states, encoded(lengths[number]))

    for number, length in enumerate(lengths):
        writer.write(handoff_file(str(number)), [number] * length, encoded(length))
        if number >= behind:
            take(number - behind)
        assert len(list(directory.iterdir())) <= behind + 1
    for number in range(max(0, len(lengths) - behind), len(lengths)):
        take(number)


def test_what_was_taken_does_not_change(tmp_path: Path) -> None:
    writer = HandoffWriter(tmp_path, reuse_files=True)
    writer.write("a.safetensors", [1] * 5, encoded(5, "none"))
    _, states = take_handoff_file(tmp_path / "a.safetensors")
    writer.write("b.safetensors", [2] * 5, encode_states(states_of(5) + 1, "none"))
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"], "it was written over the first"
    same(states, encoded(5, "none"))


def test_large_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_MAX_KEPT_BYTES", 100)
    HandoffWriter(tmp_path, reuse_files=True).write("a.safetensors", [1] * 5, encoded(5))
    _, states = take_handoff_file(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())
    same(states, encoded(5))


def test_a_file_that_is_taken_in_the_middle_of_a_write_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HandoffWriter(tmp_path, reuse_files=True)
    writer.write("a.safetensors", [1], encoded(1))
    rename = Path.rename

    def taken_late(path: Path, to: Path) -> Path:
        try:
            return rename(path, to)
        except FileNotFoundError:
            take_handoff_file(tmp_path / "a.safetensors")
            raise

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", taken_late)
        writer.write("b.safetensors", [2], encoded(1))
    for path in tmp_path.glob("*.safetensors"):
        take_handoff_file(path)
    writer.write("c.safetensors", [3], encoded(1))
    writer.write("d.safetensors", [4], encoded(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "d.safetensors"]


def test_a_step_that_finishes_hundreds_leaves_no_more_files_than_that(tmp_path: Path) -> None:
    writer = HandoffWriter(tmp_path, reuse_files=True)
    for step in range(4):
        names = [handoff_file(f"{step}-{number}") for number in range(256)]
        for name in names:
            writer.write(name, [step] * 3, encoded(3))
        for name in names:
            assert take_handoff_file(tmp_path / name)[0].tolist() == [step] * 3
        assert len(list(tmp_path.iterdir())) == 256


def test_files_that_others_delete_or_keep_are_not_touched(tmp_path: Path) -> None:
    """A server's clients read and delete files in any order, or never."""
    writer = HandoffWriter(tmp_path, reuse_files=False)
    for number in range(200):
        writer.write(f"{number}.safetensors", [number], states_of(1))
        if number % 3 == 0:
            (tmp_path / f"{number}.safetensors").unlink()
    kept = {f"{number}.safetensors" for number in range(200) if number % 3}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert not writer._written, "nothing is remembered of them"
    for name in kept:
        assert load_file(tmp_path / name)["token_ids"].tolist() == [int(name.split(".")[0])]


def test_several_threads(tmp_path: Path) -> None:
    writer = HandoffWriter(tmp_path, reuse_files=True)

    def write(number: int) -> int:
        writer.write(handoff_file(str(number)), [number] * (1 + number % 9), encoded(1 + number % 9))
        return number

    def written() -> Iterator[int]:
        with ThreadPoolExecutor(4) as threads:
            yield from threads.map(write, range(400))

    for number in written():
        token_ids, states = take_handoff_file(tmp_path / handoff_file(str(number)))
        assert token_ids.tolist() == [number] * (1 + number % 9)
        same(states, encoded(1 + number % 9))
