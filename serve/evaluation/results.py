"""What evaluation measured: every key of `results.json`, and how its figures come about.

Written by serve/evaluation/evaluate.py; read by serve/evaluation/report.py, serve/server.py (which K to serve) and by people.
Figures are as measured: no rounding, no outlier removed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired  # pydantic reads this one on every Python; typing's only from 3.12

from typing_extensions import TypedDict

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine.environment import resolved
from draftsmith.serve.evaluation.configurations import Throughput
from draftsmith.serve.evaluation.curve import CurvePoint
from draftsmith.serve.evaluation.engine import Counters, Generated
from draftsmith.serve.evaluation.fidelity import Control, Difference, Fidelity
from draftsmith.serve.evaluation.intervals import Interval, Ratio, bootstrap
from draftsmith.serve.evaluation.leakage import Overlap

__all__ = ["Control", "CurvePoint", "Difference", "Fidelity", "Interval", "Ratio", "Throughput"]


class Speeds(TypedDict):
    """Response tokens per wall second, prompt processing included, one request at a time, in the recipe's dtype."""

    plain: float
    speculative: float


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


class SuiteAtK(Acceptance):
    """One suite at one K, its prompts in batches beside plain decoding in the same batches."""

    acceptance_length_interval: Interval
    by_prompt: dict[str, list[int]]
    """Drafts and accepted tokens of each prompt by its id, for comparisons and figures of one's own. Second and later turns
    have ids that end in `/turn-2` and so on."""
    prompts_identical: int
    """Prompts whose answer equals plain decoding's, token for token."""
    fidelity: Fidelity
    """Whether what differs is explained by rounding."""
    seconds: float
    """Engine time for all of the suite, in batches."""


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
    """One request at a time, in the recipe's dtype."""
    speedup: float
    """Over plain decoding in the same dtype."""
    speedup_interval: Interval


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


class Suite(Acceptance):
    """One set of prompts. Acceptance is at the chosen K and over all its prompts; speed is of some of them, drawn so that every
    category has its share, one request at a time."""

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
    """Longest response where acceptance is measured; timed responses are `evaluate.timing_tokens` long."""
    tokens_per_second: Speeds
    speedup: float
    """Wall-clock speedup at the chosen K over plain decoding, both in the recipe's dtype."""
    speedup_interval: Interval
    speedup_over_fastest_plain: float
    """The drafter in its fastest dtype over plain decoding in its fastest."""
    speedup_over_fastest_plain_interval: Interval
    timed_prompts: int
    throughput: Throughput
    """All configurations with one request in flight, and what the figures above come from."""
    identical_to_plain: bool
    """Every answer of the run's drafter on this suite, at every K in `at_k`, equals plain decoding's."""
    overlap_with_training: NotRequired[Overlap | None]
    """How much of it the drafter was trained on; None where a store does not say what it was made from."""
    control: Control
    """What rounding alone makes of the plain answers; `margins` are the first few."""
    differences: list[Difference]
    """The first few answers that are not plain decoding's, of the run's drafter and of other methods."""
    at_k: dict[str, SuiteAtK]
    """The same at each K measured on all prompts: the first suite at every K, others at the chosen one and at
    `evaluate.acceptance_k`."""
    plain_seconds: float
    """Engine time of plain decoding for all of the suite, in batches."""


class Machine(TypedDict):
    """Where it was measured."""

    processor: str
    cores: int
    """CPU cores that this program may use."""
    memory_gib: float
    gpus: list[str]
    system: str


class Engines(TypedDict):
    """How vLLM ran, where the recipe leaves it to the device."""

    enforce_eager: bool
    """Without compilation and CUDA graphs."""
    tensor_parallel_size: int
    at_once: int | None
    """Engines that the GPUs hold at a time: of more, which are compared, groups took turns beside plain decoding. None where any
    number is up together (on a CPU)."""


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
    toss_up: list[int]
    """Other K that may as well be the fastest; empty where the choice is clear."""
    engine_starts: int
    """How often engines were started anew for speeds and step costs. With one, intervals say nothing of how far engines that do
    the same are apart."""
    predicted_acceptance_length: dict[str, float] | None
    """What training predicted for held-out text, by K as a string; None when it did not."""
    predicted_speedup: dict[str, float] | None
    """That over the step cost measured here, for every K of `k_curve` that it has; to hold beside `CurvePoint.speedup`."""
    load: dict[str, Throughput]
    """By requests in flight (`evaluate.concurrency`), on the first suite. The drafter has the K that `draftsmith tune` had chosen for
    that load, where it was run before with these weights; otherwise the K above."""
    rates: dict[str, Rate]
    """By requests a second (`evaluate.request_rates`)."""
    examples: list[Example]
    dtype: str
    """What the target computed in. Equality with plain decoding can only be exact in float32 on a CPU: a GPU's attention rounds
    float32 too (`fidelity.near_tie`)."""
    versions: dict[str, str]
    machine: Machine
    engine: Engines


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


def predicted_speedup(
    predicted: Mapping[str, float] | None, curve: Mapping[str, CurvePoint]
) -> dict[str, float] | None:
    """Predicted acceptance length over measured step cost, by K."""
    if predicted is None:
        return None
    return {k: predicted[k] / point["step_cost"] for k, point in curve.items() if k in predicted}


def acceptance_interval(by_prompt: Mapping[str, Sequence[float]]) -> Interval:
    """Of an acceptance length, from drafts and accepted tokens by prompt."""
    return bootstrap(by_prompt, lambda sums: 1 + sums[1] / sums[0])


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


def draft_position(answer: Generated) -> list[int]:
    """Which token of the drafter's chain each token of an answer was, from 1; 0 where the target itself gave it.

    The target gives the first; from there every step yields the guesses it accepts and one token more. For drafters that
    guess in every step.
    """
    found = [0]
    for accepted in answer.accepted:
        found += [*range(1, accepted + 1), 0]
    found += [0] * len(answer.token_ids)  # near the longest length a step may not guess
    return found[: len(answer.token_ids)]


def engines(engine: EngineConfig, at_once: int | None) -> Engines:
    """How vLLM runs here with the recipe's `engine`, where so many are up at a time (`Placement.at_once`)."""
    eager = resolved(engine).enforce_eager
    assert eager is not None
    return {"enforce_eager": eager, "tensor_parallel_size": engine.tensor_parallel_size, "at_once": at_once}


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
