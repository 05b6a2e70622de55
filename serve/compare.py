"""Two evaluations against each other: is B worse than A, beyond what other prompts would have made of it?

Prompts that both have are compared in pairs, so that what makes a prompt easy or hard drops out. Of several figures some look
worse by chance, so each has to be so at a level divided by their number (Bonferroni).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from draftsmith.errors import UserError
from draftsmith.serve.results import TURN, bootstrap

_LEVEL = 0.05
_FEWEST = 5
"""Conversations: of fewer, a bootstrap says nothing."""


class Comparison(TypedDict):
    """One figure of two evaluations."""

    suite: str
    figure: str
    """`acceptance length, K = 3`, `speed-up` or `identical to plain decoding`."""
    a: float
    b: float
    interval: list[float]
    """Of B's figure less A's, at a level divided by the number of comparisons."""
    verdict: str
    """`better`, `worse`, or `same` where the interval holds zero."""


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Comparison]:
    """Every figure that two evaluations share.

    Args:
        a: the results (`results.json`) to hold the others against.
        b: the results in question.

    Raises:
        UserError: they have no suite with the same prompts in common, or are of different targets.
    """
    if a["target"] != b["target"]:
        raise UserError(
            f"A is an evaluation of {a['target']} and B one of {b['target']}: figures of different targets do not compare."
        )
    pairs: list[tuple[str, str, dict[str, list[float]], str]] = []
    found: list[Comparison] = []
    for name in (name for name in a["suites"] if name in b["suites"]):
        one, other = a["suites"][name], b["suites"][name]
        if one["prompts_sha256"] != other["prompts_sha256"]:
            continue
        for k in (k for k in one["at_k"] if k in other["at_k"]):
            both = _paired(one["at_k"][k]["by_prompt"], other["at_k"][k]["by_prompt"])
            pairs.append((name, f"acceptance length, K = {k}", both, "acceptance"))
        both = _paired(one["seconds_by_prompt"], other["seconds_by_prompt"])
        pairs.append((name, "speed-up", both, "speed-up"))
        same = [float(suite["identical_to_plain"]) for suite in (one, other)]
        verdict = "same" if same[0] == same[1] else "worse" if same[1] < same[0] else "better"
        found.append(
            {
                "suite": name, "figure": "identical to plain decoding", "a": same[0], "b": same[1],
                "interval": [same[1] - same[0]] * 2, "verdict": verdict,
            }
        )  # fmt: skip
    pairs = [
        pair for pair in pairs if len({prompt.partition(TURN)[0] for prompt in pair[2]}) >= _FEWEST and _counts(pair[2])
    ]
    if not pairs:
        raise UserError(
            f"The two evaluations have no suite with the same prompts, at least {_FEWEST}, in common, so there is nothing to compare. "
            "Evaluate both on the same suites."
        )
    for name, figure, both, kind in pairs:
        statistic = _acceptance_gain if kind == "acceptance" else _speedup_gain
        low, high = bootstrap(both, lambda sums, of=statistic: of(sums)[0], level=_LEVEL / len(pairs), otherwise=0.0)  # type: ignore[misc]
        _, before, after = statistic([sum(column) for column in zip(*both.values(), strict=True)])
        verdict = "worse" if high < 0 else "better" if low > 0 else "same"
        found.append(
            {"suite": name, "figure": figure, "a": before, "b": after, "interval": [low, high], "verdict": verdict}
        )
    return found


def _counts(both: Mapping[str, Sequence[float]]) -> bool:
    """Whether both have drafts (seconds) at all: answers of a single token have none."""
    return all(sum(column) > 0 for column in list(zip(*both.values(), strict=True))[::2])


def _paired(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Columns of A and then of B by prompt, those that both have."""
    return {prompt: [*values, *other[prompt]] for prompt, values in one.items() if prompt in other}


def _acceptance_gain(sums: Sequence[Any]) -> tuple[Any, Any, Any]:
    drafts, accepted, drafts_b, accepted_b = sums
    before, after = 1 + accepted / drafts, 1 + accepted_b / drafts_b
    return after - before, before, after


def _speedup_gain(sums: Sequence[Any]) -> tuple[Any, Any, Any]:
    plain, speculative, plain_b, speculative_b = sums
    before, after = plain / speculative, plain_b / speculative_b
    return after - before, before, after


def read_results(place: Path, *, output: str = "eval") -> dict[str, Any]:
    """The `results.json` of a run, of an evaluation's folder, or itself.

    Raises:
        UserError: there is none, or it is of an earlier version.
    """
    paths = [place, place / "results.json", place / output / "results.json"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(
            f"There is no evaluation in {place}: name a run, its evaluation's folder, or a results.json. `draftsmith evaluate` "
            "with the run's recipe makes one."
        )
    try:
        results = json.loads(path.read_text())
        suites = results["suites"].values()
        whole = all("seconds_by_prompt" in suite and "target" in results for suite in suites)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path} is not the results of an evaluation.") from None
    if not whole:
        raise UserError(
            f"{path} has no figures by prompt: an earlier version wrote it. Run `draftsmith evaluate` again with its recipe."
        )
    return dict(results)
