"""The best settings of lookup: n-gram and suffix decoding, on the tuning part of the store of `recipes/learn.yaml`.

Greedy answers determine exactly which draft tokens would be accepted, so vLLM's own n-gram proposer and Arctic's suffix cache draft
along the answers in the store, for every combination of settings. Engines, one at each K beside a baseline, give the step cost
by the number of verified tokens; together that gives a speedup for each combination, one request at a time. The best
settings belong into `evaluate.methods` of recipes that compare with lookup.

Suffix decoding is included if `arctic-inference` is installed (`make suffix`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.config.methods import NGram
from draftsmith.config.recipe import Recipe
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.curve import non_decreasing
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.store.format import Sequence
from tests.benchmarks.bench_learn import learn_recipe, learn_target, learn_text
from tests.benchmarks.figures import Figure, figure

KS, LEAST, MOST = (2, 3, 4, 5, 8), (1, 2, 3, 4, 5), (3, 5, 8, 12, 16)
"""N-gram: draft tokens, and the fewest and the most last tokens to match."""
SUFFIX_KS, PROBABILITIES, FACTORS = (2, 3, 4, 5, 8, 16, 24), (0.0, 0.05, 0.1, 0.3, 0.5), (0.5, 1.0, 2.0, 4.0)
"""Suffix: most draft tokens, `suffix_decoding_min_token_prob` and `suffix_decoding_max_spec_factor`."""
DEPTH = 24
"""`suffix_decoding_max_tree_depth`, vLLM's default: a match and its draft together, so no draft is longer."""
TIMED_KS = (*KS, 16, DEPTH)
TIMED, ROUNDS, TIMED_LOOKUP = 8, 2, (1, 5)
"""Prompts for timing engines, rounds, and the fewest and most tokens to match: with a draft in most steps."""

Steps = list[tuple[int, int]]
"""Of each decoding step: draft tokens, and how many of them are accepted."""


class Answer(NamedTuple):
    prompt: np.ndarray[Any, np.dtype[np.int32]]
    answer: np.ndarray[Any, np.dtype[np.int32]]


def lookup_best() -> dict[str, Figure]:
    """`lookup.ngram_speedup` and `lookup.suffix_speedup`, with the best settings, which `against` names; `_k`, `_min`, `_max` and
    `_min_token_prob`, `_max_spec_factor` are the settings. `lookup.ngram_apart`: the largest difference over K between the number
    of steps with a draft in vLLM and the predicted number."""
    recipe, text = learn_recipe("eagle3"), learn_text()
    answers = [answer_of(sequence) for sequence in text.tuning]
    cost, apart = step_costs(recipe, [one.prompt.tolist() for one in answers[:TIMED]])
    found = {}
    grid = [one for one in product(KS, LEAST, MOST) if one[1] <= one[2]]
    with Bar("n-gram settings", total=len(grid), unit="settings") as bar:
        for k, least, most in grid:
            propose = ngram_proposer(k, least, most, recipe.engine.max_model_len)
            found[k, least, most] = [step for one in answers for step in walk(one, propose)]
            bar.step()
    figures = _figures("ngram", found, cost, ("k", "min", "max"), NGram(method="ngram"))
    against = (
        f"steps with a draft predicted for {TIMED} answers, matching {TIMED_LOOKUP[0]} to {TIMED_LOOKUP[1]} tokens"
    )
    figures["lookup.ngram_apart"] = figure([apart], "ratio", against, direction="lower", bar=0.03)
    if find_spec("arctic_inference"):
        settings = list(product(SUFFIX_KS, PROBABILITIES, FACTORS))
        with Bar("suffix settings", total=len(settings), unit="settings") as bar:
            found = {}
            for one in settings:
                found[one] = suffix_steps(answers, *one)
                bar.step()
        figures |= _figures("suffix", found, cost, ("k", "min_token_prob", "max_spec_factor"), None)
    return figures


def _figures(
    name: str,
    found: dict[tuple[float, ...], Steps],
    cost: Callable[[int], float],
    settings: tuple[str, ...],
    default: NGram | None,
) -> dict[str, Figure]:
    speedups = {one: speedup(steps, cost) for one, steps in found.items()}
    best = max(speedups, key=lambda one: speedups[one])
    steps = found[best]
    against = (
        f"the baseline; {', '.join(f'{key} {value:g}' for key, value in zip(settings, best, strict=True))}; "
        f"{sum(hits + 1 for _, hits in steps) / len(steps):.3f} tokens per step, a draft in "
        f"{sum(drafted > 0 for drafted, _ in steps) / len(steps):.2f} of the steps; a step of {', '.join(f'{k} costs {cost(k):.2f}' for k in (1, *TIMED_KS))}"
    )
    if default is not None:
        usual = (default.num_speculative_tokens, default.prompt_lookup_min, default.prompt_lookup_max)
        against += f"; with the defaults {usual}: {speedups[usual]:.3f}"
    figures = {f"lookup.{name}_speedup": figure([speedups[best]], "ratio", against, direction="higher")}
    for key, value in zip(settings, best, strict=True):
        figures[f"lookup.{name}_{key}"] = figure([value], "setting", "the others that were tried")
    return figures


def speedup(steps: Steps, cost: Callable[[int], float]) -> float:
    """Tokens over the cost of the steps, in baseline steps."""
    return sum(hits + 1 for _, hits in steps) / sum(cost(drafted) for drafted, _ in steps)


