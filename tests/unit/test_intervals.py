"""Intervals over prompts and engine starts have their nominal coverage; draws by category."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.serve.evaluation.statistics import between_starts, gain, ratio, student_t
from draftsmith.serve.evaluation.suites import stratified

ENGINE_NOISE = 0.04
"""Planted standard deviation between engine starts of the logarithm of an engine's speed."""


def measured(
    draw: np.random.Generator,
    speedup: float,
    *,
    starts: int = 3,
    prompts: int = 16,
    prompts_seed: int | None = None,
    noise: float = ENGINE_NOISE,
) -> tuple[list[dict[str, list[float]]], list[dict[str, list[float]]]]:
    """Simulated measurements: prompts differ in their speedup, engines in their speed.

    Returns:
        Tokens and seconds of the baseline and of the drafter; and of the baseline and of a second such engine.
    """
    ease = (draw if prompts_seed is None else np.random.default_rng(prompts_seed)).normal(0.0, 0.1, prompts)
    own, alike = [], []
    for _ in range(starts):
        baseline, again, drafter = np.exp(draw.normal(0.0, noise, 3))
        jitter = np.exp(draw.normal(0.0, 0.01, (prompts, 3)))
        own.append(
            {
                f"p{n}": [
                    64.0,
                    4.0 * baseline * jitter[n, 0],
                    64.0,
                    4.0 * drafter * jitter[n, 1] / (speedup * np.exp(ease[n])),
                ]
                for n in range(prompts)
            }
        )
        alike.append(
            {f"p{n}": [64.0, 4.0 * baseline * jitter[n, 0], 64.0, 4.0 * again * jitter[n, 2]] for n in range(prompts)}
        )
    return own, alike


@pytest.mark.parametrize("starts", [2, 3, 5])
@pytest.mark.parametrize("prompts", [5, 16])
@pytest.mark.parametrize("noise", [0.002, ENGINE_NOISE])
def test_intervals_have_their_nominal_coverage(starts: int, prompts: int, noise: float) -> None:
    """Whether the spread of prompts or that of engine starts decides."""
    draw = np.random.default_rng(7)
    inside = 0
    for _ in range(500):
        own, alike = measured(draw, 1.4, starts=starts, prompts=prompts, noise=noise)
        low, high = ratio(own, noise=alike)["interval"]
        inside += low <= 1.4 <= high
    assert 463 <= inside <= 490  # 475 expected, standard deviation 4.9


def test_quantiles_of_student_t_are_those_of_tables() -> None:
    table = {(0.975, 1): 12.7062, (0.975, 2): 4.3027, (0.995, 4): 4.6041, (0.95, 30): 1.6973, (0.975, 1e9): 1.9600}
    assert {of: student_t(*of) for of in table} == pytest.approx(table, rel=1e-4)
    assert student_t(0.999375, 2) == pytest.approx(28.258, rel=1e-4)  # of t = (2p - 1) / sqrt(2p (1 - p))
    assert student_t(0.5, 3) == 0


def test_the_spread_of_three_starts_alone_is_by_student_t() -> None:
    """Conversations agree, and both ends are as far away."""
    logs = np.array([-0.03, 0.01, 0.02])
    found = ratio([{f"p{n}": [10.0, 1.0, 10.0, float(np.exp(-one))] for n in range(5)} for one in logs])
    half = 4.30265 * logs.std(ddof=1) / 3**0.5
    assert np.log(np.array(found["interval"]) / found["value"]) == pytest.approx([-half, half], rel=1e-4)


def test_prompts_alone_would_be_overconfident() -> None:
    """An interval over prompts alone misses the truth far more often than its level."""
    draw = np.random.default_rng(8)
    outside = 0
    for _ in range(200):
        own, _ = measured(draw, 1.4, starts=1)
        low, high = ratio(own)["interval"]
        outside += not low <= 1.4 <= high
    assert outside > 30  # 10 if it were right


