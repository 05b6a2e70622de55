"""Stores to other programs' layouts and back: bit for bit, damage is found, and others' files are checked before they are a store."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.store.exchange import export_store, import_states
from draftsmith.store.format import Sequence, StoreIdentity
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.train.train import run_train
from tests.unit.tiny_run import make_recipe, make_run

LAYERS, HIDDEN, VOCAB = (1, 3), 4, 50
LAYOUTS = ["files", "speculators"]
TARGET = TargetInfo(
    path=Path("nowhere"),
    name="tiny",
    revision="r",
    config_hash="c",
    tokenizer_hash="t",
    chat_template_hash=None,
    num_hidden_layers=4,
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    config=SimpleNamespace(),
)
IDENTITY = StoreIdentity(
    target="tiny",
    target_revision="r",
    target_config_hash="c",
    tokenizer_hash="t",
    chat_template_hash=None,
    layer_ids=LAYERS,
    hidden_size=HIDDEN,
    dtype="float32",
    sampling={"mode": "generate", "temperature": 0.0},
    engine_options={"quantization": "fp8"},
)


def make_store(folder: Path, sequences: list[Sequence], **options: Any) -> Store:
    dtype = str(sequences[0].hidden_states.dtype).removeprefix("torch.")
    folder.mkdir(parents=True)
    with StoreWriter(folder, replace(IDENTITY, dtype=dtype), shard_tokens=100, **options) as writer:
        for sequence in sequences:
            writer.append(sequence)
        writer.close()
    return Store(folder)


def make_sequence(chooser: random.Random, dtype: torch.dtype = torch.float32) -> Sequence:
    """Any mask, any finite values and images; half end with a token that has no state."""
    tokens, sampled = chooser.randint(1, 12), chooser.random() < 0.5
    generator = torch.Generator().manual_seed(chooser.getrandbits(60))
    mask = torch.rand(tokens + sampled, generator=generator) < chooser.choice([0, 0.3, 1])
    if sampled:
        mask[-1] = True
    states = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator) * 2.0 ** chooser.randint(-12, 12)
    states[:, :, 0] += torch.finfo(dtype).smallest_normal
    token_ids = torch.randint(0, VOCAB, (tokens + sampled,), generator=generator, dtype=torch.int32)
    images = tuple(chooser.randbytes(32).hex() for _ in range(chooser.choice([0, 0, 1, 2])))
    return Sequence(chooser.getrandbits(63), chooser.random() < 0.2, token_ids, mask, states.to(dtype), images)


def take(source: Path, out: Path, **options: Any) -> Store:
    import_states(source, out, **{"target": TARGET, "layer_ids": LAYERS} | options)
    return Store(out)


def check_same(found: Store, expected: Store) -> None:
    assert found.identity == expected.identity
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.sample_id, ours.held_out, ours.images) == (theirs.sample_id, theirs.held_out, theirs.images)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.loss_mask, theirs.loss_mask)
        assert ours.hidden_states.dtype == theirs.hidden_states.dtype
        assert torch.equal(ours.hidden_states.view(torch.uint8), theirs.hidden_states.view(torch.uint8))


def refused(source: Path, out: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """The lines that name what cannot be used; nothing is left of the store."""
    before = set(out.parent.iterdir())
    capsys.readouterr()
    with pytest.raises(
        UserError, match=f"sequences in {re.escape(str(source))} cannot be used, so no store was written"
    ):
        take(source, out, **options)
    assert set(out.parent.iterdir()) == before
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("import: /")]


# ---- our own files ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_thousand_sequences_come_back_bit_for_bit(layout: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    chooser = random.Random(f"{layout} {dtype}")
    for number, form in enumerate(["none", "lossless"]):
        folder = tmp_path / str(number)
        store = make_store(folder / "store", [make_sequence(chooser, dtype) for _ in range(84)], compression=form)
        export_store(store, layout, folder / "out")
        check_same(take(folder / "out", folder / "back", compression=form), store)
        assert stage.read(folder / "back") is not None, "training takes it for finished"


def test_others_read_what_vllm_s_connector_would_have_written(tmp_path: Path) -> None:
    chooser = random.Random(0)
    store = make_store(tmp_path / "store", [make_sequence(chooser, torch.bfloat16) for _ in range(9)])
    export_store(store, "files", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 9
    for sequence in store:
        tensors = load_file(tmp_path / "out" / f"{sequence.sample_id:016x}.safetensors")
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {
            "token_ids": torch.int64,
            "hidden_states": torch.bfloat16,
        }
        assert torch.equal(tensors["hidden_states"], sequence.hidden_states)
        assert tensors["token_ids"].tolist() == sequence.token_ids[: len(sequence.hidden_states)].tolist()


def test_speculators_rows(tmp_path: Path) -> None:
    """Training first, so that one ratio gives speculators the same split; frequencies are those of training responses."""
    chooser = random.Random(1)
    sequences = [make_sequence(chooser) for _ in range(40)]
    store = make_store(tmp_path / "store", sequences)
    figures = export_store(store, "speculators", tmp_path / "out")
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    training = store.rows(held_out=False)
    assert int(len(rows) * figures["train_data_ratio"]) == len(training) < 40
    for number, index in enumerate(training + store.rows(held_out=True)):
        sequence, row = store[index], rows[number]
        count = len(sequence.hidden_states)
        assert row["input_ids"].tolist() == sequence.token_ids[:count].tolist()
        assert row["loss_mask"].tolist() == sequence.loss_mask[:count].tolist()
        assert row["seq_len"] == count
        states = load_file(tmp_path / "out" / "hidden_states" / f"hs_{number}.safetensors")["hidden_states"]
        assert torch.equal(states, sequence.hidden_states)
    counts = store.token_counts(VOCAB)
    frequencies = torch.load(tmp_path / "out" / "token_freq.pt")
    assert frequencies == {token: int(counts[token]) for token in range(VOCAB) if counts[token]}


def test_rounded_states_are_not_taken_for_exact_ones(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    identity = replace(IDENTITY, states="int8")
    with StoreWriter(tmp_path / "store", identity, shard_tokens=100, compression="int8") as writer:
        writer.append(make_sequence(random.Random(2)))
        writer.close()
    store = Store(tmp_path / "store")
    export_store(store, "files", tmp_path / "out")
    back = take(tmp_path / "out", tmp_path / "back")
    assert torch.equal(back[0].hidden_states, store[0].hidden_states)
    assert back.identity.states == "exact"
    assert back.identity.sampling["states"] == "int8"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bytes_are_found(layout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chooser = random.Random(layout)
    export_store(make_store(tmp_path / "store", [make_sequence(chooser) for _ in range(3)]), layout, tmp_path / "out")
    files = sorted((tmp_path / "out").rglob("*.safetensors"))
    for number in range(250):
        path = chooser.choice(files)
        content = bytearray(path.read_bytes())
        # Half of them in the header: it says what the bytes are, and whether there is a checksum at all.
        at = chooser.randrange(len(content) if number % 2 else 8 + int.from_bytes(content[:8], "little"))
        kept, content[at] = content[at], content[at] ^ chooser.randrange(1, 256)
        path.write_bytes(content)
        (line,) = refused(tmp_path / "out", tmp_path / "back", capsys)
        assert line.startswith(f"import: {path}: it is "), line
        content[at] = kept
        path.write_bytes(content)
    take(tmp_path / "out", tmp_path / "back")


def test_damaged_rows_are_found_or_change_nothing(tmp_path: Path) -> None:
    """Arrow files have no checksum, and have bytes that nobody reads."""
    chooser = random.Random(3)
    store = make_store(tmp_path / "store", [make_sequence(chooser) for _ in range(3)])
    export_store(store, "speculators", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.arrow")
    whole = path.read_bytes()
    found = 0
    for number in range(150):
        content = bytearray(whole)
        content[chooser.randrange(len(content))] ^= chooser.randrange(1, 256)
        path.write_bytes(content)
        try:
            back = take(tmp_path / "out", tmp_path / f"back-{number}")
        except UserError:
            found += 1
            assert not (tmp_path / f"back-{number}").exists()
        else:
            check_same(back, store)
    assert found > 30


def test_of_another_target_or_other_layers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [make_sequence(random.Random(4))])
    export_store(store, "files", tmp_path / "out")
    for options, said in (
        ({"target": replace(TARGET, revision="other")}, "target_revision is 'r' there and 'other' in this run"),
        ({"layer_ids": (1, 4)}, r"layer_ids is \(1, 3\) there and \(1, 4\) in this run"),
        ({"layer_ids": (3, 1)}, "ascending order"),
        ({"layer_ids": (1, 9)}, "outside the model"),
    ):
        with pytest.raises(UserError, match=said):
            take(tmp_path / "out", tmp_path / "back", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "out"}
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "thesis.txt").write_text("years of work")
    for write in (
        lambda: take(tmp_path / "out", tmp_path / "back"),
        lambda: export_store(store, "files", tmp_path / "back"),
    ):
        with pytest.raises(UserError, match="already exists"):
            write()
    assert (tmp_path / "back" / "thesis.txt").read_text() == "years of work"


# ---- files of others ----


def by_vllm(folder: Path, name: str, token_ids: torch.Tensor, states: torch.Tensor) -> None:
    """A file as vLLM's example connector writes it: by its own function, which needs a GPU only for what comes before."""
    theirs = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector")
    folder.mkdir(exist_ok=True)
    tensors = {"hidden_states": states.contiguous(), "token_ids": token_ids.long()}
    lock = (folder / f"{name}.safetensors.lock").open("w")  # a client may have left it
    theirs.ExampleHiddenStatesConnector._write_tensors(tensors, mock.Mock(), str(folder / f"{name}.safetensors"), None)
    lock.close()