# ---- drafts ----


def answer_of(sequence: Sequence) -> Answer:
    """The prompt and the one answer of a sequence, int32."""
    ids, mask = sequence.token_ids.numpy().astype(np.int32), sequence.loss_mask.numpy()
    start = int(mask.argmax())
    return Answer(ids[:start], ids[start:])


def walk(one: Answer, propose: Callable[[np.ndarray[Any, np.dtype[np.int32]]], Iterable[int]]) -> Steps:
    """The steps of decoding an answer greedily. The first token comes from prefill."""
    text, at = np.concatenate(one), len(one.prompt) + 1
    steps = []
    while at < len(text):
        draft = list(propose(text[:at]))
        pairs = enumerate(zip(draft, text[at:], strict=False))
        hits = next((i for i, (drafted, token) in pairs if drafted != token), min(len(draft), len(text) - at))
        steps.append((len(draft), hits))
        at += hits + 1
    return steps


def ngram_proposer(
    k: int, least: int, most: int, max_model_len: int
) -> Callable[[np.ndarray[Any, np.dtype[np.int32]]], Iterable[int]]:
    """vLLM's own proposer."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    def propose(text: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
        found: list[int] = _find_longest_matched_ngram_and_propose_tokens(text, least, most, max_model_len, k).tolist()
        return found

    return propose


def suffix_steps(answers: list[Answer], k: int, probability: float, factor: float) -> Steps:
    """The steps of all answers in order, each with the earlier ones in the cache, as vLLM's proposer uses Arctic's cache."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=10_000)
    steps: Steps = []
    for number, one in enumerate(answers):
        cache.start_request(number, one.prompt)
        known = len(one.prompt)

        def propose(text: np.ndarray[Any, np.dtype[np.int32]], number: int = number) -> list[int]:
            nonlocal known
            cache.add_active_response(number, text[known:].tolist())
            known = len(text)
            draft = cache.speculate(
                number, text[-DEPTH:], max_spec_tokens=k, max_spec_factor=factor, min_token_prob=probability
            )
            return list(draft.token_ids)

        steps += walk(one, propose)
        cache.stop_request(number)
    return steps


# ---- costs ----


def step_costs(recipe: Recipe, prompts: list[list[int]]) -> tuple[Callable[[int], float], float]:
    """The cost of a step that verifies n draft tokens, in baseline steps: 1 for none, else on straight lines between the costs at every K,
    none lower than at a smaller K (steps without a draft cost as much as the baseline's); and the largest difference over K between
    vLLM's number of steps with a draft and that of `walk`, relative.

    Steps are those of `walk`: vLLM also counts draft tokens as accepted that an answer's end cuts off, so its own counts do not give them.
    """
    totals = {k: np.zeros(4) for k in (0, *TIMED_KS)}  # seconds; steps, and with a draft; the same by vLLM
    with tempfile.TemporaryDirectory() as folder:
        hosts = start_engines([_engine(recipe, k) for k in totals], Path(folder))
        try:
            with Bar("step cost", total=(ROUNDS + 1) * len(hosts), unit="rounds") as bar:
                for turn in range(ROUNDS + 1):
                    for host in hosts if turn % 2 else reversed(hosts):
                        found = _decode(host, prompts, recipe.engine.max_model_len)
                        if turn:  # the first warms up
                            totals[host.config.num_speculative_tokens] += found
                        bar.step()
        finally:
            for host in hosts:
                host.close()
    baseline = totals[0][0] / totals[0][1]
    costs = [
        (seconds - (steps - drafting) * baseline) / drafting / baseline
        for seconds, steps, drafting, _ in (totals[k] for k in TIMED_KS)
    ]
    in_order = non_decreasing([1.0, *costs])

    def cost(drafted: int) -> float:
        return float(np.interp(drafted, (0, *TIMED_KS), in_order))

    return cost, max(abs(totals[k][3] / totals[k][2] - 1) for k in TIMED_KS)


def _engine(recipe: Recipe, k: int) -> EngineSpec:
    speculative = NGram(
        method="ngram",
        num_speculative_tokens=max(k, 1),
        prompt_lookup_min=TIMED_LOOKUP[0],
        prompt_lookup_max=TIMED_LOOKUP[1],
    ).keys()
    return EngineSpec(
        name=f"ngram-{k}" if k else "baseline",
        target=str(learn_target().path),
        dtype=recipe.target.dtype,
        engine=recipe.engine,
        speculative=speculative if k else None,
        max_num_seqs=1,
        memory_share=1 / (len(TIMED_KS) + 1),
    )


def _decode(host: EngineHost, prompts: list[list[int]], max_model_len: int) -> tuple[float, int, int, int]:
    """Prompts one at a time: seconds of decoding, steps and those with a draft, and vLLM's number of the latter."""
    k = host.config.num_speculative_tokens
    propose = ngram_proposer(k, *TIMED_LOOKUP, max_model_len) if k else lambda _: []
    seconds, steps, counted = 0.0, [], 0
    for prompt in prompts:
        ((answer,), _) = host.generate([prompt], max_tokens=128)
        seconds += answer.decode_seconds
        steps += walk(Answer(*(np.array(one, np.int32) for one in (prompt, answer.token_ids))), propose)
        counted += len(answer.drafted)
    return seconds, len(steps), sum(drafted > 0 for drafted, _ in steps), counted
