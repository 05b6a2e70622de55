"""Step costs by K, and the certainty of the choice of K."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.serve.evaluation.curve import fastest, is_beaten, non_decreasing, rivals, speedup_curve, step_cost_curve
from draftsmith.serve.evaluation.schema import AcceptanceByPrompt, CurvePoint


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=12))
def test_costs_in_order_are_the_nearest_in_least_squares(values: list[float]) -> None:
    found = non_decreasing(values)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    assert non_decreasing(found) == pytest.approx(found)
    draw = np.random.default_rng(0)
    ours = sum((a - b) ** 2 for a, b in zip(found, values, strict=True))
    for _ in range(20):
        other = np.sort(draw.uniform(0.5, 3.0, len(values)))
        assert ours <= float(((other - values) ** 2).sum()) + 1e-9
    if values == sorted(values):
        assert found == pytest.approx(values)


def _starts(medians: list[list[float]], spread: float) -> list[dict[int, list[float]]]:
    """By engine start, ratios of twelve prompts around each K's median."""
    offsets = np.linspace(-spread, spread, 12)
    return [{k + 1: [median + float(x) for x in offsets] for k, median in enumerate(one)} for one in medians]


def test_an_impossible_order_is_smoothed_and_the_choice_is_a_toss_up() -> None:
    costs = step_cost_curve(_starts([[1.25, 1.17, 1.31, 1.23], [1.15, 1.25, 1.29, 1.37]], 0.1))
    assert [costs[k]["cost"] for k in (1, 2, 3, 4)] == sorted(costs[k]["cost"] for k in (1, 2, 3, 4))
    assert costs[4]["measured"] == pytest.approx(1.30)
    assert costs[1]["error"] > costs[3]["error"]  # its starts are further apart
    accepted = {1: 43, 2: 60, 3: 66, 4: 69}
    by_prompt = {k: {f"p{n}": [100, count] for n in range(45)} for k, count in accepted.items()}
    curve = speedup_curve(costs, by_prompt, (1, 2, 3, 4))
    chosen = fastest(curve)
    assert curve[chosen]["fastest_share"] < 0.95
    assert rivals(curve, chosen)
    assert sum(one["fastest_share"] for one in curve.values()) == pytest.approx(1)


def test_an_impossible_order_is_a_toss_up_however_well_each_cost_repeats() -> None:
    """One engine start, whose prompts agree: 0.018 of standard error, and costs out of order by three of them."""
    costs = step_cost_curve(_starts([[1.25, 1.17, 1.31, 1.23]], 0.08))
    assert costs[3]["error"] < 0.02
    accepted = {1: 65, 2: 105, 3: 128, 4: 140}
    by_prompt = {k: {f"p{n}": [100, count] for n in range(45)} for k, count in accepted.items()}
    curve = speedup_curve(costs, by_prompt, (1, 2, 3, 4))
    assert fastest(curve) == 4
    assert rivals(curve, 4)


def test_a_choice_that_is_not_sure_has_a_rival() -> None:
    curve = {k: _point(1.0) | {"fastest_share": share} for k, share in {1: 0.03, 2: 0.93, 3: 0.04}.items()}
    assert rivals(curve, 2) == [3]  # type: ignore[arg-type]
    assert rivals({2: curve[2] | {"fastest_share": 1.0}}, 2) == []  # type: ignore[dict-item]


def test_a_clear_choice_is_clear() -> None:
    costs = step_cost_curve(_starts([[1.1, 1.2, 1.5], [1.1, 1.2, 1.5], [1.11, 1.21, 1.49]], 0.01))
    by_prompt = {k: {f"p{n}": [100, count + n] for n in range(45)} for k, count in {1: 40, 2: 90, 3: 95}.items()}
    curve = speedup_curve(costs, by_prompt, (1, 2))
    assert fastest({k: curve[k] for k in (1, 2)}) == 2
    assert curve[2]["fastest_share"] == 1
    assert rivals({k: curve[k] for k in (1, 2)}, 2) == []
    assert curve[3]["fastest_share"] == 0  # measured, and not to be chosen
    low, high = curve[2]["speedup_interval"]
    assert low < curve[2]["speedup"] < high


