"""What evaluation measured: every key of `results.json`, and how its figures come about.

Written by serve/evaluate.py; read by serve/report.py, serve/server.py (which K to serve) and by people.
Figures are as measured: no rounding, no outlier removed.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict  # pydantic reads this one on every Python; typing's only from 3.12

from draftsmith.serve.engine import Counters, Generated

DIFFERENCES_KEPT = 20
"""Differing prompts listed for each suite; all are counted."""
NEAR_TIE = {"float32": 0.0, "bfloat16": 0.5, "float16": 0.0625}
"""Largest difference of logits that rounding explains: four units in the last place of a logit between 16 and 32. In float32
answers are equal."""
TURN = "/turn-"
"""Between the id of a conversation and the number of a later turn."""
_BOOTSTRAP_SAMPLES = 2000


class Speeds(TypedDict):
    """Response tokens per second of engine time, prefill included, one prompt at a time."""

    plain: float
    speculative: float


class Ratios(TypedDict):
    """Speed-ups of single prompts: plain seconds over speculative seconds for the same prompt."""

    min: float
    median: float
    max: float


class Difference(TypedDict):
    """A prompt whose speculative answer is not plain decoding's."""

    prompt: str
    """The prompt's id."""
    position: int
    """First response token that differs, from 0; the shorter answer's length where one only ends earlier."""
    num_speculative_tokens: int
    method: str | None
    """The name of another method than the run's drafter."""
    gap: float | None
    """By how much the target preferred plain decoding's token there to the other one: the difference of its logits. None where
    one answer only ends earlier, or the other token is none of the likeliest."""
    near_tie: bool
    """Whether that is within what rounding makes of a logit in the target's dtype (`NEAR_TIE`): the same step with more rows
    adds in another order. Any other difference is a fault."""


class Acceptance(TypedDict):
    """vLLM's own counters over a set of prompts at one K.

    A draft is one step of one request in which at least one token was proposed.
    """

    acceptance_length: float
    """1 + accepted tokens / drafts: tokens that one step of the target yields, its own token counted."""
    acceptance_per_position: list[float]
    """Share of drafts whose token at position i (0 is the first drafted) was accepted."""
    acceptance_per_position_conditional: list[float]
    """The same among drafts that were accepted up to position i - 1; 0 where there were none."""
    drafts: int
    draft_tokens: int
    accepted: int


Interval = list[float]
"""Two ends of a 95% confidence interval, by bootstrap over conversations (`bootstrap`): how much a figure would move with
other prompts of the same kind. It says nothing of a machine that is busy at times."""


class SuiteAtK(Acceptance):
    """One suite at one K, its prompts in batches beside plain decoding in the same batches."""

    acceptance_length_interval: Interval
    by_prompt: dict[str, list[int]]
    """Drafts and accepted tokens of each prompt by its id, for comparisons and figures of one's own. Second and later turns
    have ids that end in `/turn-2` and so on."""
    prompts_identical: int
    """Prompts whose answer equals plain decoding's, token for token."""
    seconds: float
    """Engine time for all of the suite, in batches."""


class Timed(TypedDict):
    """One suite by the clock, one prompt at a time, at the chosen K."""

    tokens_per_second: Speeds
    """Over the timed prompts, each run plainly and speculatively in turn; prompt processing included."""
    speedup: float
    """Ratio of the two: total over total."""
    speedup_interval: Interval
    speedup_per_prompt: Ratios
    timed_prompts: int
    """The suite's last ones; step costs are measured on its first."""
    seconds_by_prompt: dict[str, list[float]]
    """Plain and speculative seconds of each timed prompt by its id."""


class Category(TypedDict):
    """Prompts of a suite that its data set files together, at the chosen K."""

    prompts: int
    acceptance_length: float
    acceptance_length_interval: Interval


class MethodAtSuite(SuiteAtK):
    """Another way of speculating on one suite, in turns with plain decoding and the drafter."""

    method: str
    """vLLM's name of it."""
    num_speculative_tokens: int
    tokens_per_step: float
    """What a decoding step yields, those in which nothing was guessed counted too. `acceptance_length` is of the others alone,
    as vLLM counts: lookup that seldom guesses, and then right, has a high one and gains little."""
    tokens_per_second: float
    """As `Timed.tokens_per_second`, on the same prompts."""
    speedup: float
    speedup_interval: Interval
    seconds_by_prompt: dict[str, list[float]]
    """Plain seconds and this method's."""


class AtBatch(TypedDict):
    """Plain or speculative decoding with so many sequences at once."""

    tokens_per_second: float
    """Of all sequences together."""
    first_token_seconds: float
    """Median over the prompts; those of a batch are asked at once."""
    seconds_per_token: float
    """Median over the prompts, from the first token on."""


class Load(TypedDict):
    """One number of sequences at once, on the first suite."""

    plain: AtBatch
    speculative: AtBatch
    speedup: float
    """Ratio of tokens per second."""


