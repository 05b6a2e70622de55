"""What a drafter learns from one fixed store: every kind of ours, and the reference that it must reach.

The store is that of `recipes/learn.yaml`, extracted when it is missing. EAGLE-3 is trained with that recipe's options and
held against speculators' own model, loss and optimizer with the same draft vocabulary; the other kinds with their own
recipe's (`recipes/smollm2-KIND.yaml`), held against their published recipe (`references.py`). All see the same training
part the same number of times, and acceptance is predicted for all on the same held-out part by the same code. What vLLM
then measures on the held-out prompts must be within 3% of what was predicted.

Runs are kept in `runs/learn/KIND`, and are continued or found finished the next time, like any run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftsmith import stage
from draftsmith.convert.convert import run_convert
from draftsmith.drafters import drafter_class
from draftsmith.extract.extract import run_extract
from draftsmith.recipe import Recipe, load_recipe
from draftsmith.serve.evaluate import run_evaluate
from draftsmith.store import Store
from draftsmith.target import TargetInfo, describe_target, load_target_tensors, prepare_target
from draftsmith.train.acceptance import predict_acceptance
from draftsmith.train.train import run_train
from draftsmith.vocabulary import choose_draft_vocabulary
from tests.benchmarks.peer_speculators import check_mapping, hand_over, load_peer, train_peer
from tests.benchmarks.references import train_reference

RECIPES, RUNS = Path("recipes"), Path("runs/learn")
POSITIONS = 5
EAGLE3_AT_LEAST, ABOVE_PEER = 1.65, 0.10


def learning_eagle3() -> dict[str, dict[str, Any]]:
    """`learn.eagle3.predicted` and `learn.eagle3.measured`."""
    recipe, target, store = learn_recipe("eagle3"), learn_target(), learn_store()
    vocabulary = peer_vocabulary(recipe, target, store)
    peer, _ = peer_lengths(target, store, vocabulary, epochs=round(recipe.train.epochs))
    lengths = ", ".join(f"{one:.3f}" for one in peer)
    return _figures(
        recipe, reference=max(EAGLE3_AT_LEAST, peer[-1] + ABOVE_PEER),
        against=f"{EAGLE3_AT_LEAST} and {ABOVE_PEER:.2f} above speculators' after each epoch: {lengths}",
    )  # fmt: skip


def learning_eagle() -> dict[str, dict[str, Any]]:
    """`learn.eagle.predicted` and `learn.eagle.measured`."""
    return _against_reference(learn_recipe("eagle"))


def learning_medusa() -> dict[str, dict[str, Any]]:
    """`learn.medusa.predicted` and `learn.medusa.measured`."""
    return _against_reference(learn_recipe("medusa"))


def learning_mlp() -> dict[str, dict[str, Any]]:
    """`learn.mlp_speculator.predicted`; stock vLLM serves none."""
    return _against_reference(learn_recipe("mlp_speculator"))


# ---- ours ----


def learn_recipe(kind: str) -> Recipe:
    """The recipe of the store, with a kind's options: all positions that it guesses, five at most, served."""
    if kind == "eagle3":
        return load_recipe(RECIPES / "learn.yaml")
    own = load_recipe(RECIPES / f"smollm2-{kind.removesuffix('_speculator')}.yaml").train
    k = min(POSITIONS, own.drafter.most_ahead or POSITIONS)
    train = json.dumps(own.model_dump(mode="json"))
    return load_recipe(RECIPES / "learn.yaml", [f"train={train}", f"evaluate.k=[{k}]", f"evaluate.acceptance_k={k}"])


def learn_target() -> TargetInfo:
    recipe = load_recipe(RECIPES / "learn.yaml")
    return describe_target(prepare_target(recipe.target), recipe.target)


def learn_store() -> Store:
    """The store, extracted when it is missing."""
    run_extract(load_recipe(RECIPES / "learn.yaml"), RUNS)
    return Store(RUNS / "store")


def train_ours(recipe: Recipe, name: str) -> tuple[Path, dict[str, Any]]:
    """Train on the learn store in a run of its own; its folder and the figures of training."""
    run_dir = RUNS / name
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "store").exists():
        (run_dir / "store").symlink_to(Path("..") / "store")
    return run_dir, run_train(recipe, run_dir)


