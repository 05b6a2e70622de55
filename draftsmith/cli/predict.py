"""`draftsmith predict`: acceptance length without an engine, greedy or sampled."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.common import AsJson, Overrides, RecipePath, RunsDir, print_json
from draftsmith.config.loading import load_recipe


def predict(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    store: Annotated[
        Path | None,
        typer.Option(help="Store with the held-out text. Default: the run's own.", show_default=False),
    ] = None,
) -> None:
    """Predict the acceptance length of a run's drafter on held-out text, as sampled in evaluation; no engine runs.

    The sampling parameters are the recipe's `evaluate.temperature`, `evaluate.top_p` and `evaluate.top_k`. The prediction is exact, but for
    the choice of prompts, on text that the target sampled with the same ones; on other text it is an estimate.

    draftsmith predict recipes/demo.yaml -s evaluate.temperature=0.8 -s evaluate.top_p=0.95 --store runs/sampled/store
    """
    from draftsmith.config.sampling import Sampling
    from draftsmith.train.predict import predict as predict_acceptance

    loaded = load_recipe(recipe, overrides)
    found = predict_acceptance(loaded, runs / loaded.name, store_dir=store)
    if as_json:
        print_json(found)
        return
    text = found["text_sampling"]
    written = "text that it did not write" if text is None else f"its own answers ({Sampling.of(text)})"
    asked = Sampling.of(found["sampling"])
    print(f"predicted for the target's answers ({asked}), from {found['sequences']} sequences of {written}:")
    for k, length in found["predicted_acceptance_length"].items():
        print(f"K = {k}: acceptance length {length:.3f}")
    if not found["own_text"]:
        print("An estimate: the text was not sampled with these parameters.")
