"""`draftsmith evaluate`: measure a run's drafter, or compare two evaluations."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.common import AsJson, Overrides, RunsDir, print_json
from draftsmith.cli.stages import evaluate_stage, run_stage
from draftsmith.run.errors import UserError

_RUNS = Path("runs")


def evaluate(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="RECIPE", help="The recipe; with --compare, two evaluations.", show_default=False),
    ],
    overrides: Overrides = None,
    runs: RunsDir = _RUNS,
    as_json: AsJson = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare evaluation B with A; exit status 3 if B is significantly worse.")
    ] = False,
) -> None:
    """Measure speculative decoding against the baseline: RUNS/NAME/eval with results.json and report.html.

    With --compare nothing is measured: two evaluations of the same target and dtype (runs, their eval folders, or results.json files)
    are compared prompt by prompt. Exit status 3 means that B is worse in acceptance length, speedup or identity by more than
    chance.

    draftsmith evaluate --compare runs/demo/eval runs/other/eval
    """
    if compare:
        if overrides or runs != _RUNS:
            raise UserError(
                "--compare reads two evaluations and no recipe: -s and --runs have no effect there. Leave them out."
            )
        _compare(places, as_json)
    elif len(places) == 1:
        run_stage(evaluate_stage, places[0], overrides, runs, as_json)
    else:
        raise UserError("Name one recipe. To compare two evaluations, use --compare A B.")


def _compare(places: list[Path], as_json: bool) -> None:
    from draftsmith.serve.evaluation.compare import compare, read_results

    if len(places) != 2:
        raise UserError(
            "--compare takes two evaluations, as in `draftsmith evaluate --compare A B`: B is compared with A."
        )
    found = compare(*(read_results(place) for place in places))
    if as_json:
        print_json(found)
    else:
        for one in found:
            low, high = one["interval"]
            why = one.get("why", f"B - A between {low:+.3f} and {high:+.3f}")
            print(
                f"{one['verdict']:<8} {one['suite']}, {one['figure']}: {one['a']:.3f} in A, {one['b']:.3f} in B; {why}"
            )
    if any(one["verdict"] == "worse" for one in found):
        raise typer.Exit(3)
