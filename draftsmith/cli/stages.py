"""Commands that run stages of a recipe: `run`, `extract`, `train`, `tune`, `serve`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.common import AsJson, Overrides, RecipePath, RunsDir, print_json
from draftsmith.cli.published import for_evaluation, for_serving, for_tuning
from draftsmith.cli.vllm_options import SpeculativeConfig, with_speculative_config
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import UserError
from draftsmith.run.process import end_at_once, launched_together

Stage = Callable[[Recipe, Path], dict[str, Any]]
"""Takes a recipe and `RUNS/NAME`; returns the figures of `stage.json`."""


def extract_stage(
    recipe: Recipe, run_dir: Path, *, training_follows: bool = False, finish: bool = False
) -> dict[str, Any]:
    from draftsmith.extract.extract import run_extract

    return run_extract(recipe, run_dir, training_follows=training_follows, finish=finish)


def train_in_this_process(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.train.train import run_train

    return run_train(recipe, run_dir)


def train_stage(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.train.launch import train_in_processes

    return train_in_processes(recipe, run_dir)


def convert_stage(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.convert.convert import run_convert

    return run_convert(recipe, run_dir)


def evaluate_stage(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.engine.process import prepare_engines
    from draftsmith.run import stage

    measurable = (run_dir / "vllm").is_dir() or recipe.extract.prompts is None
    if stage.read(run_dir / recipe.evaluate.output) is None and measurable:
        prepare_engines(recipe.engine)  # imports vLLM while this process imports the rest
    from draftsmith.serve.evaluation.evaluate import WrongAnswersError, run_evaluate

    try:
        found = dict(run_evaluate(for_evaluation(recipe), run_dir))
    except WrongAnswersError:
        _write_card(recipe, run_dir)  # or the card would go on showing what an earlier evaluation found
        raise
    _write_card(recipe, run_dir)
    return found


def _write_card(recipe: Recipe, run_dir: Path) -> None:
    """The model card beside the drafter, with what was measured; or a line that says why it stays as it is."""
    from draftsmith.convert.records import write_measured_card
    from draftsmith.run.progress import console

    try:
        write_measured_card(run_dir, recipe.evaluate.output)
    except UserError as error:
        console.print(
            f"evaluate: the drafter's card does not show this evaluation: {error}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


STAGES: dict[str, Stage] = {
    "extract": functools.partial(extract_stage, training_follows=True),
    "train": train_stage,
    "convert": convert_stage,
    "evaluate": evaluate_stage,
}
"""The stages of `draftsmith run`, in order. None may leave memory in use that the next one needs."""


def run_stage(stage: Stage, recipe_path: Path, overrides: list[str] | None, runs: Path, as_json: bool) -> None:
    recipe = load_recipe(recipe_path, overrides)
    figures = stage(recipe, runs / recipe.name)
    if as_json:
        print_json(figures)


def _all_stages(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    if launched_together():
        raise UserError(
            "A launcher started several processes of `draftsmith run`, which starts one training process per GPU itself. Start "
            "`draftsmith run` without a launcher; `accelerate launch` is for `draftsmith train`."
        )
    from draftsmith.cli.fit import check_run_fits
    from draftsmith.extract.requests import require_prompts
    from draftsmith.run.stage import read

    if read(run_dir / "store") is None:  # or extraction says what it needs
        require_prompts(recipe)
    check_run_fits(recipe, run_dir)
    return {name: stage(recipe, run_dir) for name, stage in STAGES.items()}


def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only estimate the cost: tokens, disk, memory, hours. Runs nothing, loads no model."
        ),
    ] = False,
) -> None:
    """Run every stage in order. Finished stages with unchanged inputs are skipped; training uses all visible GPUs.

    With --plan nothing runs: the tokens, disk space, memory, FLOP and hours of each stage are estimated from the target's
    config and the recipe's `plan` section (text lengths, hardware), and printed with their assumptions.
    """
    if not plan:
        run_stage(_all_stages, recipe, overrides, runs, as_json)
        return
    from draftsmith.cli.fit import misfit
    from draftsmith.cli.plan import make_plan
    from draftsmith.cli.plan_report import report

    loaded = load_recipe(recipe, overrides)
    planned = make_plan(loaded) | {"misfit": misfit(loaded)}
    if as_json:
        print_json(planned)
    else:
        print("\n".join(report(planned)))


def extract(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish", help="Answer no more training prompts: make a store of those done so far and the held-out ones."
        ),
    ] = False,
) -> None:
    """Prompts to RUNS/NAME/store: generate the target's responses and save its hidden states along the way.

    Interrupted, it continues with the next call. If it takes longer than you have, interrupt it and call it with --finish.
    """
    run_stage(functools.partial(extract_stage, finish=finish), recipe, overrides, runs, as_json)


def train(
    recipe: RecipePath, overrides: Overrides = None, runs: RunsDir = Path("runs"), as_json: AsJson = False
) -> None:
    """Store to RUNS/NAME/checkpoint: train the drafter and predict its acceptance length on held-out text."""
    run_stage(train_in_this_process, recipe, overrides, runs, as_json)
    if launched_together():
        end_at_once(0)


def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also measure wall-clock speedups, of every K and of the schedule.")
    ] = False,
) -> None:
    """Find the best K at every load and write it to RUNS/NAME/tune, which `draftsmith serve` uses.

    Measures the step cost at each concurrency and K, and the acceptance length. The best K at every concurrency becomes vLLM's
    schedule num_speculative_tokens_per_batch_size; K is 0 where speculation does not pay.
    """
    from draftsmith.serve.tune import run_tune

    loaded = for_tuning(load_recipe(recipe, overrides))
    figures = run_tune(loaded, runs / loaded.name, verify=verify)
    if as_json:
        print_json(figures)


def serve(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    k: Annotated[
        int | None,
        typer.Option("-k", min=1, help="Number of speculative tokens. Default: what tuning or the evaluation chose."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="API key that clients must send.", show_default=False),
    ] = None,
    speculative_config: SpeculativeConfig = None,
) -> None:
    """Run vLLM's OpenAI-compatible server with the target and the run's drafter until interrupted.

    The recipe's `serve.method` selects another method of speculation (ngram, suffix, draft_model, mtp, another drafter, or
    none); `serve.vllm_args` holds further options of vLLM's server.

    draftsmith serve recipes/demo.yaml -s 'serve.method={method: ngram}' -s serve.vllm_args.max_num_seqs=64
    """
    from draftsmith.serve.server import serve as serve_forever

    loaded = for_serving(load_recipe(recipe, with_speculative_config(overrides, speculative_config)))
    serve_forever(loaded, runs / loaded.name, host=host, port=port, k=k, api_key=api_key)
