"""`draftsmith generate`: answers to a file of prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from draftsmith.cli.common import AsJson, Overrides, RecipePath, RunsDir, home_expanded, print_json
from draftsmith.cli.published import for_serving
from draftsmith.cli.vllm_options import SpeculativeConfig, with_speculative_config
from draftsmith.config.loading import load_recipe
from draftsmith.config.methods import NoSpeculation
from draftsmith.config.sources import Prompts
from draftsmith.run.errors import UserError

_FILES = (".json", ".jsonl", ".gz", ".parquet", ".arrow", ".txt")


def generate(
    recipe: RecipePath,
    prompts: Annotated[
        str,
        typer.Argument(
            help="Prompts: a file or folder as extraction takes it, or a data set's Hub id.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Output, JSON lines; an existing file is resumed.", show_default=False)
    ],
    overrides: Overrides = None,
    runs: RunsDir = Path("runs"),
    as_json: AsJson = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="How to speculate: a method's name, or a section as in `serve.method`. Default: as in `serve`.",
            show_default=False,
        ),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    k: Annotated[
        int | None,
        typer.Option("-k", min=1, help="Number of speculative tokens. Default: what tuning or the evaluation chose."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Answer this many rows, drawn as `limit` of a recipe's prompts draws them."),
    ] = None,
    layout: Annotated[
        str, typer.Option("--format", help="Keys of the rows, as `format` of a recipe's prompts.")
    ] = "auto",
) -> None:
    """Answer prompts offline with the target and the run's drafter, or any other method, and write the answers as they come.

    The recipe's section `sampling` has vLLM's sampling parameters. After an interruption the same command continues. The file is in a
    layout that extraction takes as prompts with answers.

    draftsmith generate recipes/demo.yaml recipes/prompts/demo-heldout.jsonl --out answers.jsonl -s sampling.temperature=0
    """
    if method is not None and speculative_config is not None:
        raise UserError("`--method` and `--speculative-config` are two ways to say the same. Leave one out.")
    overrides = with_speculative_config(overrides, speculative_config)
    if method is not None:
        overrides.append(f"serve.method={_section(method)}")
    loaded = for_serving(load_recipe(recipe, overrides))
    if k is not None and isinstance(loaded.serve.method, NoSpeculation):
        raise UserError("`-k` is a number of draft tokens, and `method: none` drafts none. Leave one of them out.")
    source = _source(prompts, layout, limit)
    from draftsmith.serve.generate import run_generate

    figures = run_generate(loaded, runs / loaded.name, source, out, k=k)
    if as_json:
        print_json(figures)


def _section(method: str) -> str:
    """The section that `--method` names, as YAML."""
    try:
        value: Any = yaml.safe_load(method)
    except yaml.YAMLError:
        raise UserError(
            f"`--method {method}` is neither a method's name nor YAML such as `{{method: ngram}}`."
        ) from None
    return method if isinstance(value, dict) else f"{{method: {value}}}"


def _source(prompts: str, layout: str, limit: int | None) -> Prompts:
    path = home_expanded(prompts)
    if path.exists():
        place = {"path": str(path.resolve())}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", prompts) and path.suffix not in _FILES:
        place = {"dataset": prompts}
    else:
        raise UserError(
            f"There is no file or folder {prompts} here, and it is not a data set's Hub id such as owner/name."
        )
    try:
        return Prompts.model_validate(place | {"format": layout, "limit": limit})
    except ValidationError as error:
        raise UserError(f"`--format {layout}`: {error.errors()[0]['msg']}.") from None
