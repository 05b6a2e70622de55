"""What 8-bit states cost in acceptance: the same drafter trained on exact states and on rounded ones.

The target answers prompts of the demo once; the store is written a second time with its states rounded; the demo's
drafter is trained on both, with several seeds, since one run's acceptance length is known to about a hundredth. Both are
held against the exact states of the same held-out conversations.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from draftsmith.config.loading import load_recipe
from draftsmith.extract.extract import run_extract
from draftsmith.run import stage
from draftsmith.store.reader import Store
from draftsmith.store.writer import StoreWriter
from draftsmith.train.train import run_train
from tests.benchmarks.figures import Figure, figure

SEEDS = (0, 1)
OPTIONS = ["extract.prompts.limit=240", "extract.max_tokens=64", "extract.held_out_max_tokens=64", "train.epochs=2"]


def int8_acceptance() -> dict[str, Figure]:
    """`store.int8_acceptance_ratio`: predicted acceptance length (K=3) with 8-bit training states over that with exact."""
    recipe = load_recipe(Path("recipes/demo.yaml"), OPTIONS)
    ratios, lengths = [], []
    with tempfile.TemporaryDirectory() as folder:
        exact, rounded = Path(folder) / "exact", Path(folder) / "rounded"
        run_extract(recipe, exact)
        _round_training_states(exact / "store", rounded / "store")
        for seed in SEEDS:
            found = []
            for directory in (exact, rounded):
                figures = run_train(load_recipe(Path("recipes/demo.yaml"), [*OPTIONS, f"seed={seed}"]), directory)
                found.append(figures["predicted_acceptance_length"]["3"])
            ratios.append(found[1] / found[0])
            lengths.append(found)
    against = f"training on exact states; acceptance lengths exact and rounded: {lengths}"
    return {
        "store.int8_acceptance_ratio": figure(ratios, "ratio", against, direction="higher"),
    }


def _round_training_states(source: Path, directory: Path) -> None:
    """The store at `source` with the training states rounded to 8 bits and the held-out ones as they are."""
    store = Store(source)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        coarse = StoreWriter(
            Path(folder), replace(store.identity, states="int8"), shard_tokens=8192, compression="int8"
        )
        for sequence in store:
            coarse.append(sequence)
        coarse.close()
        writer = StoreWriter(directory, store.identity, shard_tokens=8192)
        for exact, rounded in zip(store, Store(Path(folder)), strict=True):
            writer.append(exact if exact.held_out else rounded)
        writer.close()
    record = stage.read(source)
    assert record is not None
    run = stage.StageRun("extract", directory, started=0)
    run.finish(record["inputs"] + " rounded", record["figures"], recipe=record["recipe"])
