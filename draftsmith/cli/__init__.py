"""The command line. Stages are imported only when they run, so that `--help` and recipe errors are instant."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from draftsmith import __version__
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console

if TYPE_CHECKING:
    from draftsmith.cli.doctor import Finding
    from draftsmith.drafters.base import Drafter
    from draftsmith.target.info import TargetInfo

app = typer.Typer(
    help="Make a language model faster with vLLM: extract its hidden states, train a drafter, convert, evaluate, serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe; may be repeated."),
]
RunsDir = Annotated[Path, typer.Option("--runs", help="Folder of all runs; this one is written to RUNS/NAME.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON on standard output.")]

Stage = Callable[[Recipe, Path], dict[str, Any]]


def _extract(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.extract.extract import run_extract

    return run_extract(recipe, run_dir)


def _train(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.train.train import run_train

    return run_train(recipe, run_dir)


def _train_in_processes(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.train.launch import train_in_processes

    return train_in_processes(recipe, run_dir)


def _convert(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.convert.convert import run_convert

    return run_convert(recipe, run_dir)


def _evaluate(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    from draftsmith.serve.evaluation.evaluate import run_evaluate

    return dict(run_evaluate(recipe, run_dir))


STAGES: dict[str, Stage] = {
    "extract": _extract,
    "train": _train_in_processes,
    "convert": _convert,
    "evaluate": _evaluate,
}
"""Of a whole run. What one leaves in memory must not be in the way of the next."""


def _run(stage: Stage, recipe_path: Path, overrides: list[str] | None, runs: Path, as_json: bool) -> None:
    recipe = load_recipe(recipe_path, overrides)
    figures = stage(recipe, runs / recipe.name)
    if as_json:
        print(json.dumps(figures, indent=2))


def _all_stages(recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "`draftsmith run` starts a training process on each GPU itself, and here it was started several times over, by a "
            "launcher. Start it alone; `accelerate launch` is for `draftsmith train`."
        )
    return {name: stage(recipe, run_dir) for name, stage in STAGES.items()}


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what it will cost: tokens, disk, memory, hours. Loads nothing.")
    ] = False,
) -> None:
    """Every stage in order; a finished stage whose inputs are unchanged is skipped. Training takes all GPUs that are visible.

    With --plan nothing runs: tokens, bytes on disk, memory, floating-point work and hours of each stage are computed from
    the target's config and the recipe's section `plan` (lengths of texts, hardware), and printed with what they assume.
    """
    if plan:
        from draftsmith.cli.plan import make_plan, report

        planned = make_plan(load_recipe(recipe, overrides))
        print(json.dumps(planned, indent=2) if as_json else "\n".join(report(planned)))
        return
    _run(_all_stages, recipe, overrides, runs, as_json)


@app.command()
def extract(
    recipe: RecipePath, overrides: Overrides = None, runs: RunsDir = Path("runs"), as_json: AsJson = False
) -> None:
    """Prompts to RUNS/NAME/store: the target answers, and its hidden states are saved as it does."""
    _run(_extract, recipe, overrides, runs, as_json)


@app.command()
def train(
    recipe: RecipePath, overrides: Overrides = None, runs: RunsDir = Path("runs"), as_json: AsJson = False
) -> None:
    """Store to RUNS/NAME/checkpoint: train the drafter, predict its acceptance length on held-out text."""
    _run(_train, recipe, overrides, runs, as_json)


@app.command()
def convert(
    source: Annotated[
        Path | None,
        typer.Argument(help="A recipe; or, with --to, a drafter: a folder or Hub id.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    to: Annotated[str | None, typer.Option(help="The format to write; see --list.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write, which must not exist.", show_default=False)
    ] = None,
    named: Annotated[
        str | None, typer.Option("--from", help="The format to read; absent: told by the content.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The drafter's target, a folder or Hub id: for formats that do not say all.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; absent: the source's own.", show_default=False)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            "--vocab", help="Cut or grow an EAGLE-3 drafter's vocabulary to so many tokens.", show_default=False
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="With --vocab: the store whose most frequent tokens they are.", show_default=False),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            help="With --to vllm: weights in 8 bits, as int8 or fp8 (GPUs), or int8-dynamic (CPUs too).",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare the logits of source and result; with --to vllm and --target, also what vLLM proposes.",
        ),
    ] = False,
    list_formats: Annotated[bool, typer.Option("--list", help="Print the formats and what converts to what.")] = False,
) -> None:
    """Checkpoint to RUNS/NAME/vllm, the directory that stock vLLM loads; or, with --to, any drafter to any format.

    draftsmith convert recipes/demo.yaml

    draftsmith convert path/to/drafter --to vllm --out drafter-vllm --target path/to/target
    """
    if list_formats:
        _print_formats()
    elif source is None:
        raise UserError(
            "Name a recipe, or a folder with a drafter's checkpoint and --to FORMAT; --list prints the formats."
        )
    elif to is None:
        options = {
            "--out": out,
            "--from": named,
            "--target": target,
            "--dtype": dtype,
            "--vocab": vocabulary,
            "--store": store,
            "--quantize": quantize,
        }
        if given := [name for name, value in options.items() if value is not None]:
            raise UserError(
                f"{', '.join(given)} needs --to FORMAT, which says what to write; --list prints the formats."
            )
        _run(_convert, source, overrides, runs, as_json)
    else:
        figures = _convert_any(source, to, out, named, target, dtype, vocabulary, store, quantize, verify)
        if as_json:
            print(json.dumps(figures, indent=2))


def _convert_any(
    source: Path, to: str, out: Path | None, named: str | None, target: str | None, dtype: str | None, vocabulary: int | None,
    store: Path | None, quantize: str | None, verify: bool,
) -> dict[str, Any]:  # fmt: skip
    from draftsmith.config.recipe import TargetConfig
    from draftsmith.convert.convert import OWN, convert_checkpoint
    from draftsmith.convert.formats import FORMATS
    from draftsmith.convert.quantize import SCHEMES
    from draftsmith.target.hub import local_directory
    from draftsmith.target.info import describe_target
    from draftsmith.target.prepare import prepare_target

    for option, value, known in (
        ("--to", to, [OWN, *FORMATS]), ("--from", named, [OWN, *FORMATS]), ("--dtype", dtype, ["float32", "bfloat16", "float16"]),
        ("--quantize", quantize, [*SCHEMES]),
    ):  # fmt: skip
        if value is not None and value not in known:
            raise UserError(f"`{option} {value}` is none of {', '.join(known)}.")
    if (vocabulary is None) != (store is None):
        raise UserError("--vocab and --store go together: how many tokens, and of which answers the most frequent.")
    if vocabulary is not None and vocabulary < 1:
        raise UserError(f"`--vocab {vocabulary}` is no size of a vocabulary.")
    if out is None:
        raise UserError("Say with --out which folder to write.")
    source = local_directory(source)
    info = None
    if target is not None:
        local = Path(target).expanduser()
        model = TargetConfig(model=str(local.resolve()) if local.is_dir() else target)
        info = describe_target(prepare_target(model), model)
    served = _served_as_made(info) if verify and to == "vllm" else None
    return convert_checkpoint(
        source, out, to=to, named=named, target=info, dtype=dtype, vocabulary=vocabulary, store=store, quantize=quantize,
        verify=verify, served=served,
    )  # fmt: skip


def _served_as_made(target: TargetInfo | None) -> Callable[[Path, Drafter], dict[str, Any]] | None:
    """What compares vLLM's proposals with the drafter's, where there is all that it takes."""
    if target is None:
        console.print("verify: without --target only logits are compared, and not what vLLM proposes")
        return None
    if find_spec("vllm") is None:
        console.print("verify: vLLM is not installed here, so only logits are compared, and not what it proposes")
        return None
    from draftsmith.serve.proposals import verify_served

    return partial(verify_served, target_dir=target.path)


def _print_formats() -> None:
    from draftsmith.convert.convert import table_of_formats

    for name, title, kinds, others in table_of_formats():
        print(f"{name:<12} {title}: {', '.join(kinds)}")
        print(f"{'':<12}   from and to {', '.join(others)}")


@app.command()
def evaluate(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RECIPE", help="The recipe; with --compare two evaluations.", show_default=False),
    ],
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Hold evaluation B against A; status 3 when B is worse beyond noise.")
    ] = False,
) -> None:
    """Plain against speculative decoding, measured: RUNS/NAME/eval with results.json and report.html.

    With --compare nothing is measured: two evaluations of the same target (runs, their eval folders, or files results.json) are
    held against each other, prompt by prompt. Status 3 says that B is worse in acceptance, speed-up or identity by more than
    chance.

    draftsmith evaluate --compare runs/demo/eval runs/other/eval
    """
    if compare:
        _compare(places, as_json)
    elif len(places) != 1:
        raise UserError("Name one recipe; two evaluations are compared with --compare A B.")
    else:
        _run(_evaluate, places[0], overrides, runs, as_json)


def _compare(places: list[Path], as_json: bool) -> None:
    from draftsmith.serve.evaluation.compare import compare, read_results

    if len(places) != 2:
        raise UserError(
            "--compare takes two evaluations: A, and B that is held against it, as in `draftsmith evaluate --compare A B`."
        )
    found = compare(*(read_results(place) for place in places))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for one in found:
            low, high = one["interval"]
            print(
                f"{one['verdict']:<6} {one['suite']}, {one['figure']}: {one['a']:.3f} in A, {one['b']:.3f} in B; B less A from "
                f"{low:+.3f} to {high:+.3f}"
            )
    if any(one["verdict"] == "worse" for one in found):
        raise typer.Exit(3)


@app.command()
def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the predicted speed-ups by the clock, and the schedule's.")
    ] = False,
) -> None:
    """How many tokens to guess at which load: RUNS/NAME/tune, which `draftsmith serve` goes by.

    Measures once what a step costs by number of sequences and of guesses, and how many guesses are accepted; the best number at
    every load makes vLLM's schedule num_speculative_tokens_per_batch_size, or none where speculation does not pay.
    """
    from draftsmith.serve.tune import run_tune

    loaded = load_recipe(recipe, overrides)
    figures = run_tune(loaded, runs / loaded.name, verify=verify)
    if as_json:
        print(json.dumps(figures, indent=2))


@app.command()
def serve(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    k: Annotated[
        int | None, typer.Option("-k", min=1, help="Speculative tokens; absent: what tuning or the evaluation chose.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="What clients must show as their API key.", show_default=False),
    ] = None,
) -> None:
    """vLLM's OpenAI-compatible server with the target and the run's drafter, until interrupted.

    The recipe's `serve.method` is another way of speculating (ngram, suffix, draft_model, mtp, a drafter from elsewhere, none),
    and `serve.vllm_args` holds any further option of vLLM's server.

    draftsmith serve recipes/demo.yaml -s 'serve.method={method: ngram}' -s serve.vllm_args.max_num_seqs=64
    """
    from draftsmith.serve.server import serve as serve_forever

    loaded = load_recipe(recipe, overrides)
    serve_forever(loaded, runs / loaded.name, host=host, port=port, k=k, api_key=api_key)


@app.command()
def publish(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A run (RUNS/NAME) or its vllm folder, or the Hub id of a whole run.",
            show_default=False,
        ),
    ],
    repo: Annotated[str, typer.Option(metavar="OWNER/NAME", help="Where to publish; made when missing.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Commit to this branch; made when missing. Absent: main.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The target's Hub id, where the recipe names a file or a folder."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="The drafter's license, as in apache-2.0. Absent: the target's."),
    ] = None,
    evaluation: Annotated[str, typer.Option(metavar="FOLDER", help="The run's evaluation: evaluate.output.")] = "eval",
    without_evaluation: Annotated[
        bool, typer.Option("--without-evaluation", help="Publish no measured numbers, only predicted ones.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show every file and the card; contact nothing and upload nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a run's drafter on the Hugging Face Hub, with a model card and its evaluation, in one commit.

    The card says what the drafter is for, how to serve it with vLLM (the command, ready to paste), how it was made, and what
    the run's evaluation measured: acceptance and speed-up by suite, machine and versions. Numbers that no finished evaluation
    of exactly these weights has produced are not published. An upload that was interrupted goes on when the command is given
    again. Log in first with `hf auth login`, or set HF_TOKEN; HF_ENDPOINT names another server than huggingface.co.

    draftsmith publish runs/demo --repo me/smollm2-drafter --dry-run
    """
    from draftsmith.convert.publish import publish as publish_drafter
    from draftsmith.target.hub import local_directory

    figures = publish_drafter(
        local_directory(place), repo, private=private, revision=revision, base_model=base_model, license=license,
        evaluation=None if without_evaluation else evaluation, dry_run=dry_run,
    )  # fmt: skip
    if as_json:
        print(json.dumps(figures, indent=2))
    elif dry_run:
        for name, size in figures["files"].items():
            print(f"{size:>14,} bytes  {name}")
        print(f"\n{figures['card']}")


