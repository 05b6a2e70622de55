"""Evaluation with fake engines on a simulated clock: what is measured, and what is not measured twice."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from draftsmith.config import recipe
from draftsmith.config.evaluation import EvaluateConfig, SuiteConfig
from draftsmith.config.methods import AnyMethod
from draftsmith.data.turns import TurnRenderer
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_json
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.serve.evaluation import acceptance, compare, configurations, evaluate, lineup, partial, speed
from draftsmith.serve.evaluation.configurations import baseline_again_drafter
from draftsmith.serve.evaluation.engine import EngineSpec
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.serve.evaluation.schema import Results
from draftsmith.serve.tune import run_tune
from tests.unit.fake_engine import COSTS, Engine, make_recipe_and_run, pretend_gpu, sorted_by_category


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[recipe.Recipe, Path]:
    """Two suites, one of conversations with two turns in two categories; a method beside the drafter; two batch sizes."""
    Engine.started.clear()
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Engine(config) for config in configs]
    )
    loaded, run_dir = make_recipe_and_run(tmp_path)
    rows = [
        {"question_id": n, "category": ("math", "writing")[n % 2], "turns": [f"first {n}", f"second {n}"]}
        for n in range(6)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = {
        "suites": {
            "questions": {"prompts": loaded.extract.prompts, "max_tokens": 21},
            "talks": {"prompts": {"path": str(tmp_path / "talks.jsonl")}, "turns": "all", "max_tokens": 13},
        },
        "methods": {"lookup": {"method": "ngram", "num_speculative_tokens": 1}},
        "k": [1, 2, 3], "acceptance_k": 3, "concurrency": [1, 4], "acceptance_batch_size": 4, "examples": 2,
    }  # fmt: skip
    return loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate(options)}), run_dir


def test_planted_figures_are_found(run: tuple[recipe.Recipe, Path]) -> None:
    found = run_evaluate(*run)
    TypeAdapter(Results).validate_python(found, strict=True)
    assert {int(k): point["step_cost"] for k, point in found["k_curve"].items()} == pytest.approx(
        {k: cost for k, cost in COSTS[1].items() if k}
    )
    # Planted: 0.01 s for each draft token, of baseline steps of 0.05 s.
    assert {k: point["drafting"] for k, point in found["k_curve"].items()} == pytest.approx(
        {"1": 0.2, "2": 0.4, "3": 0.6}
    )
    assert found["num_speculative_tokens"] == 2  # accepts 2.25 tokens at 1.2 times the cost
    assert found["toss_up"] == []
    assert found["k_curve"]["2"]["fastest_share"] == 1
    talks = found["suites"]["talks"]
    assert talks["prompts"] == 12
    assert [name for name in talks["at_k"]["2"]["by_prompt"] if name.startswith("3")] == ["3", "3/turn-2"]
    assert {name: one["prompts"] for name, one in talks["categories"].items()} == {"math": 6, "writing": 6}
    assert talks["acceptance_length"] == pytest.approx(1 + talks["accepted"] / talks["drafts"])
    lookup = found["suites"]["questions"]["methods"]["lookup"]
    assert (lookup["method"], lookup["num_speculative_tokens"]) == ("ngram", 1)
    assert lookup["acceptance_length"] == pytest.approx(1.75, abs=0.05)
    assert set(found["load"]) == {"1", "4"}
    at_four = found["load"]["4"]
    assert (at_four["in_flight"], at_four["requests"], at_four["engine_starts"]) == (4, 64, 3)
    assert at_four["configurations"]["baseline, float32"]["seconds_per_token"] == pytest.approx(0.05)
    assert at_four["configurations"]["baseline, float32"]["tokens_per_second"] == pytest.approx(4 / 0.05)
    # 64 tokens: the first, then 2.25 a step at 1.3 times the cost.
    assert at_four["speedup"]["value"] == pytest.approx(64 / (1 + 63 / 2.25) / 1.3, rel=0.02)
    assert at_four["noise"]["by_start"] == pytest.approx([1, 1, 1])
    assert len(found["examples"]) == 2
    assert found["suites"]["questions"]["quality"] is None
    assert talks["identical_to_baseline"]
    assert {one["fidelity"]["verdict"] for one in talks["at_k"].values()} == {"identical"}


def test_what_vllm_executes_otherwise_than_the_baseline_is_said(
    run: tuple[recipe.Recipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_evaluate(*run)
    by_name = found["suites"]["questions"]["throughput"]["configurations"]
    assert by_name["lookup, float32"]["execution"] == {"model_runner": "V2", "async_scheduling": False}
    assert {one["execution"]["async_scheduling"] for name, one in by_name.items() if name != "lookup, float32"} == {
        True
    }
    said = [line for line in capsys.readouterr().err.splitlines() if "vLLM executes" in line]
    assert said == [
        "vLLM executes lookup, float32 by runner V2, synchronous scheduling, and the baseline by runner V2, asynchronous scheduling: a part "
        "of their ratio is that"
    ]
    assert "<td>runner V2, synchronous scheduling</td>" in (run[1] / "eval" / "report.html").read_text()


def test_loads_are_measured_as_tuning_chose(
    run: tuple[recipe.Recipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it chose after an evaluation. Where it chose not to speculate, the figures show why, and it is said."""
    loaded, run_dir = run
    asked = loaded.evaluate.model_copy(update={"concurrency": (1, 4, 8), "only": ("questions",), "engine_starts": 1})
    loaded = loaded.model_copy(update={"evaluate": asked})
    before = run_evaluate(loaded, run_dir)
    assert not any("tuned_k" in load for load in before["load"].values())
    tuned = run_tune(loaded, run_dir)
    assert tuned["schedule"] == [[1, 4, 2], [5, 32, 0]]

    record = json.loads((run_dir / "tune" / "stage.json").read_text())
    record["figures"]["schedule"] = [[1, 2, 2], [3, 4, 1], [5, 32, 0]]  # another K at four, too
    (run_dir / "tune" / "stage.json").write_text(json.dumps(record))
    capsys.readouterr()
    found = run_evaluate(loaded, run_dir)
    assert "but draftsmith tune has chosen another K for a load since" in " ".join(capsys.readouterr().err.split())
    assert {n: load["tuned_k"] for n, load in found["load"].items()} == {"1": 2, "4": 1, "8": 0}
    k_of = {n: baseline_again_drafter(load)[2]["speculation"] for n, load in found["load"].items()}
    assert k_of == {"1": 2, "4": 1, "8": 2}
    assert found["load"]["8"]["speedup"]["value"] < 1
    said = "8 at once: draftsmith tune chose not to speculate at this load, and draftsmith serve drafts nothing there; measured at K = 2"
    assert said in (run_dir / "eval" / "report.html").read_text()

    # What changes nothing that was measured is said without measuring again.
    count = len(Engine.started)
    assert run_evaluate(loaded, run_dir) == found
    record["figures"]["schedule"] = [[1, 2, 2], [3, 4, 1], [5, 32, 2]]
    (run_dir / "tune" / "stage.json").write_text(json.dumps(record))
    measured = stage.read(run_dir / "eval")
    assert measured is not None
    then = {
        "finished_at": "2020-01-01T00:00:00Z",
        "wall_seconds": 7200.0,
        "versions": {"vllm": "0.1"},
        "git_commit": "c",
    }
    write_json(run_dir / "eval" / stage.MARKER, measured | then)
    assert run_evaluate(loaded, run_dir)["load"]["8"]["tuned_k"] == 2
    revised = stage.read(run_dir / "eval")
    assert revised is not None
    assert then.items() <= revised.items(), "nothing was measured"
    assert revised["figures"] == json.loads((run_dir / "eval" / "results.json").read_text())
    assert stage.StageRun("evaluate", run_dir / "eval").finished(revised["inputs"], check_files=True)
    assert said not in (run_dir / "eval" / "report.html").read_text()
    assert len(Engine.started) == count


