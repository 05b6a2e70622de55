"""`make lint` finds a circle of imports and an import that goes the wrong way, in the rooms and in the stages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is, its links followed."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "draftsmith", folder / "draftsmith", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )


def test_there_is_none(tree: Path) -> None:
    done = check(tree)
    assert done.returncode == 0, done.stdout
    assert "5 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("config/section.py", "from draftsmith.config import loading", "No circles"),
        ("extract/handoff.py", "from draftsmith.extract import extract", "No circles"),
        ("store/format.py", "from draftsmith.drafters import base", "Stages use the shared rooms"),
        ("train/loss.py", "from draftsmith.convert import convert", "Stages use the shared rooms"),
        ("config/section.py", "import torch", "Recipes can be checked without torch"),
    ],
)
def test_a_planted_one_is_found(tree: Path, module: str, line: str, broken: str) -> None:
    path = tree / "draftsmith" / module
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        done = check(tree)
    finally:
        path.write_text(before)
    assert done.returncode == 1
    assert any(broken in row and "BROKEN" in row for row in _contracts(done.stdout)), done.stdout


def test_a_circle_of_a_package_and_its_own_module_is_found(tree: Path) -> None:
    script, path = ROOT / "scripts" / "import_circles.py", tree / "draftsmith" / "serve" / "plugin" / "versions.py"
    assert str(script.relative_to(ROOT)) in (ROOT / "Makefile").read_text()
    before = path.read_text()
    for planted, status in ((before, 0), (f"{before}\nfrom draftsmith.serve.plugin import ARCHITECTURE\n", 1)):
        path.write_text(planted)
        done = subprocess.run(
            [sys.executable, script], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
    path.write_text(before)
    assert "draftsmith.serve.plugin.versions" in done.stderr


def _contracts(printed: str) -> list[str]:
    """One line for each contract; long names are wrapped."""
    rows: list[str] = []
    for line in printed.splitlines():
        if rows and not rows[-1].endswith(("KEPT", "BROKEN")):
            rows[-1] += f" {line}"
        else:
            rows.append(line)
        if not line.strip():
            rows.append("")
    return rows
