"""Section `train`: store to checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from draftsmith.config.drafters import MOST, AnyDrafterOptions, BlockOptions, DSparkOptions, Eagle3Options, EagleOptions
from draftsmith.config.sampling import Sampling
from draftsmith.config.section import LocalPath, Section


class StoreFolder(Section):
    """A finished store of another run."""

    path: LocalPath
    """Its folder (`runs/OTHER/store`), relative to the recipe's folder unless absolute."""


_FIRST_NAMES = {
    "warmup_ratio": "warmup", "lr_schedule": "schedule", "publish_epoch": "keep", "extra_stores": "more_stores",
    "ttt_steps": "chain_steps", "ttt_loss_decay": "chain_decay",
}  # fmt: skip


class TrainConfig(Section):
    """Store to checkpoint: training the drafter."""

    drafter: AnyDrafterOptions = Eagle3Options()
    """The drafter's `kind` and the options of that kind. The default kind is `eagle3`."""
    epochs: float = Field(3, gt=0, le=10_000)
    """Passes over the training part of the store."""
    tokens_per_step: int = Field(2048, ge=16)
    """Packed tokens per optimizer step, over all processes and micro-batches, so that a run has the same steps on any number of
    processes. Each micro-batch has tokens_per_step / (processes * gradient_accumulation_steps) tokens, which should be those of a
    sequence or more: a sequence is not divided, and a micro-batch without one computes in vain."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches per process and optimizer step: more take less memory, with the same result."""
    fsdp: bool = False
    """With several processes: shard weights, gradients and optimizer states over them (FSDP2) instead of replicating them
    (DDP)."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Data type of matrix products (autocast) and of Muon; weights, gradients and optimizer states are always float32. Absent:
    bfloat16 where the hardware has arithmetic for it (`draftsmith doctor` says so), at twice the rate of float32 on CPUs and at ten times on
    GPUs, and float32 elsewhere. `stage.json` records the choice."""
    activation_checkpointing: bool = False
    """Recompute the widest layers in the backward pass instead of keeping their activations: less memory, more time."""
    ttt_steps: int = Field(3, ge=1, le=MOST)
    """Steps of training-time test: draft steps that are trained per position."""
    ttt_loss_decay: float = Field(0.8, gt=0, le=1)
    """The loss of draft step k is weighted by ttt_loss_decay**k; not where a drafter has an `acceptance_alpha`."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: Muon for matrices, AdamW for the rest. `adamw`: AdamW for everything."""
    lr: float = Field(3e-4, gt=0)
    """AdamW's peak learning rate."""
    muon_lr: float = Field(2e-3, gt=0)
    """Muon's peak learning rate."""
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    """Share of the steps during which the learning rate rises linearly to its peak."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after warm-up: a cosine or linear decay to zero, or constant."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is then evaluated and published instead of them (0.99 to
    0.9999; lower during the first steps, so that the initial weights are soon forgotten). Absent: no average."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of both optimizers."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""
    train_lm_head: bool = False
    """Train the drafter's vocabulary head, which otherwise keeps the target's rows. EAGLE has none of its own."""
    loss: Literal["cross_entropy", "kl", "total_variation"] = "cross_entropy"
    """Loss between the drafter's and the target's distribution. `kl` is `cross_entropy` minus the target's entropy and has the
    same gradients; `total_variation` is the probability that a sampled draft token is rejected. Only `cross_entropy` where DSpark has a
    `variation_weight` or a confidence head: its own weights say there what it learns."""
    loss_vocab_size: int | None = Field(None, ge=16)
    """Compute the loss over this many tokens of the draft vocabulary: those that target or drafter find likely in the batch, and
    a random sample that stands for the rest. Each micro-batch chooses its own, so the loss depends slightly on how many there
    are. Absent: over the whole draft vocabulary."""
    prompt_loss_weight: float = Field(0.0, ge=0, le=1)
    """Weight of the loss on prompt tokens; response tokens have weight 1."""
    extra_stores: tuple[StoreFolder, ...] = ()
    """Further stores to train on, with the same target, layer ids and sampling. Duplicate conversations count once, and are held
    out if any store holds them out."""
    save_every_steps: int | None = Field(None, ge=1)
    """Optimizer steps between snapshots to resume from. Absent: one every five minutes, or less often where they would take more than a
    hundredth of the time. Snapshots are also written at the end of every epoch, on SIGUSR1, and on
    SIGTERM before the process stops."""
    publish_epoch: Literal["best", "last"] = "best"
    """Publish the epoch with the best predicted acceptance length, or the last one."""
    keep_last_epochs: int = Field(0, ge=0)
    """Also keep the checkpoints of this many last epochs, as `checkpoint/epoch-N`."""
    state_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the target's hidden states in training. It helps Medusa and MLP speculators on small stores. It harms EAGLE-3,
    whose induction heads match positions by codes in these states."""
    predict_positions: int = Field(5, ge=1)
    """Largest K for which the acceptance length is predicted."""
    predict_temperature: float | None = Field(None, gt=0)
    """Also predict the acceptance length at this temperature (`predicted_at_temperature` in the figures), preferably on
    responses that were sampled at it."""
    predict_top_p: float = Field(1.0, gt=0, le=1)
    """With `predict_temperature`: the top-p of the answers to predict for."""
    predict_top_k: int | None = Field(None, ge=1)
    """With `predict_temperature`: their top-k. Absent: all tokens."""
    step_costs: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]] | None = None
    """Cost of a decoding step by K, relative to a baseline step, such as `{1: 1.14, 2: 1.31}`; adds `predicted_speedup` to the
    figures. `draftsmith evaluate` measures it (`k_curve`); drafters of the same shape on the same machine share it."""
    tracker: Literal["wandb", "tensorboard", "trackio"] | None = None
    """Tracker to log to, through accelerate. Without an account wandb runs offline."""

    def precision_on(self, *, native_bfloat16: bool) -> Literal["float32", "bfloat16"]:
        """`precision`, or its default on hardware with or without arithmetic for bfloat16."""
        return self.precision or ("bfloat16" if native_bfloat16 else "float32")

    @property
    def predicted_sampling(self) -> Sampling | None:
        """The sampling parameters to predict for, beside those of the responses; None for no others."""
        if self.predict_temperature is None:
            return None
        return Sampling(self.predict_temperature, self.predict_top_p, self.predict_top_k)

    def predictions(self) -> dict[str, Any]:
        """The options that say what else is predicted of the finished drafter."""
        return self.model_dump(
            mode="json", include={"predict_temperature", "predict_top_p", "predict_top_k", "step_costs"}
        )

    def inputs(self) -> dict[str, Any]:
        """The options that affect the outcome. Changing the others, which say how work is divided, saved and logged, does not
        prevent a run from resuming. Keys have the names that they had at first, so renaming one repeats no finished training."""
        without_effect = {
            "gradient_accumulation_steps", "fsdp", "activation_checkpointing", "save_every_steps", "keep_last_epochs", "tracker",
        }  # fmt: skip
        found = self.model_dump(mode="json", exclude=without_effect)
        # A finished drafter is kept when other predictions of it are asked for. The digest is as if none were.
        for name in self.predictions():
            found[name] = None
        del found["predict_top_p"], found["predict_top_k"]  # which came later
        if found["drafter"].get("train_mask_embedding"):  # likewise
            del found["drafter"]["train_mask_embedding"]
        return {_FIRST_NAMES.get(key, key): value for key, value in found.items()}

    @model_validator(mode="after")
    def _loss_has_a_distribution(self) -> TrainConfig:
        if self.loss != "cross_entropy" and getattr(self.drafter, "targets", "distribution") != "distribution":
            raise ValueError(f"`loss: {self.loss}` needs `targets: distribution` in the drafter's options")
        if self.loss != "cross_entropy" and isinstance(self.drafter, DSparkOptions) and self.drafter.weighs_terms:
            raise ValueError(
                f"`loss: {self.loss}` would do nothing: with a `variation_weight` or a confidence head, DSpark's loss is the weighted sum of "
                "cross-entropy, |p - q| and confidence. Leave `loss` out; to train on total variation, set `variation_weight` in the "
                "drafter's options, with `token_weight: 0` for that alone"
            )
        return self

    @model_validator(mode="after")
    def _trains_what_there_is(self) -> TrainConfig:
        if self.train_lm_head and isinstance(self.drafter, EagleOptions):
            raise ValueError(
                "`train_lm_head: true` would do nothing: EAGLE drafts with the target's own head. Leave it out, or train another kind, such "
                "as `eagle3`"
            )
        weighs_by_acceptance = isinstance(self.drafter, BlockOptions) and self.drafter.acceptance_alpha is not None
        # A whole section that was written out has the default, which changes nothing either.
        if weighs_by_acceptance and self.ttt_loss_decay != type(self).model_fields["ttt_loss_decay"].default:
            raise ValueError(
                "`ttt_loss_decay` would do nothing: with an `acceptance_alpha` draft tokens are weighted by the acceptance that each decides "
                "on. Leave it out, or set `acceptance_alpha: null` in the drafter's options"
            )
        return self

    @model_validator(mode="after")
    def _predicts_at_a_temperature(self) -> TrainConfig:
        if self.predict_temperature is None and (self.predict_top_p != 1 or self.predict_top_k is not None):
            raise ValueError(
                "`predict_top_p` and `predict_top_k` need a `predict_temperature`: greedy decoding has neither"
            )
        return self
