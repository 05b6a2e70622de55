"""What the README tells people to type: commands, options, recipes and overrides that are there."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from draftsmith.cli import app
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("recipes/*.yaml")]


def commands(text: str) -> list[list[str]]:
    """Arguments after `draftsmith`, of every such command in backticks, in a code block, or alone on a comment's line."""
    found = re.findall(r"`draftsmith ([^`\n]+(?:\n[^`\n]+)?)`|^(?:#? +)?draftsmith ([a-z-][^\n]*)$", text, flags=re.M)
    texts = [re.sub(r"\s+#? *", " ", inside or alone).split("    ")[0].strip() for inside, alone in found]
    expanded: list[list[str]] = []
    for one in texts:
        first, *rest = shlex.split(re.sub(r" +\([^)]*\)$", "", one))
        expanded += [[name, *rest] for name in first.split("|")]
    return expanded


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
UsageError = typer.BadParameter.__mro__[1]
"""Of typer's own copy of click."""


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The command's parameters, by the command line's own parser; nothing runs. Empty for a mention without arguments.

    Raises:
        UsageError: it has no such option.
    """
    name, *rest = arguments
    try:
        return dict(COMMANDS[name].make_context(name, rest).params)
    except typer.BadParameter as error:
        if "Missing parameter" not in str(error):
            raise
        return {}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_there(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for arguments in commands(document.read_text()):
        params = parsed(arguments)
        for recipe in (Path(params[name]) for name in ("recipe", "source") if params.get(name)):
            if recipe.suffix == ".yaml" and recipe.parent.name == "recipes":
                load_recipe(recipe, params.get("overrides"))


def test_the_readme_s_recipe_is_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert Recipe.model_validate(yaml.safe_load(block)).name == "my-run"


def test_commands_are_found() -> None:
    text = "Do `draftsmith run R --plan`.\n```\ndraftsmith convert A --to vllm\n```\n#   draftsmith extract|train R    (both)\n"
    assert commands(text) == [
        ["run", "R", "--plan"],
        ["convert", "A", "--to", "vllm"],
        ["extract", "R"],
        ["train", "R"],
    ]
    for wrong in (["run", "R", "--plans"], ["evaluate", "recipes/demo.yaml", "--k", "3"]):
        with pytest.raises(UsageError):
            parsed(wrong)
    assert len(commands((ROOT / "README.md").read_text())) > 12
