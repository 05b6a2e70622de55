"""N requests always in flight in one engine, to measure throughput and latency under a constant load.

Timing a batch until its slowest answer ends measures the tail, and the sum of the answers' decode seconds is not wall-clock time. Here
every answer that ends is replaced at once, the first requests only bring the engine into its steady state, and the clock
stops when no request is left to replace one with.

The engine can be paused between two steps: engines that are compared alternate every second or so, each with its own N requests in
flight, and each one's clock runs only while it steps. On GPUs vLLM returns from a step while the next one runs, or a draft: before a
pause the clock waits for that, which would otherwise be free for this engine and delay the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Request(NamedTuple):
    """One request."""

    prompt_token_ids: list[int]
    max_tokens: int
    counted: bool
    """False for those that bring the engine into its steady state; counting starts when all of these have ended."""


class Timing(NamedTuple):
    """One counted request."""

    request: int
    """Its index among all requests."""
    tokens: int
    """Response tokens generated while the clock ran."""
    seconds: float
    """Its share of the clock: every step's time is divided equally among the N requests in flight. Sum of tokens over sum of seconds, of
    all requests, is the engine's tokens per wall second."""
    first_token_seconds: float | None
    """From the request to the first token; None if there was none when the clock stopped."""
    seconds_per_token: float | None
    """From the first token to the last, per token after the first; None if it had not ended or has a single token."""
    token_ids: list[int]
    """The answer so far."""
    ended: bool
    """Whether that is all of it."""
    drafts: int
    """Steps in which tokens were drafted for it; 0 if it had not ended."""
    accepted: int
    """Draft tokens that the target accepted."""


@dataclass
class _Running:
    index: int
    request: Request
    asked: float
    first_token: float | None = None
    last_token: float = 0.0


class ConstantLoad:
    """Drives an engine under a constant load, some tokens at a time.

    Args:
        engine: vLLM's `LLMEngine`, or another with its `add_request(id, prompt, sampling)`, `step()` and `abort_request(ids)`.
        requests: in order; N that do not count come first.
        in_flight: N.
        sampling: makes vLLM's sampling parameters from the longest answer's tokens.
        clock: returns seconds.
        settle: waits until the engine computes nothing.
    """

    def __init__(
        self,
        engine: Any,
        requests: Sequence[Request],
        in_flight: int,
        sampling: Callable[[int], Any],
        clock: Callable[[], float] = time.perf_counter,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self._settle = settle
        self._engine, self._requests, self._in_flight = engine, requests, in_flight
        self._sampling, self._clock = sampling, clock
        self._running: dict[str, _Running] = {}
        self._next = 0
        self._left_uncounted = sum(not request.counted for request in requests)
        self._elapsed = 0.0
        self._emitted = 0
        self._answers: list[list[int]] = [[] for _ in requests]
        self._tokens = [0] * len(requests)
        self._seconds = [0.0] * len(requests)
        self._first: list[float | None] = [None] * len(requests)
        self._per_token: list[float | None] = [None] * len(requests)
        self._drafts = [(0, 0)] * len(requests)
        self._ended: set[int] = set()
        self.done = False

    def advance(self, tokens: int) -> bool:
        """Step until `tokens` were generated since the start, or the measurement ends.

        Returns:
            Whether it has ended: a request ended and none was left to replace it.
        """
        while not self.done and self._emitted < tokens:
            self._step()
        started = self._clock()
        self._settle()
        if not self.done:
            self._spend(self._clock() - started)
        return self.done

    def timings(self) -> list[Timing]:
        """The timing of every request that counts and had a share of the clock."""
        return [
            Timing(
                index,
                self._tokens[index],
                self._seconds[index],
                self._first[index],
                self._per_token[index],
                self._answers[index],
                index in self._ended,
                *self._drafts[index],
            )
            for index, request in enumerate(self._requests)
            if request.counted and self._seconds[index] > 0
        ]

    def _step(self) -> None:
        started = self._clock()
        while len(self._running) < self._in_flight and self._next < len(self._requests):
            request = self._requests[self._next]
            name = f"load-{id(self)}-{self._next}"
            self._running[name] = _Running(self._next, request, self._elapsed)
            self._engine.add_request(
                name, {"prompt_token_ids": request.prompt_token_ids}, self._sampling(request.max_tokens)
            )
            self._next += 1
        if len(self._running) < self._in_flight:
            self._engine.abort_request(list(self._running))
            self.done = True
            return
        outputs = self._engine.step()
        self._spend(self._clock() - started)
        counting = self._left_uncounted == 0
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._take(running, output, counting)

    def _spend(self, seconds: float) -> None:
        self._elapsed += seconds
        if self._left_uncounted == 0:
            for one in self._running.values():
                self._seconds[one.index] += seconds / self._in_flight

    def _take(self, running: _Running, output: Any, counting: bool) -> None:
        """Record the tokens that a step generated for a request."""
        index, (answer,) = running.index, output.outputs
        new = list(answer.token_ids)[len(self._answers[index]) :]
        self._answers[index] += new
        self._emitted += len(new)
        if counting:
            self._tokens[index] += len(new)
        if new:
            running.last_token = self._elapsed
            if running.first_token is None:
                running.first_token = self._elapsed
                self._first[index] = self._elapsed - running.asked
        if not output.finished:
            return
        del self._running[output.request_id]
        self._ended.add(index)
        self._left_uncounted -= not running.request.counted
        after_first = len(self._answers[index]) - 1
        if running.first_token is not None and after_first > 0:
            self._per_token[index] = (running.last_token - running.first_token) / after_first
        steps = getattr(answer, "spec_decode_metrics", None)
        if steps:
            self._drafts[index] = (len(steps.per_step_drafted), sum(steps.per_step_accepted))