def test_methods_are_timed_under_load_where_that_is_asked_for(run: tuple[recipe.Recipe, Path]) -> None:
    loaded, run_dir = run
    asked = loaded.evaluate.model_copy(update={"methods_under_load": True, "only": ("questions",), "engine_starts": 1})
    found = run_evaluate(loaded.model_copy(update={"evaluate": asked}), run_dir)
    at_four = found["load"]["4"]
    assert "lookup, float32" in at_four["configurations"]
    # One draft token at 1.2 times the cost with four in flight, of which three in four are accepted.
    assert at_four["speedups"]["lookup, float32"]["value"] == pytest.approx(
        64 / (1 + 63 / 1.75) / COSTS[4][1], rel=0.02
    )
    assert at_four["fidelity"]["lookup, float32"]["verdict"] == "identical"


def test_answers_are_scored_and_rates_asked(run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, run_dir = run
    suites = dict(loaded.evaluate.suites)
    suites["talks"] = suites["talks"].model_copy(update={"score": "last_number"})
    scored = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"suites": suites})})
    with pytest.raises(
        UserError, match=r"`0` of the suite `talks` has nothing to score its answers with.*an `answer` with a number"
    ):
        run_evaluate(scored, run_dir)

    source = run_dir.parent / "sums.jsonl"
    source.write_text(
        "\n".join(json.dumps({"question": f"{n}?", ("answer", "expected")[n % 2]: f"#### {n}"}) for n in range(6, 9))
    )
    suites["talks"] = SuiteConfig.model_validate(
        {"prompts": {"path": str(source)}, "score": "last_number", "max_tokens": 9}
    )
    options = {"suites": suites, "request_rates": (0.5,), "request_prompts": 4}
    asked: list[Any] = []
    monkeypatch.setattr(evaluate, "at_request_rates", lambda *arguments, **named: asked.append(arguments[2:4]))
    texts = iter(["7", "7", "it is 7", "8", "6 or 8", "8"])  # baseline and speculative, in turns
    monkeypatch.setattr(TurnRenderer, "decode", lambda self, answer: next(texts))
    found = run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)}), run_dir)
    assert found["suites"]["talks"]["quality"] == {
        "measure": "last_number",
        "prompts": 3,
        "baseline": pytest.approx(2 / 3),
        "speculative": pytest.approx(1 / 3),
    }
    [(speculative, prompts)] = asked
    assert speculative["num_speculative_tokens"] == 2
    assert len(set(prompts)) == 4
    assert set(prompts) <= {f"question {number}" for number in range(16)}
    assert prompts != [f"question {number}" for number in (12, 13, 14, 15)]