class AtRate(TypedDict):
    """A server that is asked so often, as vLLM's load generator sees it."""

    requests_per_second: float
    """From the first request to the last answer; far fewer than asked where the server cannot keep up."""
    tokens_per_second: float
    first_token_seconds: float
    """Median over the requests, waiting included."""
    first_token_seconds_p99: float
    seconds_per_token: float
    """Median over the requests, from the first token on."""
    seconds_per_token_p99: float


class Rate(TypedDict):
    """One request rate: the same requests at the same moments."""

    plain: AtRate
    speculative: AtRate


class Quality(TypedDict):
    """How many first answers are right, by plain decoding and at the chosen K."""

    measure: str
    """`evaluate.suites.NAME.score`."""
    prompts: int
    plain: float
    """Share that is right."""
    speculative: float


class Example(TypedDict):
    """An answer of the first suite at the chosen K."""

    prompt: str
    """Its id."""
    question: str
    tokens: list[list[str | int]]
    """Text of each token, and which token of the drafter's chain it was, from 1; 0 where the target itself gave it."""


class Suite(Acceptance, Timed):
    """One set of prompts. Acceptance is at the chosen K and over all its prompts."""

    prompts: int
    """Questions asked: each turn is one."""
    prompts_sha256: str
    """Of the first turns' tokens: evaluations of the same prompts compare."""
    acceptance_length_interval: Interval
    categories: dict[str, Category]
    """Where the data set has any."""
    methods: dict[str, MethodAtSuite]
    """By their names in the recipe (`evaluate.methods`)."""
    quality: Quality | None
    """None where the recipe does not ask for it."""
    max_tokens: int
    """Longest response where acceptance is measured; timed responses are `evaluate.speed_tokens` long."""
    identical_to_plain: bool
    """Every answer of the run's drafter on this suite, at every K in `at_k` and in the timed runs, equals plain decoding's."""
    near_ties: int
    """Answers that differ, of any method, at a near-tie of the target's (`Difference.near_tie`)."""
    faults: int
    """Answers that differ otherwise."""
    differences: list[Difference]
    """The first few where it does not."""
    at_k: dict[str, SuiteAtK]
    """The same at each K measured on all prompts: the first suite at every K, others at the chosen one and at
    `evaluate.acceptance_k`."""
    plain_seconds: float
    """Engine time of plain decoding for all of the suite, in batches."""


class CurvePoint(TypedDict):
    """One K on the first suite."""

    acceptance_length: float
    """Over the whole suite."""
    step_cost: float
    """Seconds of one decoding step at this K over those of a plain step, one prompt at a time: the median over the curve's
    prompts, each run plainly and at every K in turn."""
    speedup: float
    """What decoding should gain: acceptance length over step cost. K is chosen by it; `Suite.speedup` is by the clock."""


class Machine(TypedDict):
    """Where it was measured."""

    processor: str
    cores: int
    """CPU cores that this program may use."""
    memory_gib: float
    gpus: list[str]
    system: str


class Results(TypedDict):
    """`results.json`."""

    target: str
    """The target's name, for people."""
    drafter: str
    """The drafter's architecture and directory name, for people."""
    drafter_sha256: dict[str, str]
    """SHA-256 of the drafter's files by name: which drafter these figures are of."""
    num_speculative_tokens: int
    """The K of `evaluate.k` with the highest speed-up in `k_curve`: the K to serve."""
    suites: dict[str, Suite]
    k_curve: dict[str, CurvePoint]
    """K as a string, ascending; measured on the first suite."""
    predicted_acceptance_length: dict[str, float] | None
    """What training predicted for held-out text, by K as a string; None when it did not."""
    predicted_speedup: dict[str, float] | None
    """That over the step cost measured here, for every K of `k_curve` that it has; to hold beside `CurvePoint.speedup`."""
    load: dict[str, Load]
    """By number of sequences at once (`evaluate.batch_sizes`)."""
    rates: dict[str, Rate]
    """By requests a second (`evaluate.request_rates`)."""
    examples: list[Example]
    dtype: str
    """What the target computed in. Equality with plain decoding can only be exact in float32."""
    versions: dict[str, str]
    machine: Machine


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


def acceptance_of(at_k: SuiteAtK) -> Acceptance:
    """The acceptance figures alone."""
    return {
        "acceptance_length": at_k["acceptance_length"],
        "acceptance_per_position": at_k["acceptance_per_position"],
        "acceptance_per_position_conditional": at_k["acceptance_per_position_conditional"],
        "drafts": at_k["drafts"],
        "draft_tokens": at_k["draft_tokens"],
        "accepted": at_k["accepted"],
    }


def curve_point(at_k: SuiteAtK, step_cost: float) -> CurvePoint:
    """One K: what it accepts, what its steps cost, and the speed-up that follows."""
    length = at_k["acceptance_length"]
    return {"acceptance_length": length, "step_cost": step_cost, "speedup": length / step_cost}


