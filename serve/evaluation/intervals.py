"""Confidence intervals over conversations and over engine starts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from draftsmith.data.turns import TURN

_BOOTSTRAP_SAMPLES = 2000

Interval = list[float]
"""Two ends of a 95% confidence interval: how much a figure would move with other prompts of the same kind and, where engines
were started several times, with other starts. It says nothing of another machine."""


class Ratio(TypedDict):
    """One engine's tokens per second over another's, over the same prompts."""

    value: float
    """Of all engine starts together: total over total."""
    interval: Interval
    """By `ratio`; over prompts alone where there was one start."""
    by_start: list[float]
    """Each engine start's own."""
    median: float
    """Of those."""


def bootstrap(
    columns: Mapping[str, Sequence[float]],
    statistic: Callable[[Sequence[Any]], Any],
    *,
    level: float = 0.05,
    otherwise: float = 1.0,
) -> Interval:
    """A confidence interval of a figure of sums, by bootstrap over conversations.

    Percentiles of the figure over samples of as many conversations, drawn with replacement (Efron and Tibshirani, An
    Introduction to the Bootstrap, 1993, chapter 13). Turns of one conversation are no independent prompts, so they are drawn
    together. The same data give the same interval.

    Args:
        columns: what is summed, by prompt id.
        statistic: of the columns' sums, float64 [samples] each.
        level: probability that the interval leaves out, half at each end.
        otherwise: both ends where no sample has a figure.
    """
    sums = conversation_sums([columns])[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = statistic(list((resampled(len(sums)) @ sums).T))
    found = found[np.isfinite(found)]  # a sample may hold no draft at all
    return _percentiles(found, level) if len(found) else [otherwise] * 2


Starts = Sequence[Mapping[str, Sequence[float]]]
"""By engine start, then by prompt id: tokens and seconds of one engine, then of the one that is held against it."""


def ratio(starts: Starts, *, noise: Starts | None = None, level: float = 0.05) -> Ratio:
    """One engine's tokens per second over another's, with its confidence interval.

    Two things make the figure move, other prompts and other engine starts, and they are crossed: the same prompts run in every
    start. Conversations are drawn with replacement as in `bootstrap`. Starts are too few to draw from (three drawn of three
    understate how far apart they are), so each sample moves by a draw of Student's t distribution, times the standard error of
    the mean over starts (`between_starts`).

    Args:
        starts: the engine below the line first.
        noise: the same of two engines that do the same, from the same starts: they tell, too, how far starts are apart.
        level: probability that the interval leaves out, half at each end.

    Raises:
        ValueError: an engine gave no token, or the starts have no prompt in common.
    """
    sums = conversation_sums(starts)
    by_start = start_ratios(sums)
    if not np.isfinite(by_start).all():
        raise ValueError("an engine gave no token on these prompts")
    groups = [by_start] if noise is None else [by_start, start_ratios(conversation_sums(noise))]
    samples = log_ratio_samples(sums) + start_samples(len(starts), groups, seed=1)
    return {
        "value": float(np.exp(_log_ratio(sums.sum(axis=(0, 1))))),
        "interval": _percentiles(np.exp(samples[np.isfinite(samples)]), level),
        "by_start": [float(one) for one in np.exp(by_start)],
        "median": statistics.median(float(one) for one in np.exp(by_start)),
    }


def gain(a: Starts, b: Starts, *, noise_a: Starts, noise_b: Starts, level: float) -> Interval:
    """A confidence interval of the difference of two such ratios, B's less A's, measured by two evaluations on the same prompts.

    Prompts are drawn alike for both, so what makes a prompt easy or hard drops out. How far starts are apart is taken to be alike in both.

    Args:
        a: two starts or more.
        b: likewise.
        noise_a: of two engines that do the same, from the starts of A.
        noise_b: likewise.
        level: probability that the interval leaves out, half at each end.

    Raises:
        ValueError: they have no prompt in common.
    """
    sums_a, sums_b = np.split(conversation_sums([*a, *b]), [len(a)])
    groups = [
        start_ratios(sums) for sums in (sums_a, sums_b, conversation_sums(noise_a), conversation_sums(noise_b))
    ]  # fmt: skip
    samples_a = log_ratio_samples(sums_a)
    samples_b = log_ratio_samples(sums_b)
    # One draw for both: the difference of two means whose standard deviation is estimated together is one t variable.
    error = start_samples(1, groups, seed=1) * math.sqrt(1 / len(a) + 1 / len(b))
    found = np.exp(samples_b + error / 2) - np.exp(samples_a - error / 2)
    return _percentiles(found[np.isfinite(found)], level)


def between_starts(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Standard deviation of the logarithm of a ratio from engine start to engine start, and its degrees of freedom.

    Args:
        groups: of each ratio, its logarithms by start; the ratios share no more than one of their two engines. Then they correlate
            by a half and their sample variances by a quarter, which costs a fifth of the degrees of freedom.
    """
    degrees = sum(len(group) - 1 for group in groups)
    if degrees == 0:
        return 0.0, math.inf
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return math.sqrt(squares / degrees), degrees if len(groups) == 1 else max(1.0, 0.8 * degrees)


def start_samples(starts: int, groups: Sequence[np.ndarray], *, seed: int) -> np.ndarray:
    """float64 [samples]: how the mean over so many starts would move with other starts; 0 where there was but one."""
    deviation, degrees = between_starts(groups)
    if deviation == 0:
        return np.zeros(_BOOTSTRAP_SAMPLES)
    draws = np.random.default_rng(seed).standard_t(degrees, size=_BOOTSTRAP_SAMPLES)
    return draws * deviation / math.sqrt(starts)


def start_ratios(sums: np.ndarray) -> np.ndarray:
    """float64 [starts]: the logarithm of the ratio in each start, of [starts, conversations, 4] sums."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _log_ratio(sums.sum(axis=1))


def log_ratio_samples(sums: np.ndarray) -> np.ndarray:
    """float64 [samples]: the logarithm of a ratio as other conversations would give it, of [starts, conversations, 4] sums.

    Sums of the same number of conversations draw the same ones.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return _log_ratio(resampled(sums.shape[1]) @ sums.sum(axis=0))


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    """Of [..., 4] sums: tokens and seconds of the engine below the line, then of the one above it."""
    found: np.ndarray = np.log(sums[..., 2] * sums[..., 1] / (sums[..., 3] * sums[..., 0]))
    return found


def conversation_sums(starts: Starts) -> np.ndarray:
    """float64 [starts, conversations, columns]: sums over the turns of the conversations that all starts have."""
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
    """float64 [samples, conversations]: how often each is drawn. The same for the same number."""
    drawn = np.random.default_rng(0).multinomial(
        conversations, np.full(conversations, 1 / conversations), size=_BOOTSTRAP_SAMPLES
    )
    return drawn.astype(np.float64)


def _percentiles(samples: np.ndarray, level: float) -> Interval:
    return [float(end) for end in np.quantile(samples, [level / 2, 1 - level / 2])]
