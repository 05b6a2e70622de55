"""What evaluation measured: every key of `results.json`, and how its figures come about.

Written by serve/evaluate.py; read by serve/report.py, serve/server.py (which K to serve) and by people.
Figures are as measured: no rounding, no outlier removed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import TypedDict  # pydantic reads this one on every Python; typing's only from 3.12

from draftsmith.serve.engine import Counters, Generated

DIFFERENCES_KEPT = 20
"""Differing prompts listed for each suite; all are counted."""


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
    speedup_per_prompt: Ratios
    timed_prompts: int
    """The suite's last ones; step costs are measured on its first."""


class Suite(Acceptance, Timed):
    """One set of prompts. Acceptance is at the chosen K and over all its prompts."""

    prompts: int
    max_tokens: int
    """Longest response where acceptance is measured; timed responses are `evaluate.speed_tokens` long."""
    identical_to_plain: bool
    """Every speculative answer of this suite, at every K in `at_k` and in the timed runs, equals plain decoding's."""
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


def differences(
    prompt_ids: Sequence[str], plain: Sequence[Generated], speculative: Sequence[Generated], *, k: int
) -> list[Difference]:
    """Where speculative answers differ from plain ones, prompt by prompt."""
    found: list[Difference] = []
    for prompt, one, other in zip(prompt_ids, plain, speculative, strict=True):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            shorter = min(len(one.token_ids), len(other.token_ids))
            position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
            found.append({"prompt": prompt, "position": position, "num_speculative_tokens": k})
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
