"""The store: what goes in comes out, damage and foreign stores are refused, an interrupted one is continued."""

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from draftsmith.config.recipe import Recipe
from draftsmith.convert.inspection import inspect
from draftsmith.extract.extract import _most_bytes, _require_free_space
from draftsmith.extract.requests import ExtractRequest
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.prefetch import prefetched
from draftsmith.serve.answers_file import AnswersFile
from draftsmith.store import reader as store_reader
from draftsmith.store import writer as store_writer
from draftsmith.store.codec import Form, channel_exponents, encode_states
from draftsmith.store.format import CorruptStore, EncodedSequence, Sequence, StoreIdentity, nth_sample
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter, most_bytes, require_free_space
from tests.soak import kill_cases

LAYERS, HIDDEN = 2, 4
FORMS: list[Form] = ["none", "lossless", "int8"]


def identity(**changes: object) -> StoreIdentity:
    fields: dict = {
        "target": "tiny", "target_revision": "r", "target_config_hash": "c", "tokenizer_hash": "t",
        "chat_template_hash": "h", "layer_ids": (1, 3), "hidden_size": HIDDEN, "dtype": "float32",
        "sampling": {"mode": "generate", "temperature": 0.0, "max_tokens": 8},
    }  # fmt: skip
    return StoreIdentity(**fields | changes)


def open_writer(directory: Path, form: Form = "none", shard_tokens: int = 10, **changes: object) -> StoreWriter:
    states = {"states": "int8"} if form == "int8" else {}
    return StoreWriter(directory, identity(**states | changes), shard_tokens=shard_tokens, compression=form)


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


def same(found: Sequence, expected: Sequence, *, states: bool = True) -> None:
    assert (found.sample_id, found.held_out) == (expected.sample_id, expected.held_out)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.loss_mask, expected.loss_mask)
    assert found.hidden_states.dtype == expected.hidden_states.dtype
    if states:
        assert torch.equal(found.hidden_states, expected.hidden_states)
    else:
        channels = torch.exp2(channel_exponents(expected.hidden_states).float())
        bound = channels * (expected.hidden_states.abs() / channels).amax(dim=-1, keepdim=True) / 253
        assert ((found.hidden_states - expected.hidden_states).abs() <= bound).all()


sequences = st.builds(
    make_sequence,
    st.integers(0, 2**63 - 1),
    st.integers(1, 5),
    st.integers(1, 6),
    last_has_state=st.booleans(),
    held_out=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(sequences, min_size=1, max_size=12, unique_by=lambda s: s.sample_id),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, written: list[Sequence], shard_tokens: int, form: Form, dtype: str
) -> None:
    directory = tmp_path_factory.mktemp("store")
    written = [replace(s, hidden_states=s.hidden_states.to(getattr(torch, dtype))) for s in written]
    writer = open_writer(directory, form, shard_tokens, dtype=dtype)
    for sequence in written:
        writer.append(sequence)
    counts = writer.close()

    store = Store(directory)
    assert store.identity.dtype == dtype
    assert len(store) == counts["sequences"] == len(written)
    assert counts["bytes"] == store.counts["bytes"] == sum(f.stat().st_size for f in directory.glob("*.safetensors"))
    exact = form != "int8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # mapped bytes that cannot be written to would make torch warn
        for found, expected in zip(store, sorted(written, key=lambda s: s.sample_id), strict=True):
            if not exact and dtype != "float32":  # the bound is float32's: their rounding comes on top
                found = replace(found, hidden_states=expected.hidden_states)
            same(found, expected, states=exact)
    assert list(store.corruptions()) == []
    assert sorted(store.rows(held_out=True) + store.rows(held_out=False)) == list(range(len(written)))
    expected_counts = torch.zeros(50, dtype=torch.int64)
    for sequence in written:
        if not sequence.held_out:
            expected_counts += torch.bincount(sequence.token_ids[sequence.loss_mask].long(), minlength=50)
    assert torch.equal(store.token_counts(50), expected_counts)


