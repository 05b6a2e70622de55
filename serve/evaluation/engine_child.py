"""The engine itself, in its child process: the calls that `engine.EngineHost` makes over the pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from draftsmith.serve.evaluation.draft_clock import DraftClock
from draftsmith.serve.evaluation.in_flight import ConstantLoad, Request
from draftsmith.serve.evaluation.schema import Execution

LIKELIEST = 10
"""Tokens whose logits are compared where two answers diverge."""


def child(pipe: Connection, arguments: dict[str, Any]) -> None:
    """Load the model, report that it is loaded, then answer calls until the pipe ends."""
    engine = _Engine(arguments)
    pipe.send(None)
    while True:
        try:
            method, values = pipe.recv()
        except EOFError:
            return  # the parent is done
        pipe.send(getattr(engine, method)(*values))


class _Engine:
    """The calls that the parent can make."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._draft_clock = DraftClock(self._llm)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, parameters: dict[str, Any]
    ) -> tuple[list[tuple[Any, ...]], float]:
        from vllm import SamplingParams

        sampling = SamplingParams(**parameters, max_tokens=max_tokens, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = []
        for output in outputs:
            stats, (answer,) = output.metrics, output.outputs
            decode_seconds = stats.last_token_ts - stats.first_token_ts
            steps = answer.spec_decode_metrics
            drafted, accepted = (steps.per_step_drafted, steps.per_step_accepted) if steps else ([], [])
            answers.append(
                (
                    list(answer.token_ids), answer.finish_reason, decode_seconds, stats.first_token_latency,
                    tuple(drafted), tuple(accepted),
                )
            )  # fmt: skip
        return answers, seconds

    def step_times(self, prompt: list[int], steps: int, parameters: dict[str, Any]) -> tuple[list[float], list[float]]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(**parameters, max_tokens=None, detokenize=False)
        engine.add_request("steps", {"prompt_token_ids": prompt}, sampling)
        answered: list[float] = []
        with self._draft_clock.running():
            while len(answered) <= steps and engine.has_unfinished_requests():
                if engine.step():  # a part of a long prompt gives no token
                    answered.append(time.perf_counter())
            engine.abort_request(["steps"])
        # The first draft is after prefill. After an answer's last token there may be none.
        drafting = self._draft_clock.seconds()[-len(answered) :][1:]
        return [after - before for before, after in pairwise(answered)], drafting

    def draft_by_load(self, ranges: list[list[int]]) -> None:
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        scheduler = self._scheduler()
        scheduler.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
            ranges, scheduler.scheduler_config.max_num_seqs, scheduler.num_spec_tokens
        )

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def begin_load(self, requests: list[tuple[Any, ...]], in_flight: int, parameters: dict[str, Any]) -> None:
        from vllm import SamplingParams

        def sampling(max_tokens: int) -> SamplingParams:
            return SamplingParams(**parameters, max_tokens=max_tokens, detokenize=False)

        self._load = ConstantLoad(
            self._llm.llm_engine, [Request(*request) for request in requests], in_flight, sampling, settle=self._settle
        )

    def _settle(self) -> None:
        """Wait for the step that asynchronous scheduling has begun, and for what else the devices compute, as a draft is."""
        core = self._llm.llm_engine.engine_core.engine_core
        for future, *_ in core.batch_queue or ():
            future.result()  # vLLM itself asks again later
        core.model_executor.collective_rpc("synchronize_device")  # of worker processes too; on a CPU nothing

    def advance_load(self, tokens: int) -> bool:
        return self._load.advance(tokens)

    def end_load(self) -> list[tuple[Any, ...]]:
        return [tuple(timing) for timing in self._load.timings()]

    def margins_read_again(
        self, prompts: list[list[int]], answers: list[list[int]], piece: int
    ) -> list[list[float | None]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, detokenize=False)
        inputs: list[Any] = [
            {"prompt_token_ids": prompt + answer} for prompt, answer in zip(prompts, answers, strict=True)
        ]
        # vLLM keeps to the pieces only while there is another request. A copy of the longest one is there until that has ended: it waits.
        longest = max(inputs, key=lambda one: len(one["prompt_token_ids"]))
        with self._pieces_of(piece, at_once=len(inputs)):
            outputs = self._llm.generate([*inputs, longest], sampling, use_tqdm=False)[: len(inputs)]
        found = []
        for prompt, answer, output in zip(prompts, answers, outputs, strict=True):
            margins: list[float | None] = []
            for token, logprobs in zip(answer, (output.prompt_logprobs or [])[len(prompt) :], strict=True):
                values = {one: said.logprob for one, said in (logprobs or {}).items()}
                best = max(
                    values, key=lambda one: (values[one], -one)
                )  # among equals, greedy decoding takes the lower id
                margins.append(None if best == token else values[best] - values[token])
            found.append(margins)
        return found

    @contextmanager
    def _pieces_of(self, tokens: int, *, at_once: int) -> Iterator[None]:
        """Prefill so many tokens a step of each of so many requests meanwhile. vLLM still prefills a prompt whole if there is no other."""
        scheduler = self._scheduler()
        config = scheduler.scheduler_config
        before = (
            config.long_prefill_token_threshold,
            scheduler.adaptive_long_prefill_threshold,
            scheduler.max_num_active_reqs,
        )
        config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = tokens, False
        scheduler.max_num_active_reqs = min(at_once, before[2])
        try:
            yield
        finally:
            config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = before[:2]
            scheduler.max_num_active_reqs = before[2]

    def logit_margin(self, context: list[int], token: int, other: int) -> float | None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=LIKELIEST, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": context}]
        (output,) = self._llm.generate(inputs, sampling, use_tqdm=False)
        logprobs = (output.outputs[0].logprobs or [{}])[0]
        if token not in logprobs or other not in logprobs:
            return None
        return float(logprobs[token].logprob - logprobs[other].logprob)

    def execution(self) -> Execution:
        config = self._llm.llm_engine.vllm_config
        return {
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
        }

    def counters(self) -> SpecDecodeCounts:
        return counters_of(self._llm)


SpecDecodeCounts = tuple[int, int, int, tuple[int, ...]]
"""Drafts, draft tokens, accepted tokens, and drafts accepted at each position."""


def counters_of(llm: Any) -> SpecDecodeCounts:
    """vLLM's speculative decoding counters of a `vllm.LLM` since it started; all zero for the baseline."""
    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            values[metric.name.removeprefix("vllm:spec_decode_num_")] = getattr(metric, "values", None) or metric.value
    return (
        values.get("drafts", 0),
        values.get("draft_tokens", 0),
        values.get("accepted_tokens", 0),
        tuple(values.get("accepted_tokens_per_pos", ())),
    )
