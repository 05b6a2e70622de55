"""`draftsmith publish` against a local Hub server: uploads, refusals and interruptions."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.cli import app, stages
from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.convert.inspection import inspect
from draftsmith.convert.model_card import render as render_card
from draftsmith.convert.publish import publish
from draftsmith.data.results_in_words import changed_answers
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run import stage
from draftsmith.run.atomic_io import sha256_of, write_bytes, write_json
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.weights import in_memory
from draftsmith.serve import server
from draftsmith.serve.evaluation import evaluate as evaluation
from draftsmith.serve.evaluation.report import render
from draftsmith.target.hub import local_directory
from draftsmith.target.prepare import target_name
from tests.hub_server import READ_TOKEN, TOKEN, Hub, use_hub
from tests.unit.test_serve import _results

REPO = "me/tiny-drafter"
UPLOADED = {"README.md", "config.json", "model.safetensors", "eval/results.json", "eval/report.html"}


def make_run(folder: Path, *, seed: int = 0, quantize: str | None = None, **target: Any) -> Path:
    """`folder/runs/tiny` with every stage finished and a random drafter. `target` is the recipe's section."""
    recipe = Recipe.model_validate({
        "name": "tiny",
        "target": {"model": str(folder / "models" / "tiny-target"), "dtype": "float32", **target},
        "extract": {"prompts": {"path": str(folder / "prompts.jsonl")}},
        "convert": {"quantize": quantize},
    })  # fmt: skip
    run_dir = folder / "runs" / "tiny"
    kind = drafter_class("eagle3")
    config = {
        "layer_ids": [1, 2, 3], "hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters":
        {"rope_theta": 1e4, "rope_type": "default"}, "max_position_embeddings": 64, "vocab_size": 50, "draft_vocab_size": 20,
        "norm_before_residual": False, "fc_norm": True, "norm_output": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    shapes = kind.shapes(kind.config_class.from_dict(config))
    # Finished before training, as in a run: the card leaves out a newer store, which was not trained on.
    stage.claim(run_dir / "store", fresh=True)
    counts = {"sequences": 12, "held_out_sequences": 2, "tokens": 400}
    finish(run_dir / "store", "extract", recipe, {"target", "extract"}, counts)
    stage.claim(run_dir / "checkpoint", fresh=True)
    training = {
        "steps": 7, "tokens": 1234, "parameters_trained": 5678, "predicted_acceptance_length": {"1": 1.25, "2": 1.5},
    }  # fmt: skip
    Checkpoint(
        kind="eagle3",
        config=config,
        target={"name": target_name(recipe.target), "revision": "weights-12ab", "config_hash": "c" * 64},
        draft_token_ids=torch.arange(20),
        training=training,
        weights=in_memory({name: torch.randn(shape) for name, shape in shapes.items()}),
    ).save(run_dir / "checkpoint")
    finish(run_dir / "checkpoint", "train", recipe, {"seed", "target", "train"}, training)
    run_convert(recipe, run_dir)
    evaluate(run_dir, recipe)
    return run_dir


def finish(
    directory: Path, name: str, recipe: Recipe, sections: set[str], figures: dict[str, Any], *files: str
) -> None:
    sections_read = recipe.model_dump(mode="json", include=sections)
    stage.StageRun(name, directory, started=0.0).finish(name, figures, recipe=sections_read, files=files)


def evaluate(run_dir: Path, recipe: Recipe, *, wrong: bool = False) -> None:
    """Write an evaluation of the drafter with made-up figures; `wrong`: one that found changed answers."""
    drafter, directory = run_dir / "vllm", run_dir / "eval"
    results = _results()
    if wrong:
        results["suites"]["held_out"]["at_k"]["2"]["fidelity"] |= {"differing": 4, "mismatches": 1, "verdict": "wrong"}  # type: ignore[typeddict-item]
    results["drafter_sha256"] = {name: sha256_of(drafter / name) for name in ("config.json", "model.safetensors")}
    stage.claim(directory, fresh=True)
    write_json(directory / "results.json", results)
    write_bytes(directory / "report.html", render(results).encode())
    eager = recipe.model_copy(update={"engine": EngineConfig(enforce_eager=True)})  # a record has what the engines took
    finish(directory, "evaluate", eager, {"engine", "evaluate"}, dict(results), "results.json", "report.html")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with use_hub(monkeypatch, tmp_path / "hf") as hub:
        yield hub


def draftsmith(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", *arguments],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def serve_command(card: str) -> str:
    """The serving command on a card."""
    found = re.search(r"## Usage\n\n```bash\n(.*?)\n```", card, re.DOTALL)
    assert found is not None
    return found[1]


def test_publish_and_pull(run_dir: Path, hub: Hub) -> None:
    done = draftsmith("publish", str(run_dir), "--repo", REPO, "--license", "mit", "--base-model", "you/target")
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/{REPO}" in said(done)
    repo = hub.repos[REPO]
    files = repo.files()
    assert set(files) == UPLOADED | {".gitattributes"}
    for name in ("config.json", "model.safetensors"):
        assert files[name].data == (run_dir / "vllm" / name).read_bytes()
    for name in ("results.json", "report.html"):
        assert files[f"eval/{name}"].data == (run_dir / "eval" / name).read_bytes()
    assert files["model.safetensors"].lfs
    assert not repo.private
    assert repo.messages == ["Drafter, model card and evaluation"]
    assert hub.requested("PUT") == 1

    # Unchanged files are not sent again, and there is no second commit.
    done = draftsmith(
        "publish", str(run_dir / "vllm"), "--repo", REPO, "--license", "mit", "--base-model", "you/target", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "nothing has changed" in said(done)
    assert json.loads(done.stdout)["commit"] == repo.branches["main"]
    assert len(repo.messages) == hub.requested("PUT") == 1

    # By its id, with a download that is interrupted and resumed.
    hub.downloads_to_cut = 1
    done = draftsmith("inspect", REPO, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["kind"], report["good"], report["finished"]) == ("vllm", True, True)
    assert (Path(report["path"]) / "model.safetensors").read_bytes() == files["model.safetensors"].data
    assert hub.downloads_to_cut == 0


def test_card(run_dir: Path) -> None:
    card = publish(run_dir, REPO, license="mit", base_model="you/target", dry_run=True)["card"]
    parsed = ModelCard(card)
    data = parsed.data
    assert (data.license, data.base_model, data.library_name, data.pipeline_tag) == (
        "mit",
        "you/target",
        "vllm",
        "text-generation",
    )
    assert {"speculative-decoding", "eagle3", "draftsmith"} <= set(data.tags)
    assert data.model_name == "tiny-drafter"
    results = _results()
    measured = {(found.dataset_name, found.metric_type): found.metric_value for found in data.eval_results}
    assert measured == {
        (name, metric): round(suite[metric], 3)  # type: ignore[literal-required]
        for name, suite in results["suites"].items()
        for metric in ("acceptance_length", "speedup", "speedup_over_fastest_baseline")
    }
    assert {found.metric_name for found in data.eval_results} == {
        "Acceptance length, 2 speculative tokens",
        "Speedup over the baseline in float32, 2 speculative tokens",
        "Speedup of the fastest dtype over the machine's fastest baseline, 2 speculative tokens",
    }
    assert serve_command(card) == (
        "python -m vllm.entrypoints.openai.api_server --model you/target --dtype float32 --enforce-eager \\\n"
        f"""    --speculative-config '{{"method": "eagle3", "model": "{REPO}", "num_speculative_tokens": 2}}'"""
    )
    for text in (
        "a draft vocabulary of 20 tokens",
        "7 steps, 1,234 tokens",
        "10 conversations and 2 held out",
        "prompts.jsonl",
        "With a target on P, 2 cores, 8 GiB, no GPU",
        "vllm 0.32.0",
        "| held_out | 2 | 1.700 |",
        "| 1.29 (1.21 to 1.37; 1.30) | 1.12 (1.05 to 1.20; 1.14) | 0.96 to 1.04 |",
        "speedup: **1.29×** (median of starts 1.30×) over decoding without speculation in float32; over the machine's fastest baseline (baseline, bfloat16), K = 2, float32: 1.12× (median 1.14×)",
        "The drafter was made for tiny-target",
    ):
        assert text in card, card
    assert str(run_dir.parents[1]) not in card


@pytest.fixture
def wrong_run(run_dir: Path) -> Path:
    """A run whose evaluation found that the drafter changes the target's answers."""
    record = stage.read(run_dir / "checkpoint")
    assert record is not None
    recipe = {"name": "tiny", "extract": {"prompts": {"path": "p.jsonl"}}} | record["recipe"]
    evaluate(run_dir, Recipe.model_validate(recipe), wrong=True)
    return run_dir


def test_figures_of_a_drafter_that_changes_answers_are_not_published(wrong_run: Path, hub: Hub) -> None:
    done = draftsmith("publish", str(wrong_run), "--repo", REPO, "--license", "mit")
    assert done.returncode == 2
    assert "changes the target's answers: held_out, K = 2: 4 of" in said(done)
    assert "--without-evaluation" in said(done)
    assert not hub.repos
    done = draftsmith("publish", str(wrong_run), "--repo", REPO, "--license", "mit", "--without-evaluation")
    assert done.returncode == 0, done.stderr
    assert set(hub.repos[REPO].files()) == UPLOADED - {"eval/results.json", "eval/report.html"} | {".gitattributes"}


def test_an_evaluation_that_finds_changed_answers_says_so_on_the_card(
    wrong_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finds_them(recipe: Recipe, run_dir: Path) -> None:
        raise evaluation.WrongAnswersError("changed")

    monkeypatch.setattr(evaluation, "run_evaluate", finds_them)
    recipe = Recipe.model_validate(
        {"name": "tiny", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "p.jsonl"}}}
    )
    with pytest.raises(evaluation.WrongAnswersError):
        stages.evaluate_stage(recipe, wrong_run)
    card = (wrong_run / "vllm" / "README.md").read_text()
    assert "**Do not serve it: in its evaluation the text changed** (held_out, K = 2: 4 of" in card
    assert "Measured speedup" not in card
    assert "## Evaluation" in card


def measured_card(run_dir: Path, results: dict[str, Any], **engine: Any) -> str:
    """The card of the run's drafter with these results of engines with more options."""
    record = stage.read(run_dir / "eval")
    assert record is not None
    record["recipe"]["engine"] |= engine
    return render_card(Checkpoint.load(run_dir / "checkpoint"), evaluate=record | {"figures": results})


def test_the_card_says_of_what_a_speedup_is(run_dir: Path) -> None:
    results: dict[str, Any] = dict(_results())
    assert "`--dtype" not in measured_card(run_dir, results)
    timed = results["suites"]["held_out"]["throughput"]
    timed["configurations"]["K = 2, bfloat16"] = timed["configurations"]["K = 2, float32"] | {"dtype": "bfloat16"}
    timed["fastest_speculative"] = "K = 2, bfloat16"
    card = measured_card(run_dir, results)
    assert "over the machine's fastest baseline (baseline, bfloat16), K = 2, bfloat16: 1.12×" in card
    assert "`--dtype bfloat16` had more tokens per second there than float32, measured one after the other." in card


def test_the_card_names_the_numbers_that_were_chosen_from(run_dir: Path) -> None:
    results: dict[str, Any] = dict(_results()) | {"toss_up": []}
    recipe = stage.read(run_dir / "eval")
    assert recipe is not None
    assert recipe["recipe"]["evaluate"]["k"] == [1, 2, 3, 4]
    assert "2 speculative tokens: the fastest of 1, 2, 3 in the evaluation." in measured_card(run_dir, results)
    results["toss_up"] = [3]
    assert "in the evaluation; within the errors, 3 may be as fast." in measured_card(run_dir, results)
    # `evaluate.acceptance_k` is measured too, and was not to be chosen.
    recipe["recipe"]["evaluate"]["k"] = [2]
    card = render_card(
        Checkpoint.load(run_dir / "checkpoint"), evaluate=recipe | {"figures": results | {"toss_up": []}}
    )
    assert "2 speculative tokens: the only number that was tried in the evaluation." in card


def test_the_card_serves_what_was_measured(run_dir: Path) -> None:
    options = {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8", "download_dir": "/home/me"}
    card = measured_card(run_dir, dict(_results()), tensor_parallel_size=2, options=options)
    arguments = shlex.split(serve_command(card).replace("\\\n", ""))
    for flag, value in (("tensor-parallel-size", "2"), ("quantization", "fp8_per_channel"), ("kv-cache-dtype", "fp8")):
        assert arguments[arguments.index(f"--{flag}") + 1] == value
    assert (
        'float32; `tensor_parallel_size: 2`; `quantization: "fp8_per_channel"`; `kv_cache_dtype: "fp8"`; vllm' in card
    )
    assert "/home/me" not in card


def test_the_card_has_the_overrides_of_recipe_and_target_in_one_flag(run_dir: Path) -> None:
    record, drafter = stage.read(run_dir / "eval"), Checkpoint.load(run_dir / "checkpoint")
    assert record is not None
    record["recipe"]["engine"]["options"] = {"hf_overrides": {"a": 1}}
    overridden = replace(drafter, target=drafter.target | {"hf_overrides": {"b": 2}})
    card = render_card(overridden, evaluate=record | {"figures": dict(_results())})
    arguments = shlex.split(serve_command(card).replace("\\\n", ""))
    assert arguments.count("--hf-overrides") == 1
    assert json.loads(arguments[arguments.index("--hf-overrides") + 1]) == {"a": 1, "b": 2}


def test_another_methods_wrong_answers_are_not_the_drafters(run_dir: Path) -> None:
    results: dict[str, Any] = dict(_results())
    suite = results["suites"]["held_out"]
    wrong = suite["methods"]["lookup"]["fidelity"] | {"verdict": "wrong"}
    suite["methods"]["lookup"] |= {"fidelity": wrong}
    suite["throughput"]["fidelity"] = {"lookup, float32": wrong}
    results["sampled_fidelity"] = {"lookup": {"verdict": "wrong"}}
    assert len(changed_answers(results | {"sampled_fidelity": {}}, methods=True)) == 4, "two suites"
    assert not changed_answers(results, methods=False)
    card = measured_card(run_dir, results)
    assert "Measured speedup" in card
    assert "Do not serve it" not in card
    suite["throughput"]["fidelity"] = {"K = 2, float32": wrong}
    assert "Do not serve it" in measured_card(run_dir, results)


def test_the_card_says_how_predicted_text_was_sampled(run_dir: Path) -> None:
    drafter = Checkpoint.load(run_dir / "checkpoint")
    for sampled, said_of_it in (
        ({"temperature": 0.0}, "held-out text, greedy, as predicted"),
        (
            {"temperature": 0.8, "top_p": 0.95, "top_k": None},
            "held-out text, temperature 0.8, top-p 0.95, as predicted",
        ),
        (None, "which the target did not write, so this is an estimate for greedy answers"),
    ):
        assert said_of_it in render_card(replace(drafter, training=drafter.training | {"text_sampling": sampled}))


def test_the_card_says_that_there_were_other_stores(run_dir: Path) -> None:
    drafter, train, extract = (
        Checkpoint.load(run_dir / "checkpoint"),
        stage.read(run_dir / "checkpoint"),
        stage.read(run_dir / "store"),
    )
    assert train is not None
    assert "more store" not in render_card(drafter, train=train, extract=extract)
    train["recipe"]["train"]["extra_stores"] = [{"path": "/a/store"}, {"path": "/b/store"}]
    card = render_card(drafter, train=train, extract=extract)
    assert "prompts from prompts.jsonl; and those of 2 more stores, which this card does not know" in card
    assert "/a/store" not in card


def test_a_drafter_of_an_earlier_checkpoint_is_not_evaluated(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures would stand beside what the newer one predicts."""
    record = stage.read(run_dir / "checkpoint")
    assert record is not None
    recipe = Recipe.model_validate({"name": "tiny", "extract": {"prompts": {"path": "p.jsonl"}}} | record["recipe"])
    saved = Checkpoint.load(run_dir / "checkpoint")
    replace(saved, training=saved.training | {"steps": 8}).save(run_dir / "checkpoint")
    with pytest.raises(
        UserError, match=r"was not made from the checkpoint in .*, which is newer\. Run `draftsmith convert`"
    ):
        evaluation.run_evaluate(recipe, run_dir)
    server.served_method(recipe, run_dir, 1)  # which measures nothing, and goes on
    assert "The run was trained again since the drafter in" in capsys.readouterr().err
    run_convert(recipe, run_dir)
    capsys.readouterr()
    server.served_method(recipe, run_dir, 1)
    assert "trained again" not in capsys.readouterr().err
    with pytest.raises(UserError) as refused:  # for its target, which is not there
        evaluation.run_evaluate(recipe, run_dir)
    assert "newer" not in str(refused.value)


def test_a_dry_run_refuses_what_can_be_no_branch(run_dir: Path) -> None:
    assert publish(run_dir, REPO, evaluation=None, dry_run=True, revision="eagle3/v2.1")["revision"] == "eagle3/v2.1"
    for name in ("", "a b", "a..b", "/a", "a/", "-a", "a~1", "a:b"):
        with pytest.raises(UserError, match="is not a branch's name"):
            publish(run_dir, REPO, evaluation=None, dry_run=True, revision=name)


def test_card_without_measurement(run_dir: Path) -> None:
    done = publish(run_dir, REPO, evaluation=None, dry_run=True)
    assert set(done["files"]) == {"README.md", "config.json", "model.safetensors"}
    card = done["card"]
    assert "## Predicted acceptance length" in card
    assert "| 2 | 1.500 |" in card
    assert "## Evaluation" not in card
    data = ModelCard(card).data
    assert (data.eval_results, data.base_model, data.license) == (None, None, None)
    assert "--model TARGET --dtype float32 \\" in serve_command(card)
    assert "`TARGET` is tiny-target" in card
    # Conversion writes the same card.
    beside = ModelCard((run_dir / "vllm" / "README.md").read_text())
    assert beside.data.tags == data.tags
    assert "THIS_DIRECTORY" in serve_command(beside.content)


@pytest.mark.parametrize(("predicted", "k"), [({}, 2), ({"1": 1.2}, 1), ({"1": 1.2, "2": 1.3}, 2)])
def test_the_card_asks_for_no_more_tokens_than_the_drafter_drafts(
    run_dir: Path, predicted: dict[str, float], k: int
) -> None:
    """Stock vLLM, for which the command is, does not refuse more of P-EAGLE and DFlash."""
    drafter = Checkpoint.load(run_dir / "checkpoint")
    config = drafter.config | {"num_depths": 2, "mask_token_id": 0}
    training = drafter.training | {"predicted_acceptance_length": predicted}
    card = render_card(replace(drafter, kind="p_eagle", config=config, training=training))
    assert f'"num_speculative_tokens": {k}' in serve_command(card)


def test_a_target_that_vllm_serves_with_overrides_alone(run_dir: Path) -> None:
    drafter = Checkpoint.load(run_dir / "checkpoint")
    overrides = {"architectures": ["TransformersForCausalLM"], "logit_scale": 0.5}
    card = render_card(replace(drafter, target=drafter.target | {"hf_overrides": overrides}).check())
    arguments = shlex.split(serve_command(card).replace("\\\n", ""))
    assert json.loads(arguments[arguments.index("--hf-overrides") + 1]) == overrides
    assert "--hf-overrides" not in serve_command(render_card(drafter))
    with pytest.raises(UserError, match="record of its target or its training is malformed"):
        replace(drafter, target=drafter.target | {"hf_overrides": "architectures"}).check()


def test_an_evaluation_writes_the_card_beside_the_drafter(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "vllm" / "README.md"
    before = path.read_text()
    assert "## Evaluation" not in before
    recipe = Recipe.model_validate(
        {"name": "tiny", "target": {"model": "a/b"}, "extract": {"prompts": {"path": "p.jsonl"}}}
    )
    monkeypatch.setattr(evaluation, "run_evaluate", lambda recipe, run_dir: {"finished": True})
    assert stages.evaluate_stage(recipe, run_dir) == {"finished": True}
    card = path.read_text()
    for text in (
        "## Evaluation",
        "| held_out | 2 | 1.700 |",
        "| 1.29 (1.21 to 1.37; 1.30) | 1.12 (1.05 to 1.20; 1.14) | 0.96 to 1.04 |",
        "speedup: **1.29×** (median of starts 1.30×) over decoding without speculation in float32; over the machine's fastest baseline (baseline, bfloat16), K = 2, float32: 1.12× (median 1.14×)",
        "`../eval/results.json`",
        "THIS_DIRECTORY",
        "7 steps, 1,234 tokens",
    ):
        assert text in card, card
    assert ModelCard(card).data.tags == ModelCard(before).data.tags
    assert str(run_dir.parents[1]) not in card

    # A card never shows the figures of another drafter.
    (run_dir / "vllm" / "config.json").write_text((run_dir / "vllm" / "config.json").read_text() + "\n")
    path.write_text(before)
    stages.evaluate_stage(recipe, run_dir)
    assert path.read_text() == before
    assert "the drafter's card does not show this evaluation: " in capsys.readouterr().err


def test_dry_run_contacts_nothing(run_dir: Path, hub: Hub) -> None:
    done = CliRunner().invoke(app, ["publish", str(run_dir), "--repo", REPO, "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    for name in UPLOADED - {"README.md"}:
        folder = run_dir if name.startswith("eval/") else run_dir / "vllm"
        assert f"{(folder / name).stat().st_size:,} bytes  {name}\n" in done.stdout
    card = done.stdout[done.stdout.index("---\n") :]
    assert f"{len(card.encode()) - 1:,} bytes  README.md" in done.stdout
    assert ModelCard(card).data.tags
    assert hub.requests == []


def test_8_bit_weights_are_published_as_such(tmp_path: Path) -> None:
    done = publish(make_run(tmp_path, quantize="int8-dynamic"), REPO, evaluation="eval", dry_run=True)
    assert "| weights | of linear layers: 8-bit integers, computed as such" in done["card"]
    plain = publish(make_run(tmp_path / "plain"), REPO, evaluation="eval", dry_run=True)
    assert "| weights |" not in plain["card"]
    assert done["files"]["model.safetensors"] < plain["files"]["model.safetensors"]


def test_private_and_revision(run_dir: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(run_dir, REPO, private=True, revision="v2")
    repo = hub.repos[REPO]
    assert repo.private
    assert set(repo.files()) == {".gitattributes"}
    assert set(repo.files("v2")) == UPLOADED | {".gitattributes"}
    assert '"revision": "v2"' in serve_command(repo.files("v2")["README.md"].data.decode())
    publish(run_dir, REPO, private=True, revision="v2")
    assert len(repo.messages) == 1
    assert inspect(local_directory(f"{REPO}@v2"))["good"]
    with pytest.raises(UserError, match="is not a store"):
        inspect(local_directory(REPO))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=rf"There is no folder {REPO} here\. There is no model .* that you can see"):
        local_directory(REPO)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    publish(run_dir, "me/public")
    with pytest.raises(UserError, match="exists and is public, which --private does not change"):
        publish(run_dir, "me/public", private=True)


def test_an_upload_that_breaks_off(run_dir: Path, hub: Hub) -> None:
    # The client retries once; then the storage refuses.
    hub.uploads_to_cut, hub.uploads_refused = 1, True
    done = draftsmith("publish", str(run_dir), "--repo", REPO)
    assert done.returncode == 1
    assert f"Publishing to {REPO} was interrupted" in said(done)
    assert "run the same command again" in said(done)
    repo = hub.repos[REPO]
    assert not repo.messages
    assert not hub.objects

    # Killed while it uploads.
    hub.uploads_refused = False
    hub.hold_uploads.clear()
    hub.upload_begun.clear()
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith.cli", "publish", str(run_dir), "--repo", REPO],
        stderr=subprocess.DEVNULL,
    )
    assert hub.upload_begun.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.hold_uploads.set()
    time.sleep(0.2)
    assert not repo.messages

    # The weights arrive but not the commit: they are not sent again.
    hub.commits_to_cut = 1
    with pytest.raises(DraftsmithError, match="files that have arrived are not sent again") as error:
        publish(run_dir, REPO)
    assert error.value.exit_status == 1
    assert not repo.messages
    uploads = hub.requested("PUT")
    publish(run_dir, REPO)
    assert hub.requested("PUT") == uploads
    assert repo.files()["model.safetensors"].data == (run_dir / "vllm" / "model.safetensors").read_bytes()
    assert len(repo.messages) == 1


def test_other_weights_take_the_place_of_earlier_ones(run_dir: Path, hub: Hub, tmp_path: Path) -> None:
    publish(run_dir, REPO)
    other = make_run(tmp_path / "other", seed=1)
    publish(other, REPO, evaluation=None)
    files = hub.repos[REPO].files()
    assert set(files) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
    }  # and no figures of the first
    assert files["model.safetensors"].data == (other / "vllm" / "model.safetensors").read_bytes()

    foreign = hub.add(
        "me/thesis", {"config.json": b"{}", "README.md": b"---\ntags: [thesis]\n---\n", "adapter.safetensors": b"1"}
    )
    with pytest.raises(UserError, match="holds files that Draftsmith did not publish"):
        publish(run_dir, "me/thesis")
    assert not foreign.messages


def test_what_is_refused(run_dir: Path, hub: Hub, tmp_path: Path) -> None:
    """Figures that are not of these weights, and drafters without a record of their training."""
    evaluation = run_dir / "eval"
    kept = {file: file.read_bytes() for file in [*evaluation.iterdir(), *(run_dir / "vllm").iterdir()]}

    def refused(message: str, *, ways_out: bool = True, **options: Any) -> None:
        with pytest.raises(UserError, match=message) as error:
            publish(run_dir, REPO, **options)
        assert ways_out == ("--without-evaluation" in str(error.value))
        for file, data in kept.items():
            file.write_bytes(data)

    def edit(name: str, **changes: Any) -> None:
        path = evaluation / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    (evaluation / "stage.json").unlink()
    refused("There is no finished evaluation")
    edit("results.json", num_speculative_tokens=1)
    refused(r"results\.json has changed since the evaluation")
    (evaluation / "report.html").write_text("ten times the speed")
    refused(r"report\.html has changed since the evaluation")
    edit("stage.json", figures=json.loads((evaluation / "results.json").read_text()) | {"target": "another"})
    refused("does not hold the figures of results.json")
    edit("stage.json", files={})
    refused("from an earlier version")
    edit("stage.json", figures=json.loads((evaluation / "results.json").read_text()) | {"schema_version": 9})
    refused("Another version of Draftsmith wrote")
    refused("There is no finished evaluation in .*eval-other", evaluation="eval-other")
    weights = run_dir / "vllm" / "model.safetensors"
    data, tensors = weights.read_bytes(), load_file(weights)
    save_file(tensors | {"fc.weight": tensors["fc.weight"] + 1}, weights)
    refused("is not as stage.json records it", ways_out=False)
    save_file(tensors | {"fc.weight": tensors["fc.weight"] + 1}, weights)
    record = stage.read(run_dir / "vllm")
    assert record is not None
    stage.StageRun("convert", run_dir / "vllm").revise(record["figures"], files=[*record["files"]])
    refused("measured a different drafter")
    weights.write_bytes(data[:-1])
    refused("is damaged", ways_out=False)

    (run_dir / "vllm" / "stage.json").unlink()
    refused("There is no finished drafter", ways_out=False)
    draft = run_dir / "checkpoint" / "draft.json"
    draft.write_text(draft.read_text() + "\n")
    refused("was not made from the checkpoint", ways_out=False)
    (run_dir / "checkpoint" / "stage.json").unlink()
    refused("There is no finished checkpoint", ways_out=False)
    for repo in ("nobody", "a/b/c", "me/--", "me/tiny.git"):
        with pytest.raises(UserError, match=r"`--repo .*` is not a repository id"):
            publish(run_dir, repo)
    with pytest.raises(UserError, match=r"There is no folder .*nothing here, and it is not a Hub id"):
        local_directory(tmp_path / "nothing")
    assert hub.requests == []


def test_what_the_hub_refuses(run_dir: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'The Hub refuses the card of me/tiny-drafter: "license" must be one of'):
        publish(run_dir, REPO, license="my-own")
    assert not hub.repos
    for token, status in ((READ_TOKEN, 403), ("wrong", 401)):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=rf"does not let you write to {REPO} \(status {status}: .*hf auth login"):
            publish(run_dir, REPO)
    assert not hub.repos


def test_the_target_s_license(tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    def license_of(run: Path, **options: Any) -> Any:
        return ModelCard(publish(run, REPO, **options)["card"]).data.license

    run = make_run(tmp_path)
    assert license_of(run, dry_run=True) is None
    assert "warning: the license of the target tiny-target is not known" in " ".join(capsys.readouterr().err.split())
    assert license_of(run, dry_run=True, license="mit") == "mit"
    assert "warning" not in capsys.readouterr().err

    # From the card in the target's folder, if it is a valid one.
    target = tmp_path / "models" / "tiny-target"
    target.mkdir(parents=True)
    for text, known in (
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("---\n- license\n---\n", None),
        ("no card", None),
    ):
        (target / "README.md").write_text(text)
        assert license_of(run, dry_run=True) == known

    # From the Hub, if the target is there and the Hub may be contacted.
    hub.add("you/target", {"README.md": b"---\nlicense: other\nlicense_name: ours\nlicense_link: LICENSE\n---\n"})
    run = make_run(tmp_path / "of-hub", model="you/target")
    assert license_of(run, dry_run=True) is None
    card = publish(run, REPO)["card"]
    data = ModelCard(card).data
    assert (data.license, data.license_name, data.license_link, data.base_model) == (
        "other",
        "ours",
        "LICENSE",
        "you/target",
    )
    run = make_run(tmp_path / "nowhere", model="you/nowhere")
    assert license_of(run) is None


def test_a_gguf_s_license(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny-Q4.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    run = make_run(tmp_path, model=None, gguf={"path": str(path)})
    data = ModelCard(publish(run, REPO, dry_run=True)["card"]).data
    assert (data.license, data.base_model) == ("apache-2.0", None)
    path.unlink()
    assert ModelCard(publish(run, REPO, dry_run=True)["card"]).data.license is None
