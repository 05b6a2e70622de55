"""Figures of an evaluation and their confidence intervals, over conversations and over engine starts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.data.turns import TURN
from draftsmith.serve.evaluation.engine import Counters, Generated
from draftsmith.serve.evaluation.schema import Acceptance, Category, Interval, Ratio

_BOOTSTRAP_SAMPLES = 2000

Starts = Sequence[Mapping[str, Sequence[float]]]
"""By engine start, then prompt id: tokens and seconds of one engine, then of the engine compared with it."""


# ---- acceptance ----


def acceptance(counters: Counters) -> Acceptance:
    """Acceptance figures of the drafts in `counters` (a difference of two readings)."""
    drafts, per_position = counters.drafts, counters.accepted_per_position
    before = (drafts, *per_position)
    return {
        "acceptance_length": 1 + counters.accepted / drafts if drafts else 1.0,
        "acceptance_per_position": [count / drafts if drafts else 0.0 for count in per_position],
        "acceptance_per_position_conditional": [
            count / of if of else 0.0 for count, of in zip(per_position, before, strict=False)
        ],
        "drafts": drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted": counters.accepted,
    }


def acceptance_interval(by_prompt: Mapping[str, Sequence[float]]) -> Interval:
    """The confidence interval of an acceptance length, from drafts and accepted tokens by prompt."""
    return bootstrap(by_prompt, lambda sums: 1 + sums[1] / sums[0])


def categories(by_prompt: Mapping[str, Sequence[int]], category_of: Mapping[str, str]) -> dict[str, Category]:
    """Acceptance by category, in order of appearance.

    Args:
        by_prompt: drafts and accepted tokens by prompt id.
        category_of: by prompt id; prompts without a category are left out.
    """
    found: dict[str, dict[str, Sequence[int]]] = {}
    for prompt, counts in by_prompt.items():
        if prompt in category_of:
            found.setdefault(category_of[prompt], {})[prompt] = counts
    return {
        name: {
            "prompts": len(part),
            "acceptance_length": 1
            + sum(accepted for _, accepted in part.values()) / max(1, sum(n for n, _ in part.values())),
            "acceptance_length_interval": acceptance_interval(part),
        }
        for name, part in found.items()
    }


def decoding_steps(answer: Generated) -> int:
    """Steps of an answer after prefill, which gives the first token.

    A step with a draft gives the accepted tokens and one more; each token beyond those is a step without a draft. (An answer's end
    may cut off its last step's tokens, which then hide as many such steps.)
    """
    return len(answer.accepted) + max(0, len(answer.token_ids) - 1 - sum(answer.accepted) - len(answer.accepted))


def tokens_per_step(answers: Sequence[Generated]) -> float:
    """Tokens per decoding step, without the first token."""
    steps = sum(map(decoding_steps, answers))
    return sum(len(answer.token_ids) - 1 for answer in answers) / steps if steps else 1.0


def draft_position(answer: Generated) -> list[int]:
    """The position in its draft of each token of an answer, from 1; 0 for the target's own tokens.

    The target gives the first; after that every step yields the accepted draft tokens and one of the target's. For drafters
    that propose in every step.
    """
    found = [0]
    for accepted in answer.accepted:
        found += [*range(1, accepted + 1), 0]
    found += [0] * len(answer.token_ids)  # near the longest length a step may have no draft
    return found[: len(answer.token_ids)]


# ---- intervals ----


def bootstrap(
    columns: Mapping[str, Sequence[float]],
    statistic: Callable[[Sequence[Any]], Any],
    *,
    level: float = 0.05,
    otherwise: float = 1.0,
) -> Interval:
    """A confidence interval for a function of sums over prompts, by bootstrap over conversations.

    Percentiles over samples of as many conversations, drawn with replacement (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13). Turns of one conversation are not independent, so they are drawn together. Deterministic.

    Args:
        columns: values to sum, by prompt id.
        statistic: a function of the columns' sums, float64 [samples] each.
        level: probability outside the interval, half at each end.
        otherwise: both ends if no sample has a finite value.
    """
    sums = conversation_sums([columns])[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = statistic(list((resampled(len(sums)) @ sums).T))
    found = found[np.isfinite(found)]  # a sample may hold no draft at all
    return _percentiles(found, level) if len(found) else [otherwise] * 2


def ratio(starts: Starts, *, noise: Starts | None = None, level: float = 0.05) -> Ratio:
    """One engine's tokens per second over another's, with its confidence interval.

    The ratio varies with prompts and with engine starts, which are crossed: the same prompts run in every start. Conversations
    are resampled as in `bootstrap`. Starts are too few to resample (three drawn from three understate their spread), so each
    sample is shifted by a draw from Student's t distribution times the standard error of the mean over starts
    (`between_starts`).

    Args:
        starts: the denominator's engine first.
        noise: the same for two identical engines in the same starts, as further evidence of the spread between starts.
        level: probability outside the interval, half at each end.

    Raises:
        ValueError: an engine generated no token, or the starts have no prompt in common.
    """
    sums = conversation_sums(starts)
    by_start = start_ratios(sums)
    if not np.isfinite(by_start).all():
        raise ValueError("an engine generated no token on these prompts")
    groups = [by_start] if noise is None else [by_start, start_ratios(conversation_sums(noise))]
    samples = log_ratio_samples(sums) + start_samples(len(starts), groups, seed=1)
    return {
        "value": float(np.exp(_log_ratio(sums.sum(axis=(0, 1))))),
        "interval": _percentiles(np.exp(samples[np.isfinite(samples)]), level),
        "by_start": [float(one) for one in np.exp(by_start)],
        "median": statistics.median(float(one) for one in np.exp(by_start)),
    }


def gain(a: Starts, b: Starts, *, noise_a: Starts, noise_b: Starts, level: float) -> Interval:
    """A confidence interval for the difference of two such ratios, B's minus A's, of two evaluations on the same prompts.

    Both use the same resampled prompts, so how easy a prompt is cancels out. The spread between starts is assumed equal in both.

    Args:
        a: two starts or more.
        b: likewise.
        noise_a: two identical engines in the starts of A.
        noise_b: likewise.
        level: probability outside the interval, half at each end.

    Raises:
        ValueError: they have no prompt in common.
    """
    sums_a, sums_b = np.split(conversation_sums([*a, *b]), [len(a)])
    groups = [start_ratios(sums) for sums in (sums_a, sums_b, conversation_sums(noise_a), conversation_sums(noise_b))]
    samples_a = log_ratio_samples(sums_a)
    samples_b = log_ratio_samples(sums_b)
    # One draw for both: the difference of two means whose standard deviation is estimated together is one t variable.
    error = start_samples(1, groups, seed=1) * math.sqrt(1 / len(a) + 1 / len(b))
    found = np.exp(samples_b + error / 2) - np.exp(samples_a - error / 2)
    return _percentiles(found[np.isfinite(found)], level)


def shared_ratios(a: Starts, b: Starts) -> tuple[float, float]:
    """The two ratios whose difference `gain` gives an interval for: on the prompts that all starts of both have.

    Raises:
        ValueError: they have no prompt in common.
    """
    sums_a, sums_b = np.split(conversation_sums([*a, *b]), [len(a)])
    one, other = (float(np.exp(_log_ratio(sums.sum(axis=(0, 1))))) for sums in (sums_a, sums_b))
    return one, other


def between_starts(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Standard deviation between engine starts of the logarithm of a ratio, and its degrees of freedom.

    Args:
        groups: the logarithms of each ratio by start. Ratios share at most one of their two engines: they correlate by a half and
            their sample variances by a quarter, which costs a fifth of the degrees of freedom.
    """
    degrees = sum(len(group) - 1 for group in groups)
    if degrees == 0:
        return 0.0, math.inf
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return math.sqrt(squares / degrees), degrees if len(groups) == 1 else max(1.0, 0.8 * degrees)


def start_samples(starts: int, groups: Sequence[np.ndarray], *, seed: int) -> np.ndarray:
    """float64 [samples]: deviations of the mean over `starts` engine starts; 0 if there was only one."""
    deviation, degrees = between_starts(groups)
    if deviation == 0:
        return np.zeros(_BOOTSTRAP_SAMPLES)
    draws = np.random.default_rng(seed).standard_t(degrees, size=_BOOTSTRAP_SAMPLES)
    return draws * deviation / math.sqrt(starts)


def start_ratios(sums: np.ndarray) -> np.ndarray:
    """float64 [starts]: the logarithm of the ratio in each start, from [starts, conversations, 4] sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _log_ratio(sums.sum(axis=1))


def log_ratio_samples(sums: np.ndarray) -> np.ndarray:
    """float64 [samples]: the logarithm of a ratio over resampled conversations, from [starts, conversations, 4] sums.

    The same number of conversations gives the same samples.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return _log_ratio(resampled(sums.shape[1]) @ sums.sum(axis=0))


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    """From [..., 4] sums: tokens and seconds of the denominator's engine, then of the numerator's."""
    found: np.ndarray = np.log(sums[..., 2] * sums[..., 1] / (sums[..., 3] * sums[..., 0]))
    return found


def conversation_sums(starts: Starts) -> np.ndarray:
    """float64 [starts, conversations, columns]: sums over turns, of the conversations that all starts have."""
    names = sorted(set.intersection(*({prompt.partition(TURN)[0] for prompt in one} for one in starts)))
    if not names:
        raise ValueError("the engine starts have no prompt in common")
    places = {name: place for place, name in enumerate(names)}
    columns = len(next(iter(starts[0].values())))
    sums = np.zeros((len(starts), len(names), columns))
    for start, one in enumerate(starts):
        for prompt, values in one.items():
            if (place := places.get(prompt.partition(TURN)[0])) is not None:
                sums[start, place] += values
    return sums


def resampled(conversations: int) -> np.ndarray:
    """float64 [samples, conversations]: how often each is drawn. Deterministic."""
    drawn = np.random.default_rng(0).multinomial(
        conversations, np.full(conversations, 1 / conversations), size=_BOOTSTRAP_SAMPLES
    )
    return drawn.astype(np.float64)


def _percentiles(samples: np.ndarray, level: float) -> Interval:
    return [float(end) for end in np.quantile(samples, [level / 2, 1 - level / 2])]
