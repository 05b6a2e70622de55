"""The train stage: store to checkpoint."""

from __future__ import annotations

import math
import netrc
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from draftsmith import stage
from draftsmith.checkpoint import Checkpoint
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.errors import UserError
from draftsmith.progress import Bar, console
from draftsmith.recipe import Recipe, digest
from draftsmith.store import Sequence, Store, prefetched
from draftsmith.target import TargetInfo, describe_target, load_target_tensors, prepare_target
from draftsmith.train.acceptance import predict_acceptance
from draftsmith.train.loss import ChainLoss
from draftsmith.train.muon import Muon
from draftsmith.train.packing import pack, plan_epoch
from draftsmith.train.vocabulary import choose_draft_vocabulary

SNAPSHOT = "resume.pt"
"""Beside the checkpoint while training runs: everything needed to go on after a crash."""


@dataclass
class Run:
    """What the loop works with; built by `_set_up`."""

    accelerator: Accelerator
    loss: ChainLoss
    optimizers: list[torch.optim.Optimizer]
    plan: list[tuple[int, list[int]]]
    """One entry an optimizer step: epoch, store rows."""
    store: Store
    held_out: list[Sequence]
    columns: list[int]
    """Which of the store's states the drafter reads."""
    last_column: int
    """Which of the store's states is the target's last, for the teacher."""


