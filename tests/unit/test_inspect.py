"""`draftsmith inspect`: its report and its exit status."""

import errno
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.convert.convert import convert_checkpoint
from draftsmith.convert.formats import FORMATS
from draftsmith.convert.inspection import inspect, store_stats, write_plot
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.tensors import TargetTensors, load_target_tensors
from tests.unit.test_formats_of_blocks import CONFIGS, sharing
from tests.unit.test_published import LAYER, PUBLISHED, make_checkpoint
from tests.unit.test_store import HIDDEN, LAYERS, filled, open_writer
from tests.unit.tiny_run import make_run


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["inspect", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_a_good_and_a_damaged_store(tmp_path: Path) -> None:
    filled(tmp_path, form="lossless").close()
    status, said = run(str(tmp_path))
    assert status == 0
    assert "is a store, its stage unfinished" in said
    assert "intact: every checksum matches" in said
    shard = tmp_path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    status, said = run(str(tmp_path))
    assert status == 1
    assert f"{shard} is damaged in bytes" in said
    status, said = run(str(tmp_path), "--json")
    assert status == 1
    damage = json.loads(said)["damage"]
    assert damage["file"] == str(shard)
    assert damage["start"] <= len(data) - 3 < damage["end"] == len(data)
    assert damage["places"] == 1


def test_several_places_are_counted_and_the_first_named(tmp_path: Path) -> None:
    filled(tmp_path).close()
    shards = sorted(tmp_path.glob("shard-*"))
    for shard in shards[1:]:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 128
        shard.write_bytes(data)
    status, said = run(str(tmp_path))
    assert status == 1
    assert f"2 places are damaged. The first: {shards[1]}" in said


def test_other_directories(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match="is not a store"):
            inspect(path)
    (tmp_path / "store").mkdir()
    with pytest.raises(UserError, match="It is a run: inspect"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="`--stats` is for stores"):
        inspect(tmp_path, stats=True)


def test_checkpoint_and_drafter(tmp_path: Path) -> None:
    target = {"name": "tiny", "revision": "r", "config_hash": "c"}
    checkpoint = replace(make_checkpoint(*PUBLISHED["medusa"]), target=target)
    checkpoint.save(tmp_path)
    report = inspect(tmp_path)
    assert report["kind"] == "checkpoint"
    assert report["good"]
    assert (report["about"]["target"], report["about"]["parameters"]) == (
        "tiny",
        sum(weight.count for weight in checkpoint.weights.values()),
    )
    drafter = tmp_path / "vllm"
    drafter.mkdir()
    weights = (tmp_path / "draft.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(weights)
    (drafter / "config.json").write_text(json.dumps({"architectures": ["X"], "draft_vocab_size": 5}))
    stage.StageRun("convert", drafter).finish("x", {}, recipe={})
    status, said = run(str(drafter))
    assert status == 0
    assert "is a drafter for vLLM\n" in said
    assert "does not take as it is: its format is not one of" in said
    record = (tmp_path / "draft.json").read_text()
    for damaged in (record[:-5], record.replace('"kind"', '"sort"')):
        (tmp_path / "draft.json").write_text(damaged)
        status, said = run(str(tmp_path))
        assert status == 1
        assert "its description cannot be used" in said
    (tmp_path / "draft.json").write_text(record.replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(UserError, match="has checkpoint format 99"):
        inspect(tmp_path)
    (tmp_path / "draft.json").write_text(record)
    for folder, weights_file, message in (
        (tmp_path, "draft.safetensors", "draft.safetensors or its description cannot be used"),
        (drafter, "model.safetensors", "model.safetensors is not a whole safetensors file"),
    ):
        (folder / weights_file).write_bytes(weights[:-1])
        status, said = run(str(folder))
        assert status == 1
        assert message in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "and the config says"),
        ({"hidden_size": "wide"}, "No drafter of the kind medusa can be made of the config"),
        ({"layer_ids": "abc"}, "`layer_ids` is 'abc', where a list of whole numbers should be"),
        ({"num_heads": 3}, "missing: "),
        ({"gears": 5}, "The config is not that of a drafter of the kind medusa"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_damaged(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(*PUBLISHED["medusa"])
    checkpoint.save(tmp_path)
    assert inspect(tmp_path)["good"]
    replace(checkpoint, config=checkpoint.config | change).save_record(tmp_path)
    report = inspect(tmp_path)
    assert not report["good"]
    assert message in report["damage"]["message"]
    with pytest.raises(UserError, match=re.escape(message)):  # as conversion says it, without a traceback
        convert_checkpoint(tmp_path, tmp_path / "out", to="vllm")


def test_a_checkpoint_of_a_later_version_s_kind_is_not_called_damaged(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(*PUBLISHED["medusa"])
    checkpoint.save(tmp_path)
    replace(checkpoint, kind="eagle9").save_record(tmp_path)
    with pytest.raises(UserError, match="knows no drafter of the kind `eagle9`"):
        inspect(tmp_path)


def test_a_drafter_whose_tensors_are_not_those_of_its_config_is_damaged(tmp_path: Path) -> None:
    FORMATS["vllm"].write(make_checkpoint(*PUBLISHED["medusa"]), tmp_path)
    assert inspect(tmp_path)["good"]
    record = json.loads((tmp_path / "config.json").read_text())
    for change, message in (({"hidden_size": 48}, "and the config says"), ({"num_heads": 3}, "The checkpoint lacks")):
        (tmp_path / "config.json").write_text(json.dumps(record | change))
        report = inspect(tmp_path)
        assert not report["good"]
        assert message in report["damage"]["message"]
    stated = {name: value for name, value in record["draftsmith"].items() if name != "kind"}
    # One from elsewhere that conversion does not take may be served all the same.
    (tmp_path / "config.json").write_text(json.dumps(record | {"draftsmith": stated, "gears": 5}))
    report = inspect(tmp_path)
    assert report["good"]
    assert "unknown fields" in report["not_compared"]
    assert (
        "its tensors were not compared with its config, which `draftsmith convert` does not take"
        in run(str(tmp_path))[1]
    )


def test_a_file_that_changed_since_its_stage_is_damage(tmp_path: Path) -> None:
    FORMATS["vllm"].write(make_checkpoint(*PUBLISHED["medusa"]), tmp_path)
    files = ("config.json", "model.safetensors")
    stage.StageRun("convert", tmp_path).finish("x", {}, recipe={}, files=files)
    assert inspect(tmp_path)["good"]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value * 2 if value.is_floating_point() else value for name, value in tensors.items()}, path)
    report = inspect(tmp_path)
    assert not report["good"]
    assert "model.safetensors is not as stage.json records it" in report["damage"]["message"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "shard-00000.safetensors"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("shard"):
        filled(tmp_path).close()
    else:
        FORMATS["vllm"].write(make_checkpoint(*PUBLISHED["medusa"]), tmp_path)
    assert inspect(tmp_path)["good"]
    opened = Path.open

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:  # tests may run as root, who may read everything
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=name):
        inspect(tmp_path)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> TargetTensors:
    make_run(folder := tmp_path_factory.mktemp("run"))
    return load_target_tensors(folder / "target")


def drafter_of(kind: str, tensors: TargetTensors) -> Checkpoint:
    """One that every format of the kind can hold."""
    if kind in ("dflash", "dspark"):
        return sharing(kind, tensors)
    configs = dict(PUBLISHED.values()) | CONFIGS
    configs["eagle"] = configs["eagle"] | {"fc_bias": False}
    norms = dict.fromkeys(("norm_before_residual", "fc_norm", "norm_output"), False)
    configs["eagle3"] = LAYER | {"layer_ids": [2, 5, 8], "draft_vocab_size": 20, **norms}
    return make_checkpoint(kind, configs[kind])


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, each in FORMATS.items() for kind in each.layouts])
def test_drafters_of_every_format(name: str, kind: str, tensors: TargetTensors, tmp_path: Path) -> None:
    FORMATS[name].write(drafter_of(kind, tensors), tmp_path, shared=lambda: tensors)
    report = inspect(tmp_path)
    assert report["good"], report
    assert (report["about"]["format"], report["about"]["drafter"]) == (name, kind)
    assert report["kind"] == ("vllm" if name == "vllm" else "drafter")
    status, said = run(str(tmp_path))
    assert status == 0
    assert f"is a drafter{' for vLLM' if name == 'vllm' else ''}, its stage unfinished\n" in said
    file = tmp_path / FORMATS[name].weights_file
    weights = load_file(file)
    first = next(key for key, value in weights.items() if value.is_floating_point())
    save_file(weights | {first: torch.full_like(weights[first], torch.nan)}, file)
    report = inspect(tmp_path)
    assert not report["good"]
    assert f"the tensor {first} has values that are not finite" in report["damage"]["message"]
    file.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")  # as conversions read it, too
    assert inspect(tmp_path)["good"]
    (tmp_path / "pytorch_model.bin").write_bytes((tmp_path / "pytorch_model.bin").read_bytes()[:-200])
    report = inspect(tmp_path)
    assert not report["good"]
    assert "pytorch_model.bin cannot be read" in report["damage"]["message"]


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(UserError, match="target is a model for transformers or vLLM, not a drafter"):
        inspect(tmp_path / "target")


def store_of(directory: Path, texts: list[tuple[list[int], bool]]) -> Store:
    """Sequences of one prompt token, 9, and a response."""
    writer = open_writer(directory)
    for sample_id, (response, held_out) in enumerate(texts):
        ids = torch.tensor([9, *response], dtype=torch.int32)
        states = torch.ones(len(ids), LAYERS, HIDDEN)
        writer.append(Sequence(sample_id, held_out, ids, torch.arange(len(ids)) > 0, states))
    writer.close()
    return Store(directory)


def test_stats_are_counted_by_hand(tmp_path: Path) -> None:
    training = [*range(256)] * 2 + [1000] * 3 + [300]  # distinct: 258; 1000 is the most frequent, 300 the rarest
    store = store_of(tmp_path, [(training, False), ([1000, 300, 5, 4000], True)])
    stats = store_stats(store)
    assert stats["tokens"]["training"] == {
        "sequences": 1,
        "tokens": 517,
        "response_tokens": 516,
        "distinct_response_tokens": 258,
    }
    assert stats["tokens"]["held_out"]["response_tokens"] == 4
    lengths = stats["lengths"]
    assert (lengths["min"], lengths["max"], lengths["mean"]) == (5, 517, 261.0)
    assert sum(row[2] for row in lengths["histogram"]) == 2
    # The 256 most frequent: 1000 and the lowest 255 ids; all 258 cover everything but the token that is only held out.
    assert stats["coverage"] == [
        {"vocabulary": 256, "training": round((3 + 2 * 255) / 516, 4), "held_out": 0.5},
        {"vocabulary": 258, "training": 1.0, "held_out": 0.75},
    ]
    status, said = run(str(tmp_path), "--stats")
    assert status == 0
    assert "training: 1 sequences, 517 tokens, 516 response tokens" in said
    assert json.loads(run(str(tmp_path), "--stats", "--json")[1])["stats"] == stats


def test_stats_without_responses(tmp_path: Path) -> None:
    stats = store_stats(store_of(tmp_path, [([], False)]))
    assert stats["coverage"] == []
    assert run(str(tmp_path), "--stats")[0] == 0


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "store").mkdir()
    stats = store_stats(store_of(tmp_path / "store", [([1, 2, 2], False), ([2], True)]))
    assert run(str(tmp_path / "store"), "--plot", str(tmp_path / "stats.svg"))[0] == 0
    assert "<svg" in (tmp_path / "stats.svg").read_text()
    with pytest.raises(UserError, match=r"Name a \.png"):
        write_plot(stats, tmp_path / "stats.nonsense")
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        write_plot(stats, tmp_path / "nowhere" / "stats.png")
    for path in (tmp_path / "store", tmp_path / "stats"):
        with pytest.raises(UserError, match=r"Name a \.png"):
            write_plot(stats, path)
        assert not path.with_suffix(".png").exists()


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[plots\]'"):
        write_plot({}, tmp_path / "stats.png")
