"""Evaluation's arithmetic and report, engine configurations, the server, and engines that die. No vLLM."""

import copy
import io
import json
import multiprocessing
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config import recipe
from draftsmith.config.evaluation import RESULTS_VERSION
from draftsmith.engine import environment, process
from draftsmith.engine.speculation import speculative_config
from draftsmith.extract import worker
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.serve import proposals, server, vllm_server
from draftsmith.serve.evaluation import charts, report, schema, statistics, summary
from draftsmith.serve.evaluation import engine as engine_module
from draftsmith.serve.evaluation.engine import Counters, EngineHost, EngineSpec, Generated
from draftsmith.serve.evaluation.machine import describe_engines

# --- results from counters ---


def test_acceptance_from_a_difference_of_counters() -> None:
    before = Counters(drafts=10, draft_tokens=30, accepted=4, accepted_per_position=(3, 1, 0))
    after = Counters(drafts=110, draft_tokens=330, accepted=84, accepted_per_position=(53, 26, 5))
    found = statistics.acceptance(after - before)
    assert found["acceptance_length"] == 1.8
    assert found["acceptance_per_position"] == [0.5, 0.25, 0.05]
    assert found["acceptance_per_position_conditional"] == [0.5, 0.5, 0.2]
    assert (found["drafts"], found["draft_tokens"], found["accepted"]) == (100, 300, 80)


def test_first_counters_may_have_no_positions_yet() -> None:
    assert (Counters(5, 5, 2, (2,)) - Counters()).accepted_per_position == (2,)


def test_nothing_drafted_is_the_baseline() -> None:
    assert statistics.acceptance(Counters())["acceptance_length"] == 1.0


