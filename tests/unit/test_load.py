"""Request rates: who is asked what in which order, and what becomes of the load generator's figures. Servers and generator are
stand-ins; with real ones: tests/integration/test_server.py."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.evaluation import load
from draftsmith.serve.evaluation.lineup import Placement
from draftsmith.serve.evaluation.partial import PartialResults
from draftsmith.target.info import TargetInfo
from tests.unit.fake_engine import make_recipe_and_run

_SAID = {
    "completed": 2, "request_throughput": 0.5, "output_throughput": 20.0, "median_ttft_ms": 250.0, "p99_ttft_ms": 900.0,
    "median_tpot_ms": 80.0, "p99_tpot_ms": 95.0,
}  # fmt: skip
"""Keys of `vllm bench serve --save-result`."""


places: list[Any] = []
"""GPUs and share of the memory of every server that was started."""
starts: list[str] = []
"""What was done to bring both up, in order."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(server, rate) in order; "ended" when a server is."""
    calls: list[tuple[str, str]] = []
    keys: set[str] = set()
    places.clear()
    starts.clear()

    class Server:
        def __init__(self, command: list[str], *, api_key: str, gpus: tuple[str, ...], **rest: Any) -> None:
            assert "--no-enable-prefix-caching" in command
            option = dict(itertools.pairwise(command))
            assert (option["--generation-config"], option["--override-generation-config"]) == ("vllm", "{}")
            places.append((gpus, option.get("--gpu-memory-utilization", option.get("--kv-cache-memory-bytes"))))
            keys.add(api_key)
            self.url = "speculative" if "--speculative-config" in command else "baseline"
            starts.append(f"start {self.url}")

        def wait_ready(self) -> bool:
            starts.append(f"wait for {self.url}")
            return True

        def end(self) -> None:
            calls.append((self.url, "ended"))

    def run(command: list[str], **rest: Any) -> SimpleNamespace:
        assert {rest["env"]["OPENAI_API_KEY"]} == keys
        option = dict(itertools.pairwise(command))
        rows = [json.loads(line) for line in Path(option["--dataset-path"]).read_text().splitlines()]
        assert [row["prompt"] for row in rows][:2] == ["one\u2028", "two"]
        calls.append((option["--base-url"], option["--request-rate"]))
        failed = option["--request-rate"] == "3.0"
        result = _SAID | {"completed": len(rows) - failed}
        (Path(option["--result-dir"]) / option["--result-filename"]).write_text(json.dumps(result))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(load, "VllmServer", Server)
    monkeypatch.setattr(load, "subprocess", SimpleNamespace(run=run, STDOUT=-2))
    return calls


def ask(
    folder: Path,
    *rates: float,
    known: Any = (),
    kept: Any = None,
    placement: Placement | None = None,
    prompts: tuple[str, ...] = ("one\u2028", "two"),
) -> dict[str, Any]:
    recipe, _ = make_recipe_and_run(folder)
    options = recipe.evaluate.model_copy(update={"request_rates": rates})
    target = TargetInfo.__new__(TargetInfo)
    object.__setattr__(target, "path", folder / "target")
    object.__setattr__(target, "name", "tiny")
    partial = PartialResults(folder / "partial.json", "inputs", rates=dict(known))
    if kept is not None:
        partial.save = lambda: kept.append(list(partial.rates))  # type: ignore[method-assign]
    load.at_request_rates(
        recipe.model_copy(update={"evaluate": options}),
        target,
        {"method": "eagle3", "num_speculative_tokens": 3},
        prompts,
        folder,
        suite="questions",
        placement=placement or Placement(),
        partial=partial,
    )
    return dict(partial.rates)


@pytest.mark.parametrize(("placement", "expected"), [
    (Placement(), [((), str(2**30))] * 2),  # on a CPU each has half of the 2 GiB
    (Placement((("0",), ("5",)), together=False), [(("0",), "0.85"), (("5",), "0.85")]),
    (Placement((("0",),)), [(("0",), "0.425")] * 2),
])  # fmt: skip
def test_each_server_has_gpus_of_its_own_if_one_cannot_hold_both(
    placement: Placement, expected: Any, asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(placement.sets))
    ask(tmp_path, 0.5, placement=placement)
    assert places == expected


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_gpu_server_measures_the_free_memory_alone(
    on_cpu: bool, asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes its share of what is free as it starts; on a CPU both may start at once."""
    monkeypatch.setattr(load, "is_cpu", lambda: on_cpu)
    ask(tmp_path, 0.5, placement=Placement(() if on_cpu else (("0",),)))
    together = ["start baseline", "start speculative", "wait for baseline", "wait for speculative"]
    apart = ["start baseline", "wait for baseline", "start speculative", "wait for speculative"]
    assert starts[:4] == (together if on_cpu else apart)


def test_servers_alternate(asked: list[tuple[str, str]], tmp_path: Path) -> None:
    kept: list[list[str]] = []
    found = ask(tmp_path, 0.5, 1.0, kept=kept)
    assert kept == [["0.5"], ["0.5", "1"]]
    assert asked[:4] == [("speculative", "0.5"), ("baseline", "0.5"), ("baseline", "1.0"), ("speculative", "1.0")]
    assert {name for name, what in asked[4:] if what == "ended"} == {"baseline", "speculative"}
    assert set(found) == {"0.5", "1"}
    assert found["0.5"]["baseline"]["seconds_per_token"] == 0.08


@pytest.mark.parametrize(("count", "p99"), [(99, (None, None)), (100, (0.9, 0.095))])
def test_what_was_measured_is_recorded_and_a_99th_percentile_of_100_requests_alone(
    count: int, p99: Any, asked: list[tuple[str, str]], tmp_path: Path
) -> None:
    prompts = ("one\u2028", "two", *(str(number) for number in range(2, count)))
    rate = ask(tmp_path, 0.5, prompts=prompts)["0.5"]
    assert (rate["suite"], rate["requests"], rate["num_speculative_tokens"]) == ("questions", count, 3)
    for server in ("baseline", "speculative"):
        assert (rate[server]["first_token_seconds_p99"], rate[server]["seconds_per_token_p99"]) == p99


def test_known_rates_are_not_measured_again(asked: list[tuple[str, str]], tmp_path: Path) -> None:
    assert list(ask(tmp_path, 0.5, 1.0, known={"0.5": {}})) == ["0.5", "1"]
    assert {rate for _, rate in asked} == {"1.0", "ended"}
    asked.clear()
    (tmp_path / "again").mkdir()
    ask(tmp_path / "again", 0.5, known={"0.5": {}})
    assert asked == []


def test_a_failed_request_is_an_error(asked: list[tuple[str, str]], tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"1 of 2 requests fail at 3 requests per second; see .*load-client\.log"):
        ask(tmp_path, 3.0)
    assert [name for name, what in asked if what == "ended"] == ["speculative", "baseline"]


def test_a_failed_generator_is_an_error(
    asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(run=lambda command, **rest: SimpleNamespace(returncode=7), STDOUT=-2)
    monkeypatch.setattr(load, "subprocess", ended)
    with pytest.raises(DraftsmithError, match="ended with status 7"):
        ask(tmp_path, 1.0)