def predicted_speedup(
    predicted: Mapping[str, float] | None, curve: Mapping[str, CurvePoint]
) -> dict[str, float] | None:
    """Predicted acceptance length over measured step cost, by K."""
    if predicted is None:
        return None
    return {k: predicted[k] / point["step_cost"] for k, point in curve.items() if k in predicted}


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
    groups: dict[str, list[Sequence[float]]] = {}
    for prompt, values in columns.items():
        groups.setdefault(prompt.partition(TURN)[0], []).append(values)
    sums = np.array(
        [np.sum(values, axis=0) for values in groups.values()], dtype=np.float64
    )  # [conversations, columns]
    drawn = np.random.default_rng(0).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=_BOOTSTRAP_SAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = statistic(list((drawn @ sums).T))
    found = found[np.isfinite(found)]  # a sample may hold no draft at all
    return [float(end) for end in np.quantile(found, [level / 2, 1 - level / 2])] if len(found) else [otherwise] * 2


def acceptance_interval(by_prompt: Mapping[str, Sequence[float]]) -> Interval:
    """Of an acceptance length, from drafts and accepted tokens by prompt."""
    return bootstrap(by_prompt, lambda sums: 1 + sums[1] / sums[0])


def speedup_interval(seconds: Mapping[str, Sequence[float]]) -> Interval:
    """Of a speed-up, from plain and speculative seconds by prompt: the same answers, so the ratio of times."""
    return bootstrap(seconds, lambda sums: sums[0] / sums[1])


def categories(by_prompt: Mapping[str, Sequence[int]], category_of: Mapping[str, str]) -> dict[str, Category]:
    """Acceptance by category, in the order in which they come up.

    Args:
        by_prompt: drafts and accepted tokens by prompt id.
        category_of: by prompt id, those that have one.
    """
    found: dict[str, dict[str, Sequence[int]]] = {}
    for prompt, counts in by_prompt.items():
        if prompt in category_of:
            found.setdefault(category_of[prompt], {})[prompt] = counts
    return {
        name: {
            "prompts": len(part),
            "acceptance_length": 1 + sum(accepted for _, accepted in part.values()) / max(1, sum(n for n, _ in part.values())),
            "acceptance_length_interval": acceptance_interval(part),
        }
        for name, part in found.items()
    }  # fmt: skip


def at_batch(runs: Sequence[tuple[Sequence[Generated], float]]) -> AtBatch:
    """Throughput and latency from answers and seconds of several runs of a batch."""
    answers = [answer for run, _ in runs for answer in run]
    per_token = [one.decode_seconds / (len(one.token_ids) - 1) for one in answers if len(one.token_ids) > 1]
    return {
        "tokens_per_second": sum(len(answer.token_ids) for answer in answers) / sum(seconds for _, seconds in runs),
        "first_token_seconds": statistics.median(answer.first_token_seconds for answer in answers),
        "seconds_per_token": statistics.median(per_token) if per_token else 0.0,
    }


def tokens_per_step(answers: Sequence[Generated]) -> float:
    """Of the tokens after the first, which prefill gives: tokens over steps.

    A step that guessed gives what was accepted and one token more; every token beyond those is a step's that did not guess. (The
    end of an answer may cut its last step's tokens off, which then hide as many such steps.)
    """
    tokens = steps = 0
    for answer in answers:
        after_first = len(answer.token_ids) - 1
        tokens += after_first
        steps += len(answer.accepted) + max(0, after_first - sum(answer.accepted) - len(answer.accepted))
    return tokens / steps if steps else 1.0


def by_whom(answer: Generated) -> list[int]:
    """Which token of the drafter's chain each token of an answer was, from 1; 0 where the target itself gave it.

    The target gives the first; from there every step yields the guesses it accepts and one token more. For drafters that
    guess in every step.
    """
    found = [0]
    for accepted in answer.accepted:
        found += [*range(1, accepted + 1), 0]
    found += [0] * len(answer.token_ids)  # near the longest length a step may not guess
    return found[: len(answer.token_ids)]


def differences(
    prompt_ids: Sequence[str],
    plain: Sequence[Generated],
    speculative: Sequence[Generated],
    *,
    k: int,
    method: str | None = None,
) -> list[Difference]:
    """Where speculative answers differ from plain ones, prompt by prompt."""
    found: list[Difference] = []
    for prompt, one, other in zip(prompt_ids, plain, speculative, strict=True):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shorter = min(len(one.token_ids), len(other.token_ids))
            position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
            found.append(
                {
                    "prompt": prompt, "position": position, "num_speculative_tokens": k, "method": method, "gap": None,
                    "near_tie": False,
                }
            )  # fmt: skip
    return found


def fastest(curve: Mapping[int, CurvePoint]) -> int:
    """The K with the highest speed-up; the smaller one of equals."""
    return max(sorted(curve), key=lambda k: curve[k]["speedup"])


def machine() -> Machine:
    """A description of this machine."""
    import torch

    processor = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": pages / 1024**3,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
