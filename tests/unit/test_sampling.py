"""The tests of sampled answers, themselves: their levels are what they say, and so is their power."""

import pytest
import torch

from tests.sampling import Acceptance, accepted_places, guesses, same_distribution

LEVELS = (0.02, 0.1, 0.5)


def deviation(count: int, chance: float) -> float:
    return (chance * (1 - chance) / count) ** 0.5


def made(bias: float, number: int, *, places: int = 1500, share: float = 0.7) -> Acceptance:
    """Places with guesses of all probabilities, accepted `bias` times as readily."""
    draw = torch.Generator().manual_seed(number)
    p = torch.rand(places, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.998 + 0.001
    looked_at = torch.rand(places, generator=draw) < share
    q = torch.where(looked_at, (bias * p).clamp(max=1), p)
    return Acceptance(p, torch.rand(places, generator=draw, dtype=torch.float64) < q, share)


def test_right_acceptance_is_called_wrong_as_often_as_the_level_says() -> None:
    found = torch.tensor([made(1.0, number).probability(1.1) for number in range(1000)])
    for level in LEVELS:
        assert abs(float((found < level).double().mean()) - level) < 4 * deviation(1000, level)


@pytest.mark.parametrize("bias", [1.03, 1.06, 1.1])
@pytest.mark.parametrize("level", [1e-3, 0.05])
def test_a_bias_is_found_as_often_as_the_power_says(bias: float, level: float) -> None:
    found = sum(made(bias, number).probability(bias) < level for number in range(600)) / 600
    expected = made(1.0, 0).power(bias, level)
    # A normal approximation: to two hundredths, beside what six hundred trials leave open.
    assert abs(found - expected) < 0.02 + 4 * deviation(600, expected)


def test_the_smallest_bias_has_the_power_that_is_asked_for() -> None:
    sample = made(1.0, 0)
    bias = sample.smallest_bias(1e-3)
    assert sample.power(bias, 1e-3) >= 0.95 > sample.power(1 + (bias - 1) * 0.97, 1e-3)
    assert made(1.0, 0, places=6000).smallest_bias(1e-3) < bias
    assert Acceptance(torch.zeros(0), torch.zeros(0), 0.0).smallest_bias(1e-3) == float("inf")


def chain(count: int, seed: int, temperature: float = 1.0) -> tuple[list[list[int]], torch.Tensor]:
    """Answers of four tokens by a chain of 32 tokens, and the probabilities that they were drawn from at temperature 1."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(33, 32, generator=torch.Generator().manual_seed(1))
    tokens = torch.full((count, 1), 32)
    probabilities = []
    for _ in range(4):
        after = logits[tokens[:, -1]]
        probabilities.append(after.softmax(-1))
        drawn = torch.multinomial((after / temperature).softmax(-1), 1, generator=draw)
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens[:, 1:].tolist(), torch.stack(probabilities, dim=1)


def test_the_same_distribution_is_called_another_as_often_as_the_level_says() -> None:
    found = torch.tensor([same_distribution(*chain(500, number)) for number in range(400)])
    for level in LEVELS:
        assert abs(float((found < level).double().mean()) - level) < 4 * deviation(400, level)


def test_another_temperature_is_found() -> None:
    assert same_distribution(*chain(2000, 0, temperature=1.15)) < 1e-6


def test_guesses_are_read_off_the_steps() -> None:
    # 7 is the target's own; the first step accepts 8 and adds 9, the second accepts 3 and 4 and is cut off after them.
    assert guesses([[7, 8, 9, 3, 4]], [[1, 3]]) == {(8, 9): 3, (9, 3): 4}
    assert accepted_places([7, 8, 9, 3, 4], [1, 3]) == [1, 3, 4]
    assert accepted_places([7, 8, 9, 3, 4], [1, 0]) is None, "a step without guesses was somewhere"
    assert guesses([[7, 8, 9, 3, 4]], [[1, 0]]) == {}
