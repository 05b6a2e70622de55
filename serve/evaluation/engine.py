"""The engines of an evaluation, each in a child process (`engine/process.py`): calls and answers over its pipe.

Several engines can be alive at once: start them all, then wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from draftsmith.config import recipe
from draftsmith.config.sampling import GREEDY, Sampling
from draftsmith.engine import environment
from draftsmith.engine.options import say_overruled
from draftsmith.engine.process import EngineProcess
from draftsmith.engine.speculation import rows_per_step, target_arguments, usable_options
from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.evaluation.engine_child import LIKELIEST
from draftsmith.serve.evaluation.engine_child import child as _child
from draftsmith.serve.evaluation.in_flight import Request, Timing
from draftsmith.serve.evaluation.schema import Execution
from draftsmith.serve.plugin.suffix import MEASURING

_LARGEST_GRAPH = 512  # vLLM's default for hundreds of sequences, but for Blackwell, where it is 1024
_SIZES_OF_GRAPHS = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
"""Engine arguments with which users choose them."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: everything that decides what it computes and how fast. Variants that share an engine have one name."""

    name: str
    """For people: names the log file and appears in errors."""
    target: str
    """Directory of the target model, or its Hub id."""
    dtype: str
    """The target's."""
    engine: recipe.EngineConfig
    trust_remote_code: bool = False
    """Whether the target's own Python code may run."""
    speculative: dict[str, Any] | None = None
    """vLLM's `speculative_config`; None for the baseline."""
    max_num_seqs: int = 32
    """Sequences that the engine runs at once."""
    memory_share: float = 1.0
    """This engine's part of `engine.kv_cache_gib` (CPU) or `engine.gpu_memory_utilization` (GPU)."""
    gpus: tuple[str, ...] = ()
    """The GPUs to run on, as in CUDA_VISIBLE_DEVICES; empty for those that this process sees."""
    k_by_load: tuple[tuple[int, int, int], ...] | None = None
    """From, to, K: the tokens that it drafts by the number of sequences, set whenever it is asked. None: as it was started."""
    sampling: Sampling = GREEDY
    """How it samples what is measured."""
    seed: int = 0
    """Of sampling."""
    drafts_from_own_answers: bool = False
    """Whether suffix decoding may draft an answer from an earlier one to the same prompt, as in a server. Not where speed is measured: the
    same few prompts are asked again and again there."""

    @property
    def num_speculative_tokens(self) -> int:
        """0 for the baseline."""
        if self.k_by_load is not None:
            return max(k for _, _, k in self.k_by_load)
        return int(self.speculative["num_speculative_tokens"]) if self.speculative else 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`. The baseline differs from speculative engines only in `speculative_config`, and in the graphs that
        this asks for."""
        eager = environment.resolved(self.engine).enforce_eager
        arguments = usable_options(self.engine.options, self.speculative) | {
            "model": self.target,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": eager,
            "tensor_parallel_size": self.engine.tensor_parallel_size,
            "enable_prefix_caching": False,  # a repeated prompt must cost what a new one costs
            "disable_log_stats": False,  # the speculative decoding counters come from there
            "logprobs_mode": "raw_logprobs",  # from which differences of logits are read
            "max_logprobs": LIKELIEST,
            "seed": self.seed,
            "use_tqdm_on_load": False,  # its output goes to a log here, and its lock would outlive the process
        }
        arguments |= environment.memory_arguments(self.engine, share=self.memory_share)
        arguments |= target_arguments(
            Path(self.target), self.speculative, options=self.engine.options, trust_remote_code=self.trust_remote_code
        )
        if self.speculative is not None:
            arguments["speculative_config"] = self.speculative
            arguments["per_request_spec_decode_metrics"] = "detailed"
        if not eager and not environment.is_cpu() and not _SIZES_OF_GRAPHS & arguments.keys():
            arguments["cudagraph_capture_sizes"] = graph_sizes(self.max_num_seqs, rows_per_step(self.speculative))
        return arguments


def graph_sizes(max_num_seqs: int, tokens_per_step: Iterable[int]) -> list[int]:
    """Tokens of the steps for which a measured engine captures CUDA graphs: alike for the baseline and speculative engines.

    By itself vLLM captures up to `2 * max_num_seqs * (1 + K)` tokens, so few sequences give a speculative engine graphs for prefills that the
    baseline runs without; a server with its hundreds of sequences has both up to 512 (`_set_cudagraph_sizes` in vllm/config/vllm.py, whose
    steps these are). Decoding steps have a size of their own for each number of sequences.

    Args:
        max_num_seqs: the engine's.
        tokens_per_step: of a decoding sequence, 1 + K.
    """

    def steps(most: int) -> list[int]:
        return [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), most) if n <= most]

    decoding = {n * tokens for tokens in tokens_per_step for n in steps(max_num_seqs)}
    return sorted({*steps(_LARGEST_GRAPH), *(size for size in decoding if size <= _LARGEST_GRAPH)})


def say_options(stage: str, engine: recipe.EngineConfig) -> None:
    """Print which of `engine.options` the engines of a measurement do not use."""
    any_drafter = {"num_speculative_tokens": 1}
    spec = EngineSpec(name="", target="", dtype="float32", engine=engine, speculative=any_drafter)
    say_overruled(stage, engine, spec.arguments())


@dataclass(frozen=True)
class Generated:
    """An engine's answer to one prompt."""

    token_ids: list[int]
    """Response tokens, including the end-of-sequence token if one was generated."""
    finish_reason: str | None
    """`stop` or `length`."""
    decode_seconds: float
    """From the first token to the last, by the engine's clock: without prefill."""
    first_token_seconds: float = 0.0
    """From the request to the first token."""
    drafted: tuple[int, ...] = ()
    """Draft tokens in each step that had any, in order; empty for the baseline."""
    accepted: tuple[int, ...] = ()
    """How many of them the target accepted."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the first decoding steps of an answer, one sequence at a time: those after prefill, which gives the first token."""

    steps: list[float]
    drafts: list[float]
    """Of these, spent on the next draft. Empty for the baseline, and where the drafter runs in other processes."""


@dataclass(frozen=True)
class Counters:
    """vLLM's speculative decoding counters since the engine started; subtract two for what happened between them.

    A draft is one step of one request with at least one draft token.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Drafts whose token at this position was accepted, position 0 first."""

    def __add__(self, later: Counters) -> Counters:
        before = self.accepted_per_position or (0,) * len(later.accepted_per_position)
        return Counters(
            self.drafts + later.drafts,
            self.draft_tokens + later.draft_tokens,
            self.accepted + later.accepted,
            tuple(then + now for then, now in zip(before, later.accepted_per_position, strict=True)),
        )

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

    `start` returns at once; `wait_ready` blocks until the model is loaded. Use it as a context manager, or call `close`.
    """

    def __init__(self, config: EngineSpec, log_directory: Path) -> None:
        self.config = config
        self.log = log_directory / f"engine-{config.name}.log"
        self.seconds_to_start: float | None = None
        """From `start` until the model was loaded, while other engines may have been starting."""
        self._process: EngineProcess | None = None
        self._started = 0.0

    def start(self) -> EngineHost:
        """Begin loading; returns at once."""
        self._started = time.monotonic()
        self._process = EngineProcess(
            _child,
            (self.config.arguments(),),
            name=self.config.name,
            engine=self.config.engine,
            log=self.log,
            variables={
                MEASURING: str(int(not self.config.drafts_from_own_answers)),
                **environment.only_these_gpus(self.config.gpus),
                **environment.float32_environment(self.config.dtype),
            },
        )
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
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float | None = None
    ) -> tuple[list[Generated], float]:
        """Decode until the end of the answer.

        Args:
            prompts: token ids, one sequence for each prompt; they run as one batch.
            max_tokens: longest response.
            temperature: 0 decodes greedily; otherwise answers are sampled, differently in every call. None: as the engine's `sampling`.

        Returns:
            The answers in the prompts' order, and the seconds that the engine took.

        Raises:
            DraftsmithError: the engine failed.
        """
        sampling = self.config.sampling if temperature is None else Sampling(temperature)
        answers, seconds = self._call("generate", [list(ids) for ids in prompts], max_tokens, sampling.arguments())
        return [Generated(*answer) for answer in answers], seconds

    def step_times(self, prompt: Sequence[int], steps: int) -> StepTimes:
        """The first decoding steps of an answer.

        Args:
            prompt: token ids.
            steps: how many; fewer are returned if the answer ends before.

        Raises:
            DraftsmithError: the engine failed.
        """
        return StepTimes(*self._call("step_times", list(prompt), steps, self.config.sampling.arguments()))

    def draft_by_load(self, ranges: Sequence[Sequence[int]]) -> None:
        """Draft other numbers of tokens than before, up to the engine's own. No request may be running.

        Args:
            ranges: from, to, K, as vLLM's `num_speculative_tokens_per_batch_size`.
        """
        self._call("draft_by_load", [list(one) for one in ranges])

    def begin_load(self, requests: Sequence[Request], in_flight: int) -> None:
        """Prepare a load of `in_flight` concurrent requests, without starting it (`in_flight.ConstantLoad`)."""
        sampling = self.config.sampling.arguments()
        self._call("begin_load", [tuple(request) for request in requests], in_flight, sampling)

    def advance_load(self, tokens: int) -> bool:
        """Run the load until it has produced `tokens` tokens since its start; True once the measurement is complete.

        Raises:
            DraftsmithError: the engine failed.
        """
        return bool(self._call("advance_load", tokens))

    def end_load(self) -> list[Timing]:
        """The measurements since `begin_load`."""
        return [Timing(*timing) for timing in self._call("end_load")]

    def logit_margin(self, context: Sequence[int], token: int, other: int) -> float | None:
        """This engine's logit of `token` minus that of `other` after a context.

        None if either is not among the likeliest tokens: they are far apart.
        """
        found: float | None = self._call("logit_margin", list(context), token, other)
        return found

    def margins_read_again(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], piece: int
    ) -> list[list[float | None]]:
        """Prefill answers in pieces: where that prefers another token than the answer's, and by how much.

        The same computation as decoding, in another shape.

        Args:
            prompts: token ids.
            answers: the token ids after each prompt; the two together must leave room for one token.
            piece: tokens of each answer per step.

        Returns:
            One entry per token of each answer: None if prefill prefers the same token, otherwise the difference of the two
            logits, which is 0 at a tie that the other token wins by its lower id.
        """
        found: list[list[float | None]] = self._call(
            "margins_read_again", [list(ids) for ids in prompts], [list(ids) for ids in answers], piece
        )
        return found

    def execution(self) -> Execution:
        """How vLLM executes this engine's steps."""
        found: Execution = self._call("execution")
        return found

    def counters(self) -> Counters:
        """The engine's speculative decoding counters; all zero for the baseline."""
        return Counters(*self._call("counters"))

    def close(self) -> None:
        """End the engine's process. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._process is not None:
            self._process.send((method, arguments))
        return self._receive(f"in `{method}`")

    def _receive(self, when: str) -> Any:
        if self._process is None:
            raise DraftsmithError(f"The engine `{self.config.name}` is not running.")
        try:
            return self._process.receive(when)
        except DraftsmithError:
            self.close()
            raise


class SharedEngine(EngineHost):
    """One of the variants that share an engine: sets its K before every call, and counts what its own calls drafted.

    In every step vLLM's scheduler tells the drafter how many tokens to draft, and it stops there. So an engine does at each K what
    one started with that K does, and its steps cost the same.

    Args:
        engine: up already; its owner closes it.
        spec: of the variant, with `k_by_load`.
    """

    def __init__(self, engine: EngineHost, spec: EngineSpec) -> None:
        super().__init__(spec, engine.log.parent)
        self._engine = engine
        self._counted = Counters()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float | None = None
    ) -> tuple[list[Generated], float]:
        self._set_k()
        before = self._engine.counters()
        found = self._engine.generate(prompts, max_tokens=max_tokens, temperature=temperature)
        self._counted += self._engine.counters() - before
        return found

    def step_times(self, prompt: Sequence[int], steps: int) -> StepTimes:
        self._set_k()
        return self._engine.step_times(prompt, steps)

    def begin_load(self, requests: Sequence[Request], in_flight: int) -> None:
        self._set_k()
        self._engine.begin_load(requests, in_flight)

    def advance_load(self, tokens: int) -> bool:
        return self._engine.advance_load(tokens)

    def end_load(self) -> list[Timing]:
        return self._engine.end_load()

    def execution(self) -> Execution:
        return self._engine.execution()

    def counters(self) -> Counters:
        k = self.config.num_speculative_tokens
        return replace(self._counted, accepted_per_position=self._counted.accepted_per_position[:k])

    def _set_k(self) -> None:
        assert self.config.k_by_load is not None
        self._engine.draft_by_load(self.config.k_by_load)


def start_engines(
    configs: Sequence[EngineSpec], log_directory: Path, on_ready: Callable[[int], None] = lambda ready: None
) -> list[EngineHost]:
    """Start engines and wait for all of them. If one fails, the others are ended.

    On a CPU they load side by side. On GPUs, those that share one load one after the other, because each measures the free
    memory.

    Args:
        on_ready: called with the number of ready engines each time it grows.
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
    """Groups of engines that may load together, in order."""
    waves: list[list[EngineHost]] = []
    for host in hosts:
        free = (wave for wave in waves if all(set(host.config.gpus).isdisjoint(one.config.gpus) for one in wave))
        # An engine without GPUs of its own uses all visible ones, and so do the others then.
        wave = next(free, None) if host.config.gpus else None
        if wave is None:
            waves.append([host])
        else:
            wave.append(host)
    return waves
