"""What each stage downloads of a target: a Hub on this machine notes which files it is asked for."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.recipe import Recipe, TargetConfig
from draftsmith.extract.extract import run_extract
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.train import run_train
from tests.hub_server import Hub, use_hub
from tests.unit import tiny_run
from tests.unit.test_target import save_model

TARGET = TargetConfig(model="you/large")
SHARED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
"""What drafters share with the target."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with use_hub(monkeypatch, tmp_path / "hf") as hub:
        yield hub


def publish(hub: Hub, folder: Path) -> tuple[set[str], set[str]]:
    """Put a model's folder on the Hub; returns the names of all its weight files, and of those with shared tensors."""
    hub.add("you/large", {path.name: path.read_bytes() for path in folder.iterdir()})
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}, {"model.safetensors"}
    places = json.loads(index.read_text())["weight_map"]
    return set(places.values()), {places[name] for name in SHARED if name in places}


def downloads(hub: Hub) -> Counter[str]:
    """How often each file was downloaded since the last call."""
    found = [re.fullmatch(r"GET /you/large/resolve/[^/]+/(.+)", request) for request in hub.requests]
    hub.requests.clear()
    return Counter(match[1] for match in found if match)


def weights(files: Counter[str]) -> set[str]:
    return {name for name in files if name.endswith(".safetensors")}


