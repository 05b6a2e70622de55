"""The train stage: store to checkpoint.

A run is a schedule of optimizer steps, a pure function of the recipe and the store. A step's sequences are divided into shares,
one for each micro-batch of each process, and its loss is divided by the whole step's weights; so the loss of a step is the
same on any number of processes. All randomness comes from the step's number. That makes a snapshot complete: weights,
optimizer states and the number of the step decide everything that comes after.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import netrc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, broadcast_object_list, set_seed
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter, DrafterConfig
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.drafters.weights import in_memory
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_json
from draftsmith.run.cuda import require_usable_gpus
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.run.prefetch import prefetched
from draftsmith.run.process import disable_malloc_trim
from draftsmith.run.progress import Bar, console
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.tensors import TargetTensors, load_target_tensors
from draftsmith.train import distributed
from draftsmith.train.acceptance import predict_acceptance, predict_sampled_acceptance, predicted_speedup
from draftsmith.train.loss import ChainLoss
from draftsmith.train.muon import Muon
from draftsmith.train.packing import balance_tokens, pack, pack_epoch

Loaded = TypeVar("Loaded")

SNAPSHOT = "resume.pt"
"""Beside the checkpoint while training runs: everything needed to go on after a crash."""
LOSSES = "losses.json"
"""Beside the finished checkpoint: the loss of every step."""


@dataclass
class Run:
    """What the loop works with; built by `_set_up`."""

    accelerator: Accelerator
    loss: ChainLoss
    model: nn.Module
    """`loss` as each process runs it."""
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, torch.Tensor]
    """Moving averages of the trained weights, by name; empty without `train.ema`."""
    target: TargetInfo
    schedule: list[tuple[int, list[int]]]
    """One entry an optimizer step: epoch, store rows."""
    store: Store
    held_out: list[int]
    """Store rows; one is read when it is needed: together they may be larger than the memory."""
    columns: list[int]
    """Which of the store's states the drafter reads."""
    last_column: int
    """Which of the store's states is the target's last, for the teacher."""


@dataclass
class Progress:
    """How far a run is; with the tensors, all that a snapshot holds."""

    step: int = 0
    """Steps done: the position in the data and in the schedule."""
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """One a step."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Figures of the finished ones."""


class MicroBatch(NamedTuple):
    """What a process works on at once, on the CPU."""

    batch: Batch
    last_states: torch.Tensor
    """[T, H]: the target's last states."""
    idle: bool
    """There were fewer sequences in the step than shares: this is a repeated one that counts nothing, as the process must
    still take part in what all do together."""


class StepResult(NamedTuple):
    """What all processes know of a step."""

    loss: float
    top1_accuracy: float
    """Share of the rows that count where the first guess is the target's token."""
    tokens: int
    signal: int
    """0, or the largest of `_SAVE` and `_STOP` that a process was asked for."""


_SAVE, _STOP = 1, 2

_LONGEST_WAIT = timedelta(hours=6)
"""Of a process for another one, which downloads the target, fits the start or predicts alone: NCCL's own limit is ten minutes. A
process that ends does not leave others waiting so long: what launched them ends them."""


def finished_training(recipe: Recipe, run_dir: Path) -> dict[str, Any] | None:
    """The figures of a checkpoint that is up to date; None where there is something to train.

    Raises:
        UserError: no finished store.
    """
    directory = run_dir / "checkpoint"
    if not stage.finished(directory, _inputs(recipe, run_dir)):
        return None
    return stage.read(directory)["figures"]  # type: ignore[index]


def _store_dirs(recipe: Recipe, run_dir: Path) -> list[Path]:
    return [run_dir / "store", *(Path(folder.path) for folder in recipe.train.extra_stores)]


def _inputs(recipe: Recipe, run_dir: Path) -> str:
    """Digest of all that the checkpoint depends on."""
    stored = []
    for store_dir in _store_dirs(recipe, run_dir):
        record = stage.read(store_dir)
        if record is None:
            raise UserError(
                f"There is no finished store at {store_dir}. Run `draftsmith extract` with its recipe first."
            )
        stored.append(record["inputs"])
    return digest([stored, recipe.seed, recipe.train.inputs()])