def _figures(recipe: Recipe, *, reference: float, against: str) -> dict[str, dict[str, Any]]:
    """Train, predict, convert, serve."""
    kind, k = recipe.train.drafter.kind, str(recipe.evaluate.acceptance_k)
    run_dir, trained = train_ours(recipe, kind)
    predicted = trained["predicted_acceptance_length"][k]
    figures = {
        f"learn.{kind}.predicted": {
            "value": predicted, "unit": f"tokens a step, K = {k}", "runs": [predicted], "against": against, "limit": reference,
        }
    }  # fmt: skip
    run_convert(recipe, run_dir)
    found = run_evaluate(recipe, run_dir)
    measured = found["suites"]["held_out"]["at_k"][k]["acceptance_length"]
    figures[f"learn.{kind}.measured"] = {
        "value": measured, "unit": f"tokens a step, K = {k}", "runs": [measured],
        "against": f"within 3% of {predicted:.4f} predicted; apart {measured / predicted - 1:+.2%}",
        "limit": round(0.97 * predicted, 4),
    }  # fmt: skip
    return figures


# ---- the references ----


def _against_reference(recipe: Recipe) -> dict[str, dict[str, Any]]:
    reached = reference_length(recipe, learn_store())
    return _figures(recipe, reference=reached, against=f"the published recipe on the same tokens: {reached:.4f}")


def reference_length(recipe: Recipe, store: Store) -> float:
    """Predicted acceptance length of the kind's published recipe, trained as often as ours; kept beside our run."""
    options, k = recipe.train.drafter, recipe.evaluate.acceptance_k
    kept = RUNS / options.kind / "reference.json"
    epochs = round(recipe.train.epochs)
    source = (Path(__file__).with_name("references.py")).read_text()
    inputs = stage.read(store.directory)["inputs"]  # type: ignore[index]
    about = [source, inputs, options.model_dump(mode="json"), epochs, k]
    if kept.is_file() and (earlier := json.loads(kept.read_text()))["about"] == about:
        return float(earlier["predicted"])
    target = learn_target()
    tensors = load_target_tensors(target.path)
    kind = drafter_class(options.kind)
    last = target.num_hidden_layers
    torch.manual_seed(0)
    drafter = kind.make(
        kind.make_config(options, target, (last,), target.vocab_size), tensors, torch.arange(target.vocab_size)
    )
    column = store.identity.layer_ids.index(last)
    train_reference(
        options.kind, drafter, tensors, store, column, epochs=epochs, steps=1 if options.kind == "eagle" else k
    )
    held_out = [store[row] for row in store.rows(held_out=True)]
    reached = round(predict_acceptance(drafter, held_out, [column], k=k)[k], 4)
    kept.parent.mkdir(parents=True, exist_ok=True)
    stage.write_json(kept, {"about": about, "predicted": reached})
    return reached


# ---- the peer ----


def peer_vocabulary(recipe: Recipe, target: TargetInfo, store: Store) -> torch.Tensor:
    """The draft vocabulary of both: int64 [V]."""
    return choose_draft_vocabulary(store.token_counts(target.vocab_size), recipe.train.drafter.draft_vocab_size)


def peer_lengths(
    target: TargetInfo, store: Store, vocabulary: torch.Tensor, *, epochs: int, fresh: bool = False
) -> tuple[list[float], list[dict[str, Any]]]:
    """Speculators' drafter, trained on the training part: predicted acceptance length after each epoch, and what that
    took (see `train_peer`). Its weights are checked to mean in our module what they mean in its own."""
    handed = hand_over(target, store.identity.layer_ids, vocabulary)
    rows = store.rows(held_out=False)
    inputs: str = stage.read(store.directory)["inputs"]  # type: ignore[index]
    folder, figures = train_peer(handed, store.read(rows), epochs=epochs, about=inputs, fresh=fresh)
    check_mapping(load_peer(handed, folder, epoch=epochs), store[rows[0]], folder)
    lengths = []
    for epoch in range(1, epochs + 1):
        peer = load_peer(handed, folder, epoch=epoch)
        held_out = (peer.prepared(store[row]) for row in store.rows(held_out=True))
        columns = list(range(len(handed.columns)))
        lengths.append(predict_acceptance(peer.drafter, held_out, columns, k=POSITIONS)[POSITIONS])
    return lengths, figures["epochs"]
