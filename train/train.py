"""The train stage: store to checkpoint.

A run is a schedule of optimizer steps, a pure function of the recipe and the store. The sequences of a step are divided among the
micro-batches of all processes, and the loss is divided by the weights of the whole step, so a step's loss is the same on any
number of processes. All randomness depends on the step's number. A snapshot is therefore complete: weights, optimizer states and
the number of the step decide everything that follows.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.distributed.tensor import DTensor

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.config.training import TrainConfig
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_json
from draftsmith.run.cuda import native_bfloat16, require_usable_gpus
from draftsmith.run.errors import DraftsmithError, Stopped, UserError
from draftsmith.run.process import disable_malloc_trim
from draftsmith.run.progress import Bar, console
from draftsmith.store.reader import Store
from draftsmith.target.hub import is_snapshot
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.shards import missing_shards
from draftsmith.train import distributed
from draftsmith.train.data import MicroBatch, TrainingData, step_seed, store_dirs
from draftsmith.train.epochs import (
    PREDICTIONS,
    best_epoch,
    draft_vocabulary_coverage,
    epoch_folder,
    finish_epoch,
    longest_prediction,
    remove_epochs,
    requested_predictions,
)
from draftsmith.train.optimizers import learning_rate_factor, set_learning_rates
from draftsmith.train.packing import balance_tokens
from draftsmith.train.setup import Run, make_accelerator, set_up
from draftsmith.train.signals import on_signal, without_saving
from draftsmith.train.snapshot import SNAPSHOT, read_snapshot, write_snapshot
from draftsmith.train.tracking import RUN_ID, tracking

LOSSES = "losses.json"
"""Beside the finished checkpoint: the loss of every step."""


# ---- the stage ----


def finished_training(recipe: Recipe, run_dir: Path) -> dict[str, Any] | None:
    """The figures of a checkpoint that is up to date; None where there is something to train or to predict. Prints nothing.
    Raises UserError: no finished store."""
    inputs, record = _inputs(recipe, run_dir), stage.read(_stage(run_dir).directory)
    if record is None or record["inputs"] != inputs or not _is_predicted(recipe.train, record):
        return None
    done: dict[str, Any] = record["figures"]
    return done


def _is_predicted(options: TrainConfig, record: dict[str, Any]) -> bool:
    """Whether a finished checkpoint's figures have the predictions that are asked for (`TrainConfig.predictions`)."""
    there = TrainConfig().predictions() | record["recipe"]["train"]
    return all(there[name] == value for name, value in options.predictions().items())


def _stage(run_dir: Path) -> stage.StageRun:
    return stage.StageRun("train", run_dir / "checkpoint")


def _inputs(recipe: Recipe, run_dir: Path) -> str:
    """Digest of all that the checkpoint depends on; a finished one's own where only that one of the two recipes names the precision."""
    stored = []
    for store_dir in store_dirs(recipe, run_dir):
        record = stage.read(store_dir)
        if record is None:
            raise UserError(
                f"There is no finished store at {store_dir}. Run `draftsmith extract` with its recipe first."
            )
        stored.append(record["inputs"])
    options = recipe.train.inputs()
    finished = stage.read(_stage(run_dir).directory)
    if finished is not None and finished.get("stage") == "train":
        used = finished["recipe"]["train"].get("precision")
        for named in (None, used) if options["precision"] in (None, used) else ():
            if finished["inputs"] == (same := digest([stored, recipe.seed, options | {"precision": named}])):
                return same
    return digest([stored, recipe.seed, options])