@pytest.mark.parametrize("form", FORMS)
def test_shards_are_safetensors_files(tmp_path: Path, form: Form) -> None:
    """Whoever has no Draftsmith opens them with the library; the states of an uncompressed one lie there plainly."""
    writer = open_writer(tmp_path, form, 1000)
    written = [make_sequence(i, 3, 2 + i, last_has_state=bool(i % 2)) for i in range(3)]
    for sequence in written:
        writer.append(sequence)
    writer.close()
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as file:
        named = {
            "offsets",
            "sample_ids",
            "checksums",
            "token_ids",
            "next_token_ids",
            "loss_mask",
            "held_out",
            "padding",
        }
        extra = {"hidden_states"} if form == "none" else {"frames", "frame_offsets"}
        assert set(file.keys()) == named | extra
        assert file.get_tensor("sample_ids").tolist() == [0, 1, 2]
        offsets = file.get_tensor("offsets").tolist()
        assert offsets[-1] == sum(len(s.hidden_states) for s in written)
        if form == "none":
            assert torch.equal(file.get_tensor("hidden_states"), torch.cat([s.hidden_states for s in written]))
    about = json.loads((tmp_path / "manifest.json").read_text())["shards"][0]
    assert about["head_bytes"] % 64 == 0


def filled(directory: Path, sample_ids: range = range(6), form: Form = "none") -> StoreWriter:
    writer = open_writer(directory, form)
    for sample_id in sample_ids:
        writer.append(make_sequence(sample_id, 3, 3, last_has_state=False))
    assert writer.sample_ids == set(sample_ids)  # waits until full shards are written: tests look at the files
    return writer


# ---- continuing, and refusing ----


def test_an_interrupted_store_is_continued(tmp_path: Path) -> None:
    filled(tmp_path)._lock.close()  # killed: shards of two sequences, all six are in
    (tmp_path / "shard-00003.safetensors.tmp").write_bytes(b"half")
    writer = open_writer(tmp_path, "lossless")  # shards of both forms read as one store
    assert writer.sample_ids == set(range(6))
    writer.append(make_sequence(6, 3, 3, last_has_state=False))
    assert writer.close()["sequences"] == 7
    for found, sample_id in zip(Store(tmp_path), range(7), strict=True):
        same(found, make_sequence(sample_id, 3, 3, last_has_state=False))


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
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    filled(tmp_path / "a").close()
    with pytest.raises(UserError, match=said):
        StoreWriter(tmp_path / "a", identity(**change), shard_tokens=10)
    StoreWriter(tmp_path / "b", identity(**change), shard_tokens=10).close()
    with pytest.raises(UserError, match="Only stores of one identity mix"):
        Store(tmp_path / "a", tmp_path / "b")


def test_other_samples_of_what_one_store_holds_out_are_not_trained_on(tmp_path: Path) -> None:
    """A held-out conversation has one answer, and other answers to it have other ids."""
    sampling = {"mode": "generate", "temperature": 0.7, "samples": 3}
    for name, held_out, numbers in (("a", True, [0]), ("b", False, [0, 1, 2])):
        (tmp_path / name).mkdir()
        writer = open_writer(tmp_path / name, sampling=sampling)
        for conversation in (11, 12):
            apart = held_out and conversation == 11
            for number in [0] if apart else numbers:
                sample_id = nth_sample(conversation, number)
                writer.append(make_sequence(sample_id, 3, 3, last_has_state=False, held_out=apart))
        writer.close()
    store = Store(tmp_path / "a", tmp_path / "b")
    assert [store.sample_id(row) for row in store.rows(held_out=True)] == [11]
    trained = {store.sample_id(row) for row in store.rows(held_out=False)}
    assert trained == {nth_sample(12, number) for number in range(3)}


