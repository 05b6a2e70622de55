"""Measuring with real engines as people serve: sampled answers, methods without a drafter and tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config.evaluation import TuneConfig
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import read, recognize
from draftsmith.extract.extract import run_extract
from draftsmith.serve import server
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.tune import run_tune
from draftsmith.target.info import describe_target
from draftsmith.train.predict import predict
from tests.integration.conftest import make_target
from tests.integration.test_evaluate import make_drafter, tiny_recipe

pytestmark = pytest.mark.integration

TEMPERATURE, TOP_P = 0.3, 0.6
"""Together they leave a random target a few likely tokens; without the top-p there would be many."""
PROMPTS, TOKENS, K = 120, 32, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, and a run with a drafter that is right now and then."""
    found = tmp_path_factory.mktemp("measuring")
    make_target(found / "target")
    make_drafter(found / "runs" / "tiny" / "vllm", found / "target")
    config = found / "runs" / "tiny" / "vllm" / "config.json"
    # Where vLLM reads them first, and the format names them.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    return found


def recipe_of(folder: Path, **sections: dict[str, Any]) -> Recipe:
    wanted = tiny_recipe(folder).model_dump(mode="json")
    for name, values in sections.items():
        wanted[name] |= values
    return Recipe.model_validate(wanted)


def test_sampled_answers_are_accepted_as_predicted_and_follow_the_target(folder: Path) -> None:
    """Predicted from text that was sampled with these parameters, and measured by vLLM's counters, within three standard errors; a
    prediction that leaves the top-p out is not. The answers pass the tests of their distribution."""
    run_dir = folder / "runs" / "tiny"
    rows = [json.dumps({"id": str(n), "prompt": f"sampled question number {n * n}?"}) for n in range(PROMPTS)]
    (folder / "many.jsonl").write_text("\n".join(rows))
    recipe = recipe_of(
        folder,
        extract={
            "held_out": {"path": str(folder / "many.jsonl")},
            "backend": "transformers",
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "max_tokens": TOKENS,
            "layer_ids": [1, 2, 3],
        },
        evaluate={
            "suites": {"held_out": {"prompts": "held_out"}},
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "fidelity": "sampling",
            "fidelity_prompts": 2,
            "fidelity_answers": 200,
            "acceptance_batch_size": 32,
            "concurrency": [],
            "dtypes": ["float32"],
        },
    )
    (run_dir / "checkpoint").mkdir()
    drafter = read(run_dir / "vllm", recognize(run_dir / "vllm", "vllm"), describe_target(folder / "target"))
    drafter.save(run_dir / "checkpoint")
    run_extract(recipe, run_dir)
    found = predict(recipe, run_dir)
    assert found["own_text"]
    assert found["sequences"] == PROMPTS
    predicted = found["predicted_acceptance_length"][str(K)]
    without = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"top_p": 1.0})})
    wrong = predict(without, run_dir)["predicted_acceptance_length"][str(K)]

    results = run_evaluate(recipe, run_dir)
    at_k = results["suites"]["held_out"]["at_k"][str(K)]
    low, high = at_k["acceptance_length_interval"]
    error = 2**0.5 * (high - low) / 3.92  # of the difference of two such figures
    measured = at_k["acceptance_length"]
    print(f"predicted {predicted:.4f}, measured {measured:.4f}, standard error {error:.4f}; without top-p {wrong:.4f}")
    assert at_k["accepted"] > 100
    assert abs(predicted - measured) < 3 * error
    assert abs(wrong - measured) > 3 * error, "a prediction without the top-p would have passed"
    tested = results["sampled_fidelity"]
    assert set(tested) == {f"K = {results['num_speculative_tokens']}"}
    for one in tested.values():
        assert one["verdict"] == "same_distribution", one
        assert one["answers"] == 2 * 200


def test_methods_without_a_drafter_on_a_base_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe of a target, a suite and two methods: lookup in the drafter's place, and the target as its own draft model beside it."""
    make_target(tmp_path / "target")
    for path in (tmp_path / "target").glob("chat_template*"):
        path.unlink()
    settings = json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "target" / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"question_id": n, "turns": [f"one two {n} one two {n} one two", f"and {n}"]} for n in range(3)]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"one two {n} one two"}) for n in range(3)))
    whole = tiny_recipe(tmp_path).model_dump(mode="json", exclude={"extract", "train"})
    whole["evaluate"] |= {
        "suites": {
            "talks": {"prompts": {"path": str(tmp_path / "talks.jsonl")}, "turns": "all", "max_tokens": 24},
            "texts": {"prompts": {"path": str(tmp_path / "texts.jsonl")}, "max_tokens": 24},
        },
        "methods": {
            "itself": {"method": "draft_model", "model": str(tmp_path / "target"), "num_speculative_tokens": 2}
        },
        "concurrency": [],
        "dtypes": ["float32"],
    }
    whole["serve"] = {"method": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}}
    recipe = Recipe.model_validate(whole)
    results = run_evaluate(recipe, tmp_path / "runs" / "alone")
    assert "no chat template" in capsys.readouterr().err
    assert results["drafter"] == "ngram"
    assert results["suites"]["texts"]["prompts"] == 3
    suite = results["suites"]["talks"]
    assert suite["prompts"] == 6
    assert all(one["identical_to_baseline"] for one in results["suites"].values()), suite["differences"]
    assert suite["at_k"]["2"]["accepted"] > 0
    itself = suite["methods"]["itself"]
    assert itself["fidelity"]["verdict"] == "identical"
    assert itself["accepted"] > 0.9 * itself["draft_tokens"]
    served = server.served_method(recipe, tmp_path / "runs" / "alone", None)
    assert served.num_speculative_tokens == results["num_speculative_tokens"]


def test_tune(folder: Path) -> None:
    """On engines that sample: every figure is there, and serving takes the schedule."""
    options = TuneConfig(suite="held_out", prompts=4, tokens=12, k=(1, 2), concurrency=(1, 2), engine_starts=1)
    recipe = recipe_of(folder, evaluate={"temperature": TEMPERATURE}).model_copy(update={"tune": options})
    run_dir = folder / "runs" / "tiny"
    found = run_tune(recipe, run_dir, verify=True)
    assert found["sampling"]["temperature"] == TEMPERATURE
    assert found["acceptance_length"].keys() == {"0", "1", "2"}
    assert found["acceptance_length"]["2"] > 1
    assert found["measured"] is not None
    for batch in ("1", "2"):
        assert found["step_cost"][batch].keys() == {"0", "1", "2"}
        assert all(cost > 0 for cost in found["step_cost"][batch].values())
        assert found["measured"][batch].keys() == {"1", "2"}
    ranges = server.served_method(recipe, run_dir, None).num_speculative_tokens_per_batch_size
    assert ranges == tuple(map(tuple, found["schedule"]))