def test_a_drafter_trains_on_files_of_vllm_s_connector(tmp_path: Path) -> None:
    original = Store(make_run(tmp_path) / "store")
    for number, sequence in enumerate(original):
        by_vllm(
            tmp_path / "theirs",
            f"cmpl-{number}",
            sequence.token_ids[: len(sequence.hidden_states)],
            sequence.hidden_states,
        )
    target, layer_ids = describe_target(tmp_path / "target"), original.identity.layer_ids
    out = tmp_path / "imported" / "store"
    with pytest.raises(UserError, match=r"no chat template, by which to find the answers\. With --loss-mask ones"):
        take(tmp_path / "theirs", out, target=target, layer_ids=layer_ids)
    imported = take(
        tmp_path / "theirs", out, target=target, layer_ids=layer_ids, loss_mask="ones", held_out_fraction=0.3
    )
    assert len(imported) == len(original)
    assert 0 < imported.counts["held_out_sequences"] < len(original)
    expected = {tuple(one.token_ids[:-1].tolist()): one.hidden_states for one in original}
    for sequence in imported:
        assert torch.equal(sequence.hidden_states, expected[tuple(sequence.token_ids.tolist())])
        assert sequence.loss_mask.all()
    figures = run_train(make_recipe(tmp_path, epochs=1), tmp_path / "imported")
    assert figures["predicted_acceptance_length"]["1"] >= 1