@given(st.integers(1, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_per_position_shares_add_up_to_the_acceptance_length(drafts: int, shares: list[float]) -> None:
    counts: list[int] = []
    for share in shares:
        counts.append(int((counts[-1] if counts else drafts) * share))
    found = statistics.acceptance(Counters(drafts, drafts * len(counts), sum(counts), tuple(counts)))
    assert found["acceptance_length"] == pytest.approx(1 + sum(found["acceptance_per_position"]))
    product = 1.0
    for whole, conditional in zip(
        found["acceptance_per_position"], found["acceptance_per_position_conditional"], strict=True
    ):
        product *= conditional
        assert product == pytest.approx(whole)


# --- report ---


def _point(speedup: float) -> schema.CurvePoint:
    return {
        "acceptance_length": 1.5, "step_cost": 1.5 / speedup, "step_cost_measured": 1.5 / speedup, "step_cost_error": 0.01, "step_cost_interval": [1.5 / speedup - 0.04, 1.5 / speedup + 0.04],
        "speedup": speedup, "speedup_interval": [speedup - 0.1, speedup + 0.1], "fastest_share": 0.5,
    }  # fmt: skip


def _fidelity(verdict: str) -> schema.Fidelity:
    return {
        "answers": 5, "differing": 0, "tokens": 300, "mismatches": 0, "rate_p_value": 1.0, "margins_p_value": None,
        "verdict": verdict,
    }  # fmt: skip


def _throughput(in_flight: int, rates: dict[str, float]) -> schema.Throughput:
    """A throughput with these tokens per second, in two engine starts of which the second is slower."""
    measured: dict[str, schema.Measured] = {}
    for name, rate in rates.items():
        speculation = (
            int(name[4]) if name.startswith("K = ") else 0 if name.startswith("baseline") else name.split(",")[0]
        )
        starts: list[schema.AtStart] = [
            {
                "by_prompt": {f"p{n}": [64.0, factor * 64 / rate] for n in range(5)},
                "first_token_seconds": 0.25,
                "seconds_per_token": 0.0875,
            }
            for factor in (1.0, 1.02)
        ]
        measured[name] = {
            "speculation": speculation, "dtype": name.split(", ")[1], "tokens_per_second": rate, "first_token_seconds": 0.25,
            "seconds_per_token": 0.0875, "starts": starts,
            "execution": {"model_runner": "V1", "async_scheduling": False},
        }  # fmt: skip
    ratio: schema.Ratio = {"value": 1.2889, "interval": [1.21, 1.37], "by_start": [1.3, 1.2915], "median": 1.2957}
    fastest: schema.Ratio = {"value": 1.1234, "interval": [1.05, 1.2], "by_start": [1.144, 1.13], "median": 1.137}
    lookup: schema.Ratio = {"value": 1.1333, "interval": [0.98, 1.29], "by_start": [1.16, 1.14], "median": 1.15}
    return {
        "in_flight": in_flight, "requests": 40, "max_tokens": 64, "engine_starts": 2, "configurations": measured, "speedup": ratio,
        "speedups": {
            name: lookup if name.startswith("lookup") else ratio for name in rates if not name.startswith("baseline")
        },
        "fastest_baseline": "baseline, bfloat16", "fastest_speculative": "K = 2, float32", "speedup_over_fastest_baseline": fastest,
        "noise": ratio | {"value": 1.0, "interval": [0.96, 1.04]}, "fidelity": {}, "differences": {},
    }  # fmt: skip


def _results(target: str = "a target") -> schema.Results:
    at_k: dict[str, schema.SuiteAtK] = {}
    for k, counters in (("2", Counters(100, 200, 70, (50, 20))), ("3", Counters(90, 270, 81, (45, 27, 9)))):
        at_k[k] = {
            **statistics.acceptance(counters),
            "acceptance_length_interval": [1.65, 1.75],
            "by_prompt": {"p1": [counters.drafts, counters.accepted]},
            "prompts_identical": 5,
            "fidelity": _fidelity("identical"),
            "seconds": 12.5,
        }
    rates = {
        "baseline, float32": 11.25, "baseline, float32, again": 11.25, "K = 2, float32": 14.5, "baseline, bfloat16": 12.9,
        "lookup, float32": 12.75,
    }  # fmt: skip
    at_rate: schema.AtRate = {
        "requests_per_second": 0.4, "tokens_per_second": 20.0, "first_token_seconds": 0.25, "first_token_seconds_p99": 0.9,
        "seconds_per_token": 0.08, "seconds_per_token_p99": 0.095,
    }  # fmt: skip
    suite: schema.Suite = {
        **statistics.acceptance(Counters(100, 200, 70, (50, 20))),
        "prompts": 5,
        "prompts_sha256": "2",
        "max_tokens": 64,
        "tokens_per_second": {"baseline": 11.25, "speculative": 14.5},
        "speedup": 1.2889,
        "speedup_interval": [1.21, 1.37],
        "speedup_over_fastest_baseline": 1.1234,
        "speedup_over_fastest_baseline_interval": [1.05, 1.2],
        "throughput": _throughput(1, rates),
        "acceptance_length_interval": [1.65, 1.75],
        "categories": {
            "writing": {
                "prompts": 6,
                "conversations": 5,
                "acceptance_length": 1.625,
                "acceptance_length_interval": [1.5, 1.75],
            }
        },
        "methods": {
            "lookup": {
                **at_k["3"],
                "method": "ngram",
                "num_speculative_tokens": 3,
                "tokens_per_step": 1.125,
                "tokens_per_second": 12.75,
                "speedup": 1.1333,
                "speedup_interval": [0.98, 1.29],
            }
        },
        "timed_prompts": 4,
        "identical_to_baseline": True,
        "control": {"tokens": 300, "differing": 0, "margins": [], "piece": 4},
        "differences": [],
        "quality": {"measure": "last_number", "prompts": 5, "baseline": 0.4, "speculative": 0.2},
        "at_k": at_k,
        "baseline_seconds": 20.0,
    }
    return {
        "schema_version": RESULTS_VERSION,
        "target": target,
        "drafter": "LlamaForCausalLMEagle3 (demo)",
        "drafter_sha256": {"config.json": "0", "model.safetensors": "1"},
        "num_speculative_tokens": 2,
        "suites": {"held_out": suite, "<b>mt</b>": suite},
        "k_curve": {"1": _point(1.1), "2": _point(1.3), "3": _point(1.2)},
        "toss_up": [3],
        "engine_starts": 2,
        "predicted_acceptance_length": {"2": 1.678, "3": 1.9},
        "predicted_speedup": {"2": 1.456, "3": 1.2},
        "load": {"4": _throughput(4, rates | {"K = 2, float32": 44.0})},
        "rates": {
            "0.5": {
                "suite": "held_out",
                "requests": 100,
                "num_speculative_tokens": 2,
                "baseline": at_rate,
                "speculative": at_rate | {"seconds_per_token": 0.0625},
            }
        },
        "examples": [
            {"prompt": "p1", "question": "Why <now>?", "tokens": [["It", 0], [" is", 1], [" <late>", 2], [".", 0]]}
        ],
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": None},
        "sampled_fidelity": {},
        "dtype": "float32",
        "versions": {"vllm": "0.32.0"},
        "machine": {"processor": "P", "cores": 2, "memory_gib": 8.0, "gpus": [], "system": "Linux"},
        "engine": {"enforce_eager": True, "tensor_parallel_size": 1, "peak_engines": 2},
    }


class _Page(HTMLParser):
    """Text and tags of a page; checks that tags close in order and nothing is loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page must load nothing"
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_report_shows_the_figures_and_loads_nothing() -> None:
    html = report.render(_results())
    page = _Page(html)
    assert page.open == []
    assert page.tags.count("svg") == 5
    text = "\n".join(page.text)
    for figure in (
        "1.29",
        "14.50",
        "0.960 to 1.040",
        "1.12",
        "11.2",
        "1.700",
        "50.0%, 20.0%",
        "1.900",
        "1.678",
        "5 of 5",
        "0.32.0",
        "1.210 to 1.370",
        "held_out, lookup",
        "12.75",
        "writing",
        "1.625",
        "44.00",
        "baseline, bfloat16",
        "K = 3 may be as fast",
        "2 engine starts",
        "Why <now>?",
    ):
        assert figure in text, figure
    assert "identical" in text
    assert 'data-draft="2" title="draft token 2"> &lt;late&gt;</b>' in html
    assert not re.search(r"https?://|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html


def test_report_shows_every_speedup_with_its_interval_and_median() -> None:
    html = report.render(_results())
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", html)]
    speedup, fastest = ["1.289", "1.210 to 1.370", "1.296"], ["1.123", "1.050 to 1.200", "1.137"]
    lookup = ["1.133", "0.980 to 1.290", "1.150"]
    suites = [row for row in rows if row[:2] in (["held_out", "2"], ["held_out", "3"], ["held_out, lookup", "3"])]
    assert [row[9:15] for row in suites] == [[*speedup, *fastest], [""] * 6, [*lookup, *[""] * 3]]
    assert ["4", *speedup, "K = 2, float32", "baseline, bfloat16", *fastest, "0.960 to 1.040"] in rows
    for where in ("held_out", "4"):
        by_name = {row[1]: row[3:6] for row in rows if row[0] == where and "float32" in row[1]}
        assert by_name == {
            "baseline, float32": [""] * 3,
            "baseline, float32, again": [""] * 3,
            "K = 2, float32": speedup,
            "lookup, float32": lookup,
        }
    assert "Its fastest configuration here by tokens per second, measured one after the other (K = 2, float32)" in html
    for median in ("1.296", "1.137"):
        assert re.search(rf"median of\sstarts {median}", html)


def test_few_conversations_are_shown_without_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    results = _results()
    suite = copy.deepcopy(results["suites"]["held_out"])
    results["suites"] = {"held_out": suite}
    suite["categories"]["writing"] |= {"conversations": 4, "acceptance_length_interval": None}
    suite["at_k"]["3"]["acceptance_length_interval"] = None
    html = report.render(results)
    assert "<th>prompts</th><th>conversations</th><th>acceptance length</th>" in html
    assert "<td>writing</td><td>6</td><td>4</td><td>1.625</td><td>-</td>" in html
    screen = io.StringIO()
    monkeypatch.setattr(summary, "console", Console(file=screen, width=80))
    summary.print_table(results)
    assert ["3", "1.90", "5/5"] in [line.split() for line in screen.getvalue().splitlines()]
    assert "(+-0.04) x baseline" in screen.getvalue()


def test_report_says_that_another_method_was_faster() -> None:
    assert "another method was faster" not in report.render(_results()), "lookup has 1.13 and the drafter 1.29"
    results = _results()
    lookup = results["suites"]["held_out"]["methods"]["lookup"]
    lookup["speedup"], lookup["speedup_interval"] = 1.5, [1.4, 1.6]
    assert (
        "<strong>held_out: another method was faster than this one&#x27;s 1.29 (1.21 to 1.37): lookup 1.50 (1.40 to 1.60), over the same "
        "baseline.</strong>" in report.render(results)
    )


def test_report_says_what_was_measured_at_request_rates() -> None:
    found = _results()
    html = report.render(found)
    assert "One run for each rate and server: 100 requests of held_out at random times" in html
    assert "K = 2. Times are medians over requests; p99: the 99th percentile." in html
    assert html.count("p99, s</th>") == html.count("s/token p99</th>") == 2
    of_few = found["rates"]["0.5"]
    of_few["requests"] = 32
    for at in (of_few["baseline"], of_few["speculative"]):
        at["first_token_seconds_p99"] = None
        at["seconds_per_token_p99"] = None
    html = report.render(found)
    assert "p99" not in html
    assert "<td>0.5</td><td>20.000</td><td>20.000</td><td>0.250</td><td>0.250</td><td>0.080</td><td>0.062</td>" in html


def test_report_escapes_what_it_did_not_write() -> None:
    html = report.render(_results(target='</title><script>alert("1")</script>'))
    assert "<script" not in html
    assert "<b>" not in html
    assert '</title><script>alert("1")</script>' in "".join(_Page(html).text)


def test_report_shows_differing_answers() -> None:
    found = _results()
    for verdict, said in (("near_ties", "each where the target itself was undecided"), ("wrong", "changes the text")):
        differing = copy.deepcopy(found["suites"]["held_out"])
        differing["identical_to_baseline"] = False
        differing["at_k"]["2"]["fidelity"] = _fidelity(verdict) | {"differing": 2}
        found["suites"] = {"held_out": differing}
        html = report.render(found)
        assert "2 answers" in html
        assert said in html


def test_report_shows_that_another_method_changes_answers() -> None:
    found = _results()
    found["suites"] = {"held_out": copy.deepcopy(found["suites"]["held_out"])}
    assert "the text changes" not in report.render(found)
    found["suites"]["held_out"]["methods"]["lookup"]["fidelity"] = _fidelity("wrong") | {
        "differing": 2,
        "mismatches": 1,
    }
    html = report.render(found)
    assert "<strong>With speculation the text changes: held_out, lookup: 2 of 5 answers differ, 1 of them" in html
    assert html.count("the text changes") == 1


def test_the_table_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(summary, "console", Console(file=screen, width=80))
    summary.print_table(_results())
    shown = screen.getvalue()
    rows = [line.split() for line in shown.splitlines()]
    assert ["held_out", "2", "1.70", "+-0.05", "11.2", "to", "14.5", "1.29", "+-0.08", "1.12", "+-0.07", "5/5"] in rows
    assert ["3", "1.90", "+-0.05", "5/5"] in rows
    assert ["lookup", "3", "1.12", "11.2", "to", "12.8", "1.13", "+-0.16", "5/5"] in rows
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown, "a cell is cut off"


def test_draft_tokens_are_told_from_the_target_s_own() -> None:
    # The target's first token; a step with one draft token accepted, one with none, one cut off by the answer's end.
    answer = Generated([5, 6, 7, 8, 9, 10], "length", 0.0, drafted=(3, 3, 3), accepted=(1, 0, 3))
    assert statistics.draft_position(answer) == [0, 1, 0, 0, 1, 2]
    assert statistics.draft_position(Generated([5, 6], "length", 0.0)) == [0, 0]
    # Five tokens in three steps, of which the last was cut off; one token in one; and two steps with drafts among four.
    lookup = Generated([1, 2, 3, 4, 5, 6], "length", 0.0, drafted=(2, 2), accepted=(1, 0))
    assert statistics.tokens_per_step([answer]) == 5 / 3
    assert statistics.tokens_per_step([answer, Generated([5, 6], "length", 0.0), lookup]) == (5 + 1 + 5) / (3 + 1 + 4)


def test_chart_heights_are_proportional_to_values() -> None:
    svg = charts.bar_chart(["x"], {"baseline": [10.0], "speculative": [20.0]})
    heights = [float(h) for h in re.findall(r'height="([\d.]+)"><title>', svg)]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)


# --- environment and configuration ---


def test_memory_is_shared_and_not_rounded_to_whole_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_cpu", lambda: True)
    assert environment.memory_arguments(recipe.EngineConfig(kv_cache_gib=1.5), share=0.5) == {
        "kv_cache_memory_bytes": 3 * 2**28
    }
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    assert environment.memory_arguments(recipe.EngineConfig(), share=0.5) == {"gpu_memory_utilization": 0.425}


@pytest.mark.parametrize(("on_gpu", "asked", "eager"), [
    (True, None, False), (False, None, True), (True, True, True), (False, False, False),
])  # fmt: skip
def test_cuda_graphs_are_a_gpu_s_default(
    on_gpu: bool, asked: bool | None, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every engine that a stage starts, and in its record."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    engine = recipe.EngineConfig(enforce_eager=asked)
    config = EngineSpec(name="baseline", target="t", dtype="float32", engine=engine)
    assert config.arguments()["enforce_eager"] is eager
    loaded = _recipe().model_copy(update={"engine": engine})
    command = vllm_server.server_command(loaded, Path("/t"), None, name="n", host="127.0.0.1", port=1)
    assert ("--enforce-eager" in command) == eager
    assert describe_engines(engine, 2) == {"enforce_eager": eager, "tensor_parallel_size": 1, "peak_engines": 2}


def test_environment_keeps_a_preload_that_the_user_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "libmine.so")
    assert environment.openmp_environment()["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:libmine.so"
    for other in ("/other/libiomp5.so", "/usr/lib/libgomp.so.1"):  # vLLM refuses two of them
        monkeypatch.setenv("LD_PRELOAD", other)
        assert "LD_PRELOAD" not in environment.openmp_environment()
    # What vLLM itself put there, in a process that made one of its configs.
    monkeypatch.setenv("LD_PRELOAD", "libmine.so:/site-packages/torch.libs/libgomp-98b21ff3.so.1")
    assert environment.openmp_environment()["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:libmine.so"


def test_environment_keeps_a_heap_that_the_user_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_cpu", lambda: True)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    values = environment.vllm_environment(recipe.EngineConfig())
    assert values["MALLOC_TRIM_THRESHOLD_"] == "5"
    assert int(values["MALLOC_MMAP_THRESHOLD_"]) == 2**25


def test_float32_is_exact_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    assert environment.float32_environment("float32") == {"TRITON_F32_DEFAULT": "ieee"}
    assert environment.float32_environment("bfloat16") == {}, "there are kernels that mean TF32"
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert environment.float32_environment("float32") == {"TRITON_F32_DEFAULT": "tf32"}
    monkeypatch.setattr(environment, "is_cpu", lambda: True)
    assert environment.float32_environment("float32") == {}


def test_engines_and_recorders_are_started_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setattr(environment, "is_cpu", lambda: False)
    started: list[object] = []
    for module in (engine_module, worker):
        monkeypatch.setattr(
            module, "EngineProcess", lambda *_, variables, **__: started.append(variables.get("TRITON_F32_DEFAULT"))
        )
    for number, dtype in enumerate(("float32", "bfloat16")):
        EngineHost(EngineSpec(name="k2", target="t", dtype=dtype, engine=recipe.EngineConfig()), tmp_path).start()
        job = SimpleNamespace(engine_arguments={"dtype": dtype})
        worker._Worker(0, 1, job, recipe.EngineConfig(), tmp_path, tmp_path / str(number), tmp_path)  # type: ignore[arg-type]
    assert started == ["ieee", "ieee", None, None]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    asked = []
    start = subprocess.Popen

    def fails(_: object, *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        asked.append(env.get("TRITON_F32_DEFAULT"))
        return start(["false"], **options)

    monkeypatch.setattr(subprocess, "Popen", fails)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(DraftsmithError, match="could not serve"):
            proposals.record([(tmp_path, "eagle3")], tmp_path / "none", [[1]], k=1, max_tokens=1, dtype=dtype)
    assert asked == ["ieee", None]


def test_engines_differ_in_speculation_only() -> None:
    baseline = EngineSpec(name="baseline", target="t", dtype="float32", engine=recipe.EngineConfig())
    speculative = EngineSpec(
        name="k2", target="t", dtype="float32", engine=recipe.EngineConfig(), speculative={"method": "eagle3"}
    )
    arguments = speculative.arguments()
    assert arguments.pop("speculative_config") == {"method": "eagle3"}
    assert arguments.pop("per_request_spec_decode_metrics") == "detailed"  # which vLLM has with speculation alone
    assert arguments == baseline.arguments()
    assert arguments["enable_prefix_caching"] is False


def test_a_drafter_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        speculative_config(tmp_path, 3)
    with pytest.raises(UserError, match=r"config\.json"):
        speculative_config(tmp_path / "nothing", 3)


# --- server ---


def _recipe() -> recipe.Recipe:
    return recipe.Recipe.model_validate(
        {"name": "r", "target": {"model": "owner/name"}, "extract": {"prompts": {"path": "p.jsonl"}}}
    )


def test_the_server_takes_the_k_that_evaluation_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = {"model.safetensors": "abc"}
    assert server.chosen_k(_recipe(), tmp_path, drafter) is None
    (tmp_path / "eval").mkdir()
    results = {"num_speculative_tokens": 2, "drafter_sha256": drafter}
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results))
    assert server.chosen_k(_recipe(), tmp_path, drafter) == 2
    capsys.readouterr()
    assert server.chosen_k(_recipe(), tmp_path, {"model.safetensors": "of a later training"}) is None
    assert "is not known to be of this drafter" in capsys.readouterr().err
    judged = _results()
    (tmp_path / "eval" / "results.json").write_text(json.dumps(judged))
    assert server.chosen_k(_recipe(), tmp_path, judged["drafter_sha256"]) == 2
    assert not capsys.readouterr().err
    judged["load"]["4"]["fidelity"]["K = 2, float32"] = _fidelity("wrong")
    (tmp_path / "eval" / "results.json").write_text(json.dumps(judged))
    assert server.chosen_k(_recipe(), tmp_path, judged["drafter_sha256"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: with this drafter the text changed" in said
    assert "4 at once, K = 2, float32: " in said
    (tmp_path / "eval" / "results.json").write_text('{"num_speculative_tokens": 2}')  # of an earlier version
    assert server.chosen_k(_recipe(), tmp_path, drafter) is None
    (tmp_path / "eval" / "results.json").write_text("[]")
    with pytest.raises(UserError):
        server.chosen_k(_recipe(), tmp_path, drafter)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"220 mail\r\n"])
def test_a_taken_port_is_refused_before_anything_starts(answer: bytes) -> None:
    """The other program's answer would be taken for the new server's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"listening on port {port} .*--port"):
            vllm_server.require_free("127.0.0.1", port)

        def reply() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        assert vllm_server._healthy(f"http://127.0.0.1:{port}") == (b"200" in answer)
        thread.join()
    vllm_server.require_free("127.0.0.1", port)


def test_overrides_of_the_target_s_config_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_server,
        "target_arguments",
        lambda *arguments, options, **named: {"hf_overrides": {**options["hf_overrides"], "vocab_size": 5}},
    )
    for key in ("hf_overrides", "hf-overrides"):
        loaded = _recipe().model_copy(
            update={
                "engine": recipe.EngineConfig(options={"hf_overrides": {"rope_theta": 1.0, "a": 1}}),
                "serve": recipe.ServeConfig(vllm_args={key: {"rope_theta": 2.0, "vocab_size": 4}}),
            }
        )
        command = vllm_server.server_command(loaded, Path("/t"), {"method": "medusa"}, name="n", host="h", port=1)
        assert command.count("--hf-overrides") == 1
        given = json.loads(command[command.index("--hf-overrides") + 1])
        assert given == {"rope_theta": 2.0, "a": 1, "vocab_size": 5}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["INFO up", "ValueError: a client's", "(EngineCore) ValueError: No common block size for 7", "RuntimeError: Engine core "
          "initialization failed. See root cause above."], "ValueError: No common block size for 7"),
        (["pydantic.ValidationError: 1 validation error for X", "  Value error, K is odd", "  For more", "more"],
         "ValidationError: 1 validation error for X Value error, K is odd For more"),
        (["starting", "  Killed  ", ""], "Killed"),
        (["(EngineCore) AssertionError", "WARNING fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
          "RuntimeError: Engine core initialization failed."], "AssertionError"),
        ([], "it printed nothing"),
    ],
)  # fmt: skip
def test_a_failed_server_s_reason_is_found_in_its_log(lines: list[str], said: str) -> None:
    assert vllm_server.failure_reason(lines) == said