def test_prompts_for_request_rates_are_drawn_by_category(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that is sorted by category, the last prompts are of one."""
    loaded, run_dir = run
    rows = [{"question_id": n, "category": ("math", "writing")[n // 8], "turns": [f"{n}"]} for n in range(16)]
    (run_dir.parent / "talks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = loaded.evaluate.model_dump() | {
        "only": ["talks"], "methods": {}, "dtypes": ["float32"], "engine_starts": 1, "concurrency": [], "request_rates": [0.5],
        "request_prompts": 4,
    }  # fmt: skip
    loaded = loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate(options)})
    asked: list[list[int]] = []
    monkeypatch.setattr(
        evaluate, "at_request_rates", lambda *arguments, **named: asked.append([int(one) for one in arguments[3]])
    )
    for seed in (0, 1, 0):  # each is another evaluation
        run_evaluate(loaded.model_copy(update={"seed": seed}), run_dir)
    assert [sorted(n // 8 for n in drawn) for drawn in asked] == [[0, 0, 1, 1]] * 3
    assert asked[0] == asked[2] != asked[1]


class Recording(Engine):
    """An engine that keeps the prompts of which it timed steps."""

    timed: set[int] = set()  # noqa: RUF012

    def step_times(self, prompt: Sequence[int], steps: int) -> Any:
        self.timed.update(prompt)
        return super().step_times(prompt, steps)


def test_what_is_timed_is_drawn_by_category_with_the_seed(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that is sorted by category, the last prompts, and the first, are of one."""
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Recording(config) for config in configs]
    )
    loaded, run_dir = run
    options = {
        "suites": {"sorted": {"prompts": sorted_by_category(run_dir.parent), "max_tokens": 5}}, "k": [2], "acceptance_k": 2,
        "dtypes": ["float32"], "engine_starts": 1, "concurrency": [4], "timing_prompts": 4, "step_cost_prompts": 6,
    }  # fmt: skip
    loaded = loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate(options)})
    drawn = []
    for seed in (0, 1):
        Recording.timed.clear()
        found = run_evaluate(loaded.model_copy(update={"seed": seed}), run_dir)
        timed = [found["suites"]["sorted"]["throughput"], found["load"]["4"]]
        asked = [baseline_again_drafter(one)[2]["starts"][0]["by_prompt"] for one in timed]
        drawn.append([set(Recording.timed), *({int(prompt) for prompt in one} for one in asked)])
    for one, other, count in zip(*drawn, (6, 4, 64), strict=True):
        assert one != other
        for prompts in (one, other):
            assert len(prompts) == count
            assert sum(prompt < 36 for prompt in prompts) == count / 2


class Uneven(Engine):
    """Engines that are slower in some starts than in others, as if by chance."""

    factors = {"drafter-float32": (1.1, 0.9, 1.0), "baseline-float32-again": (1.02, 0.97, 1.0)}  # noqa: RUF012

    def __init__(self, config: EngineSpec) -> None:
        number = sum(one.name == config.name for one in self.started)
        super().__init__(config)
        self.factor = self.factors.get(config.name, (1.0,) * 3)[number % 3]


def test_intervals_are_as_wide_as_engines_differ_between_starts(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [Uneven(config) for config in configs]
    )
    loaded, run_dir = run
    loaded = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"methods": {}})})
    found = run_evaluate(_in_float32(loaded), run_dir)
    # The drafter's engine is started three times for step costs, the last of which is the first that speed is measured with.
    assert [config.name for config in Engine.started].count("drafter-float32") == 5
    slower, again = (1.0, 1.1, 0.9), (1.02, 0.97, 1.0)
    for timed in (*(suite["throughput"] for suite in found["suites"].values()), found["load"]["4"]):
        ratio = timed["speedup"]
        assert ratio["median"] == ratio["by_start"][0]
        assert ratio["by_start"] == pytest.approx([ratio["median"] / factor for factor in slower])
        assert timed["noise"]["by_start"] == pytest.approx([1 / factor for factor in again])
        assert timed["noise"]["median"] == pytest.approx(1.0)
        low, high = ratio["interval"]
        assert low < min(ratio["by_start"]) < max(ratio["by_start"]) < high
        # Student's t of 0.8 * (2 + 2) degrees of freedom is beyond 3.07 with probability 0.05.
        spread = math.sqrt((statistics.variance(map(math.log, slower)) + statistics.variance(map(math.log, again))) / 2)
        assert math.log(high / low) / 2 == pytest.approx(3.07 * spread / math.sqrt(3), rel=0.1)
    questions = found["suites"]["questions"]
    assert questions["speedup_interval"] == questions["throughput"]["speedup"]["interval"]
    assert found["k_curve"]["2"]["step_cost"] == pytest.approx(COSTS[1][2])
    assert found["k_curve"]["2"]["step_cost_error"] == pytest.approx(COSTS[1][2] * 0.1 / math.sqrt(3))


