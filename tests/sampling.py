"""Whether sampled answers follow a target's own probabilities, and how small a fault such a test would find.

Answers are held against exact probabilities, not against another sample: that halves the variance. Two statistics:

`same_distribution` looks for any difference: Pearson's chi-square of the token after each beginning of an answer.

`Acceptance` looks for what a fault in accepting guesses does: guessed tokens come up more (or less) often than their
probabilities say. Where the target gives a guess the probability p, and guesses are accepted `bias` times as readily, it comes up
with probability min(1, bias p). Which tokens are guessed after which is learned from answers that are not tested. So the test
is right whatever is learned: a token's probability is known before it is drawn, and the sum over all places is a martingale,
normal for many places (Hall and Heyde, Martingale Limit Theory, 1980, corollary 3.1).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from draftsmith.serve.evaluation.sampled_fidelity import accepted_places

_CERTAIN = 1e-6
"""Tokens this near to probability 0 or 1 say nothing about acceptance."""
_LEAST_EXPECTED = 5.0
"""Cells of a chi-square test with fewer expected are put together (Cochran 1954)."""


@torch.no_grad()
def token_probabilities(
    model: torch.nn.Module, prompt: Sequence[int], answers: Sequence[Sequence[int]], temperature: float
) -> torch.Tensor:
    """float32 [answers, longest, vocab]: of every token of every answer, the distribution that it should be drawn from.

    Args:
        model: a causal language model of transformers, in float32.
        prompt: token ids, the same for all.
        answers: token ids; what stands beyond the end of a shorter one means nothing.
    """
    longest = max(len(answer) for answer in answers)
    rows = torch.tensor([[*prompt, *answer, *[0] * (longest - len(answer))] for answer in answers])
    # One position before each token predicts it.
    logits = [model(some).logits[:, len(prompt) - 1 : -1] for some in rows.split(128)]
    return (torch.cat(logits) / temperature).softmax(-1)


def same_distribution(answers: Sequence[Sequence[int]], probabilities: torch.Tensor, *, places: int = 4) -> float:
    """Probability that answers drawn from `probabilities` are as far from them as these, or farther.

    The answers that begin alike are multinomial draws of their next token. All beginnings of up to `places` - 1 tokens
    together are one chi-square test; tokens that are expected too seldom after a beginning count as one.
    """
    statistic, freedom = 0.0, 0
    for place in range(places):
        beginnings: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, answer in enumerate(answers):
            if len(answer) > place:
                beginnings[tuple(answer[:place])].append(number)
        for numbers in beginnings.values():
            if len(numbers) < 2 * _LEAST_EXPECTED:  # one cell, which says nothing
                continue
            expected = probabilities[numbers[0], place].double() * len(numbers)
            found = torch.bincount(torch.tensor([answers[i][place] for i in numbers]), minlength=len(expected)).double()
            often = expected >= _LEAST_EXPECTED
            cells = torch.stack([torch.cat([x[often], x[~often].sum()[None]]) for x in (found, expected)])
            if cells[1, -1] < _LEAST_EXPECTED:  # what is left is too little for a cell of its own
                cells = torch.cat([cells[:, :-2], cells[:, -2:].sum(1, keepdim=True)], dim=1)
            statistic += float(((cells[0] - cells[1]) ** 2 / cells[1]).sum())
            freedom += cells.shape[1] - 1
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64))) if freedom else 1.0


def guesses(answers: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """The token most often accepted after each pair of tokens; arguments as for `accepted_places`, of many answers."""
    found: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for answer, steps in zip(answers, accepted, strict=True):
        for place in accepted_places(answer, steps) or []:
            if place >= 2:
                found[answer[place - 2], answer[place - 1]][answer[place]] += 1
    return {pair: counts.most_common(1)[0][0] for pair, counts in found.items()}


@dataclass(frozen=True)
class Acceptance:
    """Places where a guess is likely to have been made, in answers that it was not learned from."""

    p: torch.Tensor
    """float64 [n]: the target's probability of the guess."""
    came: torch.Tensor
    """bool [n]: whether that token came."""
    share: float
    """Of these places, those where the guess was looked at; elsewhere the token is the target's own whatever is accepted."""

    @classmethod
    def of(
        cls, answers: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]], probabilities: torch.Tensor
    ) -> Acceptance:
        """Learned from the first half of the answers, of the second.

        `share` is estimated: a guess that is looked at is accepted with its probability. Answers whose accepted places are
        not known are left out of that, but tested.
        """
        half = len(answers) // 2
        guess = guesses(answers[:half], accepted[:half])
        p, came = [], []
        taken, possible = 0, 0.0
        for number in range(half, len(answers)):
            answer = answers[number]
            known = accepted_places(answer, accepted[number])
            for place in range(2, len(answer)):
                token = guess.get((answer[place - 2], answer[place - 1]))
                chance = 0.0 if token is None else float(probabilities[number, place, token])
                if not _CERTAIN < chance < 1 - _CERTAIN:
                    continue
                p.append(chance)
                came.append(answer[place] == token)
                if known is not None:
                    taken += answer[place] == token and place in known
                    possible += chance
        share = min(1.0, taken / possible) if possible else 0.0
        return cls(torch.tensor(p, dtype=torch.float64), torch.tensor(came, dtype=torch.bool), share)

    def probability(self, bias: float) -> float:
        """Probability, where acceptance is right, of answers as far from it as these (two-sided); weights are the best
        against `bias`."""
        weights = self._weights(bias)
        variance = (weights**2 * self.p * (1 - self.p)).sum()
        z = float((weights * (self.came.double() - self.p)).sum() / variance.sqrt()) if len(self.p) else 0.0
        return 2 * NormalDist().cdf(-abs(z))

    def power(self, bias: float, level: float) -> float:
        """Probability that `probability` is below `level` where guesses are accepted `bias` (above 1) times as readily.

        Normal approximation with the variances under both, as for any score test (Lehmann and Romano, Testing Statistical
        Hypotheses, 2005, section 13.3).
        """
        if not len(self.p) or not self.share:
            return 0.0
        weights, shift = self._weights(bias), self.share * self._shift(bias)
        q = self.p + shift
        mean = float((weights * shift).sum())
        right = float((weights**2 * self.p * (1 - self.p)).sum()) ** 0.5
        wrong = float((weights**2 * q * (1 - q)).sum()) ** 0.5
        normal = NormalDist()
        return normal.cdf((mean - normal.inv_cdf(1 - level / 2) * right) / wrong)

    def smallest_bias(self, level: float, power: float = 0.95) -> float:
        """The smallest bias that is found with this probability, to a hundredth of its excess over 1; inf above 4."""
        low, high = 1.0, 4.0
        if self.power(high, level) < power:
            return float("inf")
        while high - low > 0.01 * (high - 1):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(middle, level) >= power else (middle, high)
        return high

    def _shift(self, bias: float) -> torch.Tensor:
        return (bias * self.p).clamp(max=1) - self.p

    def _weights(self, bias: float) -> torch.Tensor:
        """Of the log likelihood's derivative; at most `bias`, so that no place counts for many."""
        return self._shift(bias) / (self.p * (1 - self.p))
