"""Sections of a recipe about evaluation, tuning and serving."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from draftsmith.config.methods import AnyMethod
from draftsmith.config.section import Section
from draftsmith.config.sources import Prompts

RESULTS_VERSION = 10
"""`schema_version` of `results.json`: counted up when results or report change, so that evaluations of before run again."""


class SuiteConfig(Section):
    """One set of prompts to evaluate on."""

    prompts: Prompts | Literal["held_out"]
    """`held_out`: the held-out prompts of extraction, where predicted acceptance length applies too."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest response, tokens; absent: as for held-out prompts in extraction."""
    turns: Literal["first", "all"] = "first"
    """Answer the first user turn of a conversation, or each in order, the target reading its own earlier answers."""
    score: Literal["last_number", "unit_tests"] | None = None
    """Whether first answers are right, plain and speculative: `last_number` compares the last number of an answer with that of
    the row's `answer` (GSM8K's exact match); `unit_tests` runs HumanEval's tests (pass@1), **with the code that the model wrote**,
    in a process with limits that stop accidents and not malice."""

    @model_validator(mode="after")
    def _held_out_has_first_turns(self) -> SuiteConfig:
        if self.prompts == "held_out" and self.turns == "all":
            raise ValueError("`turns: all` needs `prompts` of its own: of what is held out, evaluation has first turns")
        return self


class EvaluateConfig(Section):
    """Plain against speculative decoding, in one run."""

    suites: dict[str, SuiteConfig] = Field(default_factory=lambda: {"held_out": SuiteConfig(prompts="held_out")})
    only: tuple[str, ...] | None = None
    """Names of the suites to run; absent: all."""
    k: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of speculative tokens to try on the first suite; the one that promises the highest speed-up is served."""
    acceptance_k: int = Field(3, ge=1)
    """Acceptance length is reported at this K for every suite, beside the chosen one, so that runs compare."""
    engine_starts: int = Field(3, ge=1)
    """How often engines are started anew to time steps and answers. Two engines that do the same are several percent apart, so
    figures that are published take at least three; with one, intervals are over prompts alone."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] | None = None
    """Dtypes in which plain decoding and the drafter are timed, beside the target's; absent: those that the machine has arithmetic
    for. The speed-up is quoted over the fastest plain decoding, too."""
    step_cost_prompts: int = Field(12, ge=1)
    """Prompts of the first suite on which the cost of a step is timed, one at a time, at every K, in each engine start."""
    timing_prompts: int = Field(16, ge=1)
    """Prompts of each suite timed with one request in flight, drawn with the recipe's seed so that every category has its share."""
    timing_tokens: int = Field(64, ge=2)
    """Response tokens of a timed prompt."""
    acceptance_batch_size: int = Field(32, ge=1)
    """Sequences at once where acceptance and identity, not speed, are measured."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of requests in flight at which throughput and latency are measured too, on the first suite's prompts: ten requests
    and more for each in flight, the next one as soon as one ends."""
    request_rates: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Requests a second at which two servers, plain and speculative, are asked the first suite's prompts by vLLM's own load
    generator, `timing_tokens` long, for latency and throughput."""
    request_prompts: int = Field(32, ge=1)
    """How many of them, at every rate."""
    examples: int = Field(3, ge=0)
    """Answers that the report shows token by token."""
    methods: dict[str, AnyMethod] = Field(default_factory=dict)
    """Other ways of speculating, measured beside the run's drafter on every suite, each with an engine of its own."""
    output: str = "eval"
    """Folder of the results inside the run."""


class TuneConfig(Section):
    """What `draftsmith tune` measures."""

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Numbers of speculative tokens, each with an engine of its own."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 4, 16), min_length=1)
    """Numbers of sequences at once."""
    suite: str | None = None
    """Whose prompts; absent: the first suite of `evaluate`."""
    prompts: int = Field(32, ge=1)
    """How many of them."""
    tokens: int = Field(64, ge=2)
    """Longest answer where acceptance is measured, and wall-clock speed."""
    engine_starts: int = Field(1, ge=1)
    """With `--verify`: how often engines are started anew; as `evaluate.engine_starts`."""
    output: str = "tune"
    """Folder of the results inside the run."""


class ServeConfig(Section):
    """How `draftsmith serve` serves."""

    method: AnyMethod | None = None
    """Absent: the run's drafter, with the number of speculative tokens that its evaluation chose."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's server by their names, as in `{ max_num_seqs: 64, enable_prefix_caching: true }`, passed on
    as they are; to the servers of `evaluate.request_rates` too."""
