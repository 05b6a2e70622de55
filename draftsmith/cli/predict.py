"""`draftsmith predict`: acceptance length without an engine, greedy or sampled, of chains and of trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.common import AsJson, Overrides, RunsDir, print_json
from draftsmith.config.loading import load_recipe, validated
from draftsmith.run import stage
from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from draftsmith.config.recipe import Recipe

_TREES = "Trees of draft tokens"


def predict(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|STORE", help="The recipe, a YAML file; or, with DRAFTER, a store.", show_default=False
        ),
    ],
    drafter: Annotated[
        Path | None,
        typer.Argument(
            metavar="DRAFTER",
            help="With a store: a run, or its checkpoint. Its training names the target.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    store: Annotated[
        Path | None,
        typer.Option(help="Store with the held-out text. Default: the run's own.", show_default=False),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Draft tokens of trees, as in 16,32,60: predict what they would have accepted, beside chains.",
            show_default=False,
            rich_help_panel=_TREES,
        ),
    ] = None,
    tree_depth: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Levels of a tree. Default: 5; parallel drafters: all.",
            show_default=False,
            rich_help_panel=_TREES,
        ),
    ] = None,
    tree_top_k: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Nodes extended on each level, and children of each. Parallel drafters have no such limit.",
            rich_help_panel=_TREES,
        ),
    ] = 8,
    tree_sequences: Annotated[
        int,
        typer.Option(
            min=0,
            help="Held-out sequences to draft trees for, drawn by the recipe's seed; 0: all.",
            rich_help_panel=_TREES,
        ),
    ] = 64,
    step_cost: Annotated[
        bool,
        typer.Option(
            help="Measure what checking so many tokens costs here, by transformers' forward pass of the target.",
            rich_help_panel=_TREES,
        ),
    ] = True,
) -> None:
    """Predict the acceptance length of a run's drafter on held-out text, as sampled in evaluation; no engine runs.

    The sampling parameters are the recipe's `evaluate.temperature`, `evaluate.top_p` and `evaluate.top_k`. The prediction is exact, but for
    the choice of prompts, on text that the target sampled with the same ones; on other text it is an estimate.

    With --tree: predict greedy acceptance for trees of draft tokens. Autoregressive drafters grow trees as EAGLE-2 and SGLang do; parallel
    drafters take the N most likely continuations. vLLM serves chains only; SGLang serves trees of EAGLE-3, and the card written by
    `draftsmith convert --to specforge` then names its flags.

    draftsmith predict recipes/demo.yaml -s evaluate.temperature=0.8 -s evaluate.top_p=0.95 --store runs/sampled/store

    draftsmith predict recipes/demo.yaml --tree 16,32,60

    draftsmith predict runs/other/store runs/demo/checkpoint --tree 16,32,60
    """
    if drafter is None:
        loaded = load_recipe(recipe, overrides)
        run_dir = runs / loaded.name
    else:
        if store is not None:
            raise UserError("Name the store once: before the drafter, or by --store after a recipe.")
        loaded, run_dir = _trained(drafter, overrides)
        store = recipe
    if tree is not None:
        options = {
            "depth": tree_depth,
            "top_k": tree_top_k,
            "sequences": tree_sequences or None,
            "step_cost": step_cost,
        }
        _predict_trees(loaded, run_dir, _sizes(tree), store, as_json, options)
        return
    from draftsmith.config.sampling import Sampling
    from draftsmith.train.predict import predict as predict_acceptance

    found = predict_acceptance(loaded, run_dir, store_dir=store)
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


def _trained(drafter: Path, overrides: list[str] | None) -> tuple[Recipe, Path]:
    """The recipe that a drafter was trained by, as far as its run recorded it, and the run's folder.

    Args:
        drafter: `RUNS/NAME`, or the checkpoint in it.

    Raises:
        UserError: there is no checkpoint of a finished training.
    """
    run_dir = drafter if (drafter / "checkpoint").is_dir() else drafter.resolve().parent
    record = stage.read(run_dir / "checkpoint")
    if record is None or not {run_dir, run_dir / "checkpoint"} & {drafter, drafter.resolve()}:
        raise UserError(
            f"{drafter} is neither the folder of a run with a trained drafter nor its `checkpoint`. To predict for a drafter from elsewhere, "
            "name a recipe, whose target and run are used: draftsmith predict RECIPE --store STORE."
        )
    # Nothing is served: the default numbers of draft tokens, which the drafter may not have, need not be checked.
    sections = {"name": run_dir.resolve().name, **record["recipe"], "evaluate": {"k": [1], "acceptance_k": 1}}
    return validated(sections, overrides, path=run_dir / "recipe"), run_dir


def _sizes(said: str) -> list[int]:
    """The numbers of `--tree`."""
    parts = [part.strip() for part in said.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1024 for part in parts):
        raise UserError(
            f"`--tree {said}` is not a list of numbers of draft tokens, 1 to 1024 each, as in --tree 16,32,60."
        )
    return [int(part) for part in parts]


def _predict_trees(
    recipe: Recipe, run_dir: Path, sizes: list[int], store: Path | None, as_json: bool, options: dict[str, Any]
) -> None:
    from draftsmith.train.predict_trees import predict_trees

    found = predict_trees(recipe, run_dir, tokens=sizes, store_dir=store, **options)
    if as_json:
        print_json(found)
        return
    grown = "the likeliest continuations" if found["top_k"] is None else f"top-k {found['top_k']}"
    written = "the target's own greedy answers" if found["own_text"] else "text that the target did not write"
    print(f"predicted for greedy answers, from {found['sequences']} sequences of {written}:")
    print(f"{'draft tokens':<22} {'acceptance length':<26} cost of checking")
    for name, ways in (("chain of", found["chains"]), ("tree of", found["trees"])):
        for count, one in ways.items():
            low, high = one["interval"]
            length = f"{one['acceptance_length']:.3f} ({low:.3f} to {high:.3f})"
            cost = "" if one["step_cost"] is None else f"{one['step_cost']:.2f}"
            print(f"{name + ' ' + count:<22} {length:<26} {cost}".rstrip())
    print(f"Trees: at most {found['depth']} levels, {grown}. In brackets: 95%, over sequences.")
    if step := found["step"]:
        best, where = (
            found["best"],
            "a GPU" if step["device"].startswith("cuda") else f"a CPU, torch threads: {step['threads']}",
        )
        print(
            f"Cost: time of transformers' forward pass of the target over the draft tokens and one more, in units of that over one "
            f"({1000 * step['seconds']:.1f} ms; {step['dtype']}, {where}, after {step['context']} tokens). Most tokens per cost, drafting "
            f"not counted: the {best['shape']} of {best['tokens']}."
        )
    if not found["own_text"]:
        print("An estimate: the target did not write the text, and may have chosen other tokens.")