def run_train(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir/checkpoint` from `run_dir/store`; continue after a crash; nothing happens when it is finished.

    Returns:
        The figures of `stage.json`.

    Raises:
        UserError: no finished store, or one that does not fit the recipe's target or layer ids.
    """
    started = time.time()
    directory = run_dir / "checkpoint"
    store_dirs = [run_dir / "store", *(Path(folder.path) for folder in recipe.train.more_stores)]
    stored = []
    for store_dir in store_dirs:
        record = stage.read(store_dir)
        if record is None:
            raise UserError(
                f"There is no finished store at {store_dir}. Run `draftsmith extract` with its recipe first."
            )
        stored.append(record["inputs"])
    inputs = digest([stored, recipe.seed, recipe.train.model_dump(mode="json")])
    if stage.finished(directory, inputs):
        console.print(f"train: {directory} is up to date")
        return stage.read(directory)["figures"]  # type: ignore[index]

    target = describe_target(prepare_target(recipe.target), recipe.target)
    store = Store(*store_dirs)
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
    resume = _read_snapshot(directory, inputs)
    set_seed(recipe.seed)
    run = _set_up(recipe, target, store, run_dir, resuming=resume is not None)
    stage.claim(directory, fresh=resume is None)  # only now: a recipe that does not fit must not cost a checkpoint
    figures = _fit(run, recipe, directory, inputs, resume)
    if run.accelerator.is_main_process:
        drafter = run.loss.drafter
        Checkpoint(
            kind=recipe.train.drafter.kind,
            config=drafter.config.to_dict(),
            target={"name": target.name, "revision": target.revision, "config_hash": target.config_hash},
            draft_token_ids=drafter.draft_token_ids,
            tensors=drafter.state_dict(),
            training=figures,
        ).save(directory)
        (directory / SNAPSHOT).unlink(missing_ok=True)
        sections = recipe.model_dump(mode="json", include={"seed", "target", "train"})
        stage.finish(directory, stage="train", inputs=inputs, recipe=sections, figures=figures, started=started)
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    return figures


def _set_up(recipe: Recipe, target: TargetInfo, store: Store, run_dir: Path, *, resuming: bool) -> Run:
    options = recipe.train
    if options.tracker == "wandb" and not (os.environ.get("WANDB_API_KEY") or _logged_in_to_wandb()):
        os.environ.setdefault("WANDB_MODE", "offline")  # `wandb sync` uploads it later
    accelerator = Accelerator(log_with=options.tracker, project_dir=run_dir)
    if options.tracker:
        wandb_arguments = {"name": recipe.name, "dir": str(run_dir)}
        settings = {key: str(value) for key, value in options.model_dump(mode="json").items()}
        accelerator.init_trackers("draftsmith", config=settings, init_kwargs={"wandb": wandb_arguments})

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
    drafter = kind.make(config, tensors, draft_token_ids)
    steps = drafter.max_steps or options.chain_steps
    columns, last_column = [saved.index(layer) for layer in read], saved.index(target.num_hidden_layers)
    rows = store.rows(held_out=False)
    if not rows:
        raise UserError(f"The store at {store.directory} has no training sequences; lower extract.held_out_fraction.")
    if len(rows) < accelerator.num_processes:
        raise UserError(
            f"The store at {store.directory} has {len(rows)} training sequences, fewer than the {accelerator.num_processes} "
            "training processes. Extract more, or train with fewer processes."
        )
    if not resuming:
        drafter.start(tensors, (_batch(store, [row], steps, columns, last_column) for row in rows))
    for head in drafter.head_parameters():
        head.requires_grad_(options.train_lm_head)
    norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data.copy_(tensors.final_norm_weight)
    loss = ChainLoss(
        drafter,
        teacher_norm=norm,
        teacher_head=tensors.lm_head[draft_token_ids].float(),
        chain_steps=steps,
        chain_decay=options.chain_decay,
        loss_vocab_size=options.loss_vocab_size,
        terms=drafter.loss_terms(options.drafter),
    )
    return Run(
        accelerator=accelerator,
        loss=loss.to(accelerator.device),
        optimizers=_optimizers(recipe, drafter),
        plan=_plan(recipe, [store.length(row) for row in rows], rows, accelerator.num_processes),
        store=store,
        held_out=[store[row] for row in store.rows(held_out=True)],
        columns=columns,
        last_column=last_column,
    )


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
    by_token = {id(p) for p in (*drafter.head_parameters(), *drafter.table_parameters())}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in by_token]
    if options.optimizer == "adamw":
        matrices = []
    chosen = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay))
    if matrices:
        optimizers.append(Muon(matrices, lr=options.muon_lr, weight_decay=options.weight_decay))
    return optimizers


def _plan(recipe: Recipe, lengths: list[int], rows: list[int], processes: int) -> list[tuple[int, list[int]]]:
    """Every optimizer step of the run: epoch and store rows, all processes' together."""
    plan = []
    for epoch in range(math.ceil(recipe.train.epochs)):
        steps = plan_epoch(
            lengths,
            tokens_per_step=recipe.train.tokens_per_step * processes,
            processes=processes,
            seed=recipe.seed,
            epoch=epoch,
        )
        share = min(1.0, recipe.train.epochs - epoch)
        plan += [(epoch, [rows[i] for i in step]) for step in steps[: math.ceil(len(steps) * share)]]
    return plan


def learning_rate_factor(step: int, total: int, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of the steps, then a cosine to zero; in (0, 1]."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _fit(run: Run, recipe: Recipe, directory: Path, inputs: str, resume: dict[str, Any] | None) -> dict[str, Any]:
    """The loop: one pass over the plan, held-out acceptance after each epoch."""
    options, accelerator = recipe.train, run.accelerator
    model = accelerator.prepare_model(run.loss)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in run.optimizers]
    epochs: list[dict[str, Any]] = []
    first, tokens, seconds = 0, 0, 0.0
    if resume:
        run.loss.drafter.load_state_dict(resume["drafter"])
        for optimizer, saved in zip(run.optimizers, resume["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, tokens, seconds, epochs = resume["step"], resume["tokens"], resume["seconds"], resume["epochs"]
        console.print(f"train: continuing {directory} at step {first}")

    losses: list[float] = resume["losses"] if resume else []
    numbers = range(first, len(run.plan))

    def load(number: int) -> tuple[Batch, torch.Tensor]:
        return _load(run, recipe, step=number)

    # Beside a GPU's computation: reading, decompressing and packing the next steps. On a CPU that would take the cores
    # that compute. What comes out depends on the step's number alone.
    on_cpu = accelerator.device.type == "cpu"
    batches = map(load, numbers) if on_cpu else prefetched(load, numbers)
    with Bar("train", total=len(run.plan), unit="steps", done=first) as bar:
        for number in numbers:
            begun = time.perf_counter()
            epoch = run.plan[number][0]
            factor = learning_rate_factor(number, len(run.plan), options.warmup)
            for optimizer, peak in zip(run.optimizers, peaks, strict=True):
                for group, lr in zip(optimizer.param_groups, peak, strict=True):
                    group["lr"] = lr * factor
            batch, last_states = next(batches)
            batch = batch.to(accelerator.device)
            last_states = last_states.to(accelerator.device, non_blocking=True)
            torch.manual_seed(_step_seed(recipe, number, accelerator.process_index))  # for a drafter that draws noise
            output = model(batch, last_states)
            accelerator.backward(output.loss)
            accelerator.clip_grad_norm_(run.loss.drafter.parameters(), options.max_grad_norm)
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(output.loss.item())
            tokens += len(batch.positions) * accelerator.num_processes
            seconds += time.perf_counter() - begun

            figures = {"loss": losses[-1], "match_1": output.matches[0].item(), "tokens_per_second": tokens / seconds}
            accelerator.log(figures | {"learning_rate": options.lr * factor}, step=number)
            if number + 1 == len(run.plan) or run.plan[number + 1][0] != epoch:
                epochs.append(_finish_epoch(run, recipe, epoch, losses))
                losses = []
                longest = list(epochs[-1]["predicted"].values())[-1:]  # at the largest K
                accelerator.log({"predicted_acceptance_length": longest[0] if longest else None}, step=number)
            predicted = list(epochs[-1]["predicted"].values()) if epochs else []
            shown = {"predicted_acceptance": predicted[-1]} if predicted else {}
            bar.update(number + 1, epoch=f"{epoch + 1}", **figures, **shown)
            if (number + 1) % options.save_every_steps == 0 and accelerator.is_main_process:
                state = {"step": number + 1, "tokens": tokens, "seconds": seconds, "epochs": epochs, "losses": losses}
                _write_snapshot(directory, inputs, run, state)
    return {
        "steps": len(run.plan),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "epochs": epochs,
        "predicted_acceptance_length": epochs[-1]["predicted"],
        "draft_vocabulary_coverage": _coverage(run),
        "parameters_trained": sum(p.numel() for p in run.loss.drafter.parameters() if p.requires_grad),
    }


def _load(run: Run, recipe: Recipe, *, step: int) -> tuple[Batch, torch.Tensor]:
    """This process's share of a step, on the CPU: the drafter's batch, and the target's last states [T, H]."""
    accelerator, options = run.accelerator, recipe.train
    mine = run.plan[step][1][accelerator.process_index :: accelerator.num_processes]
    batch, last_states = _batch(
        run.store, mine, run.loss.chain_steps, run.columns, run.last_column, prompt_weight=options.prompt_loss_weight
    )
    if options.state_dropout:
        generator = torch.Generator().manual_seed(_step_seed(recipe, step, accelerator.process_index))
        kept = torch.rand(batch.hidden_states.shape, generator=generator) >= options.state_dropout
        batch = replace(batch, hidden_states=batch.hidden_states * kept / (1 - options.state_dropout))
    return batch, last_states


def _step_seed(recipe: Recipe, step: int, process: int) -> int:
    """A step's randomness comes from its number alone, so that a continued run sees what an unbroken one does."""
    return (recipe.seed * 1_000_003 + step) * 4099 + process


def _batch(
    store: Store, rows: list[int], steps: int, columns: list[int], last_column: int, *, prompt_weight: float = 0.0
) -> tuple[Batch, torch.Tensor]:
    """Store rows packed: what the drafter reads, and the target's last states, which teach."""
    everything = pack(store.read(rows), steps=steps, prompt_weight=prompt_weight)
    states = everything.hidden_states.float()
    return replace(everything, hidden_states=states).with_layers(columns), states[:, last_column]


def _finish_epoch(run: Run, recipe: Recipe, epoch: int, losses: list[float]) -> dict[str, Any]:
    drafter = run.loss.drafter
    k = min(recipe.train.predict_positions, drafter.max_steps or recipe.train.predict_positions)
    predicted = predict_acceptance(drafter, run.held_out, run.columns, k=k) if run.held_out else {}
    return {
        "epoch": epoch + 1,
        "loss": round(sum(losses) / len(losses), 4),
        "predicted": {str(k): round(value, 4) for k, value in predicted.items()},
    }


def _coverage(run: Run) -> float:
    """Share of the held-out response tokens that the drafter can propose."""
    known = torch.zeros(run.loss.drafter.config.vocab_size, dtype=torch.bool)
    known[run.loss.drafter.draft_token_ids.cpu()] = True
    tokens = [s.token_ids[s.loss_mask].long() for s in run.held_out]
    return round(known[torch.cat(tokens)].float().mean().item(), 4) if tokens else math.nan


def _write_snapshot(directory: Path, inputs: str, run: Run, state: dict[str, Any]) -> None:
    everything = state | {
        "inputs": inputs,
        "drafter": run.loss.drafter.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }
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