def test_options_become_vllm_s_flags() -> None:
    options = {
        "max_num_seqs": 4, "enable-prefix-caching": False, "enable_lora": True, "chat_template": None,
        "allowed_origins": ["*"], "cudagraph_capture_sizes": [4, 8], "compilation_config": {"mode": 3},
    }  # fmt: skip
    assert vllm_server._flags(options) == [
        "--max-num-seqs",
        "4",
        "--no-enable-prefix-caching",
        "--enable-lora",
        "--allowed-origins",
        '["*"]',
        "--cudagraph-capture-sizes",
        "4",
        "8",
        "--compilation-config",
        '{"mode": 3}',
    ]
    with pytest.raises(UserError, match="with --api-key"):
        vllm_server._flags({"api_key": "secret"})
    with pytest.raises(UserError, match=r"by `target\.trust_remote_code`"):
        vllm_server._flags({"trust_remote_code": True})


def test_server_command_and_curl_quote_what_they_are_given() -> None:
    command = vllm_server.server_command(
        _recipe(), Path("/t"), {"method": "eagle3"}, name="n", host="127.0.0.1", port=1
    )
    assert json.loads(command[command.index("--speculative-config") + 1]) == {"method": "eagle3"}
    body = json.loads(shlex.split(server.curl_command("http://x", "it's"))[-1])
    assert body["model"] == "it's"


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_server_goes_on_if_its_log_cannot_be_shown(error: Exception) -> None:
    """It writes more than a pipe holds, as with `draftsmith serve ... | head`."""

    def show(line: str) -> None:
        raise error

    program = "import sys; print('x\\n' * 100_000); sys.exit('ValueError: the reason')"
    running = vllm_server.VllmServer(
        [sys.executable, "-c", program], engine=recipe.EngineConfig(), url="http://127.0.0.1:1", show=show
    )
    latest = time.monotonic() + 60
    try:
        with pytest.raises(DraftsmithError, match="ended by itself with status 1: ValueError: the reason"):
            running.wait_stopped(lambda: time.monotonic() > latest)
    finally:
        running.end()


