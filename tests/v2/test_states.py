"""Extracted states are the target's own: generated and prefilled, in chunks, and after preemption."""

from pathlib import Path

import pytest

from draftsmith.config.loading import load_recipe
from draftsmith.extract.extract import run_extract
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from tests.integration.conftest import demo_prompts, write_recipe
from tests.integration.test_extract import (
    check_states,
    test_preempted_sequences_keep_their_states,  # noqa: F401 (runs here too)
)


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_states_are_true(mode: str, target: TargetInfo, tmp_path: Path) -> None:
    # Prompts of different lengths in one batch; the longest is prefilled in several chunks of 64 tokens.
    prompts = [*demo_prompts(4), "Summarise this: " + " ".join(demo_prompts(12))[:250], "Hi"]
    options = {"mode": mode, "layer_ids": [0, 1, 2, 3], "max_num_batched_tokens": 64, "max_num_seqs": 4}
    path = write_recipe(tmp_path, target.path, prompts[:-1], prompts[-1:], extract={"max_tokens": 24} | options)
    run_extract(load_recipe(path), tmp_path / "run")
    check_states(Store(tmp_path / "run" / "store"), target.path, prompts, mode)