def power(slowdown: float, noise: float, starts: int) -> float:
    """Probability that a test of two means at a level of 0.05 finds the slowdown, if its standard deviation is estimated from four ratios, which
    correlate (`between_starts`)."""
    draw, degrees = np.random.default_rng(0), 0.8 * 4 * (starts - 1)
    error = noise * np.sqrt(2) * np.sqrt(2 / starts)  # of a difference of two means of ratios of two engines
    standard = draw.normal(np.log(slowdown) / error, 1.0, 100_000)
    limit = np.quantile(draw.standard_t(degrees, 100_000), 0.975)
    return float(np.mean(standard / np.sqrt(draw.chisquare(degrees, 100_000) / degrees) > limit))


@pytest.mark.parametrize(("noise", "starts", "likely"), [(0.04, 5, 0.69), (0.02, 3, 0.93), (0.05, 3, 0.29)])
def test_two_evaluations_of_the_same_seldom_differ_and_a_tenth_is_found_as_often_as_can_be(
    noise: float, starts: int, likely: float
) -> None:
    """Engines that differ more between starts raise no more alarms. What they hide is hidden from any test."""
    draw = np.random.default_rng(9)
    alarms = found = 0
    for number in range(200):
        (a, noise_a), (b, noise_b), (slow, noise_slow) = (
            measured(draw, speedup, starts=starts, prompts_seed=number, noise=noise)
            for speedup in (1.4, 1.4, 1.4 / 1.1)
        )
        low, high = gain(a, b, noise_a=noise_a, noise_b=noise_b, level=0.05)
        alarms += not low <= 0 <= high
        found += gain(a, slow, noise_a=noise_a, noise_b=noise_slow, level=0.05)[1] < 0
    assert alarms <= 20  # 10 expected
    assert power(1.1, noise, starts) == pytest.approx(likely, abs=0.01)
    assert found / 200 == pytest.approx(likely, abs=0.1)


def test_figures_by_hand() -> None:
    starts = [
        {"a": [10.0, 2.0, 10.0, 1.0], "b": [10.0, 2.0, 10.0, 1.0]},
        {"a": [10.0, 4.0, 10.0, 2.0], "b": [10.0, 4.0, 10.0, 2.0]},
    ]
    found = ratio(starts)
    assert found["value"] == pytest.approx(2)
    assert found["by_start"] == pytest.approx([2, 2])
    assert found["interval"] == pytest.approx([2, 2])
    assert between_starts([np.array([0.0, 0.2]), np.array([1.0, 1.0, 1.0])]) == (
        pytest.approx((0.02 / 3) ** 0.5),
        pytest.approx(2.4),
    )
    with pytest.raises(ValueError, match="no prompt in common"):
        ratio([{"a": [1.0] * 4}, {"b": [1.0] * 4}])
    with pytest.raises(ValueError, match="no token"):
        ratio([{"a": [1.0, 1.0, 0.0, 1.0]}])


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 5))
def test_every_stratum_has_its_share(strata: list[str], count: int, seed: int) -> None:
    items = list(enumerate(strata))
    found = stratified(items, count, lambda item: item[1], seed=seed)
    assert len(set(found)) == len(found) == min(count, len(items))
    have, of = Counter(one for _, one in found), Counter(strata)
    for one, number in of.items():
        # Each stratum is within one of its part of the order; where the order is cut moves by up to one for each of them.
        assert abs(have[one] - number * len(found) / len(items)) <= 1 + number / len(items) * len(of) + 1e-9
    assert found == stratified(items, count, lambda item: item[1], seed=seed)
    # Fewer are the first of more.
    assert stratified(items, count + 5, lambda item: item[1], seed=seed)[: len(found)] == found


def test_the_seed_decides_which() -> None:
    items = [(n, n % 8) for n in range(160)]
    assert len({tuple(stratified(items, 12, lambda item: item[1], seed=seed)) for seed in range(5)}) == 5
