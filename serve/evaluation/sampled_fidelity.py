"""Do sampled answers follow the baseline's distribution? Statistical tests of many short answers (`evaluate.fidelity: sampling`).

Sampled answers differ from engine to engine by chance, so they cannot be compared token for token. What can be compared is how often
which answers come. The baseline and each speculative engine draw as many answers to the same prompts, and two tests look for a
difference, each at half of the level:

`continuations` looks for any: after every beginning of an answer, Pearson's chi-square test of whether both engines go on with the same
tokens equally often.

`drafts` looks for what a fault in accepting drafts does: draft tokens come more (or less) often than they should. Which token is drafted
after which two is learned from one half of the answers; in the other half, the number of times that it comes is compared. Each answer
gives one number, answers are independent, and the numbers of both engines have one distribution if speculation is right, whatever was
learned; so the difference of their means, over its standard error, is normal for many answers.

With the target's own probabilities, which `tests/sampling.py` has for small targets, half as many answers would do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

from draftsmith.config.recipe import Recipe
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost, Generated
from draftsmith.serve.evaluation.fidelity import LEVEL
from draftsmith.serve.evaluation.lineup import Lineup
from draftsmith.serve.evaluation.partial import PartialResults
from draftsmith.serve.evaluation.schema import SampledFidelity, Variant
from draftsmith.serve.evaluation.suites import SuiteInput, draw
from draftsmith.serve.evaluation.variants import Variants

_PLACES = 4
"""Tokens of each answer whose continuations are compared; beginnings that come once or twice tell nothing."""
_LEAST_EXPECTED = 5.0
"""Cells of a chi-square test with fewer expected are put together (Cochran 1954)."""
_POWER = 0.95
_LARGEST_BIAS = 4.0

Answers = Sequence[Sequence[Generated]]
"""By prompt: one engine's answers to it."""
Pair = tuple[int, int, int]
"""A prompt's index, and two tokens that follow one another in an answer."""


def measure_sampled_fidelity(
    lineup: Lineup[Variant], variants: Variants, suite: SuiteInput, recipe: Recipe, partial: PartialResults
) -> None:
    """Draw answers of the baseline, of the drafter at the chosen K and of every method, and test them, if the recipe asks for it."""
    options = recipe.evaluate
    if options.fidelity != "sampling" or partial.sampled_fidelity:
        return
    compared: list[Variant] = [partial.best_k(options.k), *options.methods]
    prompts = [turn.token_ids for turn in draw(suite.prompts, options.fidelity_prompts, seed=recipe.seed)]
    drawn: dict[Variant, Answers] = {}
    for engines in lineup.turns(variants.engines([0, *compared]), lambda variant: 0):
        here = [variant for variant in (0, *compared) if variant in engines and variant not in drawn]
        with Bar(f"{suite.name}: sampled answers", total=len(prompts) * len(here), unit="prompts") as bar:
            for variant in here:
                drawn[variant] = _draw(
                    engines[variant], prompts, options.fidelity_answers, options.fidelity_tokens, bar
                )
    for variant in compared:
        name = variant if isinstance(variant, str) else f"K = {variant}"
        partial.sampled_fidelity[name] = compare_samples(drawn[0], drawn[variant])
    partial.save()


def _draw(engine: EngineHost, prompts: Sequence[list[int]], answers: int, tokens: int, bar: Bar) -> Answers:
    found = []
    for prompt in prompts:
        found.append(engine.generate([prompt] * answers, max_tokens=tokens)[0])
        bar.step()
    return found


