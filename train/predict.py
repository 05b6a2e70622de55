"""Predict a trained drafter's acceptance length, greedy or sampled, on the held-out text of a store; nothing is trained or written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling import Sampling
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.norm import FinalNorm
from draftsmith.run.cuda import require_usable_gpus
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.store.format import MANIFEST
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.tensors import TargetTensors, load_target_tensors
from draftsmith.train.acceptance import predict_acceptance, predict_sampled_acceptance
from draftsmith.train.data import store_dirs
from draftsmith.train.packing import pack_in_order


def predict(recipe: Recipe, run_dir: Path, *, store_dir: Path | None = None) -> dict[str, Any]:
    """The acceptance length that `draftsmith evaluate` with the same sampling parameters should find on held-out prompts.

    Args:
        recipe: `target`, `train` and the sampling parameters of `evaluate` are read.
        run_dir: `runs/NAME`, with the drafter in `checkpoint/`.
        store_dir: the store with the held-out text; None for the run's own. Best is text that the target sampled with these parameters.

    Returns:
        `sampling`; `text_sampling`, None if the target did not write the text; `sequences`; `own_text`, whether the two are the same, so
        that nothing is approximated; `predicted_acceptance_length` by K, as text.

    Raises:
        UserError: there is no drafter, or no store that fits it with held-out text; or greedy answers are asked for of sampled text.
    """
    run = open_run(recipe, run_dir, store_dir)
    sampling, options, drafter = recipe.evaluate.sampling, recipe.train, run.drafter
    k = min(options.predict_positions, drafter.max_draft_tokens or options.predict_positions)
    with Bar("predict", total=len(run.rows), unit="sequences") as bar:

        def read(row: int) -> Any:
            bar.step()
            return run.store[row]

        packed = pack_in_order(map(read, run.rows), steps=k)
        batches = (batch.with_layers(run.columns, run.last_column) for batch in packed)
        if sampling.greedy:
            lengths = predict_acceptance(drafter, batches, k=k)
        else:
            tensors = run.tensors
            found = predict_sampled_acceptance(
                drafter,
                batches,
                k=k,
                sampling=sampling,
                norm=FinalNorm.of(tensors, run.target.facts.norm_eps).to(run.device),
                head=tensors.lm_head.float().to(run.device),
                soft_cap=tensors.logit_soft_cap,
                own_text=run.own_text,
            )
            lengths = found.greedy_drafts
    return {
        "sampling": sampling.record(),
        "text_sampling": None if run.text is None else run.text.record(),
        "own_text": run.own_text,
        "sequences": len(run.rows),
        "predicted_acceptance_length": {str(k): round(length, 4) for k, length in lengths.items()},
    }


@dataclass(frozen=True)
class RunToPredict:
    """A run's drafter and the held-out text that acceptance is predicted on."""

    kind: str
    drafter: Drafter
    target: TargetInfo
    tensors: TargetTensors
    store: Store
    rows: list[int]
    text: Sampling | None
    """How the target sampled it; None if it did not write it."""
    own_text: bool
    """Whether the target wrote it with the recipe's sampling parameters and no others."""
    columns: list[int]
    """Of the store's states, those that the drafter reads; and the target's last."""
    last_column: int
    device: torch.device


def _not_trained_on(store: Store, recipe: Recipe, run_dir: Path) -> list[int]:
    """Rows of `store` to predict on. Another store may hold out what the run was trained on: those are left out, and counted on screen."""
    rows = store.rows_to_predict()
    own = [folder for folder in store_dirs(recipe, run_dir) if (folder / MANIFEST).exists()]
    if not own or store.directory.resolve() == own[0].resolve():
        return rows
    trained = Store(*own)
    seen = {trained.sample_id(row) for row in trained.rows(held_out=False)}
    kept = [row for row in rows if store.sample_id(row) not in seen]
    if len(kept) < len(rows):
        console.print(
            f"predict: {len(rows) - len(kept)} of {len(rows)} held-out sequences of {store.directory} are left out: the drafter was trained on "
            "their conversations"
        )
    return kept


def open_run(recipe: Recipe, run_dir: Path, store_dir: Path | None) -> RunToPredict:
    """See `predict`, with its errors."""
    require_usable_gpus()
    sampling = recipe.evaluate.sampling
    saved = Checkpoint.load(run_dir / "checkpoint")
    target = describe_target(prepare_target(recipe.target, weights="shared"), recipe.target)
    store = Store(store_dir or run_dir / "store")
    store.identity.require_fields(
        {"target_config_hash": target.config_hash, "tokenizer_hash": target.tokenizer_hash},
        store.directory,
        way_out="Name a store of this recipe's target.",
    )
    text, rows = store.identity.sampled_with, _not_trained_on(store, recipe, run_dir)
    if not rows:
        raise UserError(f"The store at {store.directory} holds no text out, and acceptance is predicted on such text.")
    if sampling.greedy and text is not None and not text.greedy:
        raise UserError(
            f"The held-out text of {store.directory} was sampled ({text}), which does not tell what greedy decoding accepts. Give "
            "evaluate.temperature (and top_p, top_k), or name a store with greedy responses."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = load_target_tensors(target.path, trust_remote_code=target.trust_remote_code)
    drafter = saved.drafter(tensors).to(device)
    layers = store.identity.layer_ids
    wanted = tuple(saved.drafter_config().layer_ids)
    if missing := sorted({*wanted, target.num_hidden_layers} - {*layers}):
        raise UserError(
            f"The store at {store.directory} has the hidden states of layers {list(layers)}, without {missing}, which the drafter or the "
            "target's head reads. Extract with `extract.layer_ids` that contain them."
        )
    columns, last = [layers.index(layer) for layer in wanted], layers.index(target.num_hidden_layers)
    own_text = store.identity.wrote_with(sampling)
    return RunToPredict(saved.kind, drafter, target, tensors, store, rows, text, own_text, columns, last, device)
