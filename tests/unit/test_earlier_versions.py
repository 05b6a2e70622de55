"""What version 0.1.0 left on disk is still read: `tests/fixtures/run_0_1_0`, a run in miniature made by its code."""

import shutil
from pathlib import Path

import pytest

from draftsmith.convert.convert import run_convert
from draftsmith.convert.inspection import inspect
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.engine.speculation import speculative_config
from draftsmith.store.reader import Store
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.acceptance import predict_acceptance
from draftsmith.train.packing import pack
from draftsmith.train.train import run_train
from tests.unit.tiny_run import make_recipe

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_0_1_0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_everything_is_whole(folder: Path) -> None:
    for part in ("store", "checkpoint", "vllm"):
        found = inspect(folder / "run" / part)
        assert found["good"]
        assert found["finished"]
    store = Store(folder / "run" / "store")
    assert [sequence.sample_id for sequence in store] == list(range(6))


def test_the_drafter_is_what_it_was(folder: Path) -> None:
    checkpoint = Checkpoint.load(folder / "run" / "checkpoint")
    kind = drafter_class(checkpoint.kind)
    config = kind.config_class.from_dict(checkpoint.config)
    drafter = kind.from_target(config, load_target_tensors(folder / "target"), checkpoint.draft_token_ids)
    drafter.load_state_dict(checkpoint.tensors)
    store = Store(folder / "run" / "store")
    columns = [store.identity.layer_ids.index(layer) for layer in config.layer_ids]
    held_out = pack((store[row] for row in store.rows(held_out=True)), steps=5).with_layers(columns)
    predicted = predict_acceptance(drafter, [held_out], k=5)
    recorded = checkpoint.training["predicted_acceptance_length"]
    assert predicted == pytest.approx({int(k): value for k, value in recorded.items()}, abs=1e-4)
    assert speculative_config(folder / "run" / "vllm", 2)["method"] == "eagle3"


def test_finished_stages_are_not_run_again(folder: Path) -> None:
    drafter = {"kind": "eagle3", "draft_vocab_size": 40, "intermediate_size": 16}
    recipe = make_recipe(folder, drafter=drafter, lr=1e-2, epochs=1, precision=None)  # left open, as it was then
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    run_train(recipe, folder / "run")
    run_convert(recipe, folder / "run")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")} == before
