"""Every key of `results.json`.

Written by `evaluate.py`; read by `report.py`, `summary.py`, `compare.py`, `serve/server.py` (which K to serve), the model card and
people. Figures are as measured: nothing is rounded, no outlier is removed.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic accepts this one on every Python; typing's only from 3.12

Variant = int | str
"""What an engine speculates with: 0 for nothing (the baseline), K for the run's drafter, the name of another method."""

Interval = list[float]
"""Two ends of a 95% confidence interval: how far a figure would move with other prompts of the same kind and, if engines were
started several times, with other starts. It says nothing about other machines."""


class Ratio(TypedDict):
    """One engine's tokens per second over another's, on the same prompts."""

    value: float
    """Total over total, of all engine starts together."""
    interval: Interval
    """From `statistics.ratio`; over prompts alone if there was one start, over starts alone if there was one conversation."""
    by_start: list[float]
    """The ratio in each engine start."""
    median: float
    """The median of `by_start`."""


# ---- acceptance ----


class Acceptance(TypedDict):
    """vLLM's own counters over a set of prompts at one K.

    A draft is one step of one request in which at least one token was proposed.
    """

    acceptance_length: float
    """1 + accepted tokens / drafts: tokens per step of the target, its own token included."""
    acceptance_per_position: list[float]
    """Share of drafts whose token at position i (0 is the first drafted) was accepted."""
    acceptance_per_position_conditional: list[float]
    """The same among drafts accepted up to position i - 1; 0 if there were none."""
    drafts: int
    draft_tokens: int
    accepted: int


class Category(TypedDict):
    """Prompts of a suite in one category of their data set, at the chosen K."""

    prompts: int
    conversations: int
    """Those whose turns the prompts are."""
    acceptance_length: float
    acceptance_length_interval: Interval | None
    """None if fewer than 5 conversations have drafts."""


class CurvePoint(TypedDict):
    """One K on the first suite."""

    acceptance_length: float
    """Over the whole suite. Steps without a draft count too, which only lookup has."""
    step_cost: float
    """Seconds of a decoding step over those of a baseline step, one prompt at a time. No less than at a smaller K: measurements
    out of order are averaged (isotonic regression)."""
    step_cost_measured: float
    """The same before that."""
    step_cost_error: float
    """Standard error of `step_cost_measured`."""
    step_cost_interval: Interval
    """Of `step_cost_measured`, by Student's t: three engine starts tell their spread only roughly."""
    drafting: NotRequired[float | None]
    """Seconds of a step spent on the next draft over those of a baseline step. What is left of `step_cost_measured` beyond 1 is the
    check of the draft tokens. None where drafts cannot be timed; not in results of earlier versions."""
    speedup: float
    """Estimated: acceptance length over step cost. K is chosen by it; `Suite.speedup` is wall-clock."""
    speedup_interval: Interval
    fastest_share: float
    """How often this K is the fastest of the candidates when prompts and step costs are resampled."""


# ---- fidelity ----


class Difference(TypedDict):
    """A prompt whose speculative answer differs from the baseline's."""

    prompt: str
    """The prompt's id."""
    position: int
    """First response token that differs, from 0; the shorter answer's length if it is the beginning of the other."""
    num_speculative_tokens: int
    method: str | None
    """The name of another method than the run's drafter."""
    margin: float | None
    """The target's logit of the baseline's token there less that of the other token. None if one answer only ends earlier, or the
    other token is not among the likeliest."""
    near_tie: bool
    """Whether rounding in the target's dtype explains that margin (`fidelity.NEAR_TIE`). Any other difference is a mismatch."""


class Control(TypedDict):
    """The effect of rounding alone: the baseline's answers read again in pieces.

    Counted as speculation's differences are, which end a comparison: one answer may have many near-ties and another none.
    """

    tokens: int
    """Tokens compared: those of each answer up to and including the first difference."""
    differing: int
    """Answers in which reading again prefers another token anywhere."""
    margins: list[float]
    """The margin at the first such place of each of them."""
    piece: int
    """Tokens read at once."""


