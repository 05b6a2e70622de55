"""Compare two evaluations: is B worse than A by more than other prompts and other engine starts would explain?

Prompts that both have are compared in pairs, so that a prompt's difficulty cancels out. Speed also varies between engine starts, so it
is compared only if both have several. Among several figures some look worse by chance, so the level of each test is divided by
their number (Bonferroni), half for acceptance and half for speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from draftsmith.config.evaluation import RESULTS_VERSION
from draftsmith.config.sampling import Sampling
from draftsmith.data.results_in_words import is_drafters
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.configurations import baseline_again_drafter
from draftsmith.serve.evaluation.schema import AtStart, Results
from draftsmith.serve.evaluation.statistics import (
    FEWEST,
    Starts,
    conversations,
    gain,
    interval_over_conversations,
    shared_ratios,
)
from draftsmith.serve.evaluation.throughput import paired

_LEVEL = 0.05
_FEW = f"fewer than {FEWEST} conversations in common"


class Comparison(TypedDict):
    """One figure of two evaluations."""

    suite: str
    figure: str
    """`acceptance length, K = 3`, `speedup`, `speedup, 4 at once` or `the target's own answers`."""
    a: float
    b: float
    interval: list[float]
    """Confidence interval of B's figure minus A's, at a level divided by the number of comparisons."""
    verdict: str
    """`better`, `worse`, `same` if the interval contains zero, or `untested`: on too few conversations; of speeds, also if A or B has a
    single engine start, or they were measured on other machines or with answers of other lengths."""
    why: NotRequired[str]
    """Of `untested`."""


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Comparison]:
    """Every figure that two evaluations share.

    Args:
        a: the reference (contents of `results.json`).
        b: the results in question.

    Raises:
        UserError: they have no suite with the same prompts in common, or they measured other things: their targets, dtypes, sampling
            or the longest answers of a suite differ.
    """
    if a["target"] != b["target"]:
        raise UserError(
            f"A is an evaluation of {a['target']} and B one of {b['target']}: different targets cannot be compared."
        )
    if a["sampling"] != b["sampling"]:
        how = [Sampling.of(one["sampling"]) for one in (a, b)]
        raise UserError(f"A was evaluated with {how[0]} answers and B with {how[1]} ones: they cannot be compared.")
    if a["dtype"] != b["dtype"]:
        raise UserError(
            f"A was evaluated in {a['dtype']} and B in {b['dtype']}, and rounding changes both answers and speed. Evaluate both with the same "
            "`target.dtype`."
        )
    found: list[Comparison] = []
    acceptance: list[tuple[str, str, dict[str, list[float]]]] = []
    speeds: list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = []
    shared = [
        name
        for name in a["suites"]
        if name in b["suites"] and a["suites"][name]["prompts_sha256"] == b["suites"][name]["prompts_sha256"]
    ]
    for name in shared:
        longest = [one["suites"][name]["max_tokens"] for one in (a, b)]
        if longest[0] != longest[1]:
            raise UserError(
                f"In the suite {name}, answers have up to {longest[0]} tokens in A and {longest[1]} in B, and acceptance depends on how long "
                f"they are. Evaluate both with the same `evaluate.suites.{name}.max_tokens`."
            )
    alike = _machine(a) == _machine(b)
    first = next(iter(a["suites"]))
    loads: dict[str, list[str]] = {}  # those that both have, by the suite whose prompts they ask
    if first in shared and first == next(iter(b["suites"])):
        loads[first] = [n for n in a["load"] if n in b["load"]]
    for name in shared:
        one, other = a["suites"][name], b["suites"][name]
        for k in (k for k in one["at_k"] if k in other["at_k"]):
            both = _paired(one["at_k"][k]["by_prompt"], other["at_k"][k]["by_prompt"])
            figure = f"acceptance length, K = {k}"
            if conversations(prompt for prompt, values in both.items() if values[0] and values[2]) >= FEWEST:
                acceptance.append((name, figure, both))
            else:
                before, after = (of["at_k"][k]["acceptance_length"] for of in (one, other))
                found.append(_untested(name, figure, before, after, f"{_FEW} have drafts"))
        speeds.append((name, "speedup", one["throughput"], other["throughput"]))
        if Sampling.of(a["sampling"]).greedy:  # sampled answers are not compared with the baseline's one by one
            right = [_is_right(of["suites"][name], [of["load"][n] for n in loads.get(name, ())]) for of in (a, b)]
            found.append(_compared_answers(name, *right))
    sampled = [[one["verdict"] for name, one in of["sampled_fidelity"].items() if is_drafters(name)] for of in (a, b)]
    if first in shared and all(sampled):
        found.append(_compared_answers(first, *("wrong" not in verdicts for verdicts in sampled)))
    speeds += [(first, f"speedup, {n} at once", a["load"][n], b["load"][n]) for n in loads.get(first, ())]
    enough = []
    for name, figure, one, other in speeds:
        if conversations(_speed_prompts(one, other)) >= FEWEST:
            enough.append((name, figure, one, other))
        else:
            found.append(_untested(name, figure, one["speedup"]["value"], other["speedup"]["value"], _FEW))
    if not acceptance and not enough:
        raise UserError(
            f"The two evaluations have no suite with the same prompts in common (at least {FEWEST}), so there is nothing to compare. "
            "Evaluate both on the same suites."
        )
    for name, figure, both in acceptance:
        level = _LEVEL / 2 / len(acceptance)
        interval = interval_over_conversations(both, _acceptance_gain, level=level)
        drafts, accepted, drafts_b, accepted_b = (sum(column) for column in zip(*both.values(), strict=True))
        found.append(_compared(name, figure, 1 + accepted / drafts, 1 + accepted_b / drafts_b, interval))
    for name, figure, one, other in enough:
        found.append(_compared_speeds(name, figure, one, other, alike=alike, level=_LEVEL / 2 / len(enough)))
    return found


def _compared_answers(suite: str, a: bool, b: bool) -> Comparison:
    """Whether the drafter left the target's answers as they are."""
    return {
        "suite": suite, "figure": "the target's own answers", "a": float(a), "b": float(b), "interval": [float(b) - float(a)] * 2,
        "verdict": "same" if a == b else "worse" if a else "better",
    }  # fmt: skip


