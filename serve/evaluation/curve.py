"""The choice of K: step cost and estimated speedup by K, and how certain the choice is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import TypedDict

from draftsmith.serve.evaluation.schema import AcceptanceByPrompt, CurvePoint
from draftsmith.serve.evaluation.statistics import conversation_sums, error_over_conversations, half_width

_SAMPLES = 2000
_SAMPLES_SEED = 1
SURE = 0.95
"""Share of samples in which the chosen K must be the fastest; below that the choice is a toss-up."""


class StepCost(TypedDict):
    """One K, over all engine starts."""

    cost: float
    """Seconds of a decoding step over those of a baseline step; no less than at a smaller K (isotonic regression)."""
    measured: float
    """As measured: the mean over engine starts of each start's median over prompts."""
    error: float
    """Standard error of `measured`: of the medians or between starts, the larger one."""
    degrees: float
    """Its degrees of freedom, of whichever decides: engine starts less one, or ratios less one of each start."""
    drafting: float | None
    """The part of `measured` that is drafting; None if it was not timed."""


def step_cost_curve(
    starts: Sequence[Mapping[int, Sequence[float]]], drafting: Sequence[Mapping[int, Sequence[float]]] = ()
) -> dict[int, StepCost]:
    """Step costs by K.

    Args:
        starts: by engine start, then K: the ratio of step times on each prompt, at least one.
        drafting: the same of the drafts in these steps; may be without ratios.
    """
    ks = sorted(starts[0])
    found: dict[int, StepCost] = {}
    for k in ks:
        medians = [statistics.median(one[k]) for one in starts]
        # Variance of a median of n values with standard deviation s: (1.2533 s)² / n.
        within = [1.2533**2 * statistics.variance(one[k]) / len(one[k]) if len(one[k]) > 1 else 0.0 for one in starts]
        between = statistics.variance(medians) if len(starts) > 1 else 0.0
        by_starts = between > statistics.fmean(within)
        error = math.sqrt((between if by_starts else statistics.fmean(within)) / len(starts))
        drafts = [statistics.median(one[k]) for one in drafting if one.get(k)]
        found[k] = {
            "cost": 0.0,
            "measured": statistics.fmean(medians),
            "error": error,
            "degrees": len(starts) - 1 if by_starts else max(1, sum(len(one[k]) - 1 for one in starts)),
            "drafting": statistics.fmean(drafts) if drafts else None,
        }
    for k, cost in zip(ks, non_decreasing([found[k]["measured"] for k in ks]), strict=True):
        found[k]["cost"] = cost
    return found


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence in least squares: pool adjacent violators (Ayer et al., 1955)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [statistics.fmean(block) for block in blocks for _ in block]


