"""The recipe's sections for evaluation, tuning and serving."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from draftsmith.config.methods import AnyMethod
from draftsmith.config.sampling import Sampling
from draftsmith.config.sampling_options import Temperature
from draftsmith.config.section import Section
from draftsmith.config.sources import Prompts

RESULTS_VERSION = 18
"""`schema_version` of `results.json`: counted up when results or report change, so that evaluations of before run again."""


_TAKEN = ("store", "checkpoint", "vllm", "generate")


def _is_free(folder: str) -> str:
    if folder in _TAKEN:
        raise ValueError(f"the run's `{folder}` holds something else; choose another name, such as `eval-{folder}`")
    return folder


OutputFolder = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), AfterValidator(_is_free)]
"""A folder's name inside the run, which is not one that another command writes: what is in it is deleted for new results."""


class SuiteConfig(Section):
    """One set of prompts to evaluate on."""

    prompts: Prompts | Literal["held_out"]
    """`held_out`: the held-out prompts of extraction, for which training predicts acceptance length."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest response, in tokens. Default: as for held-out prompts in extraction."""
    turns: Literal["first", "all"] = "first"
    """Answer the first user turn of a conversation, or all in order, each after the target's own earlier answers."""
    score: Literal["last_number", "unit_tests"] | None = None
    """Score first answers, baseline and speculative. `last_number` compares the last number of an answer with that of the row's
    `answer` (GSM8K's exact match). `unit_tests` runs HumanEval's tests (pass@1) and thereby **the code that the model wrote**, in a
    process whose limits stop accidents, not malice."""

    @model_validator(mode="after")
    def _held_out_has_first_turns(self) -> SuiteConfig:
        if self.prompts == "held_out" and self.turns == "all":
            raise ValueError("`turns: all` needs `prompts` of its own: held-out prompts have first turns only")
        return self


class EvaluateConfig(Section):
    """Measuring speculative decoding against the baseline."""

    suites: dict[str, SuiteConfig] = Field(default_factory=lambda: {"held_out": SuiteConfig(prompts="held_out")})
    only: tuple[str, ...] | None = None
    """Names of the suites to run. Default: all."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 3, 4), min_length=1)
    """Numbers of speculative tokens to try on the first suite; the one with the highest estimated speedup is served. With one engine
    start, those are left out that cannot be the fastest, by step costs and acceptance at smaller K."""
    temperature: Temperature = 0.0
    """Sampling temperature of all answers that are measured, of `draftsmith tune` too; 0 is greedy. Above 0 answers are drawn anew by
    each engine, so they are not compared token for token: see `fidelity`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """With a `temperature`: sample from the likeliest tokens whose probabilities add up to this."""
    top_k: int | None = Field(None, ge=1)
    """With a `temperature`: sample from this many likeliest tokens. Absent: from all."""
    fidelity: Literal["identity", "sampling"] = "identity"
    """How it is checked that speculation does not change the text. `identity` compares greedy answers token for token; with a `temperature`
    nothing is compared. `sampling` needs a `temperature`: every engine draws many short answers to a few prompts, and statistical tests
    compare those of each with the baseline's."""
    fidelity_prompts: int = Field(4, ge=1)
    """With `fidelity: sampling`: prompts of the first suite."""
    fidelity_answers: int = Field(500, ge=50)
    """With `fidelity: sampling`: answers of each engine to each of these prompts. What the tests can find shrinks with the square root."""
    fidelity_tokens: int = Field(16, ge=4)
    """With `fidelity: sampling`: longest answer, in tokens."""
    acceptance_k: int = Field(3, ge=1)
    """Acceptance length is reported at this K for every suite, beside the chosen one, so that runs can be compared."""
    engine_starts: int = Field(3, ge=1)
    """How often engines are started to time steps and answers. Identical engines differ by several percent, so published figures
    need at least three starts; with one, intervals are over prompts alone."""
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] | None = None
    """Dtypes in which the baseline and the drafter are timed, beside the target's. Default: those that the machine has arithmetic for;
    of a quantized target, none. The speedup is also reported over the fastest baseline."""
    step_cost_prompts: int = Field(12, ge=1)
    """Prompts of the first suite for timing steps, one at a time, at every K, in each engine start."""
    timing_prompts: int = Field(16, ge=1)
    """Prompts of each suite for timing with one request in flight, drawn by category with the recipe's seed."""
    timing_tokens: int = Field(64, ge=2)
    """Response tokens of a timed prompt."""
    acceptance_batch_size: int = Field(32, ge=1)
    """Batch size for measuring acceptance and fidelity (not speed)."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of requests in flight at which throughput and latency are also measured, on the first suite's prompts: at least ten
    requests for each in flight, the next one as soon as one ends."""
    request_rates: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Requests per second at which vLLM's load generator sends the first suite's prompts to two servers, baseline and speculative, for
    latency and throughput; answers have `timing_tokens` tokens."""
    request_prompts: int = Field(32, ge=1)
    """Requests at every rate: as many of these prompts, drawn by category with the recipe's seed. With 100 and more the results have 99th
    percentiles too."""
    examples: int = Field(3, ge=0)
    """Answers that the report shows token by token."""
    methods: dict[str, AnyMethod] = Field(default_factory=dict)
    """Other methods, measured on every suite as the run's drafter is. Two engines are up at a time, whatever is compared."""
    methods_under_load: bool = False
    """Time these methods at each `concurrency` too, not only with one request in flight."""
    output: OutputFolder = "eval"
    """Folder of the results inside the run."""

    @property
    def sampling(self) -> Sampling:
        """How the answers are sampled."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    @model_validator(mode="after")
    def _samples_at_a_temperature(self) -> EvaluateConfig:
        if self.temperature == 0 and (self.top_p != 1 or self.top_k is not None):
            raise ValueError("`top_p` and `top_k` need a `temperature` above 0: greedy decoding has neither")
        if self.temperature == 0 and self.fidelity == "sampling":
            raise ValueError(
                "`fidelity: sampling` needs a `temperature` above 0; greedy answers are compared token for token"
            )
        return self


class TuneConfig(Section):
    """What `draftsmith tune` measures."""

    k: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    """Numbers of speculative tokens. Default: 1 to 5, or as many as the drafter drafts if those are fewer."""
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 4, 16), min_length=1)
    """Batch sizes, in sequences."""
    suite: str | None = None
    """The suite with the prompts. Default: the first of `evaluate.suites`."""
    prompts: int = Field(32, ge=1)
    """Prompts to use."""
    tokens: int = Field(64, ge=2)
    """Longest answer for acceptance and wall-clock speed, in tokens."""
    engine_starts: int = Field(1, ge=1)
    """With `--verify`: how often engines are started, as in `evaluate.engine_starts`."""
    output: OutputFolder = "tune"
    """Folder of the results inside the run."""


class ServeConfig(Section):
    """How `draftsmith serve` runs the server."""

    method: AnyMethod | None = None
    """Default: the run's drafter, with the schedule that tuning chose or the number of tokens that evaluation chose. In a recipe without
    `extract.prompts`, which trains none, this is also what `draftsmith evaluate` and `draftsmith tune` measure; by default the first of
    `evaluate.methods`."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's server by name, as in `{ max_num_seqs: 64, enable_prefix_caching: true }`, passed on unchanged; also to
    the servers of `evaluate.request_rates`."""
