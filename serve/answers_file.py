"""Answers as JSON lines, one line an answer: appended as they come, continued after an end at any moment, in the prompts' order once
all are there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from draftsmith.run.atomic_io import new_file, no_locks
from draftsmith.run.errors import UserError

KEY = "key"
"""In every line: identifies an answer by its prompt and by all that decides what is answered."""
_START = f'{{"{KEY}": "'.encode()


class AnswersFile:
    """A file of answers, open for more. A last line that was cut off is dropped.

    Args:
        path: the file, which may exist.
        keys: of all answers that it is to hold, in order.

    Raises:
        UserError: it holds something else, or another process is writing it.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        if path.is_dir():
            raise UserError(
                f"{path} is a folder, and the answers are one file. Name one in it, as --out {path / 'answers.jsonl'}."
            )
        self._path, self._keys = path, keys
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_alone(path)
        self._places: dict[str, tuple[int, int]] = {}  # by key: start and length of its line
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> set[str]:
        """Keys of the answers that it has."""
        return set(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def append(self, row: dict[str, Any]) -> None:
        """Add an answer; `row` has a key of `keys`."""
        line = json.dumps({KEY: row[KEY]} | row).encode("ascii") + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self._places[row[KEY]] = (start, len(line))

    def order(self) -> None:
        """Put the answers into the prompts' order, all at once: readers see the old file or the new one."""
        wanted = [key for key in self._keys if key in self._places]
        if wanted == sorted(self._places, key=lambda key: self._places[key]):
            return
        with new_file(self._path, size=sum(length for _, length in self._places.values())) as ordered:
            for key in wanted:
                start, length = self._places[key]
                self._file.seek(start)
                ordered.write(self._file.read(length))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        wanted, start = set(self._keys), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            key = _key_of(line)
            if key is None and (self._file.read(1) or not _was_begun(line)):
                raise UserError(f"{self._path}, line {number}: not an answer of `draftsmith generate`. {_OTHER_FILE}")
            if key is None:
                break
            if key not in wanted:
                raise UserError(
                    f"{self._path}, line {number}: an answer to another prompt, of another target, or with other `sampling` or engine settings (`engine.options`, `engine.max_model_len`). {_OTHER_FILE}"
                )
            self._places[key] = (start, len(line))
            start += len(line)
        self._file.truncate(start)


def _open_alone(path: Path) -> BinaryIO:
    """The file, open and locked. Raises UserError: another process has it locked, or its file system has no locks."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"Another process is writing {path}. Wait for it, or name another file with --out."
            ) from None
        except OSError as error:
            file.close()
            raise UserError(f"{no_locks(path.parent, error)} (`--out`).") from None
        # Before it was locked, the process that had it may have put another in its place (`AnswersFile.order`), or somebody removed it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


_OTHER_FILE = "Name another file with --out, or move this one away."


def _was_begun(line: bytes) -> bool:
    """Whether it is the beginning of an answer's line; another's file is never shortened."""
    return line[: len(_START)] == _START[: len(line)]


def _key_of(line: bytes) -> str | None:
    """The key of a whole line; None for one that was cut off, or is something else."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    key = row.get(KEY) if isinstance(row, dict) else None
    return key if isinstance(key, str) else None
