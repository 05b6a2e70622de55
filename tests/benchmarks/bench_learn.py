"""What a drafter learns from one fixed store: every kind of ours, and the reference that it must reach.

The store is that of `recipes/learn.yaml`, extracted when it is missing. What it holds out is divided into two halves. On the
tuning part everything is chosen: learning rates, numbers of epochs and states read for the references and the peer, by sweeps;
the epoch for ours, and against published recipes the number of epochs, that DFlash and DSpark learn a distribution, and our learning rates for DFlash, DSpark, Medusa and the MLP speculator
(those of the others were chosen on other text). For references and the peer, states and learning rates are chosen by trainings of one
epoch, each with its whole schedule, and after them the number of epochs; for block drafters, which are held against the peer after equal
tokens, learning rates alone, with as many epochs as ours, and the number of epochs of both in a benchmark of its own (`longer_blocks`). On the report part nobody chose anything: there
acceptance is predicted for all, by the same code, and there vLLM measures ours, which must be within 3% of what was predicted.

EAGLE-3 is trained with that recipe's options, the other kinds with their own recipe's (`recipes/smollm2-KIND.yaml`); DFlash and
DSpark in shorter blocks and in steps of the peer's size. EAGLE-3, P-EAGLE,
DFlash and DSpark are held against speculators' own model, loss and optimizer, with the same draft vocabulary and size; the others against
their published recipe (`references.py`). All see the same training part.

Runs of ours are kept in `runs/learn/KIND` (`KIND-6-epochs`), and are continued or found finished the next time, like any run; of each training
of a sweep, `runs/learn/references` keeps what it came to, so that a sweep that was interrupted goes on with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.config.drafters import BlockOptions
from draftsmith.config.loading import digest, load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.convert.convert import run_convert
from draftsmith.data.prompts import training_and_held_out
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.drafters.vocabulary import choose_draft_vocabulary
from draftsmith.extract.extract import run_extract
from draftsmith.run import stage
from draftsmith.run.cuda import native_bfloat16
from draftsmith.run.progress import console
from draftsmith.serve.evaluation.evaluate import run_evaluate
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.acceptance import count_accepted
from draftsmith.train.packing import pack
from draftsmith.train.train import run_train
from tests.benchmarks.figures import Figure, figure
from tests.benchmarks.peer_speculators import (
    LEARNING_RATE,
    TOKENS_PER_STEP,
    check_mapping,
    hand_over,
    load_peer,
    train_peer,
)
from tests.benchmarks.references import REFERENCES, made_from, train_reference
from tests.benchmarks.sweep import Counts, Outcome, best_of, interval_of_difference, kept, length

RECIPES, RUNS = Path("recipes"), Path("runs/learn")
POSITIONS, EPOCHS = 5, 3
OUR_EPOCHS = (EPOCHS, 2 * EPOCHS, 4 * EPOCHS)
"""Of ours against published recipes, whose number of epochs is chosen too; against speculators, ours has `EPOCHS`."""
EAGLE3_AT_LEAST, ABOVE_PEER = 1.65, 0.10
LEARNING_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""What sweeps move along; further than is first tried only while the best is at an edge."""
FIRST_TRIED = {"eagle": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)}
"""From EAGLE's published one up, which was for hundreds of thousands of steps; others' are tried with both neighbors."""
FIRST_TRIED_IN_BLOCKS = (LEARNING_RATE, 3e-3)
"""Speculators' default, and what was best for its EAGLE-3 (docs/log.md)."""


def learning_eagle3() -> dict[str, Figure]:
    """`learn.eagle3.predicted`, `.measured` and `.apart`."""
    return _against_peer(learn_recipe("eagle3"), at_least=EAGLE3_AT_LEAST)


def learning_p_eagle() -> dict[str, Figure]:
    """`learn.p_eagle.predicted`, `.measured` and `.apart`."""
    return _against_peer(learn_recipe("p_eagle"))


def learning_dflash() -> dict[str, Figure]:
    """`learn.dflash.predicted`, `.measured` and `.apart`."""
    return _against_peer(learn_recipe("dflash"))


def learning_dspark() -> dict[str, Figure]:
    """`learn.dspark.predicted`, `.measured` and `.apart`."""
    return _against_peer(learn_recipe("dspark"))


