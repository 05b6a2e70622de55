"""How much of the evaluated suites is found in stores."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config.evaluation import SuiteConfig
from draftsmith.config.recipe import Recipe
from draftsmith.config.sources import Prompts
from draftsmith.data.overlap import TRAINING_PROMPTS, PromptsFile
from draftsmith.data.prompts import load_prompts
from draftsmith.data.results_in_words import not_trained_on, trained_on
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import evaluate
from draftsmith.serve.evaluation.leakage import overlap

ASKED = [
    f"A farmer counts {number} sheep on Monday and {number * 7} on Tuesday; how many does he count in both days?"
    for number in ("nine", "ten")
] + [
    "Explain to a child why the sky is blue at noon and red in the evening, without any formula.",
    "Name a bird.",
]


def store(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    file = PromptsFile(folder)
    for text in texts:
        file.add([text])
    file.publish(folder)
    return folder


def suite(folder: Path, **options) -> SuiteConfig:
    path = folder / "suite.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ASKED))
    return SuiteConfig(prompts=Prompts(path=str(path), **options))


def test_overlap_is_counted_over_all_stores(tmp_path):
    mine = suite(tmp_path)
    evaluated = load_prompts(mine.prompts)
    first = store(tmp_path / "a", ["Name a bird", "Name a fish.", "Name a bird?"])
    second = store(
        tmp_path / "b", ["Hello. " + ASKED[2].upper(), "Something else that has nothing to do with it at all"]
    )
    none = store(tmp_path / "c", ["Something else that has nothing to do with it at all"])
    for stores, verbatim, near in (([first], 1, 0), ([second], 0, 1), ([first, second], 1, 1), ([none], 0, 0)):
        found = overlap(stores, {"mine": mine}, {"mine": evaluated})
        assert found == {"mine": {"prompts": 4, "verbatim": verbatim, "near": near}}
        said = trained_on({"suites": {"mine": {"overlap_with_training": found["mine"]}}})
        assert (
            ("mine: " + str(verbatim + near) + " of its 4 prompts" in "".join(said))
            == bool(said)
            == bool(verbatim + near)
        )


def test_what_is_clean_and_what_is_not_known_is_said_apart() -> None:
    overlaps: dict[str, Any] = {
        "clean": {"prompts": 4, "verbatim": 0, "near": 0},
        "seen": {"prompts": 4, "verbatim": 1, "near": 0},
        "unknown": None,
    }
    results = {"suites": {name: {"overlap_with_training": one} for name, one in overlaps.items()}}
    clean, unknown = not_trained_on(results)
    assert "on no prompt of clean, nor" in clean
    assert "prompts of unknown was not checked" in unknown
    (seen,) = trained_on(results)
    assert seen.startswith("seen: 1 of its 4 prompts")
    assert not_trained_on({"suites": {"questions": {}}}) == [], "nothing was trained"


def test_prompts_that_are_not_evaluated_are_not_counted(tmp_path):
    mine = suite(tmp_path)
    evaluated = load_prompts(mine.prompts)[:2]
    found = overlap([store(tmp_path / "a", ASKED[1:])], {"mine": mine}, {"mine": evaluated})
    assert found["mine"]["prompts"] == 2
    assert found["mine"]["verbatim"] == 1


def test_held_out_prompts_are_compared_with_other_stores(tmp_path):
    held_out = load_prompts(suite(tmp_path).prompts)
    found = overlap(
        [store(tmp_path / "own", ["Name a fish."]), store(tmp_path / "other", ASKED[2:])],
        {"held_out": SuiteConfig(prompts="held_out")},
        {"held_out": held_out},
    )
    assert found == {"held_out": {"prompts": 4, "verbatim": 2, "near": 0}}


def test_a_store_without_recorded_prompts_gives_no_figure(tmp_path):
    mine = suite(tmp_path)
    (tmp_path / "old").mkdir()
    good = store(tmp_path / "a", ASKED)
    assert overlap([good, tmp_path / "old"], {"mine": mine}, {"mine": load_prompts(mine.prompts)}) is None
    path = good / TRAINING_PROMPTS
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged"):
        overlap([good], {"mine": mine}, {"mine": load_prompts(mine.prompts)})


def test_stores_are_those_that_training_recorded(tmp_path: Path) -> None:
    """Not those that the recipe names now."""
    mine = suite(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store(run_dir / "store", ["Nothing of it."])
    trained_with = store(tmp_path / "other", ["Name a bird."])
    recipe = Recipe.model_validate(
        {
            "name": "run",
            "target": {"model": "owner/name"},
            "evaluate": {"suites": {"mine": mine.model_dump(mode="json")}},
        }
    )
    evaluated = {"mine": load_prompts(mine.prompts)}

    def verbatim() -> int:
        found: Any = {"suites": {"mine": {}}}
        evaluate._add_overlap(found, recipe, run_dir, evaluated)
        return int(found["suites"]["mine"]["overlap_with_training"]["verbatim"])

    assert verbatim() == 0
    (run_dir / "checkpoint").mkdir()
    record = {"inputs": "1", "figures": {}, "recipe": {"train": {"extra_stores": [{"path": str(trained_with)}]}}}
    (run_dir / "checkpoint" / "stage.json").write_text(json.dumps(record))
    assert verbatim() == 1