def forget_downloads(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "5KB"])
def test_config_then_shared_tensors_then_all(tmp_path: Path, hub: Hub, tied: bool, max_shard_size: str) -> None:
    """Each file once, and none before it is needed."""
    state = save_model(tmp_path / "model", tied=tied, max_shard_size=max_shard_size)
    every, shared = publish(hub, tmp_path / "model")
    if max_shard_size == "5KB":
        assert 2 * len(shared) < len(every)

    path = prepare_target(TARGET, weights="none")
    first = downloads(hub)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(first)
    assert not weights(first)
    info = describe_target(path, TARGET)
    with pytest.raises(UserError, match=r"model.*safetensors"):
        load_target_tensors(path)

    assert prepare_target(TARGET, weights="shared") == path
    assert downloads(hub) == Counter(shared)
    assert describe_target(path, TARGET).revision == info.revision == hub.repos["you/large"].branches["main"]
    tensors = load_target_tensors(path)
    assert torch.equal(tensors.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(tensors.lm_head, state["lm_head.weight"])
    assert torch.equal(tensors.final_norm_weight, state["model.norm.weight"])

    assert prepare_target(TARGET) == path
    assert downloads(hub) == Counter(every - shared)


def test_tensors_of_other_models_in_the_checkpoint(tmp_path: Path, hub: Hub) -> None:
    """A vision tower's blocks and layers for multi-token prediction are not needed, even where they have an `embed_tokens`."""
    save_model(tmp_path / "model", max_shard_size="5KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"] |= {
        "visual.blocks.0.norm.weight": "vision.safetensors",
        "model.layers.3.embed_tokens.weight": "mtp.safetensors",
        "model.layers.3.mlp.experts.7.up_proj.weight": "mtp.safetensors",
    }
    index.write_text(json.dumps(record))
    for name in ("vision", "mtp"):
        shutil.copy(
            tmp_path / "model" / record["weight_map"]["model.norm.weight"], tmp_path / "model" / f"{name}.safetensors"
        )
    _, shared = publish(hub, tmp_path / "model")
    prepare_target(TARGET, weights="shared")
    assert weights(downloads(hub)) == shared


def test_a_copy_that_is_there_is_used(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded whole before, and then without a network; a part does for training alone, and an engine is refused."""
    save_model(tmp_path / "model", max_shard_size="5KB")
    every, _ = publish(hub, tmp_path / "model")
    part = prepare_target(TARGET, weights="shared")
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert prepare_target(TARGET, weights="shared") == part
        with pytest.raises(UserError, match=r"Could not download the model you/large|is incomplete"):
            prepare_target(TARGET)
    whole = prepare_target(TARGET)
    assert weights(downloads(hub)) == every
    prepare_target(TARGET, weights="shared")
    assert not downloads(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert prepare_target(TARGET) == prepare_target(TARGET, weights="shared") == whole


def test_a_download_that_breaks_off_is_resumed(tmp_path: Path, hub: Hub) -> None:
    state = save_model(tmp_path / "model", max_shard_size="5KB")
    _, shared = publish(hub, tmp_path / "model")
    hub.downloads_to_cut = 1
    path = prepare_target(TARGET, weights="shared")
    files = downloads(hub)
    assert hub.downloads_to_cut == 0
    assert weights(files) == shared
    assert sum(files[name] for name in shared) == len(shared) + 1, "the rest of one file was asked for again"
    assert torch.equal(load_target_tensors(path).lm_head, state["lm_head.weight"])


def test_a_folder_with_a_part_of_the_shards(tmp_path: Path) -> None:
    """Enough for training, and said before an engine starts. Nothing is downloaded: there is no Hub here."""
    model = tmp_path / "model"
    state = save_model(model, max_shard_size="5KB")
    places = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    shared = {places[name] for name in SHARED}
    missing = sorted(set(places.values()) - shared)
    for name in missing:
        (model / name).unlink()
    local = TargetConfig(model=str(model))
    assert prepare_target(local, weights="shared") == prepare_target(local, weights="none") == model
    assert torch.equal(load_target_tensors(model).embedding, state["model.embed_tokens.weight"])
    with pytest.raises(
        UserError, match=rf"incomplete: {missing[0]}, {missing[1]}, {missing[2]}( and \d+ more)? of its shards"
    ):
        prepare_target(local)


@pytest.mark.parametrize(
    "text", ["no json", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}']
)  # fmt: skip
def test_a_wrong_index(tmp_path: Path, text: str) -> None:
    save_model(tmp_path, max_shard_size="5KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    local = TargetConfig(model=str(tmp_path))
    for read in (lambda: prepare_target(local), lambda: load_target_tensors(tmp_path)):
        with pytest.raises(UserError, match=r"index\.json does not map tensors to files beside it"):
            read()


def test_a_damaged_shard(tmp_path: Path) -> None:
    save_model(tmp_path, max_shard_size="5KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / places["model.embed_tokens.weight"]).write_bytes(b"\x08" + b"\0" * 20)
    with pytest.raises(UserError, match="is damaged"):
        load_target_tensors(tmp_path)


# ---- stages ----


def test_training_and_conversion(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole training with the shared tensors' shards; conversions with no weights, or the same shards to verify."""
    shards: list[set[str]] = []

    def describe(path: Path) -> TargetInfo:
        LlamaForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "sharded", max_shard_size="15KB")
        shutil.copy(path / "tokenizer.json", tmp_path / "sharded")
        shards.extend(publish(hub, tmp_path / "sharded"))
        return describe_target(prepare_target(TARGET, weights="none"), TARGET)

    monkeypatch.setattr(tiny_run, "describe_target", describe)
    run_dir = tiny_run.make_run(tmp_path)
    every, shared = shards
    assert 2 * len(shared) < len(every)
    drafter = {"kind": "eagle3", "draft_vocab_size": 60}
    recipe = tiny_run.make_recipe(tmp_path, drafter=drafter, epochs=1).model_copy(update={"target": TARGET})
    forget_downloads(monkeypatch, tmp_path / "for training")
    downloads(hub)
    run_train(recipe, run_dir)
    assert weights(downloads(hub)) == shared

    monkeypatch.setattr("draftsmith.cli.convert.find_spec", lambda name: None)  # or all weights are for vLLM
    for number, (options, wanted) in enumerate(((("--verify",), shared), ((), set()))):
        forget_downloads(monkeypatch, tmp_path / f"for conversion {number}")
        arguments = [
            str(run_dir / "checkpoint"), "--to", "vllm", "--out", str(tmp_path / f"out-{number}"), "--target", "you/large"
        ]  # fmt: skip
        done = CliRunner().invoke(app, ["convert", *arguments, *options], catch_exceptions=False)
        assert done.exit_code == 0
        files = downloads(hub)
        assert "config.json" in files
        assert weights(files) == wanted


@pytest.mark.parametrize("machines", [None, "all"])
def test_extraction(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, machines: str | None) -> None:
    """All weights where the engines are; the machine that hands out prompts to others needs none."""
    save_model(tmp_path / "model", max_shard_size="5KB")
    every, _ = publish(hub, tmp_path / "model")
    recipe = Recipe.model_validate({
        "name": "run", "target": {"model": "you/large"},
        "extract": {"prompts": {"path": str(tmp_path / "prompts.jsonl")}, "machines": machines},
    })  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    stop = mock.Mock(side_effect=RuntimeError("all is downloaded"))
    monkeypatch.setattr("draftsmith.extract.extract.describe_target", stop)
    with pytest.raises(RuntimeError, match="all is downloaded"):
        run_extract(recipe, tmp_path / "run")
    assert weights(downloads(hub)) == (every if machines is None else set())


def test_a_folder_without_some_shards_is_told_what_it_needs(tmp_path: Path) -> None:
    """Its shards tell it apart from other fine-tunes, which a Hub commit's hash does for the Hub's."""
    run_dir = tiny_run.make_run(tmp_path)
    target = tmp_path / "target"
    LlamaForCausalLM.from_pretrained(target).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    (target / "model.safetensors").unlink()
    places = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())["weight_map"]
    shared = {places[name] for name in SHARED}
    assert len(shared) < len({*places.values()})
    for name in ("model.safetensors.index.json", *shared):
        shutil.copy(tmp_path / "sharded" / name, target)
    missing = len({*places.values()}) - len(shared)
    with pytest.raises(
        UserError, match=rf"target_revision is .*The target's folder {target} lacks {missing} of its shards"
    ):
        run_train(tiny_run.make_recipe(tmp_path), run_dir)