def test_what_cannot_be_the_fastest_is_told_before_it_is_measured() -> None:
    def found(k: int, accepted: list[int]) -> AcceptanceByPrompt:
        return {
            "acceptance_length": 1 + sum(accepted) / 100, "acceptance_per_position": [one / 100 for one in accepted],
            "acceptance_per_position_conditional": [], "drafts": 100, "draft_tokens": 100 * k, "accepted": sum(accepted),
            "by_prompt": {f"p{n}": [10, sum(accepted) / 10] for n in range(10)},  # type: ignore[list-item]
        }  # fmt: skip

    measured = {1: found(1, [45]), 2: found(2, [44, 16])}  # 1.45 and 1.60 tokens; at K = 3 1.76 at most, at K = 4 1.92
    exact = step_cost_curve(_starts([[1.15, 1.25, 1.40, 1.45]], 0.001))
    assert is_beaten(3, exact, measured, (1, 2, 3, 4)), "1.76 / 1.40 < 1.60 / 1.25"
    assert not is_beaten(4, exact, measured, (1, 2, 3, 4)), "1.92 / 1.45 > 1.60 / 1.25"
    assert not is_beaten(2, exact, {}, (1, 2, 3, 4)), "nothing is known"
    assert not is_beaten(1, exact, {2: measured[2]}, (1, 2, 3, 4)), "nor from larger K"
    assert is_beaten(4, exact, measured | {3: found(3, [44, 16, 4])}, (1, 2, 3, 4)), "it is 1.68 at most"
    rough = step_cost_curve(_starts([[1.15, 1.25, 1.40, 1.45]], 0.4))
    assert not is_beaten(3, rough, measured, (1, 2, 3, 4)), "it may cost less than measured"


def test_one_start_has_the_error_of_its_medians_alone() -> None:
    (cost,) = step_cost_curve([{1: [1.0, 1.2, 1.4]}]).values()
    assert cost["error"] == pytest.approx(1.2533 * 0.2 / 3**0.5)
    (cost,) = step_cost_curve([{1: [1.3]}]).values()
    assert (cost["cost"], cost["error"]) == (1.3, 0)


@pytest.mark.parametrize("starts", [3, 5])
def test_intervals_of_costs_and_speedups_have_their_nominal_coverage(starts: int) -> None:
    """Engines that differ from start to start by more than prompts do: the spread of three is known roughly."""
    draw = np.random.default_rng(4)
    inside = [0, 0]
    for _ in range(400):
        ratios = 1.2 * np.exp(draw.normal(0.0, 0.04, (starts, 1)) + draw.normal(0.0, 0.01, (starts, 12)))
        costs = step_cost_curve([{1: list(map(float, one))} for one in ratios])
        by_prompt = {1: {f"p{n}": [100, 60 + draw.normal(0.0, 3.0)] for n in range(12)}}
        (point,) = speedup_curve(costs, by_prompt, (1,)).values()
        for place, (name, truth) in enumerate((("step_cost_interval", 1.2), ("speedup_interval", 1.6 / 1.2))):
            low, high = point[name]  # type: ignore[literal-required]
            inside[place] += low <= truth <= high
    assert 366 <= min(inside) <= max(inside) <= 394  # 380 expected, standard deviation 4.4


def test_a_choice_by_three_starts_is_less_sure_than_its_spread_says() -> None:
    """Two K whose costs are three standard errors apart: a normal distribution is sure of it."""
    costs = step_cost_curve(_starts([[1.20, 1.245], [1.22, 1.255], [1.24, 1.265]], 0.001))
    assert {cost["degrees"] for cost in costs.values()} == {2}
    by_prompt = {k: {f"p{n}": [100, 60] for n in range(45)} for k in (1, 2)}
    curve = speedup_curve(costs, by_prompt, (1, 2))
    assert fastest(curve) == 1
    assert rivals(curve, 1) == [2]


def test_drafting_is_the_mean_of_the_medians_of_the_starts_that_have_it() -> None:
    costs = step_cost_curve(
        [{1: [1.2], 2: [1.5]}, {1: [1.3], 2: [1.7]}, {1: [1.3], 2: [1.6]}],
        [{1: [0.1, 0.1, 0.9], 2: []}, {1: [0.2], 2: []}],  # an earlier version measured the other start
    )
    assert costs[1]["drafting"] == pytest.approx(0.15)
    assert costs[2]["drafting"] is None


def _point(speedup: float) -> CurvePoint:
    return {
        "acceptance_length": 1.5, "step_cost": 1.5 / speedup, "step_cost_measured": 1.5 / speedup, "step_cost_error": 0.0, "step_cost_interval": [1.5 / speedup] * 2,
        "speedup": speedup, "speedup_interval": [speedup, speedup], "fastest_share": 0.0,
    }  # fmt: skip


def test_the_fastest_k_wins_and_the_smaller_of_equals() -> None:
    assert fastest({1: _point(1.1), 2: _point(1.3), 3: _point(1.2)}) == 2
    assert fastest({4: _point(1.2), 2: _point(1.2)}) == 2
