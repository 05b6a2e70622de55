"""What documents tell people to type: commands, options, recipes, overrides, targets and files that exist."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from draftsmith.cli import app
from draftsmith.config.loading import RENAMED, load_recipe
from draftsmith.config.recipe import Recipe

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs" / "log.md"  # a record of what was typed then, with the names of then
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set((ROOT / "docs").glob("*.md")) - {LOG})]
DOCUMENTS = [*PAGES, *ROOT.glob("recipes/*.yaml")]
MINIMAL: dict[str, Any] = {
    "name": "run",
    "target": {"model": "owner/name"},
    "extract": {"prompts": {"path": "prompts.jsonl"}},
}


def commands(text: str) -> list[list[str]]:
    """Arguments after `draftsmith`, of every such command in backticks, in a code block, or alone on a comment's line."""
    found = re.findall(r"`draftsmith ([^`\n]+(?:\n[^`\n]+)?)`|^(?:#? +)?draftsmith ([a-z-][^\n]*)$", text, flags=re.M)
    texts = [
        re.sub(r"\s+#? *", " ", inside or alone.partition(" #")[0]).split("    ")[0].strip() for inside, alone in found
    ]
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
def test_commands_exist(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = document.read_text()
    of_the_page = re.findall(r'```yaml title="(\S+)"', text)  # test_add_a_drafter.py loads it
    for arguments in commands(text):
        params = parsed(arguments)
        named = [Path(str(params[name])) for name in ("recipe", "source") if params.get(name)]
        named += params.get("places") or []
        for recipe in named:
            if recipe.suffix == ".yaml" and recipe.parent.name == "recipes" and str(recipe) not in of_the_page:
                load_recipe(recipe, params.get("overrides"))


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_targets_files_and_keys_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z][a-z0-9-]*)", text, flags=re.M)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / link).exists(), link
        assert not link.startswith("reference/"), "`make docs` makes it: in a clone, and on GitHub, it is not there"
    folders = "draftsmith|extract|train|convert|serve|recipes|docs|tests|scripts"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+\.(?:py|yaml|sh|md))`", text):
        assert (ROOT / path).exists() or re.search(r"[A-Z]", Path(path).stem), path
    for key in re.findall(r"`((?:target|engine|extract|train|convert|evaluate|tune|serve|plan)\.[a-z_]+)[.`=:]", text):
        section, name = key.split(".")
        model = Recipe.model_fields[section].annotation
        fields = {
            field for part in (model, *getattr(model, "__args__", ())) for field in getattr(part, "model_fields", {})
        }
        assert name in fields or key in RENAMED, key


def anchors(page: Path) -> set[str]:
    """Of the page's headings, those that are the same on GitHub and on the site: a heading with dashes or signs between words has two."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.M):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        of_github, of_the_site = plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)
        if of_github == of_the_site:
            found.add(of_github)
    return found


@pytest.mark.parametrize("document", [*PAGES, LOG, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_anchors_exist(document: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        assert anchor in anchors(document.parent / link if link else document), f"{link}#{anchor}"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_recipes_are_valid(document: Path) -> None:
    """A block is a recipe, or a part of one."""
    for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), flags=re.S):
        part = yaml.safe_load(block)
        Recipe.model_validate(MINIMAL | part | {"extract": MINIMAL["extract"] | part.get("extract", {})})


def test_the_readme_is_short_and_its_recipe_is_one() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    assert Recipe.model_validate(yaml.safe_load(block)).name == "my-run"


def test_the_changelog_lists_renamed_keys() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for old, new in RENAMED.items():
        assert f"| `{old}` | `{new}` |" in text


def test_every_page_is_in_the_navigation() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed = set(re.findall(r"'([\w/-]+\.md)'", str(site["nav"])))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("*.md")}
    assert pages <= listed
    assert listed - pages == {"reference/recipe.md", "reference/cli.md", "reference/results.md"}


def test_commands_are_found() -> None:
    text = "Do `draftsmith run R --plan`.\n```\ndraftsmith convert A --to vllm\n```\n#   draftsmith extract|train R    (both)\n"
    assert commands(text + "draftsmith serve R   # a server\n") == [
        ["run", "R", "--plan"],
        ["convert", "A", "--to", "vllm"],
        ["extract", "R"],
        ["train", "R"],
        ["serve", "R"],
    ]
    for wrong in (["run", "R", "--plans"], ["evaluate", "recipes/demo.yaml", "--k", "3"]):
        with pytest.raises(UsageError):
            parsed(wrong)
    assert sum(len(commands(page.read_text())) for page in PAGES) > 40