def plain(chooser: random.Random, tokens: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(chooser.getrandbits(60))
    states = torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator)
    return {"token_ids": torch.randint(0, VOCAB, (tokens,), generator=generator), "hidden_states": states}


def test_malformed_files_are_named_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chooser, folder = random.Random(5), tmp_path / "theirs"
    folder.mkdir()
    save_file(plain(chooser), folder / "good.safetensors")
    whole = (folder / "good.safetensors").read_bytes()
    tokens, states = plain(chooser).values()

    def spoiled(tensor: torch.Tensor, at: Any, value: float) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    wrong: list[tuple[bytes | dict[str, torch.Tensor], str]] = [
        *((whole[: chooser.randrange(len(whole))], "not a safetensors file") for _ in range(30)),
        *((whole + b"x" * n, "not a safetensors file") for n in (1, 8, 64)),
        *((content, "not a safetensors file") for content in (b"", b"[]", b"\0" * 64, b"PK\3\4" + b"x" * 60)),
        *(({"token_ids": tokens[:n], "hidden_states": states}, "do not go together") for n in range(1, 6)),
        *(({"token_ids": tokens, "hidden_states": states[:n]}, "do not go together") for n in range(1, 6)),
        *(({"token_ids": tokens, "hidden_states": states.to(dtype)}, "expected floats") for dtype in (
            torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool)),
        *(({"token_ids": tokens.to(dtype), "hidden_states": states}, "expected integers") for dtype in (
            torch.float32, torch.int8, torch.bool)),
        *(({"token_ids": tokens.view(shape), "hidden_states": states}, "expected integers") for shape in ((1, 6), (6, 1))),
        *(({"token_ids": tokens, "hidden_states": states.flatten(n, n + 1)}, "expected floats") for n in (0, 1)),
        ({"token_ids": tokens[:0], "hidden_states": states[:0]}, "expected floats"),
        *(({"token_ids": tokens, "hidden_states": states[:, :, :n]}, "states have shape") for n in range(1, HIDDEN)),
        *(({"token_ids": tokens, "hidden_states": states.repeat(1, n, 1)}, "states have shape") for n in (2, 3)),
        ({"token_ids": tokens, "hidden_states": states[:, :1]}, "states have shape"),
        ({"token_ids": tokens}, "no hidden_states"), ({"hidden_states": states}, "no token_ids"), ({}, "no hidden_states"),
        ({"input_ids": tokens, "hidden_states": states}, "no token_ids"),
        *(({"token_ids": spoiled(tokens, n, value), "hidden_states": states}, "outside the target's vocabulary")
          for n, value in enumerate((-1, VOCAB, 2**31, 2**32 + 5, -(2**62)))),
        *(({"token_ids": tokens, "hidden_states": spoiled(states, (n, 1, 2), value)}, "not all finite")
          for n in range(6) for value in (torch.nan, torch.inf, -torch.inf)),
        *(({"token_ids": tokens, "hidden_states": spoiled(states, (n, layer), 0)}, "all zeros") for n in range(3) for layer in (0, 1)),
        ({"token_ids": tokens, "hidden_states": states.half()}, "another dtype or origin"),
    ]  # fmt: skip
    assert len(wrong) == 100
    for number, (content, _) in enumerate(wrong):
        path = folder / f"wrong-{number:02}.safetensors"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file({name: tensor.contiguous() for name, tensor in content.items()}, path)
    lines = refused(folder, tmp_path / "back", capsys, loss_mask="ones")
    assert len(lines) == 100
    for number, (line, (_, said)) in enumerate(zip(lines, wrong, strict=True)):
        assert line.startswith(f"import: {folder}/wrong-{number:02}.safetensors: "), line
        assert said in line, line
    for path in folder.glob("wrong-*"):
        path.unlink()
    assert len(take(folder, tmp_path / "back", loss_mask="ones")) == 1


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    chooser, rows = random.Random(6), []
    prompts = [plain(chooser, 5)["token_ids"] for _ in range(30)]
    folder = tmp_path / "theirs" / "hidden_states"
    folder.mkdir(parents=True)
    for number in range(90):  # three answers to each prompt
        answered = plain(chooser, 8)
        answered["token_ids"][:5] = prompts[number % 30]
        save_file(answered, folder / f"hs_{number}.safetensors")
        rows.append({"input_ids": answered["token_ids"].tolist(), "loss_mask": [0] * 5 + [1] * 3, "seq_len": 8})

    def held_out(count: int) -> dict[int, bool]:
        datasets.Dataset.from_list(rows[:count]).save_to_disk(tmp_path / "theirs")
        for path in folder.glob("hs_*"):
            if int(path.stem[3:]) >= count:
                path.unlink()
        store = take(tmp_path / "theirs", tmp_path / f"store-{count}", held_out_fraction=0.5)
        return {sequence.sample_id: sequence.held_out for sequence in store}

    everything = held_out(90)
    some = held_out(40)
    assert some.items() <= everything.items()
    assert 10 < sum(everything.values()) < 80
    parts: dict[tuple[int, ...], set[bool]] = {}
    for sequence in Store(tmp_path / "store-90"):
        assert sequence.loss_mask.tolist() == [False] * 5 + [True] * 3
        parts.setdefault(tuple(sequence.token_ids[:5].tolist()), set()).add(sequence.held_out)
    assert len(parts) == 30
    assert all(len(part) == 1 for part in parts.values())


