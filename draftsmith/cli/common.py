"""Options and output that several commands share."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe; may be repeated."),
]
RunsDir = Annotated[Path, typer.Option("--runs", help="Folder that holds all runs; this one is RUNS/NAME.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON to standard output.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
