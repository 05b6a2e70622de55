"""How much of what a drafter is evaluated on it was trained on, as the stores say that it was trained from.

Extraction keeps training apart from the suites that its recipe names. Suites added later and stores of other recipes
(`train.extra_stores`) it cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic reads this one on every Python; typing's only from 3.12

from draftsmith.config.evaluation import SuiteConfig
from draftsmith.data.overlap import TRAINING_PROMPTS, read_prompts_file
from draftsmith.data.prompts import Prompt, known_of, whole_suite
from draftsmith.run.errors import UserError


class Overlap(TypedDict):
    """Prompts of one suite that the drafter was trained on, by the measure of draftsmith/data/overlap.py."""

    prompts: int
    """Conversations that are evaluated."""
    verbatim: int
    """Of them, those in the training part word for word."""
    near: int
    """Of them, those in it nearly so, and not word for word."""


def overlap(
    stores: Sequence[Path], suites: dict[str, SuiteConfig], prompts: dict[str, list[Prompt]]
) -> dict[str, Overlap] | None:
    """Hold every suite against the training part of all stores.

    Args:
        stores: their directories.
        suites: the recipe's, by name.
        prompts: what is evaluated of each.

    Returns:
        By suite; None where one of the stores does not say what it was made from: it is of an earlier version.

    Raises:
        UserError: a store's file of prompts is damaged.
    """
    if not all((store / TRAINING_PROMPTS).is_file() for store in stores):
        return None
    found: dict[str, Overlap] = {}
    for name, evaluated in prompts.items():
        suite = suites[name]
        of_a_kind = suite.prompts == "held_out"
        # The whole suite, as extraction takes it: the drawn part alone would not show what is boilerplate in it.
        known = known_of(evaluated if of_a_kind else whole_suite(suite), of_a_kind=of_a_kind)
        kinds: dict[str, str] = {}
        try:
            if of_a_kind:
                for store in stores:
                    for texts in read_prompts_file(store):
                        known.count(texts)
            for store in stores:
                for texts in read_prompts_file(store):
                    for label, kind in known.find(texts).items():
                        kinds[label] = "verbatim" if kind == "verbatim" else kinds.get(label, "near")
        except ValueError as error:
            raise UserError(f"{error}. The store is damaged: copy it anew, or delete it and extract again.") from None
        of_evaluated = [kinds.get(one.id) for one in evaluated]
        found[name] = {
            "prompts": len(evaluated), "verbatim": of_evaluated.count("verbatim"), "near": of_evaluated.count("near"),
        }  # fmt: skip
    return found


def trained_on(results: Mapping[str, Any]) -> list[str]:
    """What to tell people: a sentence for every suite of which some prompts were trained on.

    Args:
        results: the contents of `results.json`.
    """
    overlaps = {name: suite.get("overlap_with_training") for name, suite in results["suites"].items()}
    return [
        f"{name}: {one['verbatim'] + one['near']} of its {one['prompts']} prompts were trained on ({one['verbatim']} word for "
        "word, the others nearly so); its figures are too good."
        for name, one in overlaps.items()
        if one and one["verbatim"] + one["near"]
    ]