def _compared(suite: str, figure: str, before: float, after: float, interval: list[float]) -> Comparison:
    verdict = "worse" if interval[1] < 0 else "better" if interval[0] > 0 else "same"
    return {"suite": suite, "figure": figure, "a": before, "b": after, "interval": interval, "verdict": verdict}


def _untested(suite: str, figure: str, before: float, after: float, why: str) -> Comparison:
    return {
        "suite": suite, "figure": figure, "a": before, "b": after, "interval": [after - before] * 2, "verdict": "untested", "why": why,
    }  # fmt: skip


def _compared_speeds(
    suite: str, figure: str, a: Mapping[str, Any], b: Mapping[str, Any], *, alike: bool, level: float
) -> Comparison:
    """The run's drafter over the baseline, in the recipe's dtype; `alike`: both on such a machine."""
    before, after = a["speedup"]["value"], b["speedup"]["value"]
    why = ""
    if not alike:
        why = "measured on other machines"
    elif a["max_tokens"] != b["max_tokens"]:
        why = f"timed answers have up to {a['max_tokens']} and {b['max_tokens']} tokens (evaluate.timing_tokens)"
    elif min(a["engine_starts"], b["engine_starts"]) < 2:
        why = "a single engine start says nothing of others (evaluate.engine_starts)"
    if why:
        return _untested(suite, figure, before, after, why)
    (drafter_a, noise_a), (drafter_b, noise_b) = _over_baseline(a), _over_baseline(b)
    interval = gain(drafter_a, drafter_b, noise_a=noise_a, noise_b=noise_b, level=level)
    before, after = shared_ratios(drafter_a, drafter_b)  # the recorded ones are of all prompts of each
    return _compared(suite, figure, before, after, interval)


def _machine(of: Mapping[str, Any]) -> list[Any]:
    """What must be alike where speeds are compared. Not vLLM's version and options: how they compare may be the question."""
    return [of["machine"][key] for key in ("processor", "cores", "gpus")]


def _starts(of: Mapping[str, Any]) -> list[list[AtStart]]:
    """Of what is compared: not of the second baseline, which is asked fewer prompts in a single engine start."""
    baseline, _, drafter = baseline_again_drafter(of)
    return [baseline["starts"], drafter["starts"]]


def _over_baseline(of: Mapping[str, Any]) -> tuple[Starts, Starts]:
    """The drafter, and the second baseline engine, each over the baseline as it ran beside it, in several engine starts."""
    baseline, again, drafter = baseline_again_drafter(of)
    of_drafter, of_again = (
        paired(one.get("baseline_starts", baseline["starts"]), one["starts"]) for one in (drafter, again)
    )
    return of_drafter, of_again


def _speed_prompts(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    prompts = [set(start["by_prompt"]) for of in (a, b) for one in _starts(of) for start in one]
    return set.intersection(*prompts)


def _is_right(suite: Mapping[str, Any], loads: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rounding explains every difference between the drafter's answers and the baseline's, on a suite and in loads of its prompts."""
    judged = [at_k["fidelity"] for at_k in suite["at_k"].values()]
    judged += [
        one for timed in (suite["throughput"], *loads) for name, one in timed["fidelity"].items() if is_drafters(name)
    ]
    return all(one["verdict"] != "wrong" for one in judged)


def _paired(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Columns of A and then of B, by prompt that both have."""
    return {prompt: [*values, *other[prompt]] for prompt, values in one.items() if prompt in other}


def _acceptance_gain(sums: np.ndarray) -> np.ndarray:
    """From [..., 4] sums: drafts and accepted tokens of A, then of B."""
    found: np.ndarray = sums[..., 3] / sums[..., 2] - sums[..., 1] / sums[..., 0]
    return found


def read_results(place: Path, *, output: str = "eval") -> dict[str, Any]:
    """Read a `results.json`, given a run, its evaluation's folder or the file.

    Raises:
        UserError: there is none, or another version wrote it.
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
        version = results.get("schema_version")
        if "suites" not in results:
            raise ValueError
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{path} is not the results of an evaluation.") from None
    if version != RESULTS_VERSION:
        raise UserError(
            f"{path} was written by another version of Draftsmith and cannot be compared. Run `draftsmith evaluate` again with its recipe."
        )
    if not (results["suites"] and Results.__required_keys__ <= results.keys()):
        raise UserError(f"{path} is not the results of an evaluation: it lacks suites or other keys.")
    return dict(results)