def test_exact_and_8_bit_states_do_not_mix(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with pytest.raises(UserError, match="states is 'exact' there and 'int8' in this run"):
        open_writer(tmp_path, "int8")


def test_missing_and_newer_stores(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no store"):
        Store(tmp_path)
    filled(tmp_path).close()
    text = (tmp_path / "manifest.json").read_text()
    for version in (1, 99):  # ours before there were checksums, and one that does without ours
        (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": version}))
        with pytest.raises(UserError, match=f"schema {version}, and this version of Draftsmith reads schema 2"):
            Store(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "an app", "start_url": "/"}')
    with pytest.raises(UserError, match="is not a store's manifest"):
        Store(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "shard-00000.safetensors").unlink()
    with pytest.raises(CorruptStore, match=r"shard-00000\.safetensors is damaged .*not there"):
        Store(tmp_path)


WRITER = """
import sys, time
from pathlib import Path
from tests.unit.test_store import filled
writer = filled(Path(sys.argv[1]), range(2))
print("writing", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(UserError, match="Another process is writing"):
        open_writer(tmp_path)
    assert len(Store(tmp_path)) == 2, "reading what is there is always allowed"
    first.kill()
    first.wait()
    assert open_writer(tmp_path).sample_ids == {0, 1}


# ---- damage ----


def read_as_training_does(directory: Path) -> None:
    store = Store(directory)
    store.token_counts(50)
    for _ in prefetched(store.__getitem__, range(len(store))):
        pass


@pytest.mark.parametrize("form", FORMS)
def test_every_single_byte_of_damage_is_found(tmp_path: Path, form: Form) -> None:
    """Over shards and manifest: by `inspect`, which names bytes that hold it, and by reading before the bytes are used."""
    filled(tmp_path, form=form).close()
    assert inspect(tmp_path)["good"]
    read_as_training_does(tmp_path)
    files = [tmp_path / "manifest.json", *sorted(tmp_path.glob("shard-*.safetensors"))]
    chooser = random.Random(form)
    positions = [(file, at) for file in files for at in range(file.stat().st_size)]
    edges = [(file, at) for file in files for at in (0, file.stat().st_size - 1)]
    for file, at in edges + chooser.sample(positions, 240 - len(edges)):
        data = bytearray(whole := file.read_bytes())
        data[at] ^= chooser.randrange(1, 256)
        file.write_bytes(data)
        try:
            with pytest.raises(DraftsmithError):
                read_as_training_does(tmp_path)
            report = inspect(tmp_path)
            assert not report["good"], (file.name, at)
            damage = report["damage"]
            assert damage["file"] == str(file)
            assert damage["start"] <= at < damage["end"], (file.name, at, damage)
        finally:
            file.write_bytes(whole)
    assert inspect(tmp_path)["good"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_a_file_of_another_length_is_found(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    filled(tmp_path).close()
    for file in (tmp_path / "manifest.json", tmp_path / "shard-00001.safetensors"):
        whole = file.read_bytes()
        file.write_bytes(change(whole))
        with pytest.raises(DraftsmithError, match=file.name):
            Store(tmp_path)
        file.write_bytes(whole)


# ---- killed, and out of room ----

# Starting Python costs far more than writing, so that one interpreter forks all the writers.
KILLER = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from tests.unit.test_store import make_sequence, open_writer

def write(directory):
    writer = open_writer(directory, "lossless", 30)
    done = writer.sample_ids
    for sample_id in range(60):
        if sample_id not in done:
            writer.append(make_sequence(sample_id, 3, 4, last_has_state=False))
    writer.close()

def started(directory):
    child = os.fork()
    if child == 0:
        write(directory)
        os._exit(0)
    return child

folder, chooser, killed = Path(sys.argv[1]), random.Random(5), 0
whole = folder / "whole"
whole.mkdir()
begun = time.perf_counter()
os.waitpid(started(whole), 0)
seconds = time.perf_counter() - begun
expected = {file.name: file.read_bytes() for file in whole.iterdir()}
for case in range(int(sys.argv[2])):
    directory = folder / str(case)
    directory.mkdir()
    kills = 0
    while kills < 2:
        child = started(directory)
        time.sleep(seconds * chooser.random())
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            kills += 1
        else:  # it was through first: a writer is faster now than the one timed above
            seconds *= 0.8
            shutil.rmtree(directory)
            directory.mkdir()
            kills = 0
    killed += kills
    _, status = os.waitpid(started(directory), 0)
    assert status == 0, case
    found = {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix != ".tmp"}
    assert found == expected, (case, sorted(found), sorted(expected))
    shutil.rmtree(directory)
print(killed)
"""


def test_killed_at_any_moment_and_run_again_is_the_uninterrupted_store(tmp_path: Path) -> None:
    cases = kill_cases(24)  # two writers each; `make soak` asks for more
    command = [sys.executable, "-c", KILLER, str(tmp_path), str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * cases, "two writers of every store were killed before they were through"
    store = Store(tmp_path / "whole")
    assert [s.sample_id for s in store] == list(range(60))


FULL = """
import resource, sys
from pathlib import Path
from draftsmith.run.errors import DraftsmithError
from tests.unit.test_store import fill_with_a_long_one
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    fill_with_a_long_one(Path(sys.argv[1]))
except DraftsmithError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def fill_with_a_long_one(directory: Path) -> None:
    """Two sequences a shard, but the fifth, long, has one of its own; continues what is there."""
    writer = open_writer(directory)
    for sample_id in sorted(set(range(7)) - writer.sample_ids):
        writer.append(make_sequence(sample_id, 3, 200 if sample_id == 4 else 3, last_has_state=False))
    writer.close()


def test_no_room_stops_cleanly_and_continues(tmp_path: Path) -> None:
    """The system's own error: files may grow to the size of a usual shard, and one shard is larger."""
    whole, full = tmp_path / "whole", tmp_path / "full"
    whole.mkdir()
    full.mkdir()
    fill_with_a_long_one(whole)
    sizes = sorted(file.stat().st_size for file in whole.iterdir())
    room = sizes[-1] - 100
    assert sizes[-2] < room
    arguments = [sys.executable, "-c", FULL, str(full), str(room)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"There is no room for {full / 'shard-00002.safetensors'}" in done.stdout
    assert "run the same command again" in done.stdout
    assert not list(full.glob("*.tmp")), "nothing half-written"
    assert inspect(full)["good"]
    assert [s.sample_id for s in Store(full)] == [0, 1, 2, 3]
    fill_with_a_long_one(full)  # now there is room
    assert {f.name: f.read_bytes() for f in full.iterdir()} == {f.name: f.read_bytes() for f in whole.iterdir()}


@pytest.mark.parametrize("form", ["none", "lossless", "int8"])
def test_the_estimate_is_no_less_than_the_store(tmp_path: Path, form: Form) -> None:
    about = identity(hidden_size=256, dtype="bfloat16", **({"states": "int8"} if form == "int8" else {}))
    writer = StoreWriter(tmp_path, about, shard_tokens=400, compression=form)
    generator = torch.Generator().manual_seed(1)
    for sample_id in range(12):
        states = (torch.randn(100, LAYERS, 256, generator=generator) * 5).bfloat16()
        writer.append(Sequence(sample_id, False, torch.arange(100, dtype=torch.int32), torch.ones(100).bool(), states))
    used = writer.close()["bytes"] + (tmp_path / "manifest.json").stat().st_size
    needed = most_bytes(about, form, tokens=1200, sequences=12)
    assert used <= needed <= 1.2 * used + 8192


def test_what_does_not_fit_is_not_started(tmp_path: Path) -> None:
    require_free_space(tmp_path, 1000, way_out="")
    with pytest.raises(UserError, match=r"needs up to 1000000000.00 GB in .* GB are free. Ask for less."):
        require_free_space(tmp_path, 10**18, way_out="Ask for less.")


def test_extraction_counts_the_longest_answers_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "n",
            "target": {"model": "owner/name"},
            "extract": {"prompts": {"path": "p"}, "compression": "none", "max_num_seqs": 1},
        }
    )
    about = identity(hidden_size=1000, dtype="bfloat16")
    todo = [ExtractRequest(i, False, [1] * 50, 200) for i in range(10)]
    states = 250 * LAYERS * 1000 * 2  # bytes of one request; ten go to the store, and two at once to the handoff
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=12 * states + 40_000))
    store, handoff = _most_bytes(recipe, about, todo)
    assert (store // states, handoff // states) == (10, 2)
    # Later turns, with an answer of 200 tokens to each, up to the longest sequence of the engine.
    asked = [{"role": "user", "content": "x" * 34}]
    talks = [replace(one, later=(asked,) * 3) for one in todo]
    assert _most_bytes(recipe, about, talks)[0] // states == 10 * (250 + 3 * 250) // 250
    short = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_model_len": 500})})
    assert _most_bytes(short, about, talks)[0] // states == 20
    _require_free_space(tmp_path, store + handoff)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=12 * states - 1))
    with pytest.raises(UserError, match=r"needs up to 0\.01 GB in .*extract\.check_free_space=false"):
        _require_free_space(tmp_path, store + handoff)