# --- engine host ---


@pytest.fixture
def fake_child(monkeypatch: pytest.MonkeyPatch):
    """Puts a function in the place of the engine's process, so that only the parent's side is under test."""

    def use(child):
        monkeypatch.setattr(process, "engine_context", lambda: multiprocessing.get_context("fork"))
        monkeypatch.setattr(engine_module, "_child", child)
        monkeypatch.setattr(process, "_SECONDS_TO_CLOSE", 0.5)  # a fake child does not listen

    return use


_CONFIG = EngineSpec(name="baseline", target="t", dtype="float32", engine=recipe.EngineConfig())


def test_an_engine_that_dies_shows_the_end_of_its_log(fake_child, tmp_path: Path) -> None:
    def child(pipe, arguments):
        pipe.send(None)
        pipe.recv()
        os.write(2, b"".join(b"line %d\n" % n for n in range(100)) + b"the reason\n")
        os._exit(7)

    fake_child(child)
    host = EngineHost(_CONFIG, tmp_path).start().wait_ready()
    with pytest.raises(DraftsmithError) as error:
        host.generate([[1]], max_tokens=1)
    assert error.value.exit_status == 1
    assert "status 7" in str(error.value)
    assert str(error.value).endswith("the reason")
    assert "line 1\n" not in str(error.value)
    with pytest.raises(DraftsmithError, match="not running"):
        host.generate([[1]], max_tokens=1)


