"""What a training run needs before its first step: processes, drafter, loss, data and optimizers, restored from a snapshot."""

import functools
import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class, layer_ids_to_read
from draftsmith.drafters.norm import FinalNorm
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.run.errors import UserError
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train import distributed
from draftsmith.train.data import ScheduledStep, TrainingData
from draftsmith.train.loss import BlockLoss, ChainLoss
from draftsmith.train.optimizers import MovingAverage, make_optimizers
from draftsmith.train.tracking import require_tracker

_PROCESS_TIMEOUT = timedelta(hours=6)
"""How long a process waits for one that downloads the target, initializes the drafter or predicts alone: NCCL's own limit is ten
minutes. A process that ends does not leave others waiting so long: what launched them ends them."""

_ROWS_TO_SCALE = 2048


@dataclass
class Progress:
    """How far a run is; beside the tensors, all that a snapshot holds."""

    step: int = 0
    """Steps done: the position in the schedule."""
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Of every step."""
    state_scales: list[float] = field(default_factory=list)
    """What training divides the states by, one a layer id; empty where the drafter norms them (`Drafter.scales_states`)."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Figures of every finished epoch."""


@dataclass
class Run:
    """What the training loop works with."""

    recipe: Recipe
    """With `train.precision` set."""
    directory: Path
    """The checkpoint's folder."""
    inputs: str
    """Digest of all that the checkpoint depends on."""
    accelerator: Accelerator
    target: TargetInfo
    data: TrainingData
    schedule: list[ScheduledStep]
    loss: ChainLoss
    model: nn.Module
    """`loss` as this process runs it."""
    optimizers: list[torch.optim.Optimizer]
    average: MovingAverage
    progress: Progress


def make_accelerator(recipe: Recipe, run_dir: Path) -> Accelerator:
    """The processes and the tracker. Raises UserError: the tracker is not installed."""
    require_tracker(recipe.train.tracker)
    # The buffers are the target's and never change: no need to broadcast them in every step.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(
        log_with=recipe.train.tracker,
        project_dir=run_dir,
        # Whatever the launcher says: the training step uses autocast as the recipe asks, and with dynamo accelerate would compile the whole
        # loss and turn TF32 on.
        mixed_precision="no",
        dynamo_backend="no",
        kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=_PROCESS_TIMEOUT)],
    )


def set_up(
    recipe: Recipe,
    accelerator: Accelerator,
    target: TargetInfo,
    store: Store,
    snapshot: dict[str, Any] | None,
    *,
    directory: Path,
    inputs: str,
) -> Run:
    """Build the run, initializing the drafter from the target or restoring everything from `snapshot`.
    Raises UserError: the store lacks hidden states that the drafter or its teacher reads, or has no training sequences."""
    options = recipe.train
    kind = drafter_class(options.drafter.kind)
    saved = store.identity.layer_ids
    layer_ids = layer_ids_to_read(options.drafter, target, saved, where=f"the store at {store.directory}")
    if not store.rows(held_out=False):
        raise UserError(f"The store at {store.directory} has no training sequences; lower extract.held_out_fraction.")
    tensors = load_target_tensors(target.path, trust_remote_code=target.trust_remote_code)
    draft_token_ids = choose_draft_vocabulary(store.token_counts(target.vocab_size), options.drafter.draft_vocab_size)
    config = kind.make_config(options.drafter, target, layer_ids, len(draft_token_ids))
    drafter = kind.from_target(config, tensors, draft_token_ids).to(accelerator.device)
    for parameter in drafter.frozen_parameters(options.drafter):
        parameter.requires_grad_(False)
    columns, last_column = [saved.index(layer) for layer in layer_ids], saved.index(target.num_hidden_layers)
    ttt_steps = drafter.max_draft_tokens or options.ttt_steps
    data = TrainingData(recipe, accelerator, store, columns, last_column, ttt_steps)
    progress = Progress(**snapshot["progress"]) if snapshot else Progress()
    if drafter.scales_states and not snapshot:
        progress.state_scales = _state_scales(data)
    data = replace(data, state_scales=progress.state_scales)
    if snapshot:
        drafter.load_state_dict(snapshot["drafter"])
    elif accelerator.is_main_process:  # the others get its weights
        drafter.init_from_target(tensors, data)
    for head in drafter.head_parameters():
        head.requires_grad_(options.train_lm_head)
    if options.activation_checkpointing:
        for module in drafter.recompute_modules():
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
    terms = drafter.loss_terms(options.drafter)
    loss = (BlockLoss if terms.in_blocks else ChainLoss)(
        drafter,
        teacher_norm=FinalNorm.of(tensors, target.facts.norm_eps),
        teacher_head=tensors.lm_head[draft_token_ids].float(),
        teacher_soft_cap=tensors.logit_soft_cap,
        ttt_steps=ttt_steps,
        ttt_loss_decay=options.ttt_loss_decay,
        loss=options.loss,
        loss_vocab_size=options.loss_vocab_size,
        terms=terms,
    ).to(accelerator.device)
    model = distributed.prepare(accelerator, loss, shard=options.fsdp)
    optimizers = make_optimizers(options, drafter)
    average = MovingAverage(drafter, options.ema)
    if snapshot:
        for optimizer, state in zip(optimizers, snapshot["optimizers"], strict=True):
            distributed.load_optimizer(optimizer, state)
        for name, value in snapshot["average"].items():
            average.weights[name].copy_(distributed.shard_like(value, average.weights[name]))
    return Run(
        recipe,
        directory,
        inputs,
        accelerator,
        target,
        data,
        data.schedule(),
        loss,
        model,
        optimizers,
        average,
        progress,
    )


def _state_scales(data: TrainingData) -> list[float]:
    """RMS of each state that the drafter reads over the first rows that a token is predicted from, as powers of two: dividing by them and
    multiplying weights by them rounds nothing. Every process finds the same."""
    squares, count = torch.zeros(len(data.columns), dtype=torch.float64), 0
    for batch in data:
        rows = batch.loss_weights[:, 0] > 0
        squares += batch.hidden_states[rows].double().pow(2).mean(-1).sum(0).cpu()
        count += int(rows.sum())
        if count >= _ROWS_TO_SCALE:
            break
    sizes = (squares / max(count, 1)).sqrt().clamp(min=1e-6)
    return [2.0 ** round(math.log2(size)) if math.isfinite(size) else 1.0 for size in sizes.tolist()]
