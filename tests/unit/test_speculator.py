"""Measuring, tuning and serving a method in a recipe that trains no drafter; base models; and prompts with tools in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from draftsmith.config.evaluation import EvaluateConfig, ServeConfig, TuneConfig
from draftsmith.config.recipe import Recipe
from draftsmith.data.conversations import parse
from draftsmith.data.prompts import training_and_held_out
from draftsmith.data.turns import TurnRenderer
from draftsmith.run.errors import UserError
from draftsmith.serve import server
from draftsmith.serve.evaluation import lineup
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.evaluation.schema import Results
from draftsmith.serve.evaluation.suites import turn_renderer
from draftsmith.serve.roofline import roofline
from draftsmith.serve.schedule import schedule_of
from draftsmith.serve.speculator import speculator
from draftsmith.serve.tune import Tuned, run_tune
from draftsmith.target.info import describe_target
from tests.unit.fake_engine import Engine, make_recipe_and_run


def method(**values: Any) -> Any:
    return ServeConfig.model_validate({"method": values}).method


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, Path]:
    """A recipe with a target, a suite and n-gram lookup, and a run folder that does not exist yet."""
    Engine.started.clear()
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Engine(config) for config in configs]
    )
    loaded, _ = make_recipe_and_run(tmp_path)
    wanted = loaded.model_dump(mode="json", exclude={"extract", "train", "convert"}, exclude_unset=True)
    wanted["evaluate"] |= {"engine_starts": 1, "timing_tokens": 20, "k": [1, 2, 3]}
    wanted["evaluate"]["suites"]["questions"]["max_tokens"] = 41
    wanted["serve"] = {"method": {"method": "ngram"}}
    return Recipe.model_validate(wanted), tmp_path / "runs" / "alone"


def with_evaluate(loaded: Recipe, **changes: Any) -> Recipe:
    values = loaded.evaluate.model_dump(mode="json", exclude_unset=True)
    return loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate({**values, **changes})})


def test_a_method_takes_the_place_of_a_drafter(run: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]) -> None:
    loaded, run_dir = run
    found = run_evaluate(loaded, run_dir)
    TypeAdapter(Results).validate_python(found, strict=True)
    assert found["drafter"] == "ngram"
    assert found["predicted_acceptance_length"] is None
    assert found["num_speculative_tokens"] == 2  # what `COSTS` and `ACCEPTED` make best
    assert set(found["k_curve"]) <= {"1", "2", "3"}
    assert {config.name for config in Engine.started if config.dtype == "float32"} == {
        "baseline-float32",
        "drafter-float32",
        "baseline-float32-again",
    }
    drafting = next(config.speculative for config in Engine.started if config.speculative)
    assert drafting["method"] == "ngram"
    assert "overlap_with_training" not in found["suites"]["questions"]
    assert "not checked whether" not in capsys.readouterr().err
    # Served with what was found, unless the recipe or the command says otherwise.
    assert server.served_method(loaded, run_dir, None).num_speculative_tokens == 2
    assert server.served_method(loaded, run_dir, 5).num_speculative_tokens == 5
    fixed = loaded.model_copy(update={"serve": ServeConfig(method=method(method="ngram", num_speculative_tokens=4))})
    assert server.served_method(fixed, run_dir, None).num_speculative_tokens == 4


def test_a_method_is_tuned(run: tuple[Recipe, Path]) -> None:
    loaded, run_dir = run
    found = run_tune(loaded, run_dir)
    TypeAdapter(Tuned).validate_python(found, strict=True)
    assert found["drafter"] == "ngram"
    assert found["schedule"][0] == [1, 4, 2]
    assert server.served_method(loaded, run_dir, None).num_speculative_tokens_per_batch_size is not None
    hashes = speculator(loaded, run_dir).sha256
    assert schedule_of(run_dir, "tune", hashes) == found["schedule"]
    longer = loaded.model_copy(update={"serve": ServeConfig(method=method(method="ngram", prompt_lookup_max=9))})
    assert schedule_of(run_dir, "tune", speculator(longer, run_dir).sha256) is None, "another method's"


def test_the_first_method_is_measured_at_every_k_and_the_others_as_they_are(run: tuple[Recipe, Path]) -> None:
    loaded, run_dir = run
    methods = {
        "first": {"method": "ngram", "num_speculative_tokens": 2},
        "second": {"method": "ngram", "prompt_lookup_max": 3},
    }
    alone = with_evaluate(loaded.model_copy(update={"serve": ServeConfig()}), methods=methods)
    found = run_evaluate(alone, run_dir)
    assert set(found["suites"]["questions"]["methods"]) == {"second"}
    # What the recipe gives the method is its K, unless the recipe lists others.
    chosen = speculator(alone, run_dir)
    assert chosen.measured(alone).evaluate.k == (1, 2, 3)
    no_k = with_evaluate(loaded, methods=methods)
    values = no_k.evaluate.model_dump(mode="json", exclude={"k"}, exclude_unset=True)
    no_k = no_k.model_copy(
        update={"evaluate": EvaluateConfig.model_validate(values), "serve": ServeConfig(), "tune": TuneConfig()}
    )
    measured = chosen.measured(no_k)
    assert (measured.evaluate.k, measured.evaluate.acceptance_k, measured.tune.k) == ((2,), 2, (2,))
    # Suffix decoding drafts as many tokens as it finds, up to its longest.
    suffix = loaded.model_copy(update={"serve": ServeConfig(method=method(method="suffix"))})
    assert speculator(suffix, run_dir).measured(suffix).evaluate.k == (24,)


class Seldom(Engine):
    """Lookup that finds something to draft in every other step only."""

    def generate(self, prompts: Any, *, max_tokens: int, temperature: float | None = None) -> Any:
        answers, seconds = super().generate(prompts, max_tokens=max_tokens)
        if not self.config.num_speculative_tokens:
            return answers, seconds
        longer = [
            # As many steps without a draft as with one, each of which gives one token.
            type(one)(
                [7] * (1 + sum(one.accepted) + 2 * len(one.drafted)),
                "length",
                2 * one.decode_seconds,
                0.0,
                one.drafted,
                one.accepted,
            )
            if one.drafted
            else one  # an idle drafter
            for one in answers
        ]
        return longer, 2 * seconds


def test_steps_without_a_draft_count(run: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Seldom(config) for config in configs]
    )
    loaded, run_dir = run
    tuned = run_tune(loaded, run_dir)
    assert tuned["acceptance_per_position"] == [0.75 / 2, 0.5 / 2, 0.25 / 2]
    assert tuned["step_cost"]["1"]["2"] == pytest.approx(1.2)
    # Its answers are longer than the baseline's, which sampled ones may be.
    curve = run_evaluate(with_evaluate(loaded, temperature=0.5), run_dir)["k_curve"]["2"]
    assert curve["acceptance_length"] == pytest.approx(1 + 1.25 / 2, abs=0.03)


def test_what_needs_a_drafter_says_so(run: tuple[Recipe, Path]) -> None:
    loaded, run_dir = run
    nothing = with_evaluate(loaded.model_copy(update={"serve": ServeConfig()}), methods={})
    for measure in (run_evaluate, run_tune):
        with pytest.raises(UserError, match=r"nothing to speculate with: .*`serve\.method` nor `evaluate\.methods`"):
            measure(nothing, run_dir)
    needy = loaded.model_copy(update={"serve": ServeConfig(method=method(method="eagle3"))})
    with pytest.raises(
        UserError, match=r"`serve\.method` needs a drafter: the run has none .*`serve\.method\.model: OWNER/NAME`"
    ):
        run_evaluate(needy, run_dir)
    with pytest.raises(UserError, match=r"`held_out` takes the prompts that extraction holds out"):
        run_evaluate(with_evaluate(loaded, suites={"held_out": {"prompts": "held_out"}}), run_dir)
    with pytest.raises(UserError, match=r"no `extract\.prompts`, so there is nothing to extract"):
        training_and_held_out(loaded.extract)
    # With prompts to train from, a drafter is missed.
    training = loaded.model_copy(update={"extract": make_recipe_and_run(run_dir.parents[1] / "other")[0].extract})
    with pytest.raises(UserError, match="There is no drafter in"):
        run_evaluate(training, run_dir)


def test_the_roofline_of_a_method(run: tuple[Recipe, Path]) -> None:
    """Nothing is read to look tokens up; a draft model's weights are, at every step of a draft."""
    loaded, run_dir = run
    target = describe_target(Path(loaded.target.model or ""))
    turns = [turn_renderer(target, 100).first(parse({"prompt": "a"}, "jsonl", where="", fallback_id="1", whole=False))]
    itself = loaded.model_copy(
        update={"serve": ServeConfig(method=method(method="draft_model", model=str(target.path)))}
    )
    speedups = [roofline(one, target, speculator(one, run_dir), turns, {2: 2.5}) for one in (loaded, itself)]
    assert speedups[0] is not None
    assert speedups[1] is not None
    assert speedups[0][1][2] > 1.5 * speedups[1][1][2]
    # Over two GPUs both take half as long.
    split = itself.model_copy(update={"engine": itself.engine.model_copy(update={"tensor_parallel_size": 2})})
    assert roofline(split, target, speculator(split, run_dir), turns, {2: 2.5}) == {
        batch: pytest.approx(by_k) for batch, by_k in speedups[1].items()
    }