def run_train(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/checkpoint` from `run_dir/store`; continue after a crash; nothing happens when it is finished.

    Started by `accelerate launch`, each of its processes calls this; the main one writes.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError: no finished store, or one that does not fit the recipe's target or layer ids; GPUs that torch cannot use.
        DraftsmithError: the loss or the gradient is no longer finite; a GPU's memory is used up.
        Stopped: SIGTERM came; a snapshot is written.
    """
    started = time.time()
    directory = run_dir / "checkpoint"
    if (done := finished_training(recipe, run_dir)) is not None:
        console.print(f"train: {directory} is up to date")
        return done

    require_usable_gpus()
    disable_malloc_trim()
    accelerator = _accelerator(recipe, run_dir)
    inputs = _inputs(recipe, run_dir)
    precision = recipe.train.precision_on(accelerator.device.type)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
    with accelerator.local_main_process_first():  # one process downloads or prepares it
        target = describe_target(prepare_target(recipe.target), recipe.target)
    store = Store(*_store_dirs(recipe, run_dir))
    store.identity.require_fields(
        {
            "target_revision": target.revision,
            "target_config_hash": target.config_hash,
            "tokenizer_hash": target.tokenizer_hash,
            "chat_template_hash": target.chat_template_hash,
        },
        store.directory,
        way_out="Extract for this recipe's target, or choose another run with `-s name=OTHER`.",
    )
    snapshot = _read_snapshot(directory, inputs)
    set_seed(recipe.seed)
    with _full_memory_explained(recipe, accelerator):
        run = _set_up(recipe, accelerator, target, store, snapshot)
    if accelerator.is_main_process:  # only now: a recipe that does not fit must not cost a checkpoint
        stage.claim(directory, fresh=snapshot is None)
    accelerator.wait_for_everyone()
    progress = Progress(**snapshot["progress"]) if snapshot else Progress()
    del snapshot
    _start_tracker(recipe, accelerator, run_dir)
    with _full_memory_explained(recipe, accelerator):
        _fit(run, recipe, directory, inputs, progress)
    published = progress.epochs[-1] if recipe.train.publish_epoch == "last" else _best(progress.epochs)
    figures = {
        "processes": accelerator.num_processes,
        "steps": progress.step,
        "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens / progress.seconds, 1) if progress.seconds else None,
        "epochs": progress.epochs,
        "published_epoch": published["epoch"],
        "predicted_acceptance_length": published["predicted"],
        "draft_vocabulary_coverage": _coverage(run),
        "parameters_trained": sum(p.numel() for p in run.loss.drafter.parameters() if p.requires_grad),
    }
    if accelerator.is_main_process:
        figures |= _more_predictions(run, recipe, directory, published)
        replace(Checkpoint.load(_epoch_folder(directory, published)), training=figures).save(directory)
        write_json(directory / LOSSES, progress.losses)
        sections = recipe.model_dump(mode="json", include={"seed", "target", "train"})
        stage.finish(directory, stage="train", inputs=inputs, recipe=sections, figures=figures, started=started)
        (directory / SNAPSHOT).unlink(missing_ok=True)
        _remove_epochs(directory, keep=progress.epochs[len(progress.epochs) - recipe.train.keep_last_epochs :])
    [figures] = broadcast_object_list([figures])
    accelerator.end_training()
    return figures


@contextmanager
def _full_memory_explained(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """What to do where a GPU's memory is used up."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        options = recipe.train
        raise DraftsmithError(
            f"The memory of {accelerator.device} is used up. Training works on tokens_per_step / (processes * gradient_accumulation_steps) = "
            f"{options.tokens_per_step // (accelerator.num_processes * options.gradient_accumulation_steps)} tokens at once on each GPU: a larger "
            "`train.gradient_accumulation_steps` makes it less and changes no result. `train.activation_checkpointing: true` and, with several "
            "GPUs, `train.fsdp: true` take less, too; `draftsmith run RECIPE --plan` says what takes how much. The same command "
            f"continues from the last snapshot. torch says: {str(error).splitlines()[0]}"
        ) from error


def _accelerator(recipe: Recipe, run_dir: Path) -> Accelerator:
    """What knows the processes and the tracker. Raises UserError where the tracker is not installed."""
    tracker = recipe.train.tracker
    modules = {"wandb": ["wandb"], "tensorboard": ["tensorboard", "tensorboardX"], "trackio": ["trackio"]}
    if tracker and not any(importlib.util.find_spec(module) for module in modules[tracker]):
        raise UserError(
            f"`train.tracker: {tracker}` needs the package {tracker}, which is not installed: "
            "pip install 'draftsmith[trackers]'. Or leave the tracker out."
        )
    # Buffers are the target's and never change: sending them round in every step would be for nothing. Precision is the
    # recipe's, whatever the launcher says: see `_step`.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(
        log_with=tracker,
        project_dir=run_dir,
        mixed_precision="no",
        kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=_LONGEST_WAIT)],
    )


def _start_tracker(recipe: Recipe, accelerator: Accelerator, run_dir: Path) -> None:
    options = recipe.train
    if options.tracker == "wandb" and not (os.environ.get("WANDB_API_KEY") or _logged_in_to_wandb()):
        os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` uploads it later
    if options.tracker:
        arguments = {"wandb": {"name": recipe.name, "dir": str(run_dir)}, "trackio": {"name": recipe.name}}
        settings = {key: str(value) for key, value in options.model_dump(mode="json").items()}
        accelerator.init_trackers("draftsmith", config=settings, init_kwargs=arguments)


def _set_up(
    recipe: Recipe, accelerator: Accelerator, target: TargetInfo, store: Store, snapshot: dict[str, Any] | None
) -> Run:
    options = recipe.train
    kind = drafter_class(options.drafter.kind)
    saved = store.identity.layer_ids
    read = kind.layer_ids(options.drafter, saved, target.num_hidden_layers)
    missing = sorted({*read, target.num_hidden_layers} - {*saved})
    if missing:
        raise UserError(
            f"Training needs hidden states of layers {missing}, and the store at {store.directory} holds {list(saved)}. "
            "EAGLE-3's train.drafter.layer_ids must be a subset of these; the last layer's output, the teacher's, must be in "
            f"the store (extract.layer_ids with {target.num_hidden_layers})."
        )
    tensors = load_target_tensors(target.path)
    draft_token_ids = choose_draft_vocabulary(store.token_counts(target.vocab_size), options.drafter.draft_vocab_size)
    config = kind.make_config(options.drafter, target, read, len(draft_token_ids))
    drafter = kind.from_target(config, tensors, draft_token_ids).to(accelerator.device)
    steps = drafter.max_draft_tokens or options.ttt_steps
    columns, last_column = [saved.index(layer) for layer in read], saved.index(target.num_hidden_layers)
    rows = store.rows(held_out=False)
    if not rows:
        raise UserError(f"The store at {store.directory} has no training sequences; lower extract.held_out_fraction.")
    if snapshot:
        drafter.load_state_dict(snapshot["drafter"])
    elif accelerator.is_main_process:  # the others get its weights
        drafter.init_from_target(tensors, _OneByOne(store, rows, steps, columns, last_column, accelerator.device))
    for head in drafter.head_parameters():
        head.requires_grad_(options.train_lm_head)
    if options.activation_checkpointing:
        for module in drafter.recompute_modules():
            again = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
            module.forward = again
    loss = ChainLoss(
        drafter,
        teacher_norm=_final_norm(config, tensors),
        teacher_head=tensors.lm_head[draft_token_ids].float(),
        ttt_steps=steps,
        ttt_loss_decay=options.ttt_loss_decay,
        loss=options.loss,
        loss_vocab_size=options.loss_vocab_size,
        terms=drafter.loss_terms(options.drafter),
    ).to(accelerator.device)
    model = distributed.prepare(accelerator, loss, shard=options.fsdp)
    optimizers = _optimizers(recipe, drafter)
    average = {}
    if options.ema is not None:
        average = {name: p.detach().clone() for name, p in drafter.named_parameters() if p.requires_grad}
    if snapshot:
        for optimizer, saved in zip(optimizers, snapshot["optimizers"], strict=True):
            distributed.load_optimizer(optimizer, saved)
        for name, value in snapshot["average"].items():
            average[name].copy_(distributed.shard_like(value, average[name]))
    return Run(
        accelerator=accelerator,
        loss=loss,
        model=model,
        optimizers=optimizers,
        average=average,
        target=target,
        schedule=_schedule(recipe, [store.length(row) for row in rows], rows),
        store=store,
        held_out=store.rows(held_out=True),
        columns=columns,
        last_column=last_column,
    )


def _final_norm(config: DrafterConfig, tensors: TargetTensors) -> nn.RMSNorm:
    """The target's norm before its head."""
    norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data.copy_(tensors.final_norm_weight)
    return norm


def _logged_in_to_wandb() -> bool:
    """Whether `wandb login` was done here: it writes the key into ~/.netrc."""
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _optimizers(recipe: Recipe, drafter: Drafter) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the network, AdamW for norms, heads and tables (Jordan's advice, see muon.py)."""
    options = recipe.train
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    by_token = {id(p) for p in (*drafter.head_parameters(), *drafter.embedding_parameters())}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in by_token]
    if options.optimizer == "adamw":
        matrices = []
    chosen = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay))
    if matrices:
        dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
        optimizers.append(Muon(matrices, lr=options.muon_lr, weight_decay=options.weight_decay, dtype=dtype))
    return optimizers


