"""The tests of sampled answers: they accept correct speculation, and find planted faults as often as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.config import recipe
from draftsmith.config.evaluation import EvaluateConfig
from draftsmith.config.sampling import Sampling
from draftsmith.data.results_in_words import changed_answers
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import compare, evaluate, lineup, sampled_fidelity
from draftsmith.serve.evaluation.engine import Generated
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.evaluation.fidelity import LEVEL
from draftsmith.serve.evaluation.sampled_fidelity import DraftTest, compare_samples, continuations_p_value
from tests.unit.fake_engine import Engine, make_recipe_and_run

TOKENS, VOCAB, PROMPTS, K = 12, 6, 3, 2


def answers(
    draw: np.random.Generator, count: int, *, bias: float = 1.0, speculative: bool = True
) -> list[list[Generated]]:
    """Answers of a target whose next token depends on the last one, to `PROMPTS` prompts with tables of their own. Drafts, of K tokens, are
    each the likeliest token, and accepted `bias` times as readily as its probability says."""
    found = []
    for prompt in range(PROMPTS):
        table = np.random.default_rng(prompt).dirichlet(np.full(VOCAB, 0.6), size=VOCAB)
        found.append([_answer(draw, table, bias, speculative) for _ in range(count)])
    return found


def _answer(draw: np.random.Generator, table: np.ndarray, bias: float, speculative: bool) -> Generated:
    tokens, steps = [int(draw.choice(VOCAB, p=table[0]))], []
    while len(tokens) < TOKENS:
        accepted = 0
        for _ in range(K if speculative else 0):
            p = table[tokens[-1]]
            draft = int(p.argmax())
            if draw.random() >= bias * p[draft]:
                rest = np.where(np.arange(VOCAB) == draft, 0, p)
                tokens.append(int(draw.choice(VOCAB, p=rest / rest.sum())))
                break
            tokens.append(draft)
            accepted += 1
        else:
            tokens.append(int(draw.choice(VOCAB, p=table[tokens[-1]])))
        steps.append(accepted)
    return Generated(
        tokens[:TOKENS],
        "length",
        0.0,
        0.0,
        (K,) * len(steps) if speculative else (),
        tuple(steps) if speculative else (),
    )


def test_correct_speculation_passes_and_p_values_are_uniform() -> None:
    draw = np.random.default_rng(1)
    both = []
    for _ in range(60):
        baseline, speculative = answers(draw, 60, speculative=False), answers(draw, 60)
        both.append([continuations_p_value(baseline, speculative), DraftTest(baseline, speculative).p_value])
    for values in np.array(both).T:
        assert values.min() > LEVEL / 2
        # Kolmogorov's distance from uniform; of 60 values it is above 0.25 once in a thousand.
        ordered = np.sort(values)
        distance = max(abs(ordered - np.arange(60) / 60).max(), abs(ordered - np.arange(1, 61) / 60).max())
        assert distance < 0.25, distance


def test_a_fault_of_the_size_that_it_promises_to_find_is_found() -> None:
    draw = np.random.default_rng(2)
    baseline = answers(draw, 400, speculative=False)
    correct = compare_samples(baseline, answers(draw, 400))
    assert correct["verdict"] == "same_distribution"
    assert correct["answers"] == 400 * PROMPTS
    bias = correct["detectable_bias"]
    assert bias is not None
    assert 1.02 < bias < 1.5
    p_values = [
        DraftTest(answers(draw, 400, speculative=False), answers(draw, 400, bias=bias)).p_value for _ in range(20)
    ]
    assert sum(p < LEVEL / 2 for p in p_values) >= 16, (
        p_values
    )  # 19 of 20 are promised; fewer than 16 come once in a thousand times
    wrong = compare_samples(baseline, answers(draw, 400, bias=1.5))
    assert wrong["verdict"] == "wrong"
    found = {"suites": {}, "load": {}, "sampled_fidelity": {"K = 2": wrong, "lookup": correct}}
    [line] = changed_answers(found, methods=True)
    assert line.startswith("K = 2: sampled answers do not follow the baseline's distribution")


def test_another_temperature_is_found_by_continuations() -> None:
    draw = np.random.default_rng(3)
    baseline = answers(draw, 300, speculative=False)
    for of_prompt in baseline:  # every third answer begins with the same token
        for answer in of_prompt[::3]:
            answer.token_ids[0] = 0
    assert continuations_p_value(baseline, answers(draw, 300)) < 1e-6


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8))
def test_engines_with_equal_answers_are_equal(texts: list[list[int]]) -> None:
    same = [[Generated(text, "length", 0.0) for text in texts]]
    assert continuations_p_value(same, same) == 1.0


def test_accepted_places() -> None:
    answer = list(range(7))
    assert sampled_fidelity.accepted_places(answer, [2, 0, 1]) == [1, 2, 5]
    assert sampled_fidelity.accepted_places(answer, [2, 0]) is None  # a step without drafts is somewhere


# ---- in an evaluation ----


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[recipe.Recipe, Path]:
    """An evaluation at a temperature, with a method beside the drafter."""
    Engine.started.clear()
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Engine(config) for config in configs]
    )
    loaded, run_dir = make_recipe_and_run(tmp_path)
    options = {
        "suites": {"questions": {"prompts": loaded.extract.prompts, "max_tokens": 21}},
        "methods": {"lookup": {"method": "ngram", "num_speculative_tokens": 1}},
        "k": [1, 2], "acceptance_k": 2, "temperature": 0.8, "top_p": 0.95, "fidelity": "sampling", "fidelity_prompts": 2,
        "fidelity_answers": 50, "engine_starts": 1,
    }  # fmt: skip
    return loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate(options)}), run_dir


def test_every_engine_samples_and_nothing_is_compared_token_for_token(run: tuple[recipe.Recipe, Path]) -> None:
    found = run_evaluate(*run)
    assert {config.sampling for config in Engine.started} == {Sampling(0.8, 0.95)}
    # From one seed vLLM draws the same first tokens in both engines: a test of two samples then sees less than chance.
    assert {(config.speculative is not None, config.seed) for config in Engine.started} == {(False, 0), (True, 1)}
    assert found["sampling"] == {"temperature": 0.8, "top_p": 0.95, "top_k": None}
    suite = found["suites"]["questions"]
    assert suite["identical_to_baseline"] is suite["control"] is None
    assert suite["at_k"]["2"]["prompts_identical"] is None
    assert suite["at_k"]["2"]["fidelity"]["verdict"] == "not_compared"
    assert suite["at_k"]["2"]["accepted"] > 0
    assert suite["speedup"] > 1
    assert set(found["sampled_fidelity"]) == {"K = 2", "lookup"}
    assert {one["answers"] for one in found["sampled_fidelity"].values()} == {2 * 50}
    assert "temperature 0.8, top-p 0.95" in (run[1] / "eval" / "report.html").read_text()
    greedy = {**found, "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": None}}
    with pytest.raises(
        UserError, match=r"A was evaluated with greedy answers and B with temperature 0\.8, top-p 0\.95 ones"
    ):
        compare.compare(greedy, found)


class Wrong(Engine):
    """Answers something else while it drafts."""

    @property
    def token(self) -> int:
        return 8 if self.config.num_speculative_tokens else 7

    @token.setter
    def token(self, value: int) -> None:
        pass


def test_wrongly_sampled_answers_are_an_error(run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Wrong(config) for config in configs]
    )
    with pytest.raises(
        evaluate.WrongAnswersError, match=r"K = 2: sampled answers do not follow .*; lookup: sampled answers"
    ):
        run_evaluate(*run)
    assert "do not follow the baseline" in (run[1] / "eval" / "report.html").read_text()


@pytest.mark.parametrize(
    ("figures", "sampling", "expected"),
    [
        ({"text_sampling": {"temperature": 0.8, "top_p": 0.95, "top_k": None}}, Sampling(0.8, 0.95), {"1": 1.5}),
        ({"text_sampling": {"temperature": 0.8, "top_p": 1.0, "top_k": None}}, Sampling(0.8, 0.95), None),
        ({"text_sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": None}}, Sampling(), {"1": 1.5}),
        ({"text_sampling": {"temperature": 0.8, "top_p": 1.0, "top_k": None}}, Sampling(), None),
        ({"predicted_at_temperature": {"temperature": 0.8, "greedy_drafts": {"1": 1.25}}}, Sampling(0.8), {"1": 1.25}),
        ({"predicted_at_temperature": {"temperature": 0.8, "greedy_drafts": {"1": 1.25}}}, Sampling(0.7), None),
        ({}, Sampling(), {"1": 1.5}),  # as an earlier version recorded it
    ],
)
def test_a_prediction_is_shown_beside_what_it_predicts(
    figures: dict[str, Any], sampling: Sampling, expected: dict[str, float] | None, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    record = {"stage": "train", "inputs": "1", "figures": {"predicted_acceptance_length": {"1": 1.5}} | figures}
    (tmp_path / "checkpoint" / "stage.json").write_text(json.dumps(record))
    assert evaluate._predicted(tmp_path, sampling) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "need a `temperature` above 0"),
        ({"top_k": 5}, "need a `temperature` above 0"),
        ({"fidelity": "sampling"}, "`fidelity: sampling` needs a `temperature`"),
    ],
)
def test_sampling_needs_a_temperature(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateConfig.model_validate(options)
