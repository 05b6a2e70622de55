"""How much of each suite the drafter was trained on, according to the stores that it was trained from.

Extraction keeps the suites that its recipe names out of training. It cannot know suites added later and stores of other recipes
(`train.extra_stores`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftsmith.config.evaluation import SuiteConfig
from draftsmith.data.overlap import TRAINING_PROMPTS, read_prompts_file
from draftsmith.data.prompts import Prompt, known_of, whole_suite
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.schema import Overlap


def overlap(
    stores: Sequence[Path], suites: Mapping[str, SuiteConfig], prompts: Mapping[str, list[Prompt]]
) -> dict[str, Overlap] | None:
    """Compare every suite with the training part of all stores.

    Args:
        stores: their directories.
        suites: the recipe's, by name.
        prompts: the evaluated prompts of each.

    Returns:
        By suite; None if a store does not record what it was made from, because an earlier version made it.

    Raises:
        UserError: a store's file of prompts is damaged.
    """
    if not all((store / TRAINING_PROMPTS).is_file() for store in stores):
        return None
    found: dict[str, Overlap] = {}
    for name, evaluated in prompts.items():
        suite = suites[name]
        of_a_kind = suite.prompts == "held_out"
        # The whole suite, as in extraction: the drawn part alone would not show its boilerplate.
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
            raise UserError(f"{error}. The store is damaged: copy it again, or delete it and extract again.") from None
        of_evaluated = [kinds.get(one.id) for one in evaluated]
        found[name] = {
            "prompts": len(evaluated), "verbatim": of_evaluated.count("verbatim"), "near": of_evaluated.count("near"),
        }  # fmt: skip
    return found
