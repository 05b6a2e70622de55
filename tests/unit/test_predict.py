"""`draftsmith predict`: what training predicted, the same for other sampling parameters and other text, and for trees."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import convert_checkpoint
from draftsmith.drafters.checkpoint import WEIGHTS
from draftsmith.run.atomic_io import sha256_of
from draftsmith.run.errors import UserError
from draftsmith.store.format import MANIFEST
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.target import step_time
from draftsmith.target.step_time import packed, step_times
from draftsmith.train.predict import predict
from draftsmith.train.predict_trees import predict_trees
from draftsmith.train.train import run_train
from tests.unit.tiny_run import make_recipe, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe and a run with a trained drafter."""
    folder = tmp_path_factory.mktemp("predict")
    run_dir = make_run(folder)
    recipe = make_recipe(
        folder,
        drafter={"kind": "eagle3", "draft_vocab_size": 60, "fc_norm": False},
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


def sampled_copy(store_dir: Path, out: Path, **sampled: Any) -> Path:
    """The same sequences, said to be sampled."""
    store = Store(store_dir)
    out.mkdir()
    sampling = store.identity.sampling | {"temperature": 0.7} | sampled
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


def test_text_that_was_trained_on_is_left_out(
    run: tuple[Recipe, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another store holds out other conversations."""
    recipe, run_dir = run
    store = Store(run_dir / "store")
    held_out, trained = store.rows(held_out=True), store.rows(held_out=False)
    (tmp_path / "other").mkdir()
    with StoreWriter(tmp_path / "other", store.identity, shard_tokens=100) as writer:
        for row in [held_out[0], *trained[:3]]:
            writer.append(replace(store[row], held_out=True))
        writer.close()
    assert predict(recipe, run_dir, store_dir=tmp_path / "other")["sequences"] == 1
    assert "3 of 4 held-out sequences" in " ".join(capsys.readouterr().err.split())


def test_text_written_with_penalties_is_no_plain_text_of_the_target(run: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, run_dir = run
    asked, penalized = asking(recipe, temperature=0.7), {"repetition_penalty": 1.1}
    found = predict(asked, run_dir, store_dir=sampled_copy(run_dir / "store", tmp_path / "penalized", **penalized))
    assert not found["own_text"]


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


def test_the_command_for_a_drafter_of_few_draft_tokens(tmp_path: Path) -> None:
    """Fewer than evaluation asks for by default."""
    run_dir = make_run(tmp_path)
    run_train(make_recipe(tmp_path, drafter={"kind": "medusa", "num_heads": 2}, epochs=0.1), run_dir)
    said = CliRunner().invoke(app, ["predict", str(run_dir / "store"), str(run_dir), "--json"])
    assert said.exit_code == 0, said.output
    assert [*json.loads(said.stdout)["predicted_acceptance_length"]] == ["1", "2"]


def test_trees(run: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run_dir = run
    found = predict_trees(recipe, run_dir, tokens=[4, 2, 12], depth=2, top_k=3)
    assert found == json.loads((run_dir / "trees.json").read_text())
    assert (found["sequences"], found["depth"], found["top_k"], found["own_text"]) == (2, 2, 3, True)
    chains = {k: chain["acceptance_length"] for k, chain in found["chains"].items()}
    assert chains == predict(recipe, run_dir)["predicted_acceptance_length"]
    assert [*found["trees"]] == ["2", "4", "12"]
    lengths = [tree["acceptance_length"] for tree in found["trees"].values()]
    assert chains["1"] <= lengths[0]
    assert lengths == sorted(lengths)
    assert chains["2"] < lengths[-1], "nine pairs of tokens hold the one of the chain"
    ways = {(shape, int(count)): one for shape in ("chain", "tree") for count, one in found[f"{shape}s"].items()}
    best = max(ways, key=lambda way: ways[way]["acceptance_length"] / ways[way]["step_cost"])
    assert found["best"] == {"shape": best[0], "tokens": best[1]}
    assert found["step"]["seconds"] > 0
    assert found["step"]["context"] == 23

    # Slower steps for more tokens: the cost is looked up at the draft tokens and one more, by the step of one.
    monkeypatch.setattr(
        "draftsmith.train.predict_trees.step_times", lambda _, counts, context: {n: n / 4 for n in counts}
    )
    dear = predict_trees(recipe, run_dir, tokens=[2, 4], depth=2, top_k=3, sequences=1)
    assert dear["sequences"] == 1
    assert {count: tree["step_cost"] for count, tree in dear["trees"].items()} == {"2": 3.0, "4": 5.0}
    assert {count: chain["step_cost"] for count, chain in dear["chains"].items()} == {"1": 2.0, "2": 3.0}
    free = predict_trees(recipe, run_dir, tokens=[2], step_cost=False)
    assert free["best"] is None
    assert free["step"] is None
    assert free["depth"] == 5

    # Text that the target did not write says little of what it would accept; sampled text says nothing.
    foreign = sampled_copy(run_dir / "store", tmp_path / "foreign", mode="prefill")
    assert not predict_trees(recipe, run_dir, tokens=[2], step_cost=False, store_dir=foreign)["own_text"]
    sampled = sampled_copy(run_dir / "store", tmp_path / "sampled")
    with pytest.raises(UserError, match="which does not tell what greedy decoding accepts"):
        predict_trees(recipe, run_dir, tokens=[2], store_dir=sampled)

    with pytest.raises(
        UserError, match="A tree of 13 tokens was asked for, and with --tree-depth 2 and --tree-top-k 3 there are 12"
    ):
        predict_trees(recipe, run_dir, tokens=[13], depth=2, top_k=3)
    with pytest.raises(UserError, match=r"answers are sampled \(temperature 0\.7\), and what a tree accepts"):
        predict_trees(asking(recipe, temperature=0.7), run_dir, tokens=[4])


def test_a_store_and_a_drafter_without_a_recipe(run: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, run_dir = run

    def said(*arguments: str) -> Any:
        done = CliRunner().invoke(app, ["predict", *arguments, "--json"], catch_exceptions=False)
        return json.loads(done.stdout)

    store = str(run_dir / "store")
    expected = predict(recipe, run_dir)["predicted_acceptance_length"]
    for drafter in (run_dir, run_dir / "checkpoint"):
        assert said(store, str(drafter))["predicted_acceptance_length"] == expected
    warm = said(store, str(run_dir), "-s", "evaluate.temperature=0.7")
    assert warm["sampling"]["temperature"] == 0.7
    trees = said(store, str(run_dir / "checkpoint"), "--tree", "4", "--no-step-cost")
    assert {k: trees["chains"][k]["acceptance_length"] for k in expected} == expected
    assert trees["checkpoint"] == sha256_of(run_dir / "checkpoint" / WEIGHTS)
    for arguments, why in (
        ([store, str(run_dir), "--store", store], "Name the store once"),
        ([store, str(run_dir / "store")], "neither the folder of a run"),
        ([store, str(tmp_path)], "neither the folder of a run"),
    ):
        with pytest.raises(UserError, match=why):
            said(*arguments)


def test_the_card_of_an_export_names_sglangs_flags(
    run: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run_dir = run
    checkpoint = run_dir / "checkpoint"

    def card(name: str, **options: Any) -> str:
        to = "specforge" if name != "vllm" else name
        convert_checkpoint(checkpoint, tmp_path / name, to=to, **options)
        return (tmp_path / name / "README.md").read_text()

    def flags(text: str) -> list[str]:
        return re.findall(r"--speculative-(?:num-steps|eagle-topk|num-draft-tokens) (\d+)", text)

    # Checking is free: the largest tree is the best. It costs its tokens: the shortest chain is.
    monkeypatch.setattr(
        "draftsmith.train.predict_trees.step_times", lambda _, counts, context: dict.fromkeys(counts, 0.1)
    )
    predict_trees(recipe, run_dir, tokens=[2, 9], depth=3, top_k=3)
    said = card("free")
    assert "--speculative-algorithm EAGLE3" in said
    assert "| tree of 9 |" in said
    assert flags(said) == ["3", "3", "10"]
    assert "## Trees" not in card("vllm"), "vLLM has no trees"
    monkeypatch.setattr(
        "draftsmith.train.predict_trees.step_times", lambda _, counts, context: {n: n**2 for n in counts}
    )
    predict_trees(recipe, run_dir, tokens=[2, 9], depth=3, top_k=3)
    assert flags(card("dear")) == ["1", "1", "2"]
    predict_trees(recipe, run_dir, tokens=[2, 9], depth=3, top_k=3, step_cost=False)
    assert flags(said := card("unmeasured")) == []
    assert "| tree of 9 |" in said

    found = json.loads((run_dir / "trees.json").read_text())
    (run_dir / "trees.json").write_text(json.dumps(found | {"checkpoint": "of other weights"}))
    assert "## Trees" not in card("stale")


def test_the_command_for_trees(run: tuple[Recipe, Path]) -> None:
    recipe, run_dir = run
    (run_dir.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    command = ["predict", str(run_dir.parent / "recipe.yaml"), "--runs", str(run_dir.parent), "--tree"]
    said = CliRunner().invoke(app, [*command, "2,8", "--tree-depth", "2", "--tree-top-k", "3"])
    assert said.exit_code == 0, said.output
    text = " ".join(said.stdout.split())
    assert "from 2 sequences of the target's own greedy answers" in text
    for line in (
        "chain of 1 ",
        "chain of 2 ",
        "tree of 2 ",
        "tree of 8 ",
        "Most tokens per cost, drafting not counted: the ",
    ):
        assert line in text
    as_json = json.loads(CliRunner().invoke(app, [*command, "2,8", "--no-step-cost", "--json"]).stdout)
    assert as_json["trees"].keys() == {"2", "8"}
    for wrong in ("", "3,", "0", "2;8", "5000"):
        refused = CliRunner().invoke(app, [*command, wrong])
        assert isinstance(refused.exception, UserError)
        assert "is not a list of numbers of draft tokens" in str(refused.exception)


def test_times_of_steps_are_of_the_tokens_and_of_the_same_cache() -> None:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=30)
    )
    seen = []
    forward = model.forward

    def spy(**named: Any) -> Any:
        cache = named.get("past_key_values")
        seen.append((named["input_ids"].shape[1], 0 if cache is None else cache.get_seq_length()))
        return forward(**named)

    model.forward = spy
    times = step_times(model, [5, 1, 17, 5], context=9, repeats=2)
    assert times.keys() == {1, 5, 17}
    assert all(seconds > 0 for seconds in times.values())
    assert seen == [(9, 0), *[(1, 9), (5, 9), (17, 9)] * 3]


def test_the_clock_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on while Python goes on."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    step_time._wait(torch.device("cpu"))
    assert waited == []
    step_time._wait(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_without_onednn_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(step_time, "_product", lambda *_: pytest.fail("computed by packed weights"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with packed(model):
        assert model(torch.ones(1, 4)).shape == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=30,
            mlp_bias=True,
        )
    ).to(dtype)
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.bias)
    tokens = torch.arange(6)[None]
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]

    def replaced() -> int:
        return sum("forward" in vars(layer) for layer in layers)

    with torch.inference_mode():
        expected = model(input_ids=tokens).logits
        with packed(model):
            assert replaced() == (len(layers) if dtype == torch.float32 else 0)
            found = model(input_ids=tokens).logits
        assert replaced() == 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_sizes_that_no_tree_has_are_refused_at_once(tmp_path: Path) -> None:
    for option in ("--tree-depth", "--tree-top-k"):
        done = CliRunner().invoke(app, ["predict", str(tmp_path / "recipe.yaml"), "--tree", "4", option, "1000000"])
        assert done.exit_code == 2
        assert "less than or equal to 1024" in done.output