def test_a_killed_evaluation_resumes(run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_evaluate(*run)
    loaded, run_dir = run
    (run_dir / "eval" / stage.MARKER).unlink()
    stage.claim(run_dir / "eval", fresh=True)
    in_batches = acceptance.in_batches
    asked: list[str] = []

    def dying(engines: Any, compared: Any, suite: Any, *rest: Any, **named: Any) -> Any:
        asked.append(suite.name)
        if asked == ["questions", "talks"]:
            raise KeyboardInterrupt
        return in_batches(engines, compared, suite, *rest, **named)

    monkeypatch.setattr(acceptance, "in_batches", dying)
    with pytest.raises(KeyboardInterrupt):
        run_evaluate(*run)
    assert not (run_dir / "eval" / stage.MARKER).exists()
    Engine.started.clear()
    again = run_evaluate(*run)
    assert asked == ["questions", "talks", "talks"]
    # K = 1 is not measured on the second suite, and step costs are known; then comes the speed phase, with the engines that are up.
    names = [config.name for config in Engine.started if config.dtype == "float32"]
    assert names[:5] == [
        "baseline-float32",
        "drafter-float32",
        "method-1-lookup-float32",
        "baseline-float32-again",
        "drafter-float32",
    ]
    assert names.count("baseline-float32") == 3
    for name in ("suites", "k_curve", "num_speculative_tokens", "load", "examples"):
        assert json.dumps(again[name]) == json.dumps(whole[name])  # type: ignore[literal-required]
    assert not (run_dir / "eval" / "partial.json").exists()

    # Killed while measuring speeds: finished engine starts and suites are not measured again.
    (run_dir / "eval" / stage.MARKER).unlink()
    stage.claim(run_dir / "eval", fresh=True)
    run_load, timed = speed.run_load, []
    one_start = [("questions", 1), ("talks", 1), ("load", 1), ("load", 4)]
    loaded = _in_float32(loaded)
    whole = run_evaluate(loaded, run_dir)
    (run_dir / "eval" / stage.MARKER).unlink()
    stage.claim(run_dir / "eval", fresh=True)

    def dying_load(engines: Any, requests: Any, in_flight: int, name: str) -> Any:
        assert len(engines) == 2
        timed.append((name, in_flight))
        if len(timed) == 11:  # in the first start, one request at a time with the method: the other loads are measured
            raise KeyboardInterrupt
        return run_load(engines, requests, in_flight, name)

    monkeypatch.setattr(speed, "run_load", dying_load)
    with pytest.raises(KeyboardInterrupt):
        run_evaluate(loaded, run_dir)
    assert timed == [*one_start * 2, *one_start[:3]]
    again = run_evaluate(loaded, run_dir)
    # Beside the baseline: the drafter and a second baseline, and with one request in flight the method.
    assert timed[11:] == [*[("load", 1)] * 3, *(2 * [*one_start * 2, *one_start[:3]])]
    assert json.dumps(again["suites"]) == json.dumps(whole["suites"])
    assert asked[-2:] == ["questions", "talks"]
    count = len(asked)

    # Partial results of another recipe are ignored.
    (run_dir / "eval" / stage.MARKER).unlink()
    write_json(run_dir / "eval" / "partial.json", {"inputs": "another", "suites": {}})
    run_evaluate(loaded, run_dir)
    assert asked[count:] == ["questions", "talks"]


def test_an_evaluation_with_only_rates_left_knows_how_many_engines_were_up(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run_dir = run
    options = {"request_rates": (0.5,), "only": ("questions",), "methods": {}, "engine_starts": 1}
    loaded = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)})

    def dying(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "at_request_rates", dying)
    with pytest.raises(KeyboardInterrupt):
        run_evaluate(loaded, run_dir)
    monkeypatch.setattr(evaluate, "at_request_rates", lambda *_, **__: None)
    Engine.started.clear()
    assert run_evaluate(loaded, run_dir)["engine"]["peak_engines"] == 2
    assert not Engine.started


def _in_float32(loaded: recipe.Recipe) -> recipe.Recipe:
    return loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"dtypes": ("float32",)})})


