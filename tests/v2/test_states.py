"""Extracted states are the target's own: generated and prefilled, in chunks, and after preemption."""

from pathlib import Path

import pytest

from draftsmith.config.loading import load_recipe
from draftsmith.engine import environment
from draftsmith.extract.extract import run_extract
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from tests.integration.conftest import demo_prompts, write_recipe
from tests.integration.test_extract import (
    check_states,
    test_preempted_sequences_keep_their_states,  # noqa: F401 (runs here too)
)

PROMPTS = [*demo_prompts(4), "Summarise this: " + " ".join(demo_prompts(12))[:250], "Hi"]
"""Of different lengths."""


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_states_are_true(mode: str, target: TargetInfo, tmp_path: Path) -> None:
    # In one batch; the longest is prefilled in several chunks of 64 tokens.
    options = {"mode": mode, "layer_ids": [0, 1, 2, 3], "max_num_batched_tokens": 64, "max_num_seqs": 4}
    path = write_recipe(tmp_path, target.path, PROMPTS[:-1], PROMPTS[-1:], extract={"max_tokens": 24} | options)
    run_extract(load_recipe(path), tmp_path / "run")
    check_states(Store(tmp_path / "run" / "store"), target.path, PROMPTS, mode)


def test_states_cross_pipeline_stages(target: TargetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs. vLLM's first runner, which CPUs have, loses them, so extraction there refuses stages."""
    monkeypatch.setattr(environment, "require_parallelism", lambda engine, config: None)
    path = write_recipe(
        tmp_path, target.path, PROMPTS[:-1], PROMPTS[-1:], extract={"max_tokens": 12, "layer_ids": [0, 1, 2, 3]},
        engine={"options": {"pipeline_parallel_size": 2}},
    )  # fmt: skip
    run_extract(load_recipe(path), tmp_path / "run")
    check_states(Store(tmp_path / "run" / "store"), target.path, PROMPTS, "generate")