def longer_blocks() -> dict[str, Figure]:
    """`learn.KIND.longer` of P-EAGLE, DFlash and DSpark: predicted after the number of epochs that is best, against speculators' after the
    number that is best for it. Hours; every training is kept, so an interrupted run goes on with the next one."""
    found: dict[str, Figure] = {}
    for kind in ("p_eagle", "dflash", "dspark"):
        recipe, text = learn_recipe(kind), learn_text()
        peer, settings = tuned_peer(recipe, text, longer=True)
        ours = with_best_epochs(recipe, text)
        mine, theirs = train_ours(ours, text, run_dir_of(ours)), peer.reported
        low, high = interval_of_difference(mine, theirs)
        found[f"learn.{kind}.longer"] = figure(
            [length(mine)],
            f"tokens a step, K = {recipe.evaluate.acceptance_k}",
            f"speculators' {length(theirs):.4f} ({settings}); ours {ours.train.epochs:g} epochs; difference "
            f"{length(mine) - length(theirs):+.4f} [{low:+.4f}, {high:+.4f}]",
            direction="higher",
            bar=round(length(theirs), 4),
        )
    return found


def learning_eagle() -> dict[str, Figure]:
    """`learn.eagle.predicted`, `.measured` and `.apart`."""
    return _against_reference(learn_recipe("eagle"))


def learning_medusa() -> dict[str, Figure]:
    """`learn.medusa.predicted`, `.measured` and `.apart`."""
    return _against_reference(learn_recipe("medusa"))


def learning_mlp() -> dict[str, Figure]:
    """`learn.mlp_speculator.predicted`, `.measured` (by vLLM with our plugin) and `.apart`."""
    return _against_reference(learn_recipe("mlp_speculator"))


# ---- the text ----


@dataclass(frozen=True)
class Text:
    """The store's three parts."""

    store: Store
    """The training part, and the tuning part as what is held out."""
    report: list[Sequence]

    @property
    def training(self) -> list[int]:
        """Rows of the training part."""
        return self.store.rows(held_out=False)

    @property
    def tuning(self) -> list[Sequence]:
        return [self.store[row] for row in self.store.rows(held_out=True)]

    @property
    def inputs(self) -> str:
        """What identifies it."""
        return str(stage.read(self.store.directory)["inputs"])  # type: ignore[index]


def learn_text() -> Text:
    """The store, extracted when it is missing, without its report part, which is beside it.

    Training of ours sees a store that does not have the report part at all: what a run holds out, it chooses its epoch on.
    """
    run_extract(load_recipe(RECIPES / "learn.yaml"), RUNS)
    return divide(RUNS / "store", RUNS / "tuning" / "store")


def divide(source: Path, directory: Path) -> Text:
    """The parts of the store at `source`; the training and the tuning part become a store of their own in `directory`."""
    whole, record = Store(source), stage.read(source)
    assert record is not None
    inputs = f"{record['inputs']} without the report part"
    run = stage.StageRun("extract", directory, started=0)
    if run.finished(inputs) is None:
        run.claim(fresh=True)
        with StoreWriter(directory, whole.identity, shard_tokens=8192) as writer:
            for sequence in whole:
                if not is_report(sequence.sample_id, sequence.held_out):
                    writer.append(sequence)
            writer.close()
        run.finish(inputs, record["figures"], recipe=record["recipe"])
    rows = [row for row in whole.rows(held_out=True) if is_report(whole.sample_id(row), held_out=True)]
    return Text(Store(directory), [whole[row] for row in rows])


def is_report(sample_id: int, held_out: bool) -> bool:
    """Whether a sequence is of the report part: half of what is held out, by a hash."""
    return held_out and int(digest(sample_id), 16) % 2 == 1


# ---- ours ----


def learn_recipe(kind: str) -> Recipe:
    """The recipe of the store, with a kind's options: all positions that it guesses, five at most, served."""
    if kind == "eagle3":
        return load_recipe(RECIPES / "learn.yaml")
    own = load_recipe(RECIPES / f"smollm2-{kind.removesuffix('_speculator').replace('_', '-')}.yaml").train
    k = min(POSITIONS, own.drafter.max_draft_tokens or POSITIONS)
    options = own.model_dump(mode="json") | {"epochs": EPOCHS}
    if isinstance(own.drafter, BlockOptions):
        options["drafter"]["block_size"] = 1 + k  # more rows would only make both slower
        options["tokens_per_step"] = TOKENS_PER_STEP  # the peer's
    train = json.dumps(options)
    return load_recipe(RECIPES / "learn.yaml", [f"train={train}", f"evaluate.k=[{k}]", f"evaluate.acceptance_k={k}"])


