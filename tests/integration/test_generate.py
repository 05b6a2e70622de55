"""`draftsmith generate` with real engines: the baseline's answers, with a drafter and without, and extraction's with the same sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config.loading import load_recipe
from draftsmith.config.sources import Prompts
from draftsmith.data.prompts import load_prompts
from draftsmith.extract.extract import run_extract
from draftsmith.serve.generate import run_generate
from draftsmith.store.reader import Store
from tests.integration.conftest import demo_prompts, make_target, write_recipe
from tests.integration.test_evaluate import make_drafter

pytestmark = pytest.mark.integration

SAMPLING: dict[str, Any] = {
    "temperature": 0, "max_tokens": 24, "min_tokens": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
    "bad_words": ["e"],
}  # fmt: skip


def test_answers_are_those_of_the_baseline_and_of_extraction(tmp_path: Path) -> None:
    """Greedy with penalties, which depend on every token before, in float32."""
    make_target(tmp_path / "target")
    run_dir = tmp_path / "runs" / "test"
    make_drafter(run_dir / "vllm", tmp_path / "target")
    texts = [text[:40] for text in demo_prompts(12)]
    path = write_recipe(
        tmp_path,
        tmp_path / "target",
        texts,
        ["Hello there"],
        extract={**SAMPLING, "layer_ids": [1, 2, 3]},
        sampling={**SAMPLING, "logprobs": 0},
    )
    prompts = Prompts(path=str(tmp_path / "train.jsonl"))
    answers: dict[str, list[list[int]]] = {}
    for name, overrides in (("baseline", ["serve.method={method: none}"]), ("drafter", [])):
        recipe = load_recipe(path, overrides)
        out = tmp_path / f"{name}.jsonl"
        figures = run_generate(recipe, run_dir, prompts, out, k=2)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["messages"][0]["content"] for row in rows] == texts
        answers[name] = [[at[0][0] for at in row["logprobs"]] for row in rows]
        assert (figures["acceptance"] is not None) == (name == "drafter")
        assert run_generate(recipe, run_dir, prompts, out, k=2)["new"] == 0
    assert figures["acceptance"]["drafts"] > 0
    assert answers["drafter"] == answers["baseline"]
    assert len({tuple(answer) for answer in answers["baseline"]}) > 6
    assert all(6 <= len(answer) <= 24 for answer in answers["baseline"])
    run_extract(load_recipe(path), run_dir)
    by_id = {sequence.sample_id: sequence for sequence in Store(run_dir / "store")}
    for conversation, answer in zip(load_prompts(prompts), answers["baseline"], strict=True):
        sequence = by_id[conversation.sample_id]
        assert sequence.token_ids[sequence.loss_mask].tolist() == answer
