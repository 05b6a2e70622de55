"""Tokens per wall second with N requests always in flight: the one definition of speed, for `evaluate` and `tune --verify`.

Engines that are compared answer the same requests in the same order and alternate every second or so (`in_flight.py`). Counting
starts when the first N requests have ended and stops when fewer than N are left. `least_requests` are counted; prompts
repeat in another order if a suite has fewer.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from draftsmith.engine.environment import is_cpu
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost
from draftsmith.serve.evaluation.in_flight import Request, Timing
from draftsmith.serve.evaluation.schema import AtStart, EngineSpeed, Ratio
from draftsmith.serve.evaluation.statistics import Starts, ratio

_TURN_TOKENS, _TURN_TOKENS_ON_GPUS = 24, 192
"""Tokens that an engine generates for each request in flight before the next engine runs: about a second. Each turn begins with an idle
device, which costs a GPU a millisecond or two that it does not lose in use."""

PER_REQUEST_IN_FLIGHT = 10
"""Counted requests for each in flight, at least."""

Key = TypeVar("Key", bound=Hashable)
Asked = list[tuple[str, Request]]
"""Requests in order, each with its prompt's id."""


def least_requests(in_flight: int) -> int:
    """Counted requests, at least: 10 for each in flight, and 64 under a load, where 40 leave a 95% interval of +-5.7% (docs/log.md)."""
    least = PER_REQUEST_IN_FLIGHT * in_flight
    return least if in_flight == 1 else max(64, least)


def request_schedule(prompts: Sequence[tuple[str, list[int]]], in_flight: int, max_tokens: int, *, seed: int) -> Asked:
    """The requests of one measurement.

    The first N are not counted. Their answers have different lengths, from a single token on, so that answers of equal length do not
    start and end in step from then on, as under a real load they do not.

    Args:
        prompts: ids and token ids; each is asked as often as every other, give or take one.
        in_flight: N.
        max_tokens: longest answer.
        seed: for the order.
    """
    count = max(len(prompts), least_requests(in_flight))
    draw = random.Random(seed)
    order = list(prompts)
    found: Asked = []
    for number in range(in_flight):
        name, token_ids = prompts[number % len(prompts)]
        longest = max(1, math.ceil(max_tokens * number / in_flight))
        found.append((name, Request(token_ids, longest, counted=False)))
    while len(found) < count + in_flight:
        take = order[: count + in_flight - len(found)]
        found += [(name, Request(token_ids, max_tokens, counted=True)) for name, token_ids in take]
        draw.shuffle(order)
    return found


def run_load(engines: Mapping[Key, EngineHost], requests: Asked, in_flight: int, name: str) -> dict[Key, list[Timing]]:
    """Every engine answers the requests, N at any time; the engines alternate.

    Returns:
        The counted requests' timings, by engine.
    """
    total = sum(request.max_tokens for _, request in requests)
    for engine in engines.values():
        engine.begin_load([request for _, request in requests], in_flight)
    left, turn = list(engines), 0
    each = _TURN_TOKENS if is_cpu() else _TURN_TOKENS_ON_GPUS
    with Bar(f"{name}: {in_flight} at once", total=total, unit="tokens") as bar:
        while left:
            turn += 1
            tokens = turn * each * in_flight
            shift = turn % len(left)  # no engine is always first
            left = [key for key in left[shift:] + left[:shift] if not engines[key].advance_load(tokens)]
            bar.update(min(tokens, total))
    return {key: engine.end_load() for key, engine in engines.items()}


def at_start(timings: Sequence[Timing], requests: Asked) -> AtStart:
    """The figures of one engine in one engine start."""
    by_prompt: dict[str, list[float]] = {}
    for timing in timings:
        tokens, seconds = by_prompt.get(requests[timing.request][0], (0.0, 0.0))
        by_prompt[requests[timing.request][0]] = [tokens + timing.tokens, seconds + timing.seconds]
    first = [one.first_token_seconds for one in timings if one.first_token_seconds is not None]
    per_token = [one.seconds_per_token for one in timings if one.seconds_per_token is not None]
    return {
        "by_prompt": by_prompt,
        "first_token_seconds": statistics.median(first) if first else 0.0,
        "seconds_per_token": statistics.median(per_token) if per_token else 0.0,
    }


def tokens_per_second(starts: Sequence[AtStart]) -> float:
    """One engine's figure over all engine starts."""
    both = [values for one in starts for values in one["by_prompt"].values()]
    return sum(tokens for tokens, _ in both) / sum(seconds for _, seconds in both)


def engine_speed(starts: Sequence[AtStart]) -> EngineSpeed:
    """One engine's figures over all engine starts."""
    return {
        "tokens_per_second": tokens_per_second(starts),
        "first_token_seconds": statistics.median([one["first_token_seconds"] for one in starts]),
        "seconds_per_token": statistics.median([one["seconds_per_token"] for one in starts]),
    }


def paired(below: Sequence[AtStart], above: Sequence[AtStart]) -> Starts:
    """Tokens and seconds of two engines by engine start and prompt, the denominator's first."""
    return [
        {
            prompt: [*values, *other["by_prompt"][prompt]]
            for prompt, values in one["by_prompt"].items()
            if prompt in other["by_prompt"]
        }
        for one, other in zip(below, above, strict=True)
    ]


def speedup(below: Sequence[AtStart], above: Sequence[AtStart], *, noise: Starts | None = None) -> Ratio:
    """Tokens per second of one engine over another's, on the same engine starts and prompts (`statistics.ratio`)."""
    return ratio(paired(below, above), noise=noise)