def learn_target() -> TargetInfo:
    recipe = load_recipe(RECIPES / "learn.yaml")
    return describe_target(prepare_target(recipe.target), recipe.target)


def run_dir_of(recipe: Recipe) -> Path:
    """The folder of a run of ours, by its kind and number of epochs."""
    kind, epochs = recipe.train.drafter.kind, round(recipe.train.epochs)
    return RUNS / (kind if epochs == EPOCHS else f"{kind}-{epochs}-epochs")


def train_ours(recipe: Recipe, text: Text, run_dir: Path) -> Counts:
    """Train on the training part, the epoch chosen on the tuning part, in a run of its own; counts on the report part."""
    train_in(recipe, text, run_dir)
    saved = Checkpoint.load(run_dir / "checkpoint")
    kind = drafter_class(saved.kind)
    config = kind.config_class.from_dict(saved.config)
    drafter = kind.from_target(config, load_target_tensors(prepare_target(recipe.target)), saved.draft_token_ids)
    drafter.load_state_dict(saved.tensors)
    columns = [text.store.identity.layer_ids.index(layer) for layer in config.layer_ids]
    return counts(drafter, text.report, columns, k=recipe.evaluate.acceptance_k)


def train_in(recipe: Recipe, text: Text, run_dir: Path) -> None:
    """Train on the training part, the epoch chosen on the tuning part, in a run of its own; nothing if that is done."""
    run_dir.mkdir(parents=True, exist_ok=True)
    link = run_dir / "store"
    link.unlink(missing_ok=True)
    link.symlink_to(text.store.directory.resolve())
    run_train(recipe, run_dir)


def counts(drafter: Drafter, sequences: list[Sequence], columns: list[int], *, k: int) -> Counts:
    """What would be accepted of each sequence at K = k, and of how many drafts."""
    return [count_accepted(drafter, [pack([sequence], steps=k).with_layers(columns)], k=k)[k] for sequence in sequences]


def _figures(recipe: Recipe, text: Text, reference: Counts, *, bar: float, against: str) -> dict[str, Figure]:
    """Train, predict, convert, serve."""
    kind, k = recipe.train.drafter.kind, recipe.evaluate.acceptance_k
    run_dir, unit = run_dir_of(recipe), f"tokens a step, K = {k}"
    ours = train_ours(recipe, text, run_dir)
    predicted = length(ours)
    low, high = interval_of_difference(ours, reference)
    against += f"; difference {predicted - length(reference):+.4f} [{low:+.4f}, {high:+.4f}]"
    run_convert(recipe, run_dir)
    found = run_evaluate(with_report_suite(recipe, text, run_dir), run_dir)
    measured = found["suites"]["report"]["at_k"][str(k)]["acceptance_length"]
    apart = abs(measured / predicted - 1)
    return {
        f"learn.{kind}.predicted": figure([predicted], unit, against, direction="higher", bar=round(bar, 4)),
        f"learn.{kind}.measured": figure(
            [measured], unit, f"{predicted:.4f} predicted", direction="higher", bar=round(0.97 * predicted, 4)
        ),
        f"learn.{kind}.apart": figure([apart], "ratio", "measured over predicted", direction="lower", bar=0.03),
    }


def with_report_suite(recipe: Recipe, text: Text, run_dir: Path) -> Recipe:
    """The recipe with the prompts of the report part as the only suite."""
    ids = {sequence.sample_id for sequence in text.report}
    prompts = [prompt for prompt in training_and_held_out(recipe.extract)[1] if prompt.sample_id in ids]
    assert len(prompts) == len(ids)
    file = (run_dir / "report.jsonl").resolve()
    file.write_text("".join(json.dumps({"id": one.id, "messages": one.messages}) + "\n" for one in prompts))
    suites = {"report": {"prompts": {"path": str(file)}}}
    evaluate = recipe.evaluate.model_dump(mode="json") | {"suites": suites}
    return Recipe.model_validate(recipe.model_dump(mode="json") | {"evaluate": evaluate})


# ---- the references ----