def test_rows_and_files_that_do_not_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chooser, folder, rows = random.Random(7), tmp_path / "theirs" / "hidden_states", []
    folder.mkdir(parents=True)
    for number in range(8):
        tensors = plain(chooser)
        rows.append({"input_ids": tensors["token_ids"].tolist(), "loss_mask": [0, 0, 0, 1, 1, 1], "seq_len": 6})
        if number != 3:
            save_file(tensors, folder / f"hs_{number}.safetensors")
    (folder / "hs_7.safetensors").write_bytes((folder / "hs_6.safetensors").read_bytes())
    rows[7] = rows[6]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "theirs")
    assert len(take(tmp_path / "theirs", tmp_path / "store")) == 6
    said = capsys.readouterr().err
    assert "import: not used: 1 x a row without a file of states (first: row 3)" in said
    assert "import: not used: 1 x the same sequence occurs twice (first: hs_7.safetensors)" in said

    save_file(plain(chooser), folder / "hs_1.safetensors")  # regenerated for other tokens
    save_file(plain(chooser), folder / "hs_8.safetensors")
    rows[2] = rows[2] | {"loss_mask": [0, 1]}
    rows[4] = rows[4] | {"loss_mask": [0, 0, 0, 0, 0, 2]}
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "again")
    folder.rename(tmp_path / "again" / "hidden_states")
    lines = refused(tmp_path / "again", tmp_path / "back", capsys)
    assert [line.rpartition("/")[2] for line in lines] == [
        "hs_1.safetensors: its row has other tokens",
        "hs_2.safetensors: the loss_mask of its row is not a list of 0s and 1s as long as the tokens",
        "hs_4.safetensors: the loss_mask of its row is not a list of 0s and 1s as long as the tokens",
        "hs_8.safetensors: the data set has no row for it",
    ]


