"""Files that appear whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.run.errors import DraftsmithError, UserError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # error numbers of a full disk, quota or file


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        UserError: the file is missing or holds something else.
        PermissionError: it may not be read.
    """
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"There is no {path.name} in {path.parent}.") from None
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}). Get it again.") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} holds a {type(record).__name__}, but should hold an object.")
    return record


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: readers see the old file or the new one, never part of one."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file atomically and durably: the parts, end to end.
    Raises DraftsmithError: the disk is full. Nothing of the new file is left, and an earlier one is unchanged."""
    with new_file(path, size=sum(memoryview(part).nbytes for part in parts)) as file:
        for part in parts:
            file.write(part)


@contextmanager
def new_file(path: Path, *, size: int) -> Iterator[BinaryIO]:
    """A file of `size` bytes that is at `path`, whole and durable, once the block has succeeded. Raises as `write_bytes`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)  # the rename itself must survive a power cut
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError) or error.errno not in _NO_SPACE:
            raise
        raise DraftsmithError(
            f"There is no room for {path} ({size / 1e6:.1f} MB): {error.strerror}. Free some space in {path.parent} and run the "
            "same command again; what was finished before is kept."
        ) from None


def no_locks(folder: Path, error: OSError) -> str:
    """That a folder's file system has no locks, which keep two processes apart, and the way out but for the option."""
    return (
        f"The file system of {folder} takes no file locks ({error.strerror}), without which two processes could write there at once. Mount it with "
        "them (Lustre: `-o flock`), or choose a folder on another file system"
    )


def require_new(folder: Path) -> None:
    """
    Raises:
        UserError: it exists, and is not an empty folder, or would lie in a file.
    """
    if file := next((parent for parent in folder.parents if parent.is_file()), None):
        raise UserError(f"{folder} cannot be a folder, since {file} is a file. Name another folder with --out.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists. Move it away, or name another folder with --out.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` once the block has succeeded, and is removed otherwise.

    Raises:
        UserError: as `require_new`.
    """
    require_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