@app.command()
def inspect(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A store, a checkpoint or a drafter for vLLM: a folder, or OWNER/NAME[@REVISION] on the Hub.",
            show_default=False,
        ),
    ],
    stats: Annotated[bool, typer.Option("--stats", help="A store's lengths, tokens and vocabulary coverage.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the stats as a picture (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a directory is and read all of it: status 0 when it is whole, 1 when damaged, 2 when it is not ours."""
    from draftsmith.convert.inspection import inspect as inspect_directory
    from draftsmith.convert.inspection import write_plot
    from draftsmith.target.hub import local_directory

    report = inspect_directory(local_directory(place), stats=stats or plot is not None)
    if plot is not None and report["good"]:
        write_plot(report["stats"], plot)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if not report["good"]:
        raise typer.Exit(1)


def _print_report(report: dict[str, Any]) -> None:
    """`inspect` for people, on standard output: it is what was asked for."""
    what = {"store": "a store", "checkpoint": "a checkpoint", "vllm": "a drafter for vLLM"}[report["kind"]]
    print(f"{report['path']} is {what}{'' if report['finished'] else ', its stage not finished'}")
    for name, value in report["about"].items():
        print(f"  {name.replace('_', ' ')}: {value}")
    if not report["good"]:
        places = report["damage"]["places"]
        print(("" if places == 1 else f"{places} places are damaged. The first: ") + report["damage"]["message"])
        return
    print("whole: every byte is as it was written" if report["kind"] == "store" else "whole: it opens and is finite")
    if "stats" not in report:
        return
    lengths, tokens, coverage = (report["stats"][name] for name in ("lengths", "tokens", "coverage"))
    for part, counts in tokens.items():
        print(
            f"{part.replace('_', '-')}: "
            + ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items())
        )
    if lengths:
        print(
            "tokens in a sequence: " + ", ".join(f"{name} {lengths[name]}" for name in ("min", "median", "mean", "max"))
        )
        most = max(row[2] for row in lengths["histogram"])
        for start, end, count in lengths["histogram"]:
            print(f"  {start:>6} to {end - 1:<6} {'#' * -(-40 * count // most):<40} {count}")
    if coverage:
        print("share of response tokens among the most frequent of the training part (training, held-out):")
        for row in coverage:
            shares = ["-" if row[part] is None else f"{row[part]:.3f}" for part in ("training", "held_out")]
            print(f"  {row['vocabulary']:>7} tokens  {'  '.join(shares)}")


@app.command()
def doctor(runs: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Say what this machine can do and what is wrong with the install: status 1 where a run would not work.

    Looks at Python, torch, the driver, GPUs, vLLM and its kernels, memory, disk and the Hub's settings; contacts nothing and
    changes nothing.
    """
    from draftsmith.cli.doctor import examine

    findings = examine(runs)
    wrong = any(finding.status == "wrong" for finding in findings)
    if as_json:
        print(json.dumps({"works": not wrong, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_findings(findings)
    if wrong:
        raise typer.Exit(1)


def _print_findings(findings: list[Finding]) -> None:
    """`doctor` for people, on standard output: it is what was asked for."""
    table = Table(show_header=False, show_lines=True)
    colors = {"good": "green", "note": "yellow", "wrong": "bold red"}
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n{finding.advice}", style=colors[finding.status])
        table.add_row(finding.name, Text(finding.status, style=colors[finding.status]), text)
    Console().print(table)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: errors are one paragraph and an exit status, never a traceback for bad input."""
    try:
        app()
    except DraftsmithError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except SystemExit as ended:
        if ended.code == 130:  # what typer makes of Ctrl-C
            console.print("interrupted; run the same command again to continue")
        raise