@pytest.mark.parametrize("content", ["nothing", "no states", "no data set"])
def test_a_folder_without_states(content: str, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    source.mkdir()
    said = "There are no hidden states in"
    if content == "no states":
        datasets.Dataset.from_list([{"input_ids": [1], "loss_mask": [1]}]).save_to_disk(source)
        said = "has a file of states"
    elif content == "no data set":
        (source / "state.json").write_text("{}")
        said = "as a data set of speculators"
    with pytest.raises(UserError, match=said):
        take(source, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_the_commands(tmp_path: Path) -> None:
    store = make_run(tmp_path, sequences=6) / "store"
    data, back = str(tmp_path / "data"), str(tmp_path / "back" / "store")
    exported = CliRunner().invoke(app, ["export", str(store), "--to", "speculators", "--out", data])
    assert exported.exit_code == 0, exported.output
    ratio = float(exported.stdout.split("--train-data-ratio ")[1])
    assert int(6 * ratio) == 5
    arguments = ["import", data, "--target", str(tmp_path / "target"), "--layer-ids", "1,2,3", "--out", back, "--json"]
    imported = CliRunner().invoke(app, arguments)
    assert imported.exit_code == 0, imported.output
    assert json.loads(imported.stdout)["held_out_sequences"] == 1
    check_same(Store(Path(back)), Store(store))


def test_metadata_is_what_others_skip(tmp_path: Path) -> None:
    """Strings in the header, which the library's own reader returns."""
    export_store(make_store(tmp_path / "store", [make_sequence(random.Random(8))]), "files", tmp_path / "out")
    (path,) = (tmp_path / "out").iterdir()
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"draftsmith", "draftsmith_checksum"}
        assert re.fullmatch("[0-9a-f]{16}", file.metadata()["draftsmith_checksum"])
