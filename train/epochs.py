"""What an epoch leaves: its predicted acceptance length, its weights in a folder, and whether they are kept and published."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from draftsmith.config.drafters import KINDS
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.norm import FinalNorm
from draftsmith.engine.speculation import target_arguments
from draftsmith.run.weights import in_memory
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train import distributed
from draftsmith.train.acceptance import predict_acceptance, predict_sampled_acceptance, predicted_speedup
from draftsmith.train.data import TrainingData
from draftsmith.train.setup import Run

PREDICTIONS = ("predicted_speedup", "predicted_at_temperature")
"""Figures that `requested_predictions` makes."""
Figures = dict[str, Any]
"""Of an epoch: `epoch` (from 1), `loss` (its mean), `predicted` ({K: acceptance length}, empty without held-out text)."""


def finish_epoch(run: Run, epoch: int) -> None:
    """Predict acceptance on held-out text, save the weights, and add the figures to the run's progress.

    Both are of the averaged weights, where `train.ema` asks for an average.
    """
    drafter, accelerator, options = run.loss.drafter, run.accelerator, run.recipe.train
    k = min(options.predict_positions, drafter.max_draft_tokens or options.predict_positions)
    losses = [loss for step, loss in zip(run.schedule, run.progress.losses, strict=False) if step.epoch == epoch]
    figures: Figures = {"epoch": epoch + 1, "loss": round(sum(losses) / len(losses), 4), "predicted": {}}
    with run.average.applied():
        tensors = distributed.gather(drafter.state_dict(), keep=accelerator.is_main_process)
        if run.data.store.rows(held_out=True):
            with distributed.unsharded(run.model):
                # Each process predicts its part. The counts are integers: their sums do not depend on who counted.
                batches = run.data.held_out(steps=k, part=accelerator.process_index, parts=accelerator.num_processes)
                predicted = predict_acceptance(drafter, batches, k=k, add_up=accelerator.reduce)
                figures["predicted"] = _rounded(predicted)
        if accelerator.is_main_process:
            if run.progress.state_scales:
                tensors = drafter.to_raw_states(tensors, run.progress.state_scales)
            folder = epoch_folder(run.directory, figures)
            folder.mkdir(exist_ok=True)
            target = {"name": run.target.name, "revision": run.target.revision, "config_hash": run.target.config_hash}
            if run.target.facts.family.states != "none":  # otherwise an engine would be refused, and a drafter is not
                method = KINDS[options.drafter.kind].serving.speculative
                trusted = run.target.trust_remote_code
                target |= target_arguments(run.target.path, method, trust_remote_code=trusted)
            checkpoint = Checkpoint(
                options.drafter.kind,
                drafter.config.to_dict(),
                target,
                drafter.draft_token_ids,
                in_memory(tensors),
                figures,
            )
            checkpoint.save(folder)
    run.progress.epochs += broadcast_object_list([figures])


def longest_prediction(epoch: Figures) -> float | None:
    """An epoch's predicted acceptance length at the largest K; None without held-out text."""
    lengths: list[float] = list(epoch["predicted"].values())
    return lengths[-1] if lengths else None


def best_epoch(epochs: list[Figures]) -> Figures:
    """The epoch with the longest predicted acceptance; the later one of equals, the last where nothing is predicted."""
    return max(epochs, key=lambda epoch: (longest_prediction(epoch) or 0.0, epoch["epoch"]))


def epoch_folder(directory: Path, epoch: Figures) -> Path:
    """Where an epoch's weights are, in the checkpoint's folder."""
    return directory / f"epoch-{epoch['epoch']}"


def remove_epochs(directory: Path, *, keep: list[Figures]) -> None:
    """Remove the folders of all other epochs."""
    kept = [epoch_folder(directory, epoch) for epoch in keep]
    for folder in directory.glob("epoch-*"):
        if folder not in kept:
            shutil.rmtree(folder)


def requested_predictions(data: TrainingData, target: TargetInfo, folder: Path, predicted: dict[str, float]) -> Figures:
    """Figures of a drafter that the recipe asks for: acceptance at a temperature, and the speedup that step costs imply.

    Args:
        folder: where its weights are.
        predicted: its acceptance length by K, as in an epoch's figures.
    """
    options = data.recipe.train
    figures: Figures = {}
    lengths = {int(k): length for k, length in predicted.items()}
    if options.step_costs:
        figures["predicted_speedup"] = _rounded(predicted_speedup(lengths, options.step_costs))
    wanted = options.predicted_sampling
    if wanted is not None and lengths:
        device = data.accelerator.device
        tensors = load_target_tensors(target.path, trust_remote_code=target.trust_remote_code)
        saved = Checkpoint.load(folder)
        found = predict_sampled_acceptance(
            saved.drafter(tensors).to(device),
            replace(data, state_scales=()).held_out(steps=max(lengths)),  # saved weights read states as they are
            k=max(lengths),
            sampling=wanted,
            norm=FinalNorm.of(tensors, target.facts.norm_eps).to(device),
            head=tensors.lm_head.float().to(device),
            soft_cap=tensors.logit_soft_cap,
            own_text=data.store.identity.wrote_with(wanted),
        )
        figures["predicted_at_temperature"] = {
            **wanted.record(),
            "greedy_drafts": _rounded(found.greedy_drafts),
            "sampled_drafts": _rounded(found.sampled_drafts),
        }
    return figures


def draft_vocabulary_coverage(run: Run) -> float | None:
    """Share of the held-out response tokens that the drafter can propose; None without held-out text."""
    drafter = run.loss.drafter
    known = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    known[drafter.draft_token_ids.cpu()] = True
    tokens = run.data.store.response_tokens(held_out=True)
    return round(known[tokens].float().mean().item(), 4) if len(tokens) else None


def _rounded(by_k: dict[int, float]) -> dict[str, float]:
    return {str(k): round(value, 4) for k, value in by_k.items()}