# ---- what is refused on the way in ----


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
        open_writer(tmp_path).append(sequence)


@pytest.mark.parametrize("form", ["none", "lossless", "int8"])
def test_states_encoded_elsewhere_make_the_same_store(tmp_path: Path, form: Form) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    here, there = (open_writer(tmp_path / name, form) for name in "ab")
    for sample_id in range(5):
        one = make_sequence(sample_id, 3, 2 + sample_id, last_has_state=sample_id % 2 == 0)
        here.append(one)
        states = encode_states(one.hidden_states, form)
        there.append(EncodedSequence(one.sample_id, one.held_out, one.token_ids, one.loss_mask, states))
    here.close()
    there.close()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]


def test_states_in_another_form_are_refused(tmp_path: Path) -> None:
    one = make_sequence(1, 3, 3, last_has_state=False)
    states = encode_states(one.hidden_states, "none")
    writer = open_writer(tmp_path, "lossless")
    with pytest.raises(ValueError, match=r"in the form none, and the store is of float32 in the form lossless"):
        writer.append(EncodedSequence(one.sample_id, one.held_out, one.token_ids, one.loss_mask, states))


def test_wrong_lengths_and_dtypes_are_refused(tmp_path: Path) -> None:
    good = make_sequence(1, 3, 3, last_has_state=False)
    writer = open_writer(tmp_path)
    with pytest.raises(ValueError, match="do not go together"):
        writer.append(replace(good, hidden_states=good.hidden_states[:-1]))
    with pytest.raises(ValueError, match="the store is of float32"):
        writer.append(replace(good, hidden_states=good.hidden_states.half()))


