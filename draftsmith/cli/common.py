"""Options and output that several commands share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from draftsmith.target.info import TargetInfo
    from draftsmith.target.prepare import Weights

RecipePath = Annotated[Path, typer.Argument(help="The recipe, a YAML file; see recipes/.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-s", "--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe; may be repeated."),
]
RunsDir = Annotated[Path, typer.Option("--runs", help="Folder that holds all runs; this one is RUNS/NAME.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON to standard output.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def home_expanded(path: str) -> Path:
    """A path with `~` and `~user` replaced; as it is where there is no such user, whom `Path.expanduser` answers with a traceback."""
    return Path(os.path.expanduser(path))


def describe(target: str, weights: Weights, trust_remote_code: bool) -> TargetInfo:
    """The target that an option names: a folder, or `OWNER/NAME` or `OWNER/NAME@REVISION` on the Hub, of which the asked weights are downloaded.
    Raises UserError: there is no such folder, or no such model."""
    from draftsmith.config.target import TargetConfig
    from draftsmith.target.info import describe_target
    from draftsmith.target.prepare import prepare_target

    local, revision = home_expanded(target), None
    if local.is_dir():
        target = str(local.resolve())
    elif target.startswith((".", "~", "/")):
        raise UserError(f"The target {target} does not exist: there is no such folder.")
    elif "@" in target:
        target, revision = target.split("@", 1)
    model = TargetConfig(model=target, revision=revision, trust_remote_code=trust_remote_code)
    return describe_target(prepare_target(model, weights=weights), model)