class Fidelity(TypedDict):
    """One variant against the baseline on one suite."""

    answers: int
    differing: int
    """Answers that differ from the baseline's."""
    tokens: int
    """Tokens compared: those of each answer up to and including the first difference."""
    mismatches: int
    """Differences that are not near-ties."""
    rate_p_value: float
    """Probability of at least so many differences among so many tokens at the control's rate (exact conditional test of two
    Poisson rates: Przyborowski and Wilenski, 1940)."""
    margins_p_value: float | None
    """Probability of margins at least as large under the control (permutation test of the mean); None with too few margins."""
    verdict: str
    """`identical`; `near_ties`: all differences are near-ties, neither more nor larger than the control's; `wrong`; `not_compared`: answers
    were sampled (`Results.sampled_fidelity`)."""


class SampledFidelity(TypedDict):
    """One variant's sampled answers against the baseline's, as many to the same prompts (`sampled_fidelity.py`)."""

    prompts: int
    answers: int
    """Of each engine, to all prompts together."""
    tokens: int
    """Of the speculative engine's answers."""
    continuations_p_value: float
    """Probability of continuations that differ at least as much by chance."""
    drafts_p_value: float
    """Probability that the tokens which are drafted come so much more, or less, often by chance."""
    detectable_bias: float | None
    """The factor by which drafts would have to be accepted too readily for the latter to find it with probability 0.95. None: too little was
    accepted to tell, or above 4."""
    verdict: str
    """`same_distribution`; `wrong`: the smaller p-value, doubled, is below `fidelity.LEVEL`."""


# ---- speed ----


class AtStart(TypedDict):
    """One engine in one engine start under one load."""

    by_prompt: dict[str, list[float]]
    """Tokens and seconds by prompt id, over all times that the prompt was asked. Sum of tokens over sum of seconds is the engine's
    response tokens per wall second, prompt processing included."""
    first_token_seconds: float
    """Median over requests of the time to the first token; 0 if none ended."""
    seconds_per_token: float
    """Median over requests of the time per output token after the first; 0 if none ended."""


class Execution(TypedDict):
    """How vLLM executes the steps of one configuration. It decides by itself, also by the method of speculation: part of a ratio between
    configurations that differ here is not speculation's."""

    model_runner: str
    """`V1` or `V2`."""
    async_scheduling: bool
    """Whether the next step is scheduled while the device still computes this one."""


class EngineSpeed(TypedDict):
    """One engine under one load, over all engine starts."""

    tokens_per_second: float
    """Response tokens per wall second of all requests together, prompt processing included."""
    first_token_seconds: float
    """Time to the first token: median over requests, then over engine starts."""
    seconds_per_token: float
    """Time per output token after the first, likewise."""


class Measured(EngineSpeed):
    """One configuration under one load."""

    speculation: Variant
    dtype: str
    starts: list[AtStart]
    execution: Execution
    baseline_starts: NotRequired[list[AtStart]]
    """The baseline of the same dtype as it ran beside this configuration: two engines are up at a time. Ratios are over that. Absent for
    the run's drafter, beside which the baseline's own figures were measured."""


class Throughput(TypedDict):
    """A constant number of requests in flight (`throughput.py`)."""

    in_flight: int
    requests: int
    """Counted ones, in each engine start; for the second baseline engine a third of them if there was a single start, but no fewer than 10
    for each in flight."""
    tuned_k: NotRequired[int]
    """K that `draftsmith tune` had chosen for so many requests; 0: that it does not pay to speculate. Absent if it had not run."""
    max_tokens: int
    """Longest answer (`evaluate.timing_tokens`)."""
    engine_starts: int
    configurations: dict[str, Measured]
    """By `Configuration.name`."""
    speedup: Ratio
    """The drafter over the baseline, both in the recipe's dtype."""
    speedups: dict[str, Ratio]
    """Every speculative configuration over the baseline of its own dtype."""
    fastest_baseline: str
    """The one over which `fastest_speculative` gains least, as they ran side by side: the baseline of its own dtype, or the best by tokens
    per second of those in other dtypes."""
    fastest_speculative: str
    """The configuration of the run's drafter with the most tokens per second, measured one after the other and minutes apart, not side by
    side; other methods are not among them."""
    speedup_over_fastest_baseline: Ratio
    """The latter over the former; as they ran side by side once more, if their dtypes differ. Sums of tokens per second, measured minutes
    apart, can be in another order where the machine drifts."""
    noise: Ratio
    """A second baseline engine over the first, both in the recipe's dtype: how far identical engines are apart."""
    fidelity: dict[str, Fidelity]
    """Every speculative configuration against the baseline of its own dtype that ran beside it, in the first engine start."""
    differences: dict[str, list[Difference]]
    """The first few of each of them."""