def _schedule(recipe: Recipe, lengths: list[int], rows: list[int]) -> list[tuple[int, list[int]]]:
    """Every optimizer step of the run: epoch and store rows, all processes' together."""
    schedule = []
    for epoch in range(math.ceil(recipe.train.epochs)):
        steps = pack_epoch(lengths, tokens_per_step=recipe.train.tokens_per_step, seed=recipe.seed, epoch=epoch)
        share = min(1.0, recipe.train.epochs - epoch)
        schedule += [(epoch, [rows[i] for i in step]) for step in steps[: math.ceil(len(steps) * share)]]
    return schedule


def learning_rate_factor(step: int, total: int, warmup: float, schedule: str = "cosine") -> float:
    """Linear warm-up over the first `warmup` share of the steps, then what `train.lr_schedule` says; in (0, 1]."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    gone = (step - rising) / max(1, total - rising)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * gone)), "linear": 1 - gone, "constant": 1.0}[schedule]


def _fit(run: Run, recipe: Recipe, directory: Path, inputs: str, progress: Progress) -> None:
    """The loop: what is left of the schedule. `progress` is kept up to date; every epoch leaves its folder in `directory`."""
    options, accelerator = recipe.train, run.accelerator
    main = accelerator.is_main_process
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in run.optimizers]
    if progress.step and main:
        console.print(f"train: continuing {directory} at step {progress.step}")
    numbers = range(progress.step, len(run.schedule))

    def load(number: int) -> list[MicroBatch]:
        return _load(run, recipe, number)

    batches = _in_turn(load, numbers, accelerator.device)  # what comes out depends on the step's number alone
    with (
        _signals() as signals,
        Bar("train", total=len(run.schedule), unit="steps", done=progress.step, shown=main) as bar,
    ):
        for number in numbers:
            begun = time.perf_counter()
            epoch = run.schedule[number][0]
            factor = learning_rate_factor(number, len(run.schedule), options.warmup_ratio, options.lr_schedule)
            for optimizer, peak in zip(run.optimizers, peaks, strict=True):
                for group, lr in zip(optimizer.param_groups, peak, strict=True):
                    group["lr"] = lr * factor
            done = _step(run, recipe, number, next(batches), signals)
            progress.step = number + 1
            progress.losses.append(done.loss)
            progress.tokens += done.tokens
            progress.seconds += time.perf_counter() - begun

            figures = {
                "loss": done.loss,
                "top1_accuracy": done.top1_accuracy,
                "tokens_per_second": progress.tokens / progress.seconds,
            }
            accelerator.log(figures | {"learning_rate": options.lr * factor}, step=number)
            ended = progress.step == len(run.schedule) or run.schedule[progress.step][0] != epoch
            if ended:
                _finish_epoch(run, recipe, directory, progress, epoch)
                accelerator.log({"predicted_acceptance_length": _longest(progress.epochs[-1])}, step=number)
            predicted = _longest(progress.epochs[-1]) if progress.epochs else None
            shown = {} if predicted is None else {"predicted_acceptance": predicted}
            bar.update(progress.step, epoch=f"{epoch + 1}", **figures, **shown)
            if ended or done.signal or progress.step % options.save_every_steps == 0:
                _write_snapshot(directory, inputs, run, progress)
            if ended and main:  # what an earlier snapshot names is removed only after a later one
                last = progress.epochs[-max(1, options.keep_last_epochs) :]
                _remove_epochs(directory, keep=[_best(progress.epochs), *last])
            if done.signal == _STOP and progress.step < len(run.schedule):
                accelerator.wait_for_everyone()  # launchers end the others when one has ended: the main one still writes
                raise Stopped(
                    f"Stopped by SIGTERM after step {progress.step} of {len(run.schedule)}, which is saved in {directory}. Run the "
                    "same command again to continue."
                )


def _in_turn(load: Callable[[int], Loaded], items: Iterable[int], device: torch.device) -> Iterator[Loaded]:
    """`load(item)` of each, a few early where that does not take the cores from what computes."""
    return prefetched(load, items) if _loads_ahead(device) else map(load, items)


def _loads_ahead(device: torch.device) -> bool:
    """Whether the next steps are read, decompressed and packed beside the computation of this one: on a CPU that would take
    the cores that compute."""
    return device.type != "cpu"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the SIGUSR1s and SIGTERMs that come, instead of dying of them; in Python's main thread only."""
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _step(run: Run, recipe: Recipe, number: int, micro_batches: list[MicroBatch], signals: list[int]) -> StepResult:
    """One optimizer step, with all processes.

    Raises:
        DraftsmithError: the loss or the gradient is not finite.
    """
    options, accelerator, loss = recipe.train, run.accelerator, run.loss
    device, steps = accelerator.device, loss.ttt_steps
    # What the step's means are over: weights and counts of each chain step, and tokens, of everyone's micro-batches.
    sums = torch.zeros(2 * steps + 1, device=device)
    for one in micro_batches:
        if not one.idle:
            light = replace(one.batch, hidden_states=one.batch.hidden_states[:0]).to(device)
            tokens = torch.tensor([len(light.positions)], device=device)
            sums += torch.cat([loss.weights(light), light.loss_weights.sum(0), tokens])
    divisors, counts, all_tokens = accelerator.reduce(sums).split([steps, steps, 1])

    losses, right = [], torch.zeros((), device=device)
    for index, one in enumerate(micro_batches):
        share = accelerator.process_index * options.gradient_accumulation_steps + index
        torch.manual_seed(_step_seed(recipe, number, share))  # for a drafter that draws noise
        batch = one.batch.to(device)
        last_states = one.last_states.to(device, non_blocking=True)
        apart = distributed.no_grad_sync(run.model) if index + 1 < len(micro_batches) else nullcontext()
        with apart:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bfloat16"):
                output = run.model(batch, last_states, divisors)
            mine = output.loss * 0 if one.idle else output.loss
            # Gradients are averaged; the divisors are everyone's.
            accelerator.backward(mine * accelerator.num_processes)
        losses.append(mine.detach())
        if not one.idle:
            right += output.matches[0] * batch.loss_weights[:, 0].sum()
    norm = accelerator.clip_grad_norm_(run.loss.drafter.parameters(), options.max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    asked = 0
    while signals:
        asked = max(asked, _STOP if signals.pop() == signal.SIGTERM else _SAVE)
    report = accelerator.gather(torch.stack([*losses, right, right.new_tensor(asked)])[None])  # a row a process
    by_share, right, asked_of_any = report[:, :-2].flatten(), report[:, -2].sum(), report[:, -1].max()
    # All that waits for the device is here, before any weight changes: the optimizers then work beside the next step's start.
    _require_finite(run, number, by_share.tolist(), norm.item())
    done = StepResult(
        loss=by_share.sum().item(),
        top1_accuracy=(right / counts[0].clamp(min=1)).item(),
        tokens=int(all_tokens.item()),
        signal=int(asked_of_any.item()),
    )

    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if run.average:
        decay = min(options.ema or 0, (number + 1) / (number + 10))
        with torch.no_grad():
            for name, parameter in run.loss.drafter.named_parameters():
                if name in run.average:
                    run.average[name].lerp_(parameter, 1 - decay)
    return done


def _require_finite(run: Run, number: int, losses: list[float], norm: float) -> None:
    """Stop where a share's loss or the gradient's norm is not finite; what is saved is from before."""
    epoch, rows = run.schedule[number]
    bad = [share for share, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and math.isfinite(norm):
        return
    if bad:
        shares = balance_tokens([run.store.length(row) for row in rows], len(losses))
        rows = [row for share in bad for row in (rows[i] for i in shares[share])]
    what = f"The loss is {losses[bad[0]]}" if bad else f"The gradient's norm is {norm}"
    samples = ", ".join(str(run.store.sample_id(row)) for row in rows)
    raise DraftsmithError(
        f"{what} in step {number + 1} (epoch {epoch + 1}), on these samples of {run.store.directory}: {samples}. Training "
        "stopped; the last snapshot is from before and is kept. Lower the learning rates (train.lr, train.muon_lr), or look "
        "at these samples; the same command continues from the snapshot."
    )


def _load(run: Run, recipe: Recipe, number: int) -> list[MicroBatch]:
    """This process's shares of a step."""
    accelerator, options = run.accelerator, recipe.train
    rows = run.schedule[number][1]
    shares = balance_tokens(
        [run.store.length(row) for row in rows], accelerator.num_processes * options.gradient_accumulation_steps
    )
    first = accelerator.process_index * options.gradient_accumulation_steps
    loaded = []
    for share in shares[first : first + options.gradient_accumulation_steps]:
        mine = [rows[i] for i in share] or [min(rows, key=run.store.length)]
        batch, last_states = _batch(
            run.store,
            mine,
            run.loss.ttt_steps,
            run.columns,
            run.last_column,
            prompt_weight=options.prompt_loss_weight,
        )
        if options.state_dropout:
            states = batch.hidden_states.split([run.store.length(row) for row in mine])
            dropped = [
                _drop(of_row, options.state_dropout, _step_seed(recipe, number, row))
                for row, of_row in zip(mine, states, strict=True)
            ]
            batch = replace(batch, hidden_states=torch.cat(dropped))
        loaded.append(MicroBatch(batch, last_states, idle=not share))
    return loaded


def _drop(states: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Dropout that is the sequence's own, whichever process works on it."""
    kept = torch.rand(states.shape, generator=torch.Generator().manual_seed(seed)) >= share
    return states * kept / (1 - share)


def _step_seed(recipe: Recipe, step: int, part: int) -> int:
    """A step's randomness comes from its number, so that a continued run sees what an unbroken one does, and from which
    part of it is meant: a store row or a share."""
    return (recipe.seed * 1_000_003 + step) * 4099 + part


def _batch(
    store: Store, rows: list[int], steps: int, columns: list[int], last_column: int, *, prompt_weight: float = 0.0
) -> tuple[Batch, torch.Tensor]:
    """Store rows packed: what the drafter reads, and the target's last states, which teach."""
    everything = pack(store.read(rows), steps=steps, prompt_weight=prompt_weight)
    states = everything.hidden_states.float()
    return replace(everything, hidden_states=states).with_layers(columns), states[:, last_column]


@dataclass(frozen=True)
class _OneByOne:
    """Store rows as batches of one sequence on the device, read anew by everyone who goes through them."""

    store: Store
    rows: list[int]
    steps: int
    columns: list[int]
    last_column: int
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        def load(row: int) -> tuple[Batch, torch.Tensor]:
            return _batch(self.store, [row], self.steps, self.columns, self.last_column)

        for batch, last_states in _in_turn(load, self.rows, self.device):
            yield batch.to(self.device), last_states.to(self.device)


def _finish_epoch(run: Run, recipe: Recipe, directory: Path, progress: Progress, epoch: int) -> None:
    """Held-out acceptance after an epoch, and its weights in a folder; both of the averaged weights, where there are."""
    drafter, main = run.loss.drafter, run.accelerator.is_main_process
    k = min(recipe.train.predict_positions, drafter.max_draft_tokens or recipe.train.predict_positions)
    losses = [loss for (of_epoch, _), loss in zip(run.schedule, progress.losses, strict=False) if of_epoch == epoch]
    figures: dict[str, Any] = {"epoch": epoch + 1, "loss": round(sum(losses) / len(losses), 4), "predicted": {}}
    with _averaged(run):
        tensors = distributed.gather(drafter.state_dict(), keep=main)
        if run.held_out:
            with distributed.unsharded(run.model):
                # Each process predicts its share. Counts are whole numbers: their sums do not depend on who counted.
                mine = run.held_out[run.accelerator.process_index :: run.accelerator.num_processes]
                predicted = predict_acceptance(
                    drafter, _sequences(run, mine), run.columns, k=k, add_up=run.accelerator.reduce
                )
                figures["predicted"] = _rounded(predicted)
        if main:
            folder = _epoch_folder(directory, figures)
            folder.mkdir(exist_ok=True)
            target = {"name": run.target.name, "revision": run.target.revision, "config_hash": run.target.config_hash}
            Checkpoint(
                kind=recipe.train.drafter.kind,
                config=drafter.config.to_dict(),
                target=target,
                draft_token_ids=drafter.draft_token_ids,
                weights=in_memory(tensors),
                training=figures,
            ).save(folder)
    progress.epochs += broadcast_object_list([figures])


def _sequences(run: Run, rows: list[int]) -> Iterator[Sequence]:
    """Store rows, read one after the other."""
    return _in_turn(run.store.__getitem__, rows, run.accelerator.device)


@contextmanager
def _averaged(run: Run) -> Iterator[None]:
    """The drafter has its averaged weights for a while; nothing changes where none are kept."""

    def exchange() -> None:
        with torch.no_grad():
            for name, parameter in run.loss.drafter.named_parameters():
                if name in run.average:
                    current = parameter.clone()
                    parameter.copy_(run.average[name])
                    run.average[name].copy_(current)

    exchange()
    yield
    exchange()


def _longest(epoch: dict[str, Any]) -> float | None:
    """An epoch's predicted acceptance length at the largest K; None without held-out text."""
    lengths: list[float] = list(epoch["predicted"].values())
    return lengths[-1] if lengths else None


def _best(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """The epoch with the best predicted acceptance; the later one of equals, and the last where nothing is predicted."""
    return max(epochs, key=lambda epoch: (_longest(epoch) or 0.0, epoch["epoch"]))


def _epoch_folder(directory: Path, epoch: dict[str, Any]) -> Path:
    return directory / f"epoch-{epoch['epoch']}"


def _remove_epochs(directory: Path, *, keep: list[dict[str, Any]]) -> None:
    kept = [_epoch_folder(directory, epoch) for epoch in keep]
    for folder in directory.glob("epoch-*"):
        if folder not in kept:
            shutil.rmtree(folder)


def _more_predictions(run: Run, recipe: Recipe, directory: Path, published: dict[str, Any]) -> dict[str, Any]:
    """Figures that the recipe asks for, of the epoch that is published: acceptance at a temperature, and the speed-up that
    follows from step costs."""
    options = recipe.train
    more: dict[str, Any] = {}
    lengths = {int(k): length for k, length in published["predicted"].items()}
    if options.step_costs:
        more["predicted_speedup"] = _rounded(predicted_speedup(lengths, options.step_costs))
    if options.predict_temperature and lengths:
        device = run.accelerator.device
        tensors = load_target_tensors(run.target.path)
        saved = Checkpoint.load(_epoch_folder(directory, published))
        kind = drafter_class(saved.kind)
        drafter = kind.from_target(kind.config_class.from_dict(saved.config), tensors, saved.draft_token_ids)
        drafter.load_state_dict(saved.tensors)
        found = predict_sampled_acceptance(
            drafter.to(device), _sequences(run, run.held_out), run.columns, k=max(lengths), temperature=options.predict_temperature,
            last_column=run.last_column, norm=_final_norm(drafter.config, tensors).to(device),
            head=tensors.lm_head.float().to(device),
        )  # fmt: skip
        more["predicted_at_temperature"] = {
            "temperature": options.predict_temperature,
            "greedy_drafts": _rounded(found.greedy_drafts),
            "sampled_drafts": _rounded(found.sampled_drafts),
        }
    return more


def _rounded(by_k: dict[int, float]) -> dict[str, float]:
    return {str(k): round(value, 4) for k, value in by_k.items()}


def _coverage(run: Run) -> float:
    """Share of the held-out response tokens that the drafter can propose."""
    known = torch.zeros(run.loss.drafter.config.vocab_size, dtype=torch.bool)
    known[run.loss.drafter.draft_token_ids.cpu()] = True
    tokens = run.store.response_tokens(held_out=True)
    return round(known[tokens].float().mean().item(), 4) if len(tokens) else math.nan


def _write_snapshot(directory: Path, inputs: str, run: Run, progress: Progress) -> None:
    """Replace the snapshot; all processes gather, the main one writes. Everything is whole and in full precision."""
    main = run.accelerator.is_main_process
    everything = {
        "inputs": inputs,
        "progress": vars(progress),
        "drafter": distributed.gather(run.loss.drafter.state_dict(), keep=main),
        "optimizers": [distributed.gather_optimizer(optimizer, keep=main) for optimizer in run.optimizers],
        "average": distributed.gather(run.average, keep=main),
    }
    if main:
        temporary = directory / (SNAPSHOT + ".tmp")
        torch.save(everything, temporary)
        temporary.replace(directory / SNAPSHOT)


def _read_snapshot(directory: Path, inputs: str) -> dict[str, Any] | None:
    """The last snapshot of a run with these very inputs, or None."""
    path = directory / SNAPSHOT
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state if state["inputs"] == inputs else None