def test_engines_are_started_when_they_are_needed(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter at every K is one engine, and what is up already is not started again."""
    loaded, run_dir = run
    run_evaluate(_in_float32(loaded), run_dir)
    step_costs = 3 * ["baseline-float32", "drafter-float32"]
    acceptance_then_speed = [
        "method-1-lookup-float32",
        "drafter-float32",
        "baseline-float32-again",
        "method-1-lookup-float32",
    ]
    two_more = 2 * ["baseline-float32", "baseline-float32-again", "drafter-float32", "method-1-lookup-float32"]
    assert [config.name for config in Engine.started] == [*step_costs, *acceptance_then_speed, *two_more]
    drafter = Engine.started[1]
    assert drafter.speculative is not None
    assert drafter.speculative["num_speculative_tokens_per_batch_size"] == [[1, 4, 3]]
    # With one start, only the second baseline engine is started for the speed phase.
    Engine.started.clear()
    options = {"engine_starts": 1, "methods": {}, "dtypes": ("float32",)}
    found = run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)}), run_dir)
    assert [config.name for config in Engine.started] == [
        "baseline-float32",
        "drafter-float32",
        "baseline-float32-again",
    ]
    timed = found["suites"]["questions"]["throughput"]
    assert timed["noise"]["by_start"] == pytest.approx([1])
    asked = {name: len(one["starts"][0]["by_prompt"]) for name, one in timed["configurations"].items()}
    assert asked == {"baseline, float32": 16, "baseline, float32, again": 10, "K = 2, float32": 16}
    assert set(found["k_curve"]) == {"1", "2", "3"}, "K = 3 cannot be the fastest, but acceptance is asked for at it"
    options["acceptance_k"] = 2
    found = run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)}), run_dir)
    assert set(found["k_curve"]) == set(found["suites"]["questions"]["at_k"]) == {"1", "2"}
    assert (found["num_speculative_tokens"], found["toss_up"]) == (2, [])
    options["acceptance_k"] = 3
    # A method whose K is fixed has an engine for each.
    Engine.started.clear()
    (run_dir / "vllm" / "config.json").write_text(json.dumps({"architectures": ["MedusaModel"], "num_heads": 3}))
    run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)}), run_dir)
    assert [config.name for config in Engine.started] == [
        "baseline-float32",
        "K1-float32",
        "K2-float32",
        "K3-float32",  # step costs
        "K1-float32",
        "K2-float32",
        "K3-float32",
        "baseline-float32-again",
        "K2-float32",  # acceptance on two suites, speed
    ]
    # Suffix decoding drafts from earlier answers: where it is timed, no engine start has more of them than another.
    Engine.started.clear()
    monkeypatch.setattr("draftsmith.engine.speculation.find_spec", lambda name: object())
    suffix = options | {
        "methods": {"suffix": TypeAdapter(AnyMethod).validate_python({"method": "suffix", "num_speculative_tokens": 2})}
    }
    run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=suffix)}), run_dir)
    anew = ["baseline-float32", "baseline-float32-again", "K2-float32", "method-1-suffix-float32"]
    assert [config.name for config in Engine.started][-4:] == anew
    # A block of four need not begin as one of three does, so K = 3 is measured.
    options["acceptance_k"] = 2
    drafter = run_dir / "vllm"
    (drafter / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 4}))
    torch.save(torch.zeros(4), drafter / "mask_embedding.pt")
    found = run_evaluate(loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update=options)}), run_dir)
    assert set(found["k_curve"]) == {"1", "2", "3"}


@pytest.mark.parametrize(("in_flight", "starts", "counted"), [(1, 1, 30), (4, 1, 40), (16, 1, 160), (4, 3, 90)])
def test_the_noise_of_a_single_start_is_measured_on_fewer_requests(in_flight: int, starts: int, counted: int) -> None:
    """A third of them, but no fewer than 10 for each in flight."""
    options = {"timing_prompts": 90, "engine_starts": starts}
    loaded = recipe.Recipe.model_validate({"name": "r", "target": {"model": "a/b"}, "evaluate": options})
    load = speed.Load("load", "load", [(str(n), [n]) for n in range(90)], in_flight, 2)
    for noise, expected in ((True, counted), (False, max(90, 10 * in_flight))):
        asked = load.requests(loaded, noise=noise)
        assert [request.counted for _, request in asked] == [False] * in_flight + [True] * expected


class Drifting(Engine):
    """An engine on a machine that gets slower with every engine start."""

    up: set[str] = set()  # noqa: RUF012

    def at(self, batch: int) -> tuple[int, float]:
        k, seconds = super().at(batch)
        return k, seconds * 1.1 ** len(Engine.started)

    def close(self) -> None:
        self.up.discard(self.config.name)


def test_an_engine_for_every_k_gives_the_ratios_of_one_for_each(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whose graphs are captured for one K, each K has an engine. Two are up at a time on either, and every ratio is of engines
    that were up together."""
    loaded, run_dir = run
    loaded = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"dtypes": ("bfloat16",)})})
    whole = run_evaluate(loaded, run_dir)
    assert whole["engine"] == {"enforce_eager": True, "tensor_parallel_size": 1, "peak_engines": 2}
    pretend_gpu(monkeypatch, gib=6)
    Engine.started.clear()

    def start(configs: Any, folder: Any, on_ready: Any) -> list[Engine]:
        Drifting.up |= {config.name for config in configs}
        assert len(Drifting.up) <= 2, "two fit"
        assert all(config.memory_share == 0.5 and config.gpus == ("0",) for config in configs)
        return [Drifting(config) for config in configs]

    monkeypatch.setattr(lineup, "start_engines", start)
    found = run_evaluate(loaded, run_dir)
    assert not Drifting.up
    for suite in found["suites"].values():
        rates = suite["tokens_per_second"]
        assert rates["speculative"] / rates["baseline"] == pytest.approx(suite["speedup"])
    assert found["engine"] == {"enforce_eager": False, "tensor_parallel_size": 1, "peak_engines": 2}
    names = [config.name for config in Engine.started]
    step_costs = ["baseline-float32", "K1-float32", "K2-float32", "K3-float32"]
    assert names[: 3 * len(step_costs)] == step_costs * 3, "the baseline is started once and stays"
    for k, point in found["k_curve"].items():
        assert point["step_cost"] == pytest.approx(whole["k_curve"][k]["step_cost"])
    for key in ("num_speculative_tokens", "examples"):
        assert found[key] == whole[key]  # type: ignore[literal-required]
    for name, suite in found["suites"].items():
        for key in ("acceptance_length", "at_k", "categories", "identical_to_baseline", "control"):
            ours, theirs = (json.dumps(_without_seconds(one[key])) for one in (suite, whole["suites"][name]))  # type: ignore[literal-required]
            assert ours == theirs, key
        for value, expected in zip(_speeds(suite), _speeds(whole["suites"][name]), strict=True):
            assert value == pytest.approx(expected)
    (drafter, again), (alike, noise) = (
        compare._over_baseline(one["suites"]["questions"]["throughput"]) for one in (found, whole)
    )
    for ours, theirs in ((drafter, alike), (again, noise)):
        assert [_ratios(start) for start in ours] == [pytest.approx(_ratios(start)) for start in theirs]
    assert "baseline_starts" not in json.dumps(whole["suites"])
    assert found["load"]["4"]["speedup"]["value"] == pytest.approx(whole["load"]["4"]["speedup"]["value"])
    assert found["load"]["4"]["noise"]["by_start"] == pytest.approx([1, 1, 1])


def _speeds(suite: Any) -> list[float]:
    return [one["value"] for one in (suite["throughput"]["speedup"], *suite["throughput"]["speedups"].values())]


def _ratios(start: Any) -> dict[str, float]:
    """By prompt: tokens per second over the baseline's."""
    return {prompt: above / over / (below / spent) for prompt, (below, spent, above, over) in start.items()}


def _without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seconds(one) for key, one in value.items() if key != "seconds"}
    return value