class Speeds(TypedDict):
    """Response tokens per wall second, prompt processing included, one request at a time, in the recipe's dtype."""

    baseline: float
    speculative: float


class AtRate(TypedDict):
    """A server at one request rate, as vLLM's load generator sees it."""

    requests_per_second: float
    """From the first request to the last answer; far below the rate if the server cannot keep up."""
    tokens_per_second: float
    first_token_seconds: float
    """Median over requests, queueing included."""
    first_token_seconds_p99: float | None
    """None with fewer than 100 requests, of which it would be the slowest."""
    seconds_per_token: float
    """Median over requests, after the first token."""
    seconds_per_token_p99: float | None
    """Likewise."""


class Rate(TypedDict):
    """One request rate: both servers get the same requests at the same moments, in one run each."""

    suite: str
    """Whose prompts they are."""
    requests: int
    """Counted ones, of each server."""
    num_speculative_tokens: int
    """Of the speculative server."""
    baseline: AtRate
    speculative: AtRate


# ---- suites ----


class AcceptanceByPrompt(Acceptance):
    """The same, and of each prompt."""

    by_prompt: dict[str, list[int]]
    """Drafts and accepted tokens of each prompt by its id. Ids of later turns end in `/turn-2` and so on."""


class SuiteAtK(AcceptanceByPrompt):
    """One suite at one K, in the batches in which the baseline answered."""

    acceptance_length_interval: Interval | None
    """None if fewer than 5 conversations have drafts."""
    prompts_identical: int | None
    """Prompts whose answer equals the baseline's, token for token. None for sampled answers."""
    fidelity: Fidelity
    """Whether rounding explains the differences."""
    seconds: float
    """Engine time for the whole suite."""


class MethodAcceptance(SuiteAtK):
    """Another method of speculation on one suite, beside the baseline and the drafter."""

    method: str
    """vLLM's name of it."""
    num_speculative_tokens: int
    tokens_per_step: float
    """Tokens per decoding step, including steps without a draft. `acceptance_length` is over steps with a draft, as in vLLM: lookup
    that seldom drafts, and then is right, has a high one and gains little."""


class MethodAtSuite(MethodAcceptance):
    """The same with its speed."""

    tokens_per_second: float
    """One request at a time, in the recipe's dtype."""
    speedup: float
    """Over the baseline in the same dtype."""
    speedup_interval: Interval


class Quality(TypedDict):
    """How many first answers are right, by the baseline and at the chosen K."""

    measure: str
    """`evaluate.suites.NAME.score`."""
    prompts: int
    baseline: float
    """Share that is right."""
    speculative: float


class Overlap(TypedDict):
    """Prompts of one suite that the drafter was trained on, as `draftsmith/data/overlap.py` measures it."""

    prompts: int
    """Conversations that are evaluated."""
    verbatim: int
    """Those whose words are all in the training part, in order."""
    near: int
    """Further ones that nearly are."""


class SuiteAcceptance(Acceptance):
    """All prompts of a suite in batches; acceptance is at the chosen K."""

    prompts: int
    """Questions asked: each turn is one."""
    prompts_sha256: str
    """Digest of the first turns' tokens: evaluations with equal ones can be compared."""
    max_tokens: int
    """Longest response in batches; timed responses have `evaluate.timing_tokens`."""
    acceptance_length_interval: Interval | None
    """As in `SuiteAtK`."""
    categories: dict[str, Category]
    """Empty if the data set has none."""
    identical_to_baseline: bool | None
    """Every answer of the run's drafter on this suite, at every K in `at_k`, equals the baseline's. None for sampled answers."""
    control: Control | None
    """The last of `controls`. None if every answer equals the baseline's, of other methods too: then there is nothing to explain. None
    for sampled answers."""
    controls: NotRequired[list[Control]]
    """With the first few `margins`: one for each number of draft tokens with which answers differ, ascending. A variant is judged by the one
    whose `piece` is one more than its own. Not in results of earlier versions, where `control` judged all variants."""
    differences: list[Difference]
    """The first few, of the run's drafter and of other methods."""
    at_k: dict[str, SuiteAtK]
    """At each K measured on all prompts: the first suite at every K of `k_curve`, others at the chosen one and at
    `evaluate.acceptance_k`."""
    baseline_seconds: float
    """Engine time of the baseline for the whole suite."""
    quality: Quality | None
    """None if the recipe does not ask for it."""


