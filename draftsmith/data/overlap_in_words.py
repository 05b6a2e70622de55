"""What the results of an evaluation say of prompts that the drafter was trained on, in sentences for report, screen and model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def trained_on(results: Mapping[str, Any]) -> list[str]:
    """A sentence for every suite of which some prompts were trained on.

    Args:
        results: the contents of `results.json`.
    """
    overlaps = {name: suite.get("overlap_with_training") for name, suite in results["suites"].items()}
    return [
        f"{name}: {one['verbatim'] + one['near']} of its {one['prompts']} prompts were trained on ({one['verbatim']} verbatim, "
        "the others nearly so); its figures are too optimistic."
        for name, one in overlaps.items()
        if one and one["verbatim"] + one["near"]
    ]


def not_trained_on(results: Mapping[str, Any]) -> list[str]:
    """Which suites the drafter was not trained on, and of which that is not known; nothing of results without a trained drafter.

    Args:
        results: the contents of `results.json`.
    """
    overlaps = {
        name: suite["overlap_with_training"]
        for name, suite in results["suites"].items()
        if "overlap_with_training" in suite
    }
    unknown = ", ".join(name for name, one in overlaps.items() if one is None)
    clean = ", ".join(name for name, one in overlaps.items() if one and not one["verbatim"] + one["near"])
    found = []
    if clean:
        found.append(f"The drafter was trained on no prompt of {clean}, nor on one that is nearly the same.")
    if unknown:
        found.append(
            f"Whether it was trained on prompts of {unknown} was not checked: a store that it was trained from is missing, or does not record "
            "its prompts."
        )
    return found