def _against_peer(recipe: Recipe, *, at_least: float = 0.0) -> dict[str, Figure]:
    """Against speculators' drafter of the same kind and size."""
    text = learn_text()
    peer, settings = tuned_peer(recipe, text)
    reached = length(peer.reported)
    also = f"{at_least} and " if at_least else ""
    return _figures(
        recipe,
        text,
        peer.reported,
        bar=max(at_least, reached + ABOVE_PEER),
        against=f"{also}{ABOVE_PEER:.2f} above speculators' {reached:.4f} ({settings})",
    )


def _against_reference(recipe: Recipe) -> dict[str, Figure]:
    text = learn_text()
    reference, settings = tuned_reference(recipe, text)
    reached = length(reference.reported)
    ours = with_best_epochs(recipe, text)
    against = f"the published recipe at its best, {reached:.4f} ({settings}); ours {ours.train.epochs:g} epochs"
    return _figures(ours, text, reference.reported, bar=reached, against=against)


def with_best_epochs(recipe: Recipe, text: Text) -> Recipe:
    """Our recipe with the number of epochs that is best on the tuning part, which references have too."""

    def of(epochs: int) -> Recipe:
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"epochs": float(epochs)})})

    def tuned(epochs: int) -> float:
        run_dir = run_dir_of(of(epochs))
        train_in(of(epochs), text, run_dir)
        record = stage.read(run_dir / "checkpoint")
        assert record is not None
        found = float(record["figures"]["predicted_acceptance_length"][str(recipe.evaluate.acceptance_k)])
        console.print(f"{run_dir.name}, {epochs} epochs: tuning part, after the best: {found:.3f}", highlight=False)
        return found

    return of(best_of(OUR_EPOCHS, OUR_EPOCHS[:2], tuned))


def tuned_reference(recipe: Recipe, text: Text) -> tuple[Outcome, str]:
    """The kind's published recipe at the learning rate and number of epochs that are best on the tuning part; and these, for
    people."""
    kind, ours = recipe.train.drafter.kind, round(recipe.train.epochs)

    def outcome(lr: float, epochs: int) -> Outcome:
        return reference_outcome(recipe, text, lr=lr, epochs=epochs)

    published = REFERENCES[kind].lr
    lr = best_of(LEARNING_RATES, FIRST_TRIED.get(kind, around(published)), lambda one: outcome(one, 1).tuned)
    epochs = best_epochs(ours, lambda one: outcome(lr, one).tuned)
    best = outcome(lr, epochs)
    return best, f"lr {lr:g} where {published:g} is published, epoch {best.epoch} of {epochs}"


def best_epochs(ours: int, tuned: Callable[[int], float]) -> int:
    """The best number of epochs: one, as many as ours, twice as many, and four times if twice is better."""
    return best_of((1, ours, 2 * ours, 4 * ours), (1, ours, 2 * ours), tuned)


def around(lr: float) -> tuple[float, ...]:
    """A learning rate and its neighbors."""
    at = LEARNING_RATES.index(lr)
    return LEARNING_RATES[at - 1 : at + 2]


def reference_outcome(recipe: Recipe, text: Text, *, lr: float, epochs: int) -> Outcome:
    """One training by the published recipe."""
    options, k = recipe.train.drafter, recipe.evaluate.acceptance_k
    about = [made_from(options.kind), text.inputs, options.model_dump(mode="json"), lr, epochs, k]

    def train() -> Outcome:
        target = describe_target(prepare_target(recipe.target), recipe.target)
        tensors = load_target_tensors(target.path)
        kind, last = drafter_class(options.kind), target.num_hidden_layers
        torch.manual_seed(0)
        drafter = kind.from_target(
            kind.make_config(options, target, (last,), target.vocab_size), tensors, torch.arange(target.vocab_size)
        )
        column = text.store.identity.layer_ids.index(last)
        outcome = Outcome([], [])
        for _ in train_reference(
            options.kind,
            drafter,
            tensors,
            text.store,
            column,
            epochs=epochs,
            lr=lr,
            steps=1 if options.kind == "eagle" else k,
        ):
            outcome.tuning.append(counts(drafter, text.tuning, [column], k=k))
            outcome.report.append(counts(drafter, text.report, [column], k=k))
        return outcome

    return kept(RUNS / "references" / options.kind / f"lr-{lr:g}-epochs-{epochs}.json", about, train)


