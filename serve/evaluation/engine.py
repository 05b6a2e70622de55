"""A vLLM engine in a child process, driven over a pipe.

One engine is one process, because a process can hold one set of vLLM counters and because an engine that
dies must not take the program with it. Several engines can be alive together: start them all, then wait.

The child talks to nobody but its parent. What it prints goes to a log file; its last lines are shown when
it dies. It ends with its parent, however the parent ends.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.config import recipe
from draftsmith.engine import environment
from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.evaluation.in_flight import ConstantLoad, Request, Timing

_LOG_LINES = 15
"""Lines of an engine's log that an error shows."""
_SECONDS_TO_CLOSE = 10.0
_LIKELIEST = 10
"""Tokens whose logits are looked at where two answers part."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: everything that decides what it computes and how fast."""

    name: str
    """For people: names the log file and appears in errors."""
    target: str
    """Directory of the target model, or its Hub id."""
    dtype: str
    """What the target computes in."""
    engine: recipe.EngineConfig
    speculative: dict[str, Any] | None = None
    """vLLM's `speculative_config`; None decodes plainly."""
    max_num_seqs: int = 32
    """Sequences that the engine runs at once."""
    memory_share: float = 1.0
    """This engine's part of `engine.kv_cache_gib` (CPU) or `engine.gpu_memory_utilization` (GPU)."""
    gpus: tuple[str, ...] = ()
    """Those that it runs on, as CUDA_VISIBLE_DEVICES has them; none: what this process sees."""

    @property
    def num_speculative_tokens(self) -> int:
        """0 for a plain engine."""
        return int(self.speculative["num_speculative_tokens"]) if self.speculative else 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`. Plain and speculative engines differ in `speculative_config` only."""
        arguments: dict[str, Any] = {
            "model": self.target,
            "dtype": self.dtype,
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": environment.resolved(self.engine).enforce_eager,
            "tensor_parallel_size": self.engine.tensor_parallel_size,
            "enable_prefix_caching": False,  # a repeated prompt must cost what a new one costs
            "disable_log_stats": False,  # the speculative decoding counters come from there
            "seed": 0,
            "use_tqdm_on_load": False,  # its output is for a log here, and its lock would outlive the process
        }
        arguments |= environment.memory_arguments(self.engine, share=self.memory_share)
        if self.speculative is not None:
            arguments["speculative_config"] = self.speculative
            arguments["per_request_spec_decode_metrics"] = "detailed"
        return arguments


@dataclass(frozen=True)
class Generated:
    """What an engine answered to one prompt."""

    token_ids: list[int]
    """Response tokens, the end-of-sequence token included where one was generated."""
    finish_reason: str | None
    """`stop` or `length`."""
    decode_seconds: float
    """From the first token to the last, by the engine's own clock: without the prompt's processing."""
    first_token_seconds: float = 0.0
    """From when it was asked to the first token."""
    drafted: tuple[int, ...] = ()
    """Tokens proposed in each step that proposed any, in order; empty for a plain engine."""
    accepted: tuple[int, ...] = ()
    """How many of them the target accepted."""


@dataclass(frozen=True)
class Counters:
    """vLLM's speculative decoding counters since the engine started; differences of two describe what lies between.

    A draft is one step of one request in which at least one token was proposed.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Drafts whose token at this position was accepted, position 0 first."""

    def __sub__(self, earlier: Counters) -> Counters:
        before = earlier.accepted_per_position or (0,) * len(self.accepted_per_position)
        return Counters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.accepted_per_position, before, strict=True)),
        )


class EngineHost:
    """The parent's side of one engine.

    `init_from_target` returns at once; `wait_ready` blocks until the model is loaded. Use it as a context manager, or
    call `close`.
    """

    def __init__(self, config: EngineSpec, log_directory: Path) -> None:
        self.config = config
        self.log = log_directory / f"engine-{config.name}.log"
        self.seconds_to_start: float | None = None
        """From the call of `init_from_target` until the model was loaded, other engines starting beside it."""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: multiprocessing.connection.Connection | None = None
        self._started = 0.0

    def start(self) -> EngineHost:
        """Begin loading; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self._pipe, theirs = multiprocessing.Pipe()
        self._started = time.monotonic()
        self._process = environment.start_engine_process(
            _child,
            (theirs, self.config.arguments(), str(self.log)),
            name=f"engine-{self.config.name}",
            engine=self.config.engine,
            share=environment.only_these_gpus(self.config.gpus),
        )
        theirs.close()
        atexit.register(self.close)
        return self

    def wait_ready(self) -> EngineHost:
        """Block until the engine can answer.

        Raises:
            DraftsmithError: it could not start.
        """
        self._receive("while starting")
        self.seconds_to_start = time.monotonic() - self._started
        return self

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 0.0
    ) -> tuple[list[Generated], float]:
        """Decode until the end of the answer.

        Args:
            prompts: token ids, one sequence for each prompt; they run as one batch.
            max_tokens: longest response.
            temperature: 0 decodes greedily; otherwise answers are drawn, other ones in every call.

        Returns:
            The answers in the prompts' order, and the seconds that the engine took.

        Raises:
            DraftsmithError: the engine failed.
        """
        answers, seconds = self._call("generate", [list(ids) for ids in prompts], max_tokens, temperature)
        return [Generated(*answer) for answer in answers], seconds

    def begin_load(self, requests: Sequence[Request], in_flight: int) -> None:
        """Prepare requests of which so many are in flight at any time; nothing is asked yet (`in_flight.ConstantLoad`)."""
        self._call("begin_load", [tuple(request) for request in requests], in_flight)

    def advance_load(self, tokens: int) -> bool:
        """Work on them until so many tokens came since the beginning; True when the measurement is complete.

        Raises:
            DraftsmithError: the engine failed.
        """
        return bool(self._call("advance_load", tokens))

    def end_load(self) -> list[Timing]:
        """What was measured since `begin_load`."""
        return [Timing(*timing) for timing in self._call("end_load")]

    def logit_margin(self, context: Sequence[int], token: int, other: int) -> float | None:
        """By how much this engine's logit of `token` is above that of `other` after a context.

        None where either is none of the likeliest: far apart.
        """
        found: float | None = self._call("logit_margin", list(context), token, other)
        return found

    def margins_read_again(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], piece: int
    ) -> list[list[float | None]]:
        """Where reading answers in pieces prefers another token than they have, and by how much.

        The same computation as decoding, in another shape.

        Args:
            prompts: token ids.
            answers: the token ids that followed each prompt; both together leave room for one token.
            piece: tokens of each that a step reads.

        Returns:
            For each answer one entry per token: None where reading prefers it too, otherwise the difference of the two logits,
            which is 0 at a tie that the other token wins by its lower id.
        """
        found: list[list[float | None]] = self._call(
            "margins_read_again", [list(ids) for ids in prompts], [list(ids) for ids in answers], piece
        )
        return found

    def counters(self) -> Counters:
        """The engine's speculative decoding counters; all zero for a plain engine."""
        return Counters(*self._call("counters"))

    def close(self) -> None:
        """End the engine's process. Safe to call twice."""
        atexit.unregister(self.close)
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()  # the child reads the end of the pipe and leaves
        if process is not None:
            process.join(_SECONDS_TO_CLOSE if self.seconds_to_start is not None else 0)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._pipe is None:
            raise DraftsmithError(f"The engine `{self.config.name}` is not running.")
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._death(f"before `{method}`") from None
        return self._receive(f"in `{method}`")

    def _receive(self, when: str) -> Any:
        if self._pipe is None:
            raise DraftsmithError(f"The engine `{self.config.name}` is not running.")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death(when) from None
        if kind == "error":
            raise self._death(when, value)
        return value

    def _death(self, when: str, reason: str | None = None) -> DraftsmithError:
        """The error that says what became of the engine, with the end of its log."""
        process = self._process
        self.close()
        if reason is None:
            status = process.exitcode if process is not None else None
            reason = f"its process ended with status {status}"
            if status == -9:
                reason += " (killed: perhaps the machine ran out of memory; lower engine.kv_cache_gib or evaluate.k)"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        tail = "\n".join(lines[-_LOG_LINES:])
        return DraftsmithError(
            f"The vLLM engine `{self.config.name}` failed {when}: {reason}. Its log is {self.log}"
            + (f"; the last lines are:\n{tail}" if tail else ", which is empty.")
        )


def start_engines(
    configs: Sequence[EngineSpec], log_directory: Path, on_ready: Callable[[int], None] = lambda ready: None
) -> list[EngineHost]:
    """Start engines and wait for all; ends those that started when one fails.

    On a CPU they load side by side. On one GPU they load one after the other, because each measures the free memory; on
    different GPUs side by side.

    Args:
        on_ready: called with the number of engines that are ready, each time it grows.
    """
    hosts = [EngineHost(config, log_directory) for config in configs]
    try:
        ready = 0
        for wave in [hosts] if environment.is_cpu() else _one_on_each_gpu(hosts):
            for host in wave:
                host.start()
            for host in wave:
                host.wait_ready()
                ready += 1
                on_ready(ready)
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return hosts


def _one_on_each_gpu(hosts: Sequence[EngineHost]) -> list[list[EngineHost]]:
    """Engines that may load together, and after them the next."""
    waves: list[list[EngineHost]] = []
    for host in hosts:
        free = (wave for wave in waves if all(set(host.config.gpus).isdisjoint(one.config.gpus) for one in wave))
        # Without GPUs of its own an engine has those that are visible, as the others then do.
        wave = next(free, None) if host.config.gpus else None
        if wave is None:
            waves.append([host])
        else:
            wave.append(host)
    return waves


# --- the child's side ---


def _child(pipe: multiprocessing.connection.Connection, arguments: dict[str, Any], log: str) -> None:
    """Load the model, say so, then answer calls until the pipe ends."""
    environment.end_with_parent()
    environment.print_into(log)
    try:
        engine = _Engine(arguments)
        pipe.send(("ok", None))
        while True:
            try:
                method, values = pipe.recv()
            except EOFError:
                return  # the parent is done
            pipe.send(("ok", getattr(engine, method)(*values)))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()  # the parent reads the log as soon as it is told
        with suppress(OSError):
            pipe.send(("error", f"{type(error).__name__}: {str(error).strip()[:500]}"))


class _Engine:
    """The calls that a parent can make."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, temperature: float
    ) -> tuple[list[tuple[Any, ...]], float]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, detokenize=False)
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

    def begin_load(self, requests: list[tuple[Any, ...]], in_flight: int) -> None:
        from vllm import SamplingParams

        def sampling(max_tokens: int) -> SamplingParams:
            return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)

        self._load = ConstantLoad(
            self._llm.llm_engine, [Request(*request) for request in requests], in_flight, sampling
        )

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
        with self._pieces_of(piece):
            outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        found = []
        for prompt, answer, output in zip(prompts, answers, outputs, strict=True):
            margins: list[float | None] = []
            for token, logprobs in zip(answer, (output.prompt_logprobs or [])[len(prompt) :], strict=True):
                values = {one: said.logprob for one, said in (logprobs or {}).items()}
                best = max(values, key=lambda one: (values[one], -one))  # greedy decoding takes the lower id of equals
                margins.append(None if best == token else values[best] - values[token])
            found.append(margins)
        return found

    @contextmanager
    def _pieces_of(self, tokens: int) -> Iterator[None]:
        """Prompts are read so many tokens a step meanwhile; a single one whole, since vLLM divides none that nobody waits for."""
        scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        config = scheduler.scheduler_config
        before = config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold
        config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = tokens, False
        try:
            yield
        finally:
            config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = before

    def logit_margin(self, context: list[int], token: int, other: int) -> float | None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_LIKELIEST, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": context}]
        (output,) = self._llm.generate(inputs, sampling, use_tqdm=False)
        logprobs = (output.outputs[0].logprobs or [{}])[0]
        if token not in logprobs or other not in logprobs:
            return None
        return float(logprobs[token].logprob - logprobs[other].logprob)

    def counters(self) -> tuple[int, int, int, tuple[int, ...]]:
        values: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num_"):
                values[metric.name.removeprefix("vllm:spec_decode_num_")] = (
                    getattr(metric, "values", None) or metric.value
                )
        return (
            values.get("drafts", 0),
            values.get("draft_tokens", 0),
            values.get("accepted_tokens", 0),
            tuple(values.get("accepted_tokens_per_pos", ())),
        )