# ---- prompts ----


def test_a_base_model_gets_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, _ = make_recipe_and_run(tmp_path)
    target = describe_target(Path(loaded.target.model or ""))
    (target.path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    renderer = turn_renderer(target, 100)
    assert "has no chat template: prompts are given as plain text" in " ".join(capsys.readouterr().err.split())
    talk = parse({"question_id": 1, "turns": ["one", "two"]}, "mt_bench", where="", fallback_id="1", whole=True)
    first = renderer.first(talk)
    assert renderer.renderer.prompt_text(first.conversation) == "one"
    second = renderer.next(first, first.token_ids, max_tokens=5)
    assert second is not None
    said = renderer.decode(first.token_ids)
    assert renderer.renderer.prompt_text(second.conversation) == f"one\n\n{said}\n\ntwo"
    # Training still needs a template: it could not tell answers from questions.
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    with pytest.raises(UserError, match="no chat template"):
        TurnRenderer(tokenizer, 100).first(talk)


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"prompt": "Find it."}, "jsonl"),
        ({"messages": [{"role": "user", "content": "Find it."}]}, "jsonl"),
        ({"instruction": "Find it."}, "jsonl"),
        ({"conversations": [{"from": "human", "value": "Find it."}]}, "sharegpt"),
        ({"question_id": 1, "turns": ["Find it."]}, "mt_bench"),
        ({"question": "Find it.", "answer": "#### 1"}, "gsm8k"),
    ],
)
def test_tools_of_a_row_are_kept_in_every_format(row: dict[str, Any], format: str) -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        found = parse(row | {"tools": tools}, format, where="", fallback_id="1", whole=True)
        assert found.tools == [TOOL]
        assert found.opening()[0].tools == [TOOL]
    assert parse(row, format, where="", fallback_id="1", whole=True).tools is None
