"""`draftsmith predict`: what training predicted, and the same for other sampling parameters and other text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError
from draftsmith.store.format import MANIFEST
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train.predict import predict
from draftsmith.train.train import run_train
from tests.unit.tiny_run import make_recipe, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe and a run with a trained drafter."""
    folder = tmp_path_factory.mktemp("predict")
    run_dir = make_run(folder)
    recipe = make_recipe(
        folder,
        drafter={"kind": "eagle3", "draft_vocab_size": 60},
        epochs=1,
        predict_positions=2,
        predict_temperature=0.7,
    )
    run_train(recipe, run_dir)
    return recipe, run_dir


def asking(recipe: Recipe, **sampling: Any) -> Recipe:
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update=sampling)})


def figures(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "checkpoint" / "stage.json").read_text())["figures"]
    return found


def test_it_is_what_training_predicted(run: tuple[Recipe, Path]) -> None:
    recipe, run_dir = run
    greedy = predict(recipe, run_dir)
    assert greedy["predicted_acceptance_length"] == figures(run_dir)["predicted_acceptance_length"]
    assert greedy["own_text"]
    assert greedy["sequences"] == 2
    warm = predict(asking(recipe, temperature=0.7), run_dir)
    assert warm["predicted_acceptance_length"] == figures(run_dir)["predicted_at_temperature"]["greedy_drafts"]
    assert not warm["own_text"]
    assert warm["sampling"] == {"temperature": 0.7, "top_p": 1.0, "top_k": None}
    assert warm["text_sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": None}
    narrow = predict(asking(recipe, temperature=0.7, top_k=1), run_dir)
    assert narrow["predicted_acceptance_length"]["1"] == pytest.approx(
        greedy["predicted_acceptance_length"]["1"], abs=1e-4
    ), "of one token there is nothing to sample"


def sampled_copy(store_dir: Path, out: Path) -> Path:
    """The same sequences, said to be sampled."""
    store = Store(store_dir)
    out.mkdir()
    sampling = store.identity.sampling | {"temperature": 0.7}
    identity = type(store.identity)(**vars(store.identity) | {"sampling": sampling})
    with StoreWriter(out, identity, shard_tokens=100) as writer:
        for sequence in store:
            writer.append(sequence)
        writer.close()
    assert (out / MANIFEST).is_file()
    return out


def test_text_of_another_store(run: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, run_dir = run
    sampled = sampled_copy(run_dir / "store", tmp_path / "sampled")
    found = predict(asking(recipe, temperature=0.7), run_dir, store_dir=sampled)
    assert found["own_text"]
    lengths = found["predicted_acceptance_length"]
    assert 1 < lengths["1"] <= lengths["2"]
    with pytest.raises(
        UserError, match=r"was sampled \(temperature 0\.7\), which does not tell what greedy decoding accepts"
    ):
        predict(recipe, run_dir, store_dir=sampled)
    with pytest.raises(UserError, match="There is no checkpoint"):
        predict(recipe, tmp_path)


def test_the_command(run: tuple[Recipe, Path]) -> None:
    recipe, run_dir = run
    (run_dir.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    command = [
        "predict",
        str(run_dir.parent / "recipe.yaml"),
        "--runs",
        str(run_dir.parent),
        "-s",
        "evaluate.temperature=0.7",
    ]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert (
        "predicted for the target's answers (temperature 0.7), from 2 sequences of its own answers (greedy)"
        in " ".join(said.stdout.split())
    )
    assert "An estimate" in said.stdout
    as_json = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert as_json["predicted_acceptance_length"] == figures(run_dir)["predicted_at_temperature"]["greedy_drafts"]
