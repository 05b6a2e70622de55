"""Tuning an MLP speculator on the second runner: engines at every K, one with an idle drafter, and the schedule."""

from pathlib import Path

from draftsmith.config.evaluation import TuneConfig
from draftsmith.serve.tune import run_tune
from draftsmith.target.info import TargetInfo
from tests.integration.test_evaluate import tiny_recipe


def test_tune(target: TargetInfo, drafters: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to(target.path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "vllm").symlink_to(drafters["mlp_speculator"] / "vllm")
    options = TuneConfig(suite="held_out", prompts=4, tokens=8, k=(1, 3), concurrency=(1, 2), engine_starts=1)
    found = run_tune(tiny_recipe(tmp_path).model_copy(update={"tune": options}), run_dir, verify=True)
    assert found["acceptance_length"].keys() == {"0", "1", "3"}
    assert found["measured"] is not None
    for batch in ("1", "2"):
        # "0": an idle drafter.
        assert found["step_cost"][batch].keys() == {"0", "1", "3"}
        assert found["measured"][batch].keys() == {"1", "3"}
