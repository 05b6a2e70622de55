"""`draftsmith inspect`: what a directory is, and whether it is intact."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.common import AsJson, print_json


def inspect(
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A store, a checkpoint or a drafter of any format: a folder, or OWNER/NAME\\[@REVISION] on the Hub.",
            show_default=False,
        ),
    ],
    stats: Annotated[
        bool, typer.Option("--stats", help="Of a store: sequence lengths, token counts and vocabulary coverage.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the stats to this file (.png, .svg or .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a directory is and verify it by reading all of it.

    Exit status 0: intact; 1: damaged; 2: none of these.
    """
    from draftsmith.convert.inspection import inspect as inspect_directory
    from draftsmith.convert.inspection import write_plot
    from draftsmith.target.hub import local_directory

    report = inspect_directory(local_directory(place), stats=stats or plot is not None)
    if plot is not None and report["good"]:
        write_plot(report["stats"], plot)
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if not report["good"]:
        raise typer.Exit(1)


def _print_report(report: dict[str, Any]) -> None:
    names = {"store": "a store", "checkpoint": "a checkpoint", "vllm": "a drafter for vLLM", "drafter": "a drafter"}
    what = names[report["kind"]]
    print(f"{report['path']} is {what}{'' if report['finished'] else ', its stage unfinished'}")
    for name, value in report["about"].items():
        print(f"  {name.replace('_', ' ')}: {value}")
    if not report["good"]:
        places = report["damage"]["places"]
        print(("" if places == 1 else f"{places} places are damaged. The first: ") + report["damage"]["message"])
        return
    if report["kind"] == "store":
        print("intact: every checksum matches")
    elif "not_compared" in report:
        print(
            "all values are finite; its tensors were not compared with its config, which `draftsmith convert` does not take as it is: "
            f"{report['not_compared']}"
        )
    else:
        print("intact: it loads and all values are finite")
    if "stats" in report:
        _print_stats(report["stats"])


def _print_stats(stats: dict[str, Any]) -> None:
    for part, counts in stats["tokens"].items():
        listed = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items())
        print(f"{part.replace('_', '-')}: {listed}")
    if lengths := stats["lengths"]:
        listed = ", ".join(f"{name} {lengths[name]}" for name in ("min", "median", "mean", "max"))
        print(f"tokens per sequence: {listed}")
        most = max(row[2] for row in lengths["histogram"])
        for start, end, count in lengths["histogram"]:
            print(f"  {start:>6} to {end - 1:<6} {'#' * -(-40 * count // most):<40} {count}")
    if coverage := stats["coverage"]:
        print("share of response tokens among the most frequent tokens of the training part (training, held-out):")
        for row in coverage:
            shares = ["-" if row[part] is None else f"{row[part]:.3f}" for part in ("training", "held_out")]
            print(f"  {row['vocabulary']:>7} tokens  {'  '.join(shares)}")