def compare_samples(baseline: Answers, speculative: Answers) -> SampledFidelity:
    """Whether two engines' answers to the same prompts come from one distribution.

    Args:
        baseline: without speculation.
        speculative: as many, with their drafts.
    """
    any_difference = continuations_p_value(baseline, speculative)
    drafts = DraftTest(baseline, speculative)
    smallest = 2 * min(any_difference, drafts.p_value)
    return {
        "prompts": len(baseline),
        "answers": sum(map(len, speculative)),
        "tokens": sum(len(answer.token_ids) for answers in speculative for answer in answers),
        "continuations_p_value": any_difference,
        "drafts_p_value": drafts.p_value,
        "detectable_bias": drafts.detectable_bias(LEVEL / 2),
        "verdict": "wrong" if smallest < LEVEL else "same_distribution",
    }


# ---- any difference ----


def continuations_p_value(one: Answers, other: Answers) -> float:
    """Probability of continuations at least as different as these if both engines have the same."""
    statistic, freedom = 0.0, 0
    for mine, theirs in zip(one, other, strict=True):
        for place in range(_PLACES):
            first, second = _by_beginning(mine, place), _by_beginning(theirs, place)
            for beginning in first.keys() & second.keys():
                value, degrees = _homogeneity(first[beginning], second[beginning])
                statistic, freedom = statistic + value, freedom + degrees
    return _chi_square_tail(statistic, freedom)


def _by_beginning(answers: Sequence[Generated], place: int) -> dict[tuple[int, ...], Counter[int]]:
    """Of each beginning of `place` tokens: how often which token follows."""
    found: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for answer in answers:
        if len(answer.token_ids) > place:
            found[tuple(answer.token_ids[:place])][answer.token_ids[place]] += 1
    return found