# ---- the peer ----


def peer_vocabulary(recipe: Recipe, target: TargetInfo, store: Store) -> torch.Tensor:
    """The draft vocabulary of both: int64 [V]."""
    return choose_draft_vocabulary(store.token_counts(target.vocab_size), recipe.train.drafter.draft_vocab_size)


def tuned_peer(recipe: Recipe, text: Text, *, longer: bool = False) -> tuple[Outcome, str]:
    """Speculators' drafter with the states, learning rate and number of epochs that are best on the tuning part; and these, for
    people. The outcome's `more` has `layer_ids`, `lr` and `epochs`, and `seconds` since the start after each epoch.

    Args:
        longer: choose a block drafter's number of epochs too, as others' is.
    """
    target, ours = learn_target(), round(recipe.train.epochs)
    vocabulary = peer_vocabulary(recipe, target, text.store)

    def outcome(layer_ids: tuple[int, ...] | None, lr: float, epochs: int) -> Outcome:
        return peer_outcome(recipe, target, text, vocabulary, layer_ids=layer_ids, lr=lr, epochs=epochs)

    choices = (None, text.store.identity.layer_ids)  # its default, and what ours reads
    if drafter_class(recipe.train.drafter.kind).drafts_at_once:
        # On the states that ours reads: an epoch takes minutes.
        states = choices[1]
        lr = best_of(LEARNING_RATES, FIRST_TRIED_IN_BLOCKS, lambda one: outcome(states, one, 1).tuned)
        epochs = best_epochs(ours, lambda one: outcome(states, lr, one).tuned) if longer else ours
    else:
        states = best_of(choices, choices, lambda one: outcome(one, LEARNING_RATE, 1).tuned)
        lr = best_of(LEARNING_RATES, around(LEARNING_RATE), lambda one: outcome(states, one, 1).tuned)
        epochs = best_epochs(ours, lambda one: outcome(states, lr, one).tuned)
    best = outcome(states, lr, epochs)
    return best, f"states {best.more['layer_ids']}, lr {lr:g}, epoch {best.epoch} of {epochs}"


def peer_outcome(
    recipe: Recipe,
    target: TargetInfo,
    text: Text,
    vocabulary: torch.Tensor,
    *,
    layer_ids: tuple[int, ...] | None,
    lr: float,
    epochs: int,
    fresh: bool = False,
) -> Outcome:
    """One training of speculators' drafter. Its weights are checked to mean in our module what they mean in its own.

    Args:
        recipe: of ours of the same kind and size.
        layer_ids: the states that it reads; None for its default.
        fresh: train again, for the clock.
    """
    options, k = recipe.train.drafter, recipe.evaluate.acceptance_k
    handed = hand_over(target, text.store.identity.layer_ids, vocabulary, layer_ids, options)
    training = text.store.read(text.training)

    def train() -> Outcome:
        folder, figures = train_peer(handed, training, epochs=epochs, lr=lr, about=text.inputs, fresh=fresh)
        check_mapping(load_peer(handed, folder, epoch=epochs), text.store[text.training[0]], folder)
        more = {
            "layer_ids": list(handed.layer_ids), "lr": lr, "epochs": epochs,
            "seconds": [one["seconds"] for one in figures["epochs"]],
        }  # fmt: skip
        outcome = Outcome([], [], more)
        for epoch in range(1, epochs + 1):
            peer = load_peer(handed, folder, epoch=epoch)
            columns = list(range(len(handed.columns)))
            for found, sequences in ((outcome.tuning, text.tuning), (outcome.report, text.report)):
                prepared = [peer.prepared(sequence) for sequence in sequences]
                found.append(counts(peer.drafter, prepared, columns, k=k))
        return outcome

    if fresh:
        return train()
    name = f"states-{'-'.join(map(str, handed.layer_ids))}-lr-{lr:g}-epochs-{epochs}.json"
    sources = [Path(__file__).with_name(source).read_text() for source in ("peer_driver.py", "peer_speculators.py")]
    about = [
        sources,
        native_bfloat16(),
        text.inputs,
        list(handed.layer_ids),
        lr,
        epochs,
        vocabulary.tolist(),
        handed.own_options,
        k,
    ]
    return kept(RUNS / "references" / f"speculators-{handed.kind}" / name, about, train)
