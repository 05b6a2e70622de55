"""Is the output of speculative decoding the target's own? Differences, what rounding explains of them, and a verdict.

Greedy decoding gives the same answer with and without speculation, but for rounding: checking K draft tokens is the same
computation in another shape, sums are added in another order, and where the target's two likeliest tokens are as good as equal, the
other one may win. How often that happens, and with which margins, is measured with a control: the plain engine reads its own
answers again in pieces as long as those that speculation checks, so in the shape of checking, and without speculation. Speculation
that works cannot differ more often than that, nor at larger margins. (Reading in one prefill is no such control: with bfloat16 on
a CPU with AMX it differs from decoding a third as often as checking does; docs/log.md.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from typing_extensions import TypedDict

from draftsmith.serve.evaluation.engine import EngineHost, Generated

DIFFERENCES_KEPT = 20
"""Differing prompts listed for each suite; all are counted."""
_NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.0625}
"""Largest margin of logits that rounding explains. Of 16-bit types four units in the last place of a logit between 16 and 32. In
float32 such a unit is 2e-6, and what adds up is the rounding of every layer's sums (relative 1e-7 each, over hundreds of sums of
values around 30)."""
LEVEL = 1e-3
"""A test of a configuration that is right raises an alarm this often."""
_FEWEST_MARGINS = 5
"""Margins on both sides, without which they are not compared."""
_PERMUTATIONS = 5_000


def near_tie(dtype: str, *, on_gpu: bool) -> float:
    """The largest margin of logits that rounding explains.

    On GPUs vLLM's attention in float32 is Triton's, whose products are TF32: of float16's precision.
    """
    return _NEAR_TIE["float16" if on_gpu and dtype == "float32" else dtype]


class Difference(TypedDict):
    """A prompt whose speculative answer is not plain decoding's."""

    prompt: str
    """The prompt's id."""
    position: int
    """First response token that differs, from 0; the shorter answer's length where one only ends earlier."""
    num_speculative_tokens: int
    method: str | None
    """The name of another method than the run's drafter."""
    margin: float | None
    """By how much the target preferred plain decoding's token there to the other one: the difference of its logits. None where
    one answer only ends earlier, or the other token is none of the likeliest."""
    near_tie: bool
    """Whether that is within what rounding makes of a logit in the target's dtype (`near_tie`). Any other difference is a
    mismatch."""


class Control(TypedDict):
    """How far rounding alone goes: plain answers read again in pieces.

    Counted as speculation's differences are, which end a comparison: one answer may have many near-ties and another none.
    """

    tokens: int
    """Tokens compared: of each answer those up to the first difference, that one counted."""
    differing: int
    """Answers in which reading again prefers another token anywhere."""
    margins: list[float]
    """By how much, at the first such place of each of them."""
    piece: int
    """Tokens read at once."""


class Fidelity(TypedDict):
    """One way of speculating against plain decoding on one suite."""

    answers: int
    differing: int
    """Answers that are not plain decoding's."""
    tokens: int
    """Tokens compared: of each answer those up to the first difference, that one counted."""
    mismatches: int
    """Differences that are no near-tie."""
    rate_p_value: float
    """Probability of so many differences among so many tokens at the control's rate (exact conditional test of two Poisson
    rates: Przyborowski and Wilenski, 1940)."""
    margins_p_value: float | None
    """Probability of margins so large among the control's (permutation test of the mean); None where there are too few."""
    verdict: str
    """`identical`; `near_ties`: all differences are near-ties, no more of them and no larger than the control's; `wrong`."""


