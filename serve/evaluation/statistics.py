"""Figures of an evaluation and their confidence intervals, over conversations and over engine starts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from draftsmith.data.turns import TURN
from draftsmith.serve.evaluation.engine import Counters, Generated
from draftsmith.serve.evaluation.schema import Acceptance, Category, Interval, Ratio

FEWEST = 5
"""Conversations that an interval of acceptance needs: of fewer, a few easy or hard prompts decide, and t has long tails."""

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


def acceptance_interval(by_prompt: Mapping[str, Sequence[float]]) -> Interval | None:
    """The confidence interval of an acceptance length; None if fewer than `FEWEST` conversations have drafts.

    Args:
        by_prompt: drafts and accepted tokens by prompt id.
    """
    if conversations(prompt for prompt, (drafts, _) in by_prompt.items() if drafts) < FEWEST:
        return None
    low, high = interval_over_conversations(by_prompt, lambda sums: np.log1p(sums[..., 1] / sums[..., 0]))
    return [max(1.0, math.exp(low)), math.exp(high)]


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
            "conversations": conversations(part),
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


def student_t(share: float, degrees: float) -> float:
    """The quantile of Student's t distribution.

    For t = sqrt(degrees) tan(x), the density of x is proportional to cos(x)^(degrees - 1); it is summed by the trapezoidal rule.

    Args:
        share: probability below the quantile, from 0.5 to less than 1.
        degrees: of freedom, at least 1; from 100,000 on it is the normal distribution.
    """
    degrees = min(degrees, 1e5)
    x = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(x) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp((2 * share - 1) * below[-1], below, x)))


def half_width(errors: Iterable[tuple[float, float]], level: float = 0.05) -> float:
    """Half the width of a confidence interval.

    Args:
        errors: standard error and degrees of freedom of each independent part of a figure's error. Their sum has the degrees of Welch
            and Satterthwaite (Satterthwaite, 1946).
        level: probability outside the interval, half at each end.
    """
    parts = [(error**2, degrees) for error, degrees in errors if error > 0]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return 0.0
    degrees = variance**2 / sum(part**2 / own for part, own in parts)
    return student_t(1 - level / 2, degrees) * math.sqrt(variance)


def error_over_conversations(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
    """Standard error of a function of sums over conversations, and its degrees of freedom; 0 of a single conversation.

    By the jackknife, from the values without one conversation each (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 11). A bootstrap's percentiles are too narrow for few conversations: those of 5 hold the truth in 82 of 100 cases.

    Args:
        sums: float64 [conversations, columns], over turns: turns of one conversation are not independent.
        statistic: from [..., columns] to [...].
    """
    sums = sums[sums.any(axis=1)]  # a conversation without a draft says nothing and must not count
    with np.errstate(divide="ignore", invalid="ignore"):
        without_one = statistic(sums.sum(axis=0) - sums)
    without_one = without_one[np.isfinite(without_one)]  # without the only one that has tokens there is no value
    left = len(without_one)
    return (math.sqrt((left - 1) * without_one.var()) if left else 0.0), len(sums) - 1


def interval_over_conversations(
    columns: Mapping[str, Sequence[float]], statistic: Callable[[np.ndarray], np.ndarray], *, level: float = 0.05
) -> Interval:
    """A confidence interval for a function of sums over prompts, by the conversations' spread.

    Args:
        columns: values to sum, by prompt id.
        statistic: from [..., columns] sums to [...].
        level: probability outside the interval, half at each end.
    """
    sums = conversation_sums([columns])[0]
    value = float(statistic(sums.sum(axis=0)))
    half = half_width([error_over_conversations(sums, statistic)], level)
    return [value - half, value + half]


def ratio(starts: Starts, *, noise: Starts | None = None, level: float = 0.05) -> Ratio:
    """One engine's tokens per second over another's, with its confidence interval.

    The ratio varies with prompts and with engine starts, which are crossed: the same prompts run in every start. The two errors of its
    logarithm are added up (`error_over_conversations`, `error_over_starts`).

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
    value = float(np.exp(_log_ratio(sums.sum(axis=(0, 1)))))
    errors = [error_over_conversations(sums.sum(axis=0), _log_ratio), error_over_starts(1 / len(starts), groups)]
    times = math.exp(half_width(errors, level))
    return {
        "value": value,
        "interval": [value / times, value * times],
        "by_start": [float(one) for one in np.exp(by_start)],
        "median": statistics.median(float(one) for one in np.exp(by_start)),
    }


def gain(a: Starts, b: Starts, *, noise_a: Starts, noise_b: Starts, level: float) -> Interval:
    """A confidence interval for the difference of two such ratios, B's minus A's, of two evaluations on the same prompts.

    Prompts are compared in pairs, so how easy a prompt is cancels out. The spread between starts is assumed equal in both.

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
    both = np.concatenate([sums_a.sum(axis=0), sums_b.sum(axis=0)], axis=1)
    errors = [
        error_over_conversations(both, _log_ratio_of_ratios),
        error_over_starts(1 / len(a) + 1 / len(b), groups),
    ]
    value, half = float(_log_ratio_of_ratios(both.sum(axis=0))), half_width(errors, level)
    # The interval is of log(B / A), and B - A = 2 sqrt(A B) sinh(log(B / A) / 2).
    middle = math.sqrt(math.prod(shared_ratios(a, b)))
    return [2 * middle * math.sinh(end / 2) for end in (value - half, value + half)]


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


def error_over_starts(share: float, groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Standard error of the mean of a ratio's logarithm over engine starts, and its degrees of freedom; 0 if there was only one.

    Args:
        share: variance of that mean over the variance of one start: 1 / starts.
        groups: of `between_starts`.
    """
    deviation, degrees = between_starts(groups)
    return deviation * math.sqrt(share), degrees


def start_ratios(sums: np.ndarray) -> np.ndarray:
    """float64 [starts]: the logarithm of the ratio in each start, from [starts, conversations, 4] sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _log_ratio(sums.sum(axis=1))


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    """From [..., 4] sums: tokens and seconds of the denominator's engine, then of the numerator's."""
    found: np.ndarray = np.log(sums[..., 2] * sums[..., 1] / (sums[..., 3] * sums[..., 0]))
    return found


def _log_ratio_of_ratios(sums: np.ndarray) -> np.ndarray:
    """From [..., 8] sums: those of A's ratio, then of B's."""
    return _log_ratio(sums[..., 4:]) - _log_ratio(sums[..., :4])


def conversations(prompts: Iterable[str]) -> int:
    """How many conversations the prompts are turns of."""
    return len({prompt.partition(TURN)[0] for prompt in prompts})


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
