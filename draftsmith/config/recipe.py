"""The recipe: one YAML file that is one whole run. Imports neither torch nor vLLM; checking a drafter's options does.

Every section forbids unknown keys; the error names the nearest key that exists. Relative paths in a
recipe are relative to the recipe's own folder. `-s section.key=value` overrides any value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from draftsmith.config.drafters import AnyDrafterOptions, Eagle3Options
from draftsmith.config.evaluation import EvaluateConfig, ServeConfig, TuneConfig
from draftsmith.config.hardware import Assumptions
from draftsmith.config.methods import NoSpeculation
from draftsmith.config.section import LocalPath, ModelName, Section
from draftsmith.config.sources import FileSource, Prompts


class TargetConfig(Section):
    """The model to make faster: a Hub id, a local directory, or a GGUF file."""

    model: ModelName | None = None
    """A Hugging Face Hub id (`owner/name`) or a local model directory."""
    revision: str | None = None
    """Hub revision; with a Hub id only."""
    gguf: FileSource | None = None
    """A GGUF file; prepared once as a Hugging Face directory in the cache."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What the target computes in, and what the store holds. float32 for exact comparisons and for CPUs without bf16."""

    @model_validator(mode="after")
    def _one_origin(self) -> TargetConfig:
        if (self.model is None) == (self.gguf is None):
            raise ValueError("give either `model` (Hub id or directory) or `gguf`, not both and not neither")
        return self


class EngineConfig(Section):
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


class ExtractConfig(Section):
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
    def _samples_differ(self) -> ExtractConfig:
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


class StoreFolder(Section):
    """A finished store of another run."""

    path: LocalPath
    """Its folder (`runs/OTHER/store`); relative paths are relative to the recipe."""


_FIRST_NAMES = {
    "warmup_ratio": "warmup", "lr_schedule": "schedule", "publish_epoch": "keep", "extra_stores": "more_stores",
    "ttt_steps": "chain_steps", "ttt_loss_decay": "chain_decay",
}  # fmt: skip


class TrainConfig(Section):
    """Store to checkpoint."""

    drafter: AnyDrafterOptions = Eagle3Options()
    """`kind` and the options of that kind; without a `kind`, EAGLE-3's."""
    epochs: float = Field(3, gt=0)
    """Passes over the training part of the store."""
    tokens_per_step: int = Field(2048, ge=16)
    """Packed tokens in one optimizer step: of all processes and micro-batches together, so that the steps of a run are
    the same on any number of processes. Each works on tokens_per_step / (processes * gradient_accumulation_steps) at once."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches of each process in one optimizer step, one after the other: less memory, the same result."""
    fsdp: bool = False
    """With several processes (`accelerate launch`): each holds a part of the weights, gradients and optimizer states
    (FSDP2) instead of all of them (DDP)."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What products are computed in, by autocast, and Muon's; weights, gradients and optimizer states are float32 either way.
    Absent: bfloat16 on GPUs, which have ten times float32's rate in it, and float32 on CPUs; `stage.json` says which it was."""
    activation_checkpointing: bool = False
    """Compute the widest layers again in the backward pass instead of keeping what they computed: less memory, more time."""
    ttt_steps: int = Field(3, ge=1)
    """Steps of the chain that are trained (training-time test)."""
    ttt_loss_decay: float = Field(0.8, gt=0, le=1)
    """Chain step k's loss has weight ttt_loss_decay**k."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon for the matrices, AdamW for the rest. `adamw`: AdamW for all."""
    lr: float = Field(3e-4, gt=0)
    """AdamW's peak learning rate."""
    muon_lr: float = Field(2e-3, gt=0)
    """Muon's peak learning rate."""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
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
    extra_stores: tuple[StoreFolder, ...] = ()
    """Further stores to train on, of the same target, layer ids and sampling; a conversation that several hold counts
    once, and is held out if it is held out in any."""
    save_every_steps: int = Field(25, ge=1)
    """Optimizer steps between resumable snapshots. There is one at the end of every epoch, too, and when the process gets
    SIGUSR1, or SIGTERM, after which it stops."""
    publish_epoch: Literal["best", "last"] = "best"
    """Publish the weights of the epoch with the best predicted acceptance, or those of the last."""
    keep_last_epochs: int = Field(0, ge=0)
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
        """What the outcome depends on: all keys but those of how the work is spread, saved and logged, under the names that they
        had at first, so that renaming a key makes no finished training run again."""
        spread = {
            "gradient_accumulation_steps", "fsdp", "activation_checkpointing", "save_every_steps", "keep_last_epochs", "tracker",
        }  # fmt: skip
        found = self.model_dump(mode="json", exclude=spread)
        return {_FIRST_NAMES.get(key, key): value for key, value in found.items()}

    @model_validator(mode="after")
    def _loss_has_a_distribution(self) -> TrainConfig:
        if self.loss != "cross_entropy" and getattr(self.drafter, "targets", "distribution") != "distribution":
            raise ValueError(f"`loss: {self.loss}` needs `targets: distribution` in the drafter's options")
        return self


class ConvertConfig(Section):
    """Checkpoint to the directory that vLLM loads."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Absent: the target's."""
    quantize: Literal["int8", "fp8", "int8-dynamic"] | None = None
    """Linear layers' weights in 8 bits: integers or floats that GPUs compute with in floating point, or integers that inputs
    are rounded to as well (the one that vLLM has on CPUs). What it costs in acceptance, the evaluation says."""


class Recipe(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder: `runs/NAME`."""
    seed: int = 0
    target: TargetConfig
    engine: EngineConfig = EngineConfig()
    extract: ExtractConfig
    train: TrainConfig = TrainConfig()
    convert: ConvertConfig = ConvertConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tune: TuneConfig = TuneConfig()
    serve: ServeConfig = ServeConfig()
    plan: Assumptions | None = None

    @model_validator(mode="after")
    def _drafter_guesses_that_far(self) -> Recipe:
        most = self.train.drafter.max_draft_tokens
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
    def _suites_exist(cls, value: EvaluateConfig) -> EvaluateConfig:
        for name in value.only or ():
            if name not in value.suites:
                raise ValueError(f"`only` names `{name}`, which is not a suite; suites: {', '.join(value.suites)}")
        for name, method in value.methods.items():
            if isinstance(method, NoSpeculation):
                raise ValueError(f"`methods.{name}` is plain decoding, which everything is measured against already")
        return value
