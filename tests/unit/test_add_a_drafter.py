"""The guide to adding a drafter works as it is written: its code is applied to a copy of the sources, and its kind is trained."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from draftsmith.drafters.base import Drafter

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "add-a-drafter.md"
BLOCK = re.compile(r'^```\w+ title="(\S+?)(?: \((before|replaces) (.+?)\))?"\n(.*?)^```$', flags=re.M | re.S)


def apply(folder: Path) -> list[Path]:
    """Write the guide's code blocks into a copy of the repository: each a new file, or a change of one that exists.

    Returns:
        The new files.
    """
    created = []
    for name, change, anchor, code in BLOCK.findall(GUIDE.read_text()):
        file = folder / name
        if not change:
            assert not (ROOT / name).exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)
            created.append(file)
            continue
        lines = file.read_text().splitlines(keepends=True)
        (at,) = (number for number, line in enumerate(lines) if line.startswith(anchor))
        lines[at : at + (change == "replaces")] = [code] if change == "replaces" else [code, "\n\n"]
        file.write_text("".join(lines))
    return created


def test_the_guide_makes_a_kind_that_learns(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "draftsmith", tmp_path / "draftsmith", ignore=ignored)  # the stages' links become folders
    for name in ("tests/__init__.py", "tests/unit/__init__.py", "tests/unit/tiny_run.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    module, test, recipe = apply(tmp_path)
    assert module.is_relative_to(tmp_path / "draftsmith" / "drafters")
    loads = f"from draftsmith.config.loading import load_recipe; load_recipe({str(recipe)!r}); import draftsmith; print(draftsmith.__file__)"
    for arguments in (["-c", loads], ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        if arguments[0] == "-c":
            assert Path(done.stdout.strip()).is_relative_to(tmp_path), "the copy is what runs, not the repository"
        else:
            assert "2 passed" in done.stdout


def test_the_guide_names_all_that_a_kind_may_define() -> None:
    finished = {"on_meta", "shapes"}  # not for kinds to define
    parts = {name for name in vars(Drafter).keys() | Drafter.__annotations__.keys() if not name.startswith("_")}
    named = set(re.findall(r"\w+", GUIDE.read_text()))
    assert not parts - finished - named