def differences(
    prompt_ids: Sequence[str],
    plain: Sequence[Generated],
    speculative: Sequence[Generated],
    *,
    k: int,
    method: str | None = None,
) -> list[Difference]:
    """Where speculative answers differ from plain ones, prompt by prompt; margins are not looked at yet."""
    found: list[Difference] = []
    for prompt, one, other in zip(prompt_ids, plain, speculative, strict=True):
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
    """The first place at which two answers differ, the shorter one's length where it only ends earlier; None where none."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def look_at_margins(
    found: Sequence[Difference],
    contexts: Mapping[str, Sequence[int]],
    plain: Mapping[str, Generated],
    speculative: Mapping[str, Generated],
    margin: Callable[[list[int], int, int], float | None],
    rounding: float,
) -> None:
    """EngineRequest the target how much it preferred its own token at every difference; in place.

    Args:
        contexts: the prompts' token ids by id.
        plain: answers by prompt id.
        speculative: answers by prompt id.
        margin: `EngineHost.logit_margin` of the plain engine.
        rounding: the largest margin of a near-tie, from `near_tie`.
    """
    for one in found:
        name, position = one["prompt"], one["position"]
        own, other = (answers[name].token_ids[position : position + 1] for answers in (plain, speculative))
        if own and other:
            context = [*contexts[name], *plain[name].token_ids[:position]]
            one["margin"] = margin(context, own[0], other[0])
            one["near_tie"] = one["margin"] is not None and abs(one["margin"]) <= rounding


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
    """Plain decoding's answers, read again by the plain engine in pieces.

    Args:
        engine: the plain engine.
        prompts: token ids.
        answers: its own, to those prompts.
        piece: tokens of an answer read at once: what speculation checks at once, the draft and the token before it.
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
    found: Sequence[Difference], prompt_ids: Sequence[str], plain: Sequence[Generated], against: Control
) -> Fidelity:
    """The verdict on one way of speculating.

    Args:
        found: its differences, margins looked at.
        prompt_ids: all prompts', and
        plain: plain decoding's answers to them.
        against: the control over the same answers.
    """
    differing = {one["prompt"]: one["position"] + 1 for one in found}
    tokens = sum(differing.get(prompt, len(answer.token_ids)) for prompt, answer in zip(prompt_ids, plain, strict=True))
    mismatches = sum(not one["near_tie"] for one in found)
    rate = rate_p_value(len(found), tokens, against["differing"], against["tokens"])
    margins = margins_p_value([abs(one["margin"]) for one in found if one["margin"] is not None], against["margins"])
    wrong = mismatches > 0 or rate < LEVEL or (margins is not None and margins < LEVEL)
    return {
        "answers": len(plain),
        "differing": len(found),
        "tokens": tokens,
        "mismatches": mismatches,
        "rate_p_value": rate,
        "margins_p_value": margins,
        "verdict": "wrong" if wrong else "near_ties" if found else "identical",
    }


def rate_p_value(count: int, tokens: int, control_count: int, control_tokens: int) -> float:
    """Probability of so many differences or more among so many tokens, if they were as frequent as the control's.

    Given their sum, one of two Poisson counts is binomial (Przyborowski and Wilenski, Biometrika 31, 1940).
    """
    total, share = count + control_count, tokens / max(1, tokens + control_tokens)
    if count == 0:
        return 1.0
    logs = [
        math.lgamma(total + 1) - math.lgamma(n + 1) - math.lgamma(total - n + 1)
        + n * math.log(share) + ((total - n) * math.log1p(-share) if n < total else 0.0)
        for n in range(count, total + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(math.exp(log) for log in logs))


def margins_p_value(margins: Sequence[float], control_margins: Sequence[float]) -> float | None:
    """Probability of a mean margin so large or larger, if the margins were drawn from both together.

    A permutation test, which the coarse steps of 16-bit logits do not disturb. None where either side has too few.
    """
    if min(len(margins), len(control_margins)) < _FEWEST_MARGINS:
        return None
    pooled = np.array([*margins, *control_margins])
    draw = np.random.default_rng(0)
    arrangements = draw.permuted(np.tile(pooled, (_PERMUTATIONS, 1)), axis=1)
    sums = arrangements[:, : len(margins)].sum(axis=1)
    # The arrangement that was seen is one of them (Phipson and Smyth, 2010), so the probability is never zero.
    return float((1 + np.sum(sums >= np.sum(margins) - 1e-9)) / (1 + _PERMUTATIONS))