def _homogeneity(one: Counter[int], other: Counter[int]) -> tuple[float, int]:
    """Pearson's chi-square of a table with two rows and a column for each token, and its degrees of freedom; seldom tokens share one."""
    sizes = np.array([one.total(), other.total()], dtype=float)
    least = _LEAST_EXPECTED * sizes.sum() / sizes.min()  # of a column, so that the smaller row expects enough
    columns = [(one[token], other[token]) for token in one | other]
    often = [column for column in columns if sum(column) >= least]
    seldom = np.array([column for column in columns if sum(column) < least], dtype=float).reshape(-1, 2).sum(axis=0)
    if seldom.sum() >= least:
        often.append((seldom[0], seldom[1]))
    elif seldom.sum() and often:
        often[-1] = (often[-1][0] + seldom[0], often[-1][1] + seldom[1])
    if len(often) < 2:
        return 0.0, 0
    table = np.array(often, dtype=float)  # [tokens, 2]
    expected = table.sum(axis=1, keepdims=True) * sizes / sizes.sum()
    return float(((table - expected) ** 2 / expected).sum()), len(often) - 1


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable is at least as large; 1 without degrees of freedom."""
    if not freedom:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


# ---- accepted too often ----


def accepted_places(answer: Sequence[int], steps: Sequence[int]) -> list[int] | None:
    """Where in an answer the accepted draft tokens are; None where that is not known.

    Args:
        answer: token ids; the first is the target's own.
        steps: how many draft tokens each step accepted. A step gives one more token. Steps that do not add up to the answer leave
            out some without drafts, at places that are not known. The last step may go beyond the answer.
    """
    if 1 + sum(steps) + len(steps) < len(answer):
        return None
    places: list[int] = []
    place = 1
    for count in steps:
        places += range(place, min(place + count, len(answer)))
        place += count + 1
    return places


class DraftTest:
    """How often the tokens come that the drafter is likely to draft, in the answers of both engines.

    The first half of each prompt's answers is for learning: the token most often accepted after each pair of tokens, from the
    speculative engine's, and how often it follows that pair, from the baseline's. The second halves are compared.
    """

    def __init__(self, baseline: Answers, speculative: Answers) -> None:
        self._drafted = _likely_drafts(speculative)
        self._rates = self._learn_rates(baseline)
        scores = [self._scores(answers) for answers in (baseline, speculative)]
        difference = variance = 0.0
        self._answers = 0
        for mine, theirs in zip(*scores, strict=True):
            difference += len(theirs) * float(theirs.mean() - mine.mean())
            variance += len(theirs) ** 2 * float(mine.var(ddof=1) / len(mine) + theirs.var(ddof=1) / len(theirs))
            self._answers += len(theirs)
        self._error = math.sqrt(variance)
        self.p_value = 2 * NormalDist().cdf(-abs(difference) / self._error) if self._error else 1.0
        """Probability of a difference at least as large if both engines have the same distribution."""
        self._rates_met, self._share = self._met(speculative)

    def detectable_bias(self, level: float) -> float | None:
        """The smallest factor by which drafts could be accepted too readily that this test at a level finds with probability 0.95; None
        above 4, or where too little was drafted to tell."""
        normal = NormalDist()
        needed = (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(_POWER)) * self._error

        def found(bias: float) -> bool:
            gained = self._share * (np.minimum(1, bias * self._rates_met) - self._rates_met).sum()
            return bool(gained >= needed > 0)

        low, high = 1.0, _LARGEST_BIAS
        if not found(high):
            return None
        while high - low > 0.01 * (high - 1):
            middle = (low + high) / 2
            low, high = (low, middle) if found(middle) else (middle, high)
        return high

    def _learn_rates(self, baseline: Answers) -> dict[Pair, float]:
        """Of each pair with a likely draft token: how often that follows it."""
        came: Counter[Pair] = Counter()
        seen: Counter[Pair] = Counter()
        for prompt, answers in enumerate(baseline):
            for answer in answers[: len(answers) // 2]:
                for pair, token in _following(prompt, answer.token_ids):
                    if pair in self._drafted:
                        seen[pair] += 1
                        came[pair] += token == self._drafted[pair]
        return {pair: came[pair] / count for pair, count in seen.items()}

    def _scores(self, answers: Answers) -> list[np.ndarray]:
        """By prompt: of each answer of the second half, how many likely draft tokens came beyond what was learned."""
        found = []
        for prompt, of_prompt in enumerate(answers):
            scores = [
                math.fsum(
                    (token == self._drafted[pair]) - self._rates[pair]
                    for pair, token in _following(prompt, answer.token_ids)
                    if pair in self._rates
                )
                for answer in of_prompt[len(of_prompt) // 2 :]
            ]
            found.append(np.array(scores))
        return found

    def _met(self, speculative: Answers) -> tuple[np.ndarray, float]:
        """The rates at the places that are compared, and of these the share at which the draft token was really drafted and looked at: it is
        accepted then as often as its rate says."""
        rates: list[float] = []
        taken, possible = 0, 0.0
        for prompt, answers in enumerate(speculative):
            for answer in answers[len(answers) // 2 :]:
                places = accepted_places(answer.token_ids, answer.accepted)
                for place, (pair, token) in enumerate(_following(prompt, answer.token_ids), start=2):
                    if pair in self._rates:
                        rates.append(self._rates[pair])
                        if places is not None:
                            taken += token == self._drafted[pair] and place in places
                            possible += self._rates[pair]
        return np.array(rates), min(1.0, taken / possible) if possible else 0.0


def _likely_drafts(speculative: Answers) -> dict[Pair, int]:
    """The token most often accepted after each pair of tokens, in the first half of each prompt's answers."""
    found: dict[Pair, Counter[int]] = defaultdict(Counter)
    for prompt, answers in enumerate(speculative):
        for answer in answers[: len(answers) // 2]:
            ids = answer.token_ids
            for place in accepted_places(ids, answer.accepted) or ():
                if place >= 2:
                    found[prompt, ids[place - 2], ids[place - 1]][ids[place]] += 1
    return {pair: counts.most_common(1)[0][0] for pair, counts in found.items()}


def _following(prompt: int, token_ids: Sequence[int]) -> list[tuple[Pair, int]]:
    """Every pair of tokens of an answer, with the token after it."""
    return [((prompt, token_ids[i - 2], token_ids[i - 1]), token_ids[i]) for i in range(2, len(token_ids))]