def speedup_curve(
    costs: Mapping[int, StepCost], by_prompt: Mapping[int, Mapping[str, Sequence[float]]], choices: Sequence[int]
) -> dict[int, CurvePoint]:
    """The estimated speedup at each K, and how often each K is the fastest.

    Args:
        costs: by K.
        by_prompt: by K: drafts and accepted tokens of each prompt of the suite.
        choices: the candidates for K.
    """
    ks = sorted(costs)
    sums = {k: conversation_sums([by_prompt[k]])[0] for k in ks}
    lengths = {k: float(_length(sums[k].sum(axis=0))) for k in ks}
    draw = np.random.default_rng(_SAMPLES_SEED)
    conversations = len(sums[ks[0]])
    weights = draw.multinomial(conversations, np.full(conversations, 1 / conversations), size=_SAMPLES)
    # A spread estimated from a few engine starts may be too small by chance: Student's t.
    noise = draw.standard_t([costs[k]["degrees"] for k in ks], (_SAMPLES, len(ks)))
    # A cost that had to be moved to be possible was wrong by at least that, whatever the spread of its own measurements.
    errors = [math.hypot(costs[k]["error"], costs[k]["measured"] - costs[k]["cost"]) for k in ks]
    means = np.array([costs[k]["cost"] for k in ks])
    drawn_costs = means * np.exp(noise * errors / means)  # never below 0
    sampled = np.stack([_length(weights @ sums[k]) for k in ks], axis=1) / drawn_costs  # [samples, K]
    among = [ks.index(k) for k in choices]
    fastest = np.array(among)[np.argmax(sampled[:, among], axis=1)]
    found: dict[int, CurvePoint] = {}
    for place, k in enumerate(ks):
        cost, degrees = costs[k], costs[k]["degrees"]
        of_length = error_over_conversations(sums[k], lambda sums: np.log(_length(sums)))
        times = math.exp(half_width([of_length, (errors[place] / cost["cost"], degrees)]))
        of_cost = half_width([(cost["error"], degrees)])
        speedup = lengths[k] / cost["cost"]
        found[k] = {
            "acceptance_length": lengths[k],
            "step_cost": cost["cost"],
            "step_cost_measured": cost["measured"],
            "step_cost_error": cost["error"],
            "step_cost_interval": [cost["measured"] - of_cost, cost["measured"] + of_cost],
            "drafting": cost["drafting"],
            "speedup": speedup,
            "speedup_interval": [speedup / times, speedup * times],
            "fastest_share": float(np.mean(fastest == place)),
        }
    return found


def is_beaten(
    k: int, costs: Mapping[int, StepCost], found: Mapping[int, AcceptanceByPrompt], choices: Sequence[int]
) -> bool:
    """Whether a K could not be the fastest in every twentieth sample, and so neither chosen nor a rival (`rivals`) beside one that is,
    told without its acceptance.

    Acceptance falls from position to position. So the most that K could accept is what the largest measured K below it accepts, and
    at each further position as often as that accepts its last.

    Args:
        k: not measured yet, one of the choices.
        costs: by K.
        found: the K measured so far.
        choices: the candidates for K.
    """
    below = max((one for one in found if one < k), default=0)
    if not below:
        return False
    more = (k - below) * found[below]["acceptance_per_position"][-1]
    by_prompt: dict[int, Mapping[str, Sequence[float]]] = {one: at_k["by_prompt"] for one, at_k in found.items()}
    by_prompt[k] = {name: [drafts, accepted + more * drafts] for name, (drafts, accepted) in by_prompt[below].items()}
    curve = speedup_curve(
        {one: costs[one] for one in by_prompt}, by_prompt, [one for one in choices if one in by_prompt]
    )
    return curve[k]["fastest_share"] < 1 - SURE


def _length(sums: np.ndarray) -> np.ndarray:
    """Acceptance length from [..., 2] drafts and accepted tokens; 1 if there are no drafts."""
    found: np.ndarray = 1 + sums[..., 1] / np.maximum(sums[..., 0], 1)
    return found


def fastest(curve: Mapping[int, CurvePoint]) -> int:
    """The K with the highest estimated speedup; the smaller one of equals."""
    return max(sorted(curve), key=lambda k: curve[k]["speedup"])


def rivals(curve: Mapping[int, CurvePoint], chosen: int) -> list[int]:
    """Other K that are the fastest in at least every twentieth sample, or the next best if none is; empty if the choice is clear."""
    if curve[chosen]["fastest_share"] >= SURE:
        return []
    others = [k for k in sorted(curve) if k != chosen]
    found = [k for k in others if curve[k]["fastest_share"] >= 1 - SURE]
    return found or [max(others, key=lambda k: curve[k]["fastest_share"])]


def predicted_speedup(
    predicted: Mapping[str, float] | None, curve: Mapping[str, CurvePoint]
) -> dict[str, float] | None:
    """Predicted acceptance length over measured step cost, by K."""
    if predicted is None:
        return None
    return {k: predicted[k] / point["step_cost"] for k, point in curve.items() if k in predicted}
