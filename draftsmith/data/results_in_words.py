"""What must be said beside the figures of an evaluation, in sentences for report, screen and model card."""

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


def faster_methods(results: Mapping[str, Any]) -> list[str]:
    """A sentence for every suite on which another method of speculation was faster than what is evaluated.

    Args:
        results: the contents of `results.json`.
    """
    found = []
    for name, suite in results["suites"].items():
        faster = {method: one for method, one in suite["methods"].items() if one["speedup"] > suite["speedup"]}
        if faster:
            listed = ", ".join(
                f"{method} {_speedup(one)}"
                for method, one in sorted(faster.items(), key=lambda item: -item[1]["speedup"])
            )
            found.append(
                f"{name}: another method was faster than this one's {_speedup(suite)}: {listed}, over the same baseline."
            )
    return found


def is_drafters(variant: str) -> bool:
    """Whether the figures under this name, as in `K = 3` or `K = 3, bfloat16`, are of what is evaluated; other names are of
    `evaluate.methods`."""
    return variant.startswith("K = ")


def changed_answers(results: Mapping[str, Any], *, methods: bool) -> list[str]:
    """A line for every verdict that speculative decoding changed the target's answers, by suite or load and variant.

    Args:
        results: the contents of `results.json`.
        methods: also of other methods (`evaluate.methods`), which say nothing of what is evaluated.
    """
    by_variant: list[tuple[str, str, Mapping[str, Any]]] = []
    for name, suite in results["suites"].items():
        of_suite = {
            **{f"K = {k}": at_k["fidelity"] for k, at_k in suite["at_k"].items()},
            **{method: other["fidelity"] for method, other in suite["methods"].items()},
            **suite["throughput"]["fidelity"],
        }
        by_variant += [(f"{name}, ", what, one) for what, one in of_suite.items()]
    for load in results["load"].values():
        by_variant += [(f"{load['in_flight']} at once, ", what, one) for what, one in load["fidelity"].items()]
    judged = {where + what: one for where, what, one in by_variant if methods or is_drafters(what)}
    found = [
        f"{what}: {one['differing']} of {one['answers']} answers differ, {one['mismatches']} of them where the target "
        f"was not undecided (p = {one['rate_p_value']:.2g} for so many)"
        for what, one in judged.items()
        if one["verdict"] == "wrong"
    ]
    return found + [
        f"{name}: sampled answers do not follow the baseline's distribution (p = {one['continuations_p_value']:.2g} by continuations, "
        f"{one['drafts_p_value']:.2g} by drafted tokens, of {one['answers']} answers)"
        for name, one in results["sampled_fidelity"].items()
        if one["verdict"] == "wrong" and (methods or is_drafters(name))
    ]


def _speedup(of: Mapping[str, Any]) -> str:
    low, high = of["speedup_interval"]
    return f"{of['speedup']:.2f} ({low:.2f} to {high:.2f})"