def test_a_gpu_too_small_for_two_engines_is_an_error_before_any_starts(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run_dir = run
    pretend_gpu(monkeypatch, gib=4)
    with pytest.raises(
        UserError, match=r"do not fit on this machine: an engine needs about 2\.\d GiB.*evaluate\.concurrency"
    ):
        run_evaluate(loaded, run_dir)
    assert not Engine.started


class WrongAtThree(Engine):
    """An engine that answers something else while it drafts three tokens."""

    @property
    def token(self) -> int:
        return 8 if self.at(1)[0] == 3 else 7

    @token.setter
    def token(self, value: int) -> None:
        pass


def test_wrong_answers_have_an_exit_status_of_their_own(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [WrongAtThree(config) for config in configs]
    )
    for _ in range(2):  # the second time it is finished and still an error
        with pytest.raises(
            evaluate.WrongAnswersError, match=r"questions, K = 3: 16 of 16 answers differ, 16 of them"
        ) as raised:
            run_evaluate(*run)
    assert raised.value.exit_status == 4
    loaded, run_dir = run
    found = json.loads((run_dir / "eval" / "results.json").read_text())
    assert found["suites"]["questions"]["at_k"]["3"]["fidelity"]["verdict"] == "wrong"
    assert found["suites"]["questions"]["at_k"]["2"]["fidelity"]["verdict"] == "identical"
    assert found["suites"]["questions"]["control"]["tokens"] == 16 * 21
    assert "changes the text" in (run_dir / "eval" / "report.html").read_text()
    assert loaded.evaluate.acceptance_k == 3


class RoundsInLongPieces(Engine):
    """An engine whose answers also differ while it drafts eight tokens, all at near-ties. Reading more than four tokens at once rounds."""

    read: list[int] = []  # noqa: RUF012

    @property
    def token(self) -> int:
        return 8 if self.config.speculative and self.at(1)[0] in (3, 8) else 7

    @token.setter
    def token(self, value: int) -> None:
        pass

    def at(self, batch: int) -> tuple[int, float]:
        return (8, 0.1) if self.config.num_speculative_tokens == 8 else super().at(batch)

    def logit_margin(self, context: list[int], token: int, other: int) -> float | None:
        return 0.0

    def margins_read_again(
        self, prompts: Sequence[Any], answers: Sequence[Any], piece: int
    ) -> list[list[float | None]]:
        self.read.append(piece)
        return [[0.0 if piece > 4 else None] * len(answer) for answer in answers]


class WrongUnderLoad(Engine):
    """An engine that answers something else while it drafts for several requests."""

    loaded = False

    @property
    def token(self) -> int:
        return 8 if self.loaded and self.config.speculative else 7

    @token.setter
    def token(self, value: int) -> None:
        pass

    def begin_load(self, requests: Any, in_flight: int) -> None:
        self.loaded = in_flight > 1
        super().begin_load(requests, in_flight)

    def end_load(self) -> Any:
        self.loaded = False
        return super().end_load()


def test_answers_under_load_are_judged_too(run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [WrongUnderLoad(config) for config in configs]
    )
    loaded, run_dir = run
    with pytest.raises(
        evaluate.WrongAnswersError, match=r": 4 at once, K = \d, float32: 16 of 16 answers differ, 16 of them"
    ):
        run_evaluate(*run)
    found = json.loads((run_dir / "eval" / "results.json").read_text())
    suite, load = found["suites"]["questions"], found["load"]["4"]
    assert {one["fidelity"]["verdict"] for one in suite["at_k"].values()} == {"identical"}
    assert {one["verdict"] for one in suite["throughput"]["fidelity"].values()} == {"identical"}
    assert {one["verdict"] for one in load["fidelity"].values()} == {"wrong"}
    assert load["differences"].keys() == load["fidelity"].keys()
    for name, different in load["differences"].items():
        assert len({one["prompt"] for one in different}) == len(different) == 16
        assert {(one["num_speculative_tokens"], one["near_tie"]) for one in different} == {(int(name[4]), False)}
    assert all(different == [] for different in suite["throughput"]["differences"].values())
    report = (run_dir / "eval" / "report.html").read_text()
    for name in load["fidelity"]:  # one for each dtype that is fast on this machine
        assert f"<strong>With speculation the text changes: 4 at once, {name}: 16 of 16 answers differ" in report
    right = json.loads(json.dumps(found))
    for one in right["load"]["4"]["fidelity"].values():
        one["verdict"] = "identical"
    verdicts = {one["figure"]: one["verdict"] for one in compare.compare(right, found) if one["suite"] == "questions"}
    assert verdicts["the target's own answers"] == "worse"
    assert loaded.evaluate.concurrency == (1, 4)


def test_long_drafts_of_another_method_excuse_no_fault_of_short_ones(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [RoundsInLongPieces(config) for config in configs]
    )
    loaded, run_dir = run
    long = {"method": "ngram", "num_speculative_tokens": 8}
    options = loaded.evaluate.model_dump() | {
        "methods": {"lookup": long, "other": long, "short": long | {"num_speculative_tokens": 3}}, "only": ["questions"],
        "dtypes": ["float32"], "engine_starts": 1,
    }  # fmt: skip
    loaded = loaded.model_copy(update={"evaluate": EvaluateConfig.model_validate(options)})
    RoundsInLongPieces.read.clear()
    with pytest.raises(evaluate.WrongAnswersError, match=r"questions, K = 3: 16 of 16 answers differ, 0 of them"):
        run_evaluate(loaded, run_dir)
    suite = json.loads((run_dir / "eval" / "results.json").read_text())["suites"]["questions"]
    assert {k: one["fidelity"]["verdict"] for k, one in suite["at_k"].items()} == {
        "1": "identical",
        "2": "identical",
        "3": "wrong",
    }
    assert {name: one["fidelity"]["verdict"] for name, one in suite["methods"].items()} == {
        "lookup": "near_ties",
        "other": "near_ties",
        "short": "wrong",
    }
    assert [(one["piece"], one["differing"]) for one in suite["controls"]] == [(4, 0), (9, 16)]
    assert suite["control"] == suite["controls"][-1]
    # Once for all variants with drafts of a length, in batches of four; then once more for each of the timed methods.
    assert RoundsInLongPieces.read[:8] == [4] * 4 + [9] * 4
    assert set(RoundsInLongPieces.read[8:]) == {4, 9}


class FastInHalf(Drifting):
    """The baseline is half as fast again in bfloat16 as in float32, and speculation gains less in it."""

    def __init__(self, config: EngineSpec) -> None:
        super().__init__(config)
        if config.dtype == "bfloat16":
            self.factor = 1.0 if config.num_speculative_tokens else 1 / 1.5


def test_the_fastest_baseline_is_what_counts(run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest baseline and the fastest drafter differ in dtype, so that they are measured beside each other too: the machine gets
    slower meanwhile."""
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [FastInHalf(config) for config in configs]
    )
    monkeypatch.setattr("draftsmith.serve.evaluation.configurations.machine_dtypes", lambda: ["float32", "bfloat16"])
    suite = run_evaluate(*run)["suites"]["questions"]
    timed = suite["throughput"]
    assert (timed["fastest_baseline"], timed["fastest_speculative"]) == ("baseline, bfloat16", "K = 2, float32")
    assert suite["speedup_over_fastest_baseline"] == pytest.approx(suite["speedup"] / 1.5)
    assert timed["speedup_over_fastest_baseline"]["by_start"] == pytest.approx([suite["speedup"] / 1.5] * 3)
    assert timed["speedups"]["K = 2, bfloat16"]["value"] == pytest.approx(suite["speedup"] / 1.5)


class LittleFasterInHalf(Drifting):
    """Everything is an eighth faster in bfloat16; the machine gets slower by more than that until it is its turn."""

    def __init__(self, config: EngineSpec) -> None:
        super().__init__(config)
        self.factor = 1 / 1.125 if config.dtype == "bfloat16" else 1.0


def test_a_machine_that_gets_slower_hides_no_faster_baseline(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens per second are of engines minutes apart: by them both the baseline and the drafter would be fastest in float32."""
    monkeypatch.setattr(
        lineup, "start_engines", lambda configs, folder, on_ready: [LittleFasterInHalf(config) for config in configs]
    )
    monkeypatch.setattr("draftsmith.serve.evaluation.configurations.machine_dtypes", lambda: ["float32", "bfloat16"])
    loaded, run_dir = run
    once = loaded.evaluate.model_copy(update={"engine_starts": 1, "only": ("questions",), "concurrency": ()})
    suite = run_evaluate(loaded.model_copy(update={"evaluate": once}), run_dir)["suites"]["questions"]
    rates = {name: one["tokens_per_second"] for name, one in suite["throughput"]["configurations"].items()}
    assert rates["baseline, bfloat16"] < rates["baseline, float32"]
    assert rates["K = 2, bfloat16"] < rates["K = 2, float32"]
    assert suite["throughput"]["fastest_baseline"] == "baseline, bfloat16"
    assert suite["speedup_over_fastest_baseline"] == pytest.approx(suite["speedup"] / 1.125)


@pytest.mark.parametrize(("on_gpu", "native", "dtypes"), [
    (False, True, ["float32", "bfloat16"]), (False, False, ["float32"]), (True, True, ["bfloat16"]), (True, False, ["float16"]),
])  # fmt: skip
def test_the_dtypes_of_machines(on_gpu: bool, native: bool, dtypes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": native and not on_gpu}, raising=False)
    assert configurations.machine_dtypes() == dtypes


@pytest.mark.parametrize(("stated", "options"), [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, {}), (None, {"quantization": "fp8_per_channel"}),
])  # fmt: skip
def test_a_quantized_target_is_timed_in_its_own_dtype(
    run: tuple[recipe.Recipe, Path],
    stated: dict[str, Any] | None,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM refuses float32 for its weights, and what the recipe asks for is not overruled."""
    loaded, run_dir = run
    monkeypatch.setattr("draftsmith.engine.quantization._has_avx512", lambda: True)
    monkeypatch.setattr(configurations, "machine_dtypes", lambda: ["float32", "bfloat16"])
    path = run_dir.parent / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({"quantization_config": stated} if stated else {})))
    loaded = loaded.model_copy(
        update={
            "target": loaded.target.model_copy(update={"dtype": "bfloat16"}),
            "engine": loaded.engine.model_copy(update={"options": options}),
        }
    )
    found = run_evaluate(loaded, run_dir)
    assert {config.dtype for config in Engine.started} == {"bfloat16"}
    assert found["suites"]["questions"]["throughput"]["fastest_baseline"] == "baseline, bfloat16"
    both = loaded.evaluate.model_copy(update={"dtypes": ("bfloat16", "float16")})
    run_evaluate(loaded.model_copy(update={"evaluate": both}), run_dir)
    assert {config.dtype for config in Engine.started} == {"bfloat16", "float16"}


def test_methods_names_are_no_engine_s(run: tuple[recipe.Recipe, Path]) -> None:
    """A method called as an engine is was measured on that engine, or the drafter on the method's."""
    loaded, run_dir = run
    plain = run_evaluate(loaded, run_dir)
    methods = {name: {"method": "ngram", "num_speculative_tokens": 1} for name in ("drafter", "K1", "one_1", "one-1")}
    changed = EvaluateConfig.model_validate(loaded.evaluate.model_dump(mode="json") | {"methods": methods})
    Engine.started.clear()
    found = run_evaluate(loaded.model_copy(update={"evaluate": changed}), run_dir)
    by_name = {config.name: config.speculative for config in Engine.started}
    assert len([name for name in by_name if name.startswith("method-") and name.endswith("float32")]) == 4
    assert by_name["drafter-float32"]["method"] != "ngram"  # type: ignore[index]
    for one in methods:
        assert found["suites"]["questions"]["methods"][one]["method"] == "ngram"
    assert found["k_curve"] == plain["k_curve"]
    named = recipe.Recipe.model_validate(loaded.model_dump(mode="json"))
    for name in ("baseline", "K = 3"):
        wrong = named.evaluate.model_dump(mode="json") | {"methods": {name: methods["one_1"]}}
        with pytest.raises(ValueError, match=f"`methods.{name}` has a name that results use"):
            recipe.Recipe.model_validate(named.model_dump(mode="json") | {"evaluate": wrong})


def test_an_evaluation_that_cannot_run_leaves_the_earlier_one(run: tuple[recipe.Recipe, Path]) -> None:
    loaded, run_dir = run
    run_evaluate(loaded, run_dir)
    before = {path: path.read_bytes() for path in (run_dir / "eval").iterdir()}
    wrong: tuple[dict[str, Any], ...] = (
        {"methods": {"of another": {"method": "eagle3", "model": str(run_dir / "nowhere")}}},
        {"suites": {"questions": {"prompts": loaded.extract.prompts, "score": "last_number"}}},
        {"suites": {"questions": {"prompts": loaded.extract.prompts, "max_tokens": 10**6}}},
    )
    for change in wrong:
        options = EvaluateConfig.model_validate(loaded.evaluate.model_dump(mode="json") | change)
        with pytest.raises(UserError):
            run_evaluate(loaded.model_copy(update={"evaluate": options}), run_dir)
        assert {path: path.read_bytes() for path in (run_dir / "eval").iterdir()} == before


@pytest.mark.parametrize(
    ("vllm_args", "reason"),
    [
        ({"port": 1}, r"`serve\.vllm_args\.port` is set elsewhere: with --port"),
        ({"max-model-len": 1}, r"`serve\.vllm_args\.max-model-len` is set elsewhere"),
        (
            {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [12]}},
            r"12, not a multiple of 5",
        ),
    ],
)
def test_what_only_the_last_phase_needs_is_checked_first(
    vllm_args: dict[str, Any], reason: str, run: tuple[recipe.Recipe, Path]
) -> None:
    """Another recipe would be another evaluation, and begin anew. The sizes fit the K that is chosen, but any of them could have been."""
    loaded, run_dir = run
    changes = {
        "evaluate": loaded.evaluate.model_copy(update={"k": (1, 2, 4), "request_rates": (0.5,)}),
        "serve": loaded.serve.model_copy(update={"vllm_args": vllm_args}),
    }
    with pytest.raises(UserError, match=reason):
        run_evaluate(loaded.model_copy(update=changes), run_dir)
    assert not Engine.started
    assert not (run_dir / "eval").exists()


def test_whether_answers_can_be_scored_is_known_first(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, run_dir = run
    source = run_dir.parent / "functions.jsonl"
    row = {"task_id": "f/0", "prompt": "def f():\n", "test": "def check(f): ...", "entry_point": "f"}
    source.write_text(json.dumps(row))
    suites = {
        "functions": SuiteConfig.model_validate(
            {"prompts": {"path": str(source)}, "score": "unit_tests", "max_tokens": 9}
        )
    }
    monkeypatch.setattr("draftsmith.serve.evaluation.quality._LIMITS", "raise SystemExit(1)\n")
    with pytest.raises(DraftsmithError, match="code cannot be run"):
        run_evaluate(
            loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"suites": suites})}), run_dir
        )
    assert not Engine.started