def test_an_engine_that_reports_an_error_is_ended(fake_child, tmp_path: Path) -> None:
    def child(pipe, arguments):
        threading.Thread(target=time.sleep, args=(60,)).start()  # it does not end by itself
        raise ValueError("no such model")

    fake_child(child)
    host = EngineHost(_CONFIG, tmp_path).start()
    started = host._process
    with pytest.raises(DraftsmithError, match="while starting: ValueError: no such model"):
        host.wait_ready()
    assert started is not None
    assert not started.process.is_alive()


def test_one_failing_engine_ends_the_others(fake_child, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def child(pipe, arguments):
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if "speculative_config" in arguments:
            os._exit(1)
        pipe.send(None)
        time.sleep(3600)  # longer than the test may take

    fake_child(child)
    second = EngineSpec(name="k1", target="t", dtype="float32", engine=recipe.EngineConfig(), speculative={"k": 1})
    with pytest.raises(DraftsmithError, match="`k1`"):
        engine_module.start_engines([_CONFIG, second], tmp_path)
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("options", "host", "url"),
    [
        ({}, "0.0.0.0", "http://127.0.0.1:8000"),
        ({}, "::1", "http://[::1]:8000"),
        ({"ssl-certfile": "c"}, "example.org", "https://example.org:8000"),
        ({"ssl_certfile": "c"}, "::", "https://127.0.0.1:8000"),
        ({"ssl_certfile": None}, "", "http://127.0.0.1:8000"),
    ],
)
def test_where_a_server_is_asked_whether_it_is_ready(options: dict[str, Any], host: str, url: str) -> None:
    loaded = _recipe()
    loaded = loaded.model_copy(update={"serve": loaded.serve.model_copy(update={"vllm_args": options})})
    assert server._url(loaded, host, 8000) == url


def test_what_would_never_be_ready_or_open_to_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vllm_args\.uds` is set elsewhere: with --host and --port"):
        vllm_server._flags({"uds": "/tmp/socket"})
    with pytest.raises(UserError, match=r"The API key is empty"):
        server.serve(_recipe(), tmp_path, api_key=" ")
    for port in ("0", "99999"):
        done = CliRunner().invoke(app, ["serve", "r.yaml", "--port", port])
        assert done.exit_code == 2
        assert "--port" in done.output