@without_saving()
def run_train(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/checkpoint` from `run_dir/store`. Resumes an interrupted run; does nothing when the checkpoint is up to date.

    Under `accelerate launch`, every process calls this; the main one writes. SIGUSR1 saves a snapshot, and is ignored before the first
    step and after the last. Returns the figures of `stage.json`.

    Raises:
        UserError: no finished store, or one that does not fit the recipe's target or layer ids; GPUs that torch cannot use.
        DraftsmithError: the loss or the gradient is no longer finite; a GPU's memory is used up.
        Stopped: SIGTERM came; a snapshot is written.
    """
    this_stage, inputs = _stage(run_dir), _inputs(recipe, run_dir)
    directory = this_stage.directory
    done = this_stage.finished(inputs)
    if done is not None and finished_training(recipe, run_dir) is not None:
        return done
    require_usable_gpus()
    disable_malloc_trim()
    # NVIDIA's containers make float32 products TF32, which the least squares of the initialization and Muon's Gram matrices cannot do with.
    torch.set_float32_matmul_precision("highest")
    accelerator = make_accelerator(recipe, run_dir)
    with accelerator.local_main_process_first():  # one process downloads or prepares it
        target = describe_target(prepare_target(recipe.target, weights="shared"), recipe.target)
    way_out = "Extract for this recipe's target, or choose another run with `-s name=OTHER`."
    if not is_snapshot(target.path) and (missing := missing_shards(target.path)):
        way_out = (
            f"The target's folder {target.path} lacks {len(missing)} of its shards, and of a folder that is no commit in the Hub's cache all "
            "are needed to tell whether it is the same target: copy the rest, or name the target by its Hub id, of which training downloads "
            "only the shards that it reads."
        )
    store = Store(*store_dirs(recipe, run_dir))
    store.identity.require_fields(
        {
            "target_revision": target.revision,
            "target_config_hash": target.config_hash,
            "tokenizer_hash": target.tokenizer_hash,
            "chat_template_hash": target.chat_template_hash,
        },
        store.directory,
        way_out=way_out,
    )
    if done is not None:
        return _predicted_anew(this_stage, done, recipe, accelerator, target, store)
    snapshot, asked = read_snapshot(directory, inputs), recipe
    recipe = _in_precision(recipe, snapshot, accelerator)
    set_seed(recipe.seed)
    with _explain_full_memory(recipe, accelerator):
        run = set_up(recipe, accelerator, target, store, snapshot, directory=directory, inputs=inputs)
    if accelerator.is_main_process:  # only now: a recipe that does not fit must not cost a checkpoint
        if snapshot is None and (why := _why_again(asked, directory)):
            console.print(f"train: {why}; training starts from the beginning", highlight=False, soft_wrap=True)
        this_stage.claim(fresh=snapshot is None)
    accelerator.wait_for_everyone()
    del snapshot
    with tracking(recipe, accelerator, run_dir, directory), _explain_full_memory(recipe, accelerator):
        _fit(run)

    progress = run.progress
    published = progress.epochs[-1] if recipe.train.publish_epoch == "last" else best_epoch(progress.epochs)
    figures = {
        "processes": accelerator.num_processes,
        "steps": progress.step,
        "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens / progress.seconds, 1) if progress.seconds else None,
        "epochs": progress.epochs,
        "published_epoch": published["epoch"],
        "predicted_acceptance_length": published["predicted"],
        "text_sampling": None if (sampled := store.identity.sampled_with) is None else sampled.record(),
        "draft_vocabulary_coverage": draft_vocabulary_coverage(run),
        "parameters_trained": _parameters_trained(run),
    }
    if accelerator.is_main_process:
        figures |= requested_predictions(run.data, target, epoch_folder(directory, published), published["predicted"])
        replace(Checkpoint.load(epoch_folder(directory, published)), training=figures).save(directory)
        write_json(directory / LOSSES, progress.losses)
        sections = recipe.model_dump(mode="json", include={"seed", "target", "train"})
        this_stage.finish(inputs, figures, recipe=sections)
        for file in (SNAPSHOT, RUN_ID):
            (directory / file).unlink(missing_ok=True)
        remove_epochs(directory, keep=progress.epochs[max(0, len(progress.epochs) - recipe.train.keep_last_epochs) :])
    [figures] = broadcast_object_list([figures])
    accelerator.end_training()
    return figures


def _in_precision(recipe: Recipe, snapshot: dict[str, Any] | None, accelerator: Accelerator) -> Recipe:
    """The recipe with the precision that it leaves open: that of the interrupted training, which may have been on other hardware, or else the
    same for all processes."""
    before = None
    if snapshot is not None:  # one of 0.1.0 does not have it: then it went by the type of device alone
        before = snapshot.get("precision", "bfloat16" if accelerator.device.type == "cuda" else "float32")
    native = torch.tensor([native_bfloat16(accelerator.device.type)], device=accelerator.device)
    every = bool(accelerator.gather(native.int()).all())
    precision = recipe.train.precision or before or recipe.train.precision_on(native_bfloat16=every)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})


def _why_again(recipe: Recipe, directory: Path) -> str | None:
    """What the checkpoint's folder has that does not fit the recipe; None if it has nothing."""
    if (record := stage.read(directory)) is not None:
        there, now = record["recipe"]["train"], recipe.train.model_dump(mode="json")
        if recipe.train.precision is None:  # the record has what was used
            del now["precision"]
        names = [f"train.{name}" for name, value in now.items() if there.get(name) != value]
        return f"the drafter in {directory} is of another {' and '.join(names) or 'store or seed'}"
    if (directory / SNAPSHOT).exists():
        return f"the snapshot in {directory} is of another recipe or store"
    return None


def _predicted_anew(
    this_stage: stage.StageRun,
    figures: dict[str, Any],
    recipe: Recipe,
    accelerator: Accelerator,
    target: TargetInfo,
    store: Store,
) -> dict[str, Any]:
    """Figures of a finished drafter with the predictions that the recipe asks for now (`TrainConfig.predictions`), which are recorded."""
    if accelerator.is_main_process:
        saved, layers = Checkpoint.load(this_stage.directory), store.identity.layer_ids
        columns = [layers.index(layer) for layer in saved.drafter_config().layer_ids]
        data = TrainingData(recipe, accelerator, store, columns, layers.index(target.num_hidden_layers), ttt_steps=1)
        figures = {name: value for name, value in figures.items() if name not in PREDICTIONS}
        figures |= requested_predictions(data, target, this_stage.directory, figures["predicted_acceptance_length"])
        replace(saved, training=figures).save_record(this_stage.directory)
        record = stage.read(this_stage.directory)
        assert record is not None
        sections = recipe.model_dump(mode="json", include={"seed", "target", "train"})
        sections["train"]["precision"] = record["recipe"]["train"]["precision"]
        this_stage.revise(figures, recipe=sections)
    [figures] = broadcast_object_list([figures])
    accelerator.end_training()
    return figures


@contextmanager
def _explain_full_memory(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """Say what to do where a GPU's memory is used up."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        options = recipe.train
        tokens = options.tokens_per_step // (accelerator.num_processes * options.gradient_accumulation_steps)
        raise DraftsmithError(
            f"The memory of {accelerator.device} is used up. Each GPU trains on tokens_per_step / (processes * "
            f"gradient_accumulation_steps) = {tokens} tokens at once: a larger `train.gradient_accumulation_steps` lowers that "
            "without changing any result. `train.activation_checkpointing: true` and, with several GPUs, `train.fsdp: true` also "
            "save memory; `draftsmith run RECIPE --plan` estimates what takes how much. Run the same command again to continue "
            f"from the last snapshot. torch says: {str(error).splitlines()[0]}"
        ) from error


# ---- the loop ----


class StepResult(NamedTuple):
    """What all processes know of a step."""

    loss: float
    top1_accuracy: float
    """Share of the weighted rows where the first draft token is the target's."""
    tokens: int
    request: int
    """0, or the larger of `_SAVE` and `_STOP` that a process was asked for by a signal."""


_SAVE, _STOP = 1, 2
_SAVE_SECONDS = 300  # between snapshots, unless the recipe counts steps
_SAVE_SHARE = 0.01  # of the time, at most


def _fit(run: Run) -> None:
    """Train what is left of the schedule. Keeps `run.progress` up to date; every epoch leaves its folder in `run.directory`."""
    options, accelerator, progress, schedule = run.recipe.train, run.accelerator, run.progress, run.schedule
    main = accelerator.is_main_process
    if main:
        console.print(f"train: {_what_is_trained(run)}", highlight=False, soft_wrap=True)
    if progress.step and main:
        console.print(f"train: continuing {run.directory} at step {progress.step}")
    if main and (warning := _few_sequences(run)):
        console.print(f"train: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    numbers = range(progress.step, len(schedule))
    # What a step draws depends on its number alone, so steps may be loaded ahead.
    loaded = run.data.in_order(lambda number: run.data.micro_batches(number, schedule[number].rows), numbers)
    received: list[int] = []
    saved, pause = time.monotonic(), float(_SAVE_SECONDS)
    with (
        on_signal(received.append),
        Bar("train", total=len(schedule), unit="steps", done=progress.step, shown=main) as bar,
    ):
        for number in numbers:
            begun = time.perf_counter()
            epoch = schedule[number].epoch
            factor = learning_rate_factor(number, len(schedule), options.warmup_ratio, options.lr_schedule)
            set_learning_rates(run.optimizers, factor)
            if main and options.save_every_steps is None and time.monotonic() - saved >= pause:
                received.append(signal.SIGUSR1)  # all processes save after the same step
            done = _step(run, number, next(loaded), received)
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
            ended = progress.step == len(schedule) or schedule[progress.step].epoch != epoch
            if ended:
                finish_epoch(run, epoch)
                accelerator.log({"predicted_acceptance_length": longest_prediction(progress.epochs[-1])}, step=number)
            predicted = longest_prediction(progress.epochs[-1]) if progress.epochs else None
            shown = {} if predicted is None else {"predicted_acceptance": predicted}
            bar.update(progress.step, epoch=f"{epoch + 1}", **figures, **shown)
            if ended or done.request or progress.step % (options.save_every_steps or math.inf) == 0:
                writing = time.monotonic()
                write_snapshot(run)
                saved = time.monotonic()
                pause = max(_SAVE_SECONDS, (saved - writing) / _SAVE_SHARE)
            if ended and main:  # only now: until this snapshot, the one before may name them
                last = progress.epochs[-max(1, options.keep_last_epochs) :]
                remove_epochs(run.directory, keep=[best_epoch(progress.epochs), *last])
            if done.request == _STOP and progress.step < len(schedule):
                accelerator.wait_for_everyone()  # launchers end all processes when one has ended: the main one still writes
                raise Stopped(
                    f"Stopped by SIGTERM after step {progress.step} of {len(schedule)}, which is saved in {run.directory}. Run "
                    "the same command again to continue."
                )


def _parameters_trained(run: Run) -> int:
    return sum(p.numel() for p in run.loss.drafter.parameters() if p.requires_grad)


def _what_is_trained(run: Run) -> str:
    """What a run's speed depends on, and the recipe may leave to the machine."""
    tokens = sum(run.data.store.length(row) for step in run.schedule for row in step.rows)
    processes, device = run.accelerator.num_processes, run.accelerator.device.type
    where = device if processes == 1 else f"{processes} processes on {device}"
    return f"{_parameters_trained(run) / 1e6:.2f} M parameters, {tokens:,} tokens, in {run.recipe.train.precision} on {where}"


def _few_sequences(run: Run) -> str | None:
    """What to say where most steps leave a micro-batch without a sequence: it repeats one, and counts for nothing."""
    processes, micro_batches = run.accelerator.num_processes, run.recipe.train.gradient_accumulation_steps
    shares = processes * micro_batches
    rows = [row for step in run.schedule for row in step.rows]
    sequences = len(rows) / len(run.schedule)
    if sequences >= shares:
        return None
    enough = math.ceil((shares + 1) * sum(map(run.data.store.length, rows)) / len(rows))
    return (
        f"a step has {sequences:.1f} sequences on average and {shares} micro-batches (processes * gradient_accumulation_steps = {processes} * "
        f"{micro_batches}); those without a sequence compute in vain. With a `train.tokens_per_step` of about {enough} each has one, and "
        "the run has fewer and larger steps; fewer processes or micro-batches change no result."
    )


def _step(run: Run, number: int, micro_batches: list[MicroBatch], signals: list[int]) -> StepResult:
    """One optimizer step, with all processes. Takes out the `signals` received since the last step.
    Raises DraftsmithError: the loss or the gradient is not finite, or there is no gradient."""
    options, accelerator, loss = run.recipe.train, run.accelerator, run.loss
    device, steps = accelerator.device, loss.ttt_steps
    # The step's means are over all processes: sums of the loss's divisors and of the row weights by chain step, and tokens.
    sums = torch.zeros(2 * steps + 1, device=device)
    for micro_batch in micro_batches:
        if not micro_batch.idle:
            batch = replace(micro_batch.batch, hidden_states=micro_batch.batch.hidden_states[:0], last_states=None).to(
                device
            )
            tokens = torch.tensor([len(batch.positions)], device=device)
            sums += torch.cat([loss.weights(batch), batch.loss_weights.sum(0), tokens])
    divisors, row_weights, all_tokens = accelerator.reduce(sums).split([steps, steps, 1])

    losses, correct = [], torch.zeros((), device=device)
    for index, micro_batch in enumerate(micro_batches):
        share = accelerator.process_index * options.gradient_accumulation_steps + index
        torch.manual_seed(step_seed(run.recipe.seed, number, share))  # for drafters that draw noise
        batch = run.data.on_device(micro_batch.batch)
        accumulating = index + 1 < len(micro_batches)
        with distributed.no_grad_sync(run.model) if accumulating else nullcontext():
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bfloat16"):
                output = run.model(batch, divisors)
            local_loss = output.loss * 0 if micro_batch.idle else output.loss
            # Processes average their gradients, and the divisors are sums over processes.
            accelerator.backward(local_loss * accelerator.num_processes)
        losses.append(local_loss.detach())
        if not micro_batch.idle:
            correct += output.matches[0] * batch.loss_weights[:, 0].sum()
    groups = [group["params"] for optimizer in run.optimizers for group in optimizer.param_groups]
    if all(parameter.grad is None for group in groups for parameter in group):
        raise DraftsmithError(
            f"No gradient has reached the drafter in step {number + 1}: nothing would be learned. torch {torch.__version__} and this way of "
            "training do not fit together; with several GPUs, `train.fsdp: false` is another."
        )
    norm = accelerator.clip_grad_norm_(loss.drafter.parameters(), options.max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    request = 0
    while signals:
        request = max(request, _STOP if signals.pop() == signal.SIGTERM else _SAVE)
    report = accelerator.gather(torch.stack([*losses, correct, correct.new_tensor(request)])[None])  # a row a process
    by_share, correct, any_request = report[:, :-2].flatten(), report[:, -2].sum(), report[:, -1].max()
    # All waiting for the device is here, before any weight changes: the optimizers then run during the next step's start.
    _require_finite(run, number, by_share.tolist(), norm.item())
    result = StepResult(
        loss=by_share.sum().item(),
        top1_accuracy=(correct / row_weights[0].clamp(min=1)).item(),
        tokens=int(all_tokens.item()),
        request=int(any_request.item()),
    )
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.average.update(number)
    return result


def _require_finite(run: Run, number: int, losses: list[float], norm: float) -> None:
    """Stop where the loss of a micro-batch or the gradient's norm is not finite; the last snapshot is from before."""
    bad = [share for share, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and math.isfinite(norm):
        return
    store = run.data.store
    epoch, rows = run.schedule[number]
    if bad:
        shares = balance_tokens([store.length(row) for row in rows], len(losses))
        rows = [row for share in bad for row in (rows[i] for i in shares[share])]
    what = f"The loss is {losses[bad[0]]}" if bad else f"The gradient's norm is {norm}"
    samples = ", ".join(str(store.sample_id(row)) for row in rows)
    raise DraftsmithError(
        f"{what} in step {number + 1} (epoch {epoch + 1}), on these samples of {store.directory}: {samples}. Training "
        "stopped. Look at these samples, or lower the learning rates (train.lr, train.muon_lr), with which training starts again. The same "
        "recipe continues from the last snapshot, which is from before, and comes to this step again."
    )