def test_another_first_suite_is_another_evaluation(run: tuple[recipe.Recipe, Path]) -> None:
    loaded, run_dir = run
    first = run_evaluate(loaded, run_dir)
    suites = dict(reversed(loaded.evaluate.suites.items()))
    turned = loaded.model_copy(update={"evaluate": loaded.evaluate.model_copy(update={"suites": suites})})
    again = run_evaluate(turned, run_dir)
    assert set(first["suites"]["questions"]["at_k"]) == set(again["suites"]["talks"]["at_k"]) == {"1", "2", "3"}
    Engine.started.clear()
    run_evaluate(turned, run_dir)
    assert not Engine.started


def test_an_evaluation_is_not_continued_on_another_machine(
    run: tuple[recipe.Recipe, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    measure = speed.run_load
    monkeypatch.setattr(speed, "run_load", dying)
    with pytest.raises(KeyboardInterrupt):
        run_evaluate(*run)
    there = json.loads((run[1] / "eval" / "partial.json").read_text())
    assert there["step_costs"]
    monkeypatch.setattr(speed, "run_load", measure)
    here = partial.measured_on()
    monkeypatch.setattr(partial, "measured_on", lambda: here | {"processor": "another"})
    Engine.started.clear()
    run_evaluate(*run)
    assert "was measured with another processor; beginning anew" in capsys.readouterr().err
    assert [config.name for config in Engine.started][:2] == ["baseline-float32", "drafter-float32"]