# ---- reading ----


def test_several_stores_read_as_one(tmp_path: Path) -> None:
    parts = [(range(4), "none"), (range(3, 7), "lossless")]
    for name, (sample_ids, form) in zip("ab", parts, strict=True):
        (tmp_path / name).mkdir()
        writer = open_writer(tmp_path / name, form)  # type: ignore[arg-type]
        for sample_id in sample_ids:
            sequence = make_sequence(sample_id, 3, 3, last_has_state=False)
            writer.append(replace(sequence, held_out=(name, sample_id) in {("b", 3), ("a", 1)}))
        writer.close()
    store = Store(tmp_path / "a", tmp_path / "b")
    for found, sample_id in zip(store, range(7), strict=True):
        # Conversation 3 is in both and held out in one: it is there once, and not trained on.
        same(found, replace(make_sequence(sample_id, 3, 3, last_has_state=False), held_out=sample_id in (1, 3)))
    assert store.rows(held_out=True) == [1, 3]


def test_more_shards_than_the_system_maps_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the mapping fails in the middle of opening, after days of extraction, as if memory were short."""
    with open_writer(tmp_path, shard_tokens=1) as writer:
        for number in range(3):
            writer.append(make_sequence(number, 2, 3, last_has_state=True))
        writer.close()
    limit = tmp_path / "max_map_count"
    monkeypatch.setattr(store_reader, "_MOST_MAPPINGS", limit)
    for allowed in (4003, 4002):
        limit.write_text(f"{allowed}\n")
        if allowed == 4003:
            assert len(Store(tmp_path)) == 3
            continue
        with pytest.raises(UserError, match=r"too many shards.*vm\.max_map_count.*sysctl.*extract\.shard_tokens"):
            Store(tmp_path)
    limit.write_text("4004")
    with pytest.raises(UserError, match="6 with those before it"):
        Store(tmp_path, tmp_path)


def test_states_stay_private(tmp_path: Path) -> None:
    """Writing into what was read changes neither the file nor what a later run reads."""
    filled(tmp_path).close()
    before = (tmp_path / "shard-00000.safetensors").read_bytes()
    Store(tmp_path)[0].hidden_states.zero_()
    assert (tmp_path / "shard-00000.safetensors").read_bytes() == before
    assert inspect(tmp_path)["good"]


@given(st.integers(0, 12), st.integers(1, 4))
def test_prefetching_keeps_the_order(items: int, ahead: int) -> None:
    started: list[int] = []

    def load(item: int) -> int:
        started.append(item)
        return item * item

    for number, found in enumerate(prefetched(load, range(items), ahead=ahead)):
        assert found == number * number
        assert len(started) <= number + ahead + 1, "no further ahead than was asked"
    assert sorted(started) == list(range(items))  # two threads begin in any order


def test_prefetching_hands_on_errors_and_stops(tmp_path: Path) -> None:
    def load(item: int) -> int:
        if item == 2:
            raise ValueError("the third")
        return item

    found = []
    with pytest.raises(ValueError, match="the third"):
        found.extend(prefetched(load, range(100)))
    assert threading.active_count() == 1 or not any("prefetch" in t.name for t in threading.enumerate())


def test_prefetched_reading_from_threads_is_exact(tmp_path: Path) -> None:
    filled(tmp_path, range(40), form="lossless").close()
    store = Store(tmp_path)
    ahead = prefetched(store.__getitem__, range(40))
    for index, found in enumerate(ahead):
        same(found, store[index])  # read here at the same time


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_only_the_writing_thread_has_the_lowest_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are written at the lowest priority; the thread that appends keeps its own."""
    seen: list[int] = []
    write = store_writer.shard_head

    def watched(*args: Any) -> bytes:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*args)

    writer = open_writer(tmp_path, "lossless")
    monkeypatch.setattr(store_writer, "shard_head", watched)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer.append(make_sequence(0, 3, 2, last_has_state=True))
    writer.close()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_appending_does_not_wait_for_the_disk_and_memory_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, disk = threading.Event(), threading.Event()
    written: list[str] = []
    write = store_writer.write_bytes

    def slow(path: Path, *parts: bytes | memoryview) -> None:
        if path.name.startswith("shard-"):
            writing.set()
            assert disk.wait(60)
            written.append(path.name)
        write(path, *parts)

    writer = open_writer(tmp_path, "lossless")  # shards of two sequences
    monkeypatch.setattr(store_writer, "write_bytes", slow)
    for sample_id in range(3):
        writer.append(make_sequence(sample_id, 3, 3, last_has_state=False))
    assert writing.wait(60)
    assert not written, "the third was taken while the first two are still being written"
    appended = threading.Event()

    def append_the_fourth() -> None:
        writer.append(make_sequence(3, 3, 3, last_has_state=False))
        appended.set()

    thread = threading.Thread(target=append_the_fourth)
    thread.start()
    assert not appended.wait(0.3), "a second full shard waits for the first"
    disk.set()
    thread.join(60)
    assert writer.sample_ids == {0, 1, 2, 3}
    assert written == ["shard-00000.safetensors", "shard-00001.safetensors"]
    writer.close()


def test_acceptance_is_predicted_on_what_evaluation_measures(tmp_path: Path) -> None:
    """Held-out sequences without images; all of them where every one has some."""

    def store(folder: Path, with_images: list[bool]) -> Store:
        folder.mkdir()
        states = torch.ones(4, LAYERS, HIDDEN)
        with open_writer(folder) as writer:
            for number, seen in enumerate(with_images):
                images = ("ab" * 32,) if seen else ()
                ids, mask = torch.arange(5, dtype=torch.int32), torch.arange(5) >= 2
                writer.append(Sequence(number, number > 0, ids, mask, states, images))
            writer.close()
        return Store(folder)

    assert store(tmp_path / "some", [False, True, False, True, False]).rows_to_predict() == [2, 4]
    assert store(tmp_path / "every", [False, True, True]).rows_to_predict() == [1, 2]


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with pytest.raises(UserError, match=r"takes no file locks \(Function not implemented\).*`-o flock`.*`--runs`"):
        open_writer(tmp_path)
    with pytest.raises(UserError, match=r"takes no file locks .*`--out`"):
        AnswersFile(tmp_path / "answers.jsonl", [])
