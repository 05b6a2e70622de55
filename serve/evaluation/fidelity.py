"""Is speculative output the target's own? Differences from the baseline, what rounding explains of them, and a verdict.

Greedy decoding gives the same answer with and without speculation, except for rounding: verifying K draft tokens is the same
computation in another shape, sums are added in another order, and where the target's two likeliest tokens are nearly equal, the
other one may win. Where answers differ, a control measures how often that happens and with which margins: the baseline engine reads
its own answers again in pieces of the size that speculation verifies. Correct speculation differs no more often than that, nor at
larger margins. (Reading in one prefill is not such a control: with bfloat16 on a CPU with AMX it differs from decoding a third as
often as verification does; docs/log.md.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated
from draftsmith.serve.evaluation.schema import Control, Difference, Fidelity

DIFFERENCES_KEPT = 20
"""Differing prompts listed for each suite; all are counted."""
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625}
"""By dtype, the largest margin of logits that rounding explains: for 16-bit types, four units in the last place of a logit between 16 and 32. In
float32 such a unit is 2e-6, and what adds up is the rounding of every layer's sums (relative 1e-7 each, over hundreds of sums of
values around 30)."""
LEVEL = 1e-3
"""Probability that a correct configuration is rejected."""
_FEWEST_MARGINS = 5
"""Margins needed on both sides to compare them."""
_PERMUTATIONS = 5_000


def differences(
    prompt_ids: Sequence[str],
    baseline: Sequence[Generated],
    speculative: Sequence[Generated],
    *,
    k: int,
    method: str | None = None,
) -> list[Difference]:
    """Where speculative answers differ from the baseline's, prompt by prompt; without margins."""
    found: list[Difference] = []
    for prompt, one, other in zip(prompt_ids, baseline, speculative, strict=True):
        position = first_difference(one.token_ids, other.token_ids)
        if position is not None:
            found.append(
                {
                    "prompt": prompt, "position": position, "num_speculative_tokens": k, "method": method, "margin": None,
                    "near_tie": False,
                }
            )  # fmt: skip
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two answers differ, the shorter one's length if it only ends earlier; None if equal."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def add_margins(
    found: Sequence[Difference],
    contexts: Mapping[str, Sequence[int]],
    baseline: Mapping[str, Generated],
    speculative: Mapping[str, Generated],
    logit_margin: Callable[[list[int], int, int], float | None],
    rounding: float,
) -> None:
    """Ask the target by how much it preferred its own token at every difference; in place.

    Args:
        contexts: the prompts' token ids by id.
        baseline: answers by prompt id.
        speculative: answers by prompt id.
        logit_margin: `EngineHost.logit_margin` of the baseline engine.
        rounding: the largest margin of a near-tie, from `NEAR_TIE`.
    """
    for one in found:
        name, position = one["prompt"], one["position"]
        own, other = (answers[name].token_ids[position : position + 1] for answers in (baseline, speculative))
        if own and other:
            context = [*contexts[name], *baseline[name].token_ids[:position]]
            one["margin"] = logit_margin(context, own[0], other[0])
            one["near_tie"] = one["margin"] is not None and abs(one["margin"]) <= rounding


def differences_with_margins(
    engine: EngineHost,
    contexts: Mapping[str, Sequence[int]],
    baseline: Sequence[Generated],
    speculative: Sequence[Generated],
    spec: EngineSpec,
    method: str | None,
) -> list[Difference]:
    """`differences` and `add_margins` for one speculative engine.

    Args:
        engine: the baseline engine.
        contexts: the prompts' token ids by id, in the order of the answers.
        baseline: the baseline's answers.
        speculative: the speculative engine's answers.
        spec: the speculative engine's.
        method: its name in the recipe; None for the run's drafter.
    """
    names = list(contexts)
    found = differences(names, baseline, speculative, k=spec.num_speculative_tokens, method=method)
    add_margins(
        found,
        contexts,
        dict(zip(names, baseline, strict=True)),
        dict(zip(names, speculative, strict=True)),
        engine.logit_margin,
        NEAR_TIE[spec.dtype],
    )
    return found