class Suite(SuiteAcceptance):
    """One set of prompts. Acceptance is over all of them; speed is over some, drawn by category, one request at a time."""

    methods: dict[str, MethodAtSuite]
    """By their names in the recipe (`evaluate.methods`)."""
    tokens_per_second: Speeds
    speedup: float
    """Wall-clock speedup over the baseline at the chosen K, both in the recipe's dtype."""
    speedup_interval: Interval
    speedup_over_fastest_baseline: float
    """The drafter in its fastest dtype over the baseline in its fastest."""
    speedup_over_fastest_baseline_interval: Interval
    timed_prompts: int
    throughput: Throughput
    """All configurations with one request in flight: what the speeds above come from."""
    overlap_with_training: NotRequired[Overlap | None]
    """How much of it the drafter was trained on; None if a store does not record what it was made from."""


class Example(TypedDict):
    """An answer of the first suite at the chosen K."""

    prompt: str
    """Its id."""
    question: str
    tokens: list[list[str | int]]
    """Text of each token and its position in the draft, from 1; 0 for the target's own tokens."""


# ---- the whole file ----


class Machine(TypedDict):
    """Where it was measured."""

    processor: str
    cores: int
    """CPU cores that this program may use."""
    memory_gib: float
    gpus: list[str]
    system: str


class Sampled(TypedDict):
    """How answers were sampled (`draftsmith.config.sampling.Sampling`)."""

    temperature: float
    """0: greedy."""
    top_p: float
    top_k: int | None


class Engines(TypedDict):
    """How vLLM ran, where the recipe leaves it to the device."""

    enforce_eager: bool
    """Without compilation and CUDA graphs."""
    tensor_parallel_size: int
    peak_engines: int
    """Most engines that were up at a time: the baseline and one other (`lineup.py`)."""
    options: NotRequired[dict[str, Any]]
    """The recipe's `engine.options`; absent if there are none."""


class Results(TypedDict):
    """`results.json`."""

    schema_version: int
    """`draftsmith.config.evaluation.RESULTS_VERSION`; other versions are refused."""
    target: str
    """The target's display name."""
    drafter: str
    """The drafter's architecture and the name of its run."""
    drafter_sha256: dict[str, str]
    """Which drafter these figures are of: SHA-256 of its files by name; of a method in its place, a digest of its options (`method`), and
    of the files of a folder that it names."""
    num_speculative_tokens: int
    """The K of `evaluate.k` with the highest speedup in `k_curve`: the K to serve."""
    suites: dict[str, Suite]
    k_curve: dict[str, CurvePoint]
    """By K, ascending; measured on the first suite. In a single engine start without those that cannot be the fastest
    (`curve.is_beaten`)."""
    toss_up: list[int]
    """Other K that may be as fast; empty if the choice is clear."""
    engine_starts: int
    """How often engines were started for speeds and step costs. With one, intervals do not cover how far identical engines are
    apart."""
    predicted_acceptance_length: dict[str, float] | None
    """What training predicted for held-out text and this sampling, by K; None if it did not."""
    predicted_speedup: dict[str, float] | None
    """That over the step cost measured here, by K; to compare with `CurvePoint.speedup`."""
    load: dict[str, Throughput]
    """By requests in flight (`evaluate.concurrency`), on the first suite. K is what `draftsmith tune` chose for that load, if it ran
    before with this drafter; otherwise, and where it chose not to speculate, the K above."""
    rates: dict[str, Rate]
    """By requests per second (`evaluate.request_rates`)."""
    sampling: Sampled
    """Of all answers above."""
    sampled_fidelity: dict[str, SampledFidelity]
    """By variant, as in `K = 3`, or the name of a method; empty unless `evaluate.fidelity` is `sampling`."""
    examples: list[Example]
    dtype: str
    """What the target computed in. Answers can only be expected to equal the baseline's in float32."""
    versions: dict[str, str]
    machine: Machine
    engine: Engines