def control(
    engine: EngineHost,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Generated],
    *,
    piece: int,
    batch_size: int,
    max_model_len: int,
    on_batch: Callable[[int], None] = lambda read: None,
) -> Control:
    """The baseline's answers, read again by the baseline engine in pieces.

    Args:
        engine: the baseline engine.
        prompts: token ids.
        answers: its own, to those prompts.
        piece: tokens of an answer read at once: what speculation verifies at once, the draft and the token before it.
        batch_size: answers read side by side.
        max_model_len: of the engine; a token that would fill it is not compared.
        on_batch: called after every batch with the number of answers read so far.
    """
    margins: list[float] = []
    tokens = 0
    for first in range(0, len(prompts), batch_size):
        batch = range(first, min(first + batch_size, len(prompts)))
        read = [answers[i].token_ids[: max_model_len - 1 - len(prompts[i])] for i in batch]
        for found in engine.margins_read_again([prompts[i] for i in batch], read, piece):
            ends = next(((place, margin) for place, margin in enumerate(found) if margin is not None), None)
            tokens += len(found) if ends is None else ends[0] + 1
            margins += [] if ends is None else [ends[1]]
        on_batch(batch.stop)
    return {"tokens": tokens, "differing": len(margins), "margins": margins, "piece": piece}


def judge(
    found: Sequence[Difference], prompt_ids: Sequence[str], baseline: Sequence[Generated], against: Control | None
) -> Fidelity:
    """The verdict on one variant.

    Args:
        found: its differences, with margins.
        prompt_ids: of all prompts.
        baseline: the baseline's answers to them.
        against: the control over the same answers; None, not measured, only if nothing differs.
    """
    differing = {one["prompt"]: one["position"] + 1 for one in found}
    tokens = sum(
        differing.get(prompt, len(answer.token_ids)) for prompt, answer in zip(prompt_ids, baseline, strict=True)
    )
    mismatches = sum(not one["near_tie"] for one in found)
    rate, margins = 1.0, None
    if found:
        assert against is not None
        rate = rate_p_value(len(found), tokens, against["differing"], against["tokens"])
        own = [abs(one["margin"]) for one in found if one["margin"] is not None]
        margins = margins_p_value(own, against["margins"])
    tests = [rate] if margins is None else [rate, margins]
    wrong = mismatches > 0 or len(tests) * min(tests) < LEVEL  # Bonferroni
    return {
        "answers": len(baseline),
        "differing": len(found),
        "tokens": tokens,
        "mismatches": mismatches,
        "rate_p_value": rate,
        "margins_p_value": margins,
        "verdict": "wrong" if wrong else "near_ties" if found else "identical",
    }


def not_compared(answers: int) -> Fidelity:
    """In place of a verdict on sampled answers, which are not compared token for token."""
    return {
        "answers": answers, "differing": 0, "tokens": 0, "mismatches": 0, "rate_p_value": 1.0, "margins_p_value": None,
        "verdict": "not_compared",
    }  # fmt: skip


def rate_p_value(count: int, tokens: int, control_count: int, control_tokens: int) -> float:
    """Probability of at least `count` differences among `tokens` if they were as frequent as in the control.

    Given their sum, one of two Poisson counts is binomial (Przyborowski and Wilenski, Biometrika 31, 1940).
    """
    total, share = count + control_count, tokens / max(1, tokens + control_tokens)
    if count == 0:
        return 1.0
    logs = [
        math.lgamma(total + 1)
        - math.lgamma(n + 1)
        - math.lgamma(total - n + 1)
        + n * math.log(share)
        + ((total - n) * math.log1p(-share) if n < total else 0.0)
        for n in range(count, total + 1)
    ]
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def margins_p_value(margins: Sequence[float], control_margins: Sequence[float]) -> float | None:
    """Probability of at least so large a mean margin if both sides came from one distribution; None with too few margins.

    A permutation test, which the coarse steps of 16-bit logits do not disturb.
    """
    if min(len(margins), len(control_margins)) < _FEWEST_MARGINS:
        return None
    pooled = np.array([*margins, *control_margins])
    draw = np.random.default_rng(0)
    arrangements = draw.permuted(np.tile(pooled, (_PERMUTATIONS, 1)), axis=1)
    sums = arrangements[:, : len(margins)].sum(axis=1)
    # The observed arrangement is one of them (Phipson and Smyth, 2010), so the probability is never zero.
    return float((1 + np.sum(sums >= np.sum(margins) - 1e-9)) / (1 + _PERMUTATIONS))
