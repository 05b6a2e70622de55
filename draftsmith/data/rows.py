"""Rows of data sets: local JSON, JSON lines, Parquet and Arrow files, and data sets on the Hugging Face Hub.

Rows are read one at a time, so a data set may be larger than memory. An unreadable row is yielded as `Unreadable`, so that the caller
can count it.

JSON is parsed here, because the reader of `datasets` rejects a whole file for one bad line or a field with two types. Parquet, Arrow
and the Hub go through `datasets`. Local files need no network.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from draftsmith.config.sources import Prompts
from draftsmith.run.errors import UserError
from draftsmith.target.downloads import fetch

_MAX_ROW_BYTES = 64 << 20
"""A longer line is not a conversation; reading it whole could exhaust memory."""
_SHUFFLE_ROWS = 10_000
_CHUNK = 1 << 16
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow", b"\xff\xff\xff\xff": "arrow"}
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", *_TABLES)


@dataclass(frozen=True)
class Unreadable:
    """In place of a row that cannot be read."""

    reason: str


def name_of(source: Prompts) -> str:
    """The source's name for messages."""
    return source.path or source.dataset or f"{source.file} of {source.package}"


def read_rows(source: Prompts) -> Iterator[tuple[str, Any]]:
    """Yield every row with its position ("line 3"): usually a mapping, else another JSON value or `Unreadable`.

    Raises:
        UserError: the source is missing, cannot be reached, or is not a data set.
    """
    if source.dataset is not None:
        yield from _hub_rows(source)
        return
    folder = Path(source.path) if source.path is not None else None
    if folder is None or not folder.is_dir():
        yield from _file_rows(fetch(source))
        return
    if source.sha256 is not None:
        raise UserError(
            f"{folder} is a folder, and `sha256` is that of a file. Leave it out, or name one file in `path`."
        )
    files = sorted(path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES) and not _is_metadata(path))
    if not files:
        raise UserError(f"The folder {folder} has no data files ({', '.join(_SUFFIXES)}).")
    for path in files:
        for where, row in _file_rows(path):
            yield f"{path.relative_to(folder)}, {where}", row


def _is_metadata(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` writes this file beside the data."""
    return path.name in ("dataset_info.json", "state.json", "dataset_dict.json")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            head = file.read(_CHUNK)
        kind = _MAGIC.get(head[:4]) or _TABLES.get(path.suffix.lower())
        if kind is not None and head:
            yield from _table_rows(kind, path)
            return
        with gzip.open(path) if head[:2] == b"\x1f\x8b" else path.open("rb") as text:
            yield from _json_rows(path, cast("IO[bytes]", text))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"Cannot read {path}: {error}. {READABLE}") from None


READABLE = "Data is UTF-8 JSON lines or one JSON array (either may be gzipped), Parquet or Arrow."


# ---- JSON ----


def _json_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    start = file.read(_CHUNK)
    if b"\0" in start[:16] or start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"Cannot read {path}: it is not UTF-8 text. {READABLE}")
    file.seek(0)
    if start.startswith(b"\xef\xbb\xbf"):  # a byte order mark, as Windows programs write it
        file.seek(3)
        start = start[3:]
    if start.lstrip()[:1] == b"[":
        yield from _array_rows(file)
    else:
        yield from _line_rows(file)


def _line_rows(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(_MAX_ROW_BYTES):
        number += 1
        if len(line) == _MAX_ROW_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(_CHUNK)
            yield f"line {number}", Unreadable(f"longer than {_MAX_ROW_BYTES >> 20} MiB")
        elif line.strip():
            yield f"line {number}", _decoded(line)


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        return Unreadable("not UTF-8 text")
    except json.JSONDecodeError as error:
        return Unreadable(f"not JSON ({error.msg})")
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets thousands deep
        return Unreadable("not JSON (too large a number, or nested too deeply)")


def _array_rows(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON array up to its end, or to where it was cut off (as in one published copy of ShareGPT)."""
    import codecs

    decoder, text_of = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    between = re.compile(r"[\s,]*")
    buffer = text_of.decode(file.read(_CHUNK))
    place, number, ended, wanted = buffer.index("[") + 1, 0, False, _CHUNK
    while True:
        place = between.match(buffer, place).end()  # type: ignore[union-attr]  # the pattern matches everywhere
        problem = ""
        if place < len(buffer):
            if buffer[place] == "]":
                break
            try:
                row, end = decoder.raw_decode(buffer, place)
                if end < len(buffer) or ended:  # else a number may continue in the next chunk
                    number, place, wanted = number + 1, end, _CHUNK
                    yield f"row {number}", row
                    continue
            except json.JSONDecodeError as error:
                problem = error.msg
            except (ValueError, RecursionError):
                problem = "too large a number, or nested too deeply"
        if ended or len(buffer) - place > _MAX_ROW_BYTES:
            why = f"not JSON ({problem})" if problem else "the array has no end"
            yield f"row {number + 1}", Unreadable(f"{why}; the rest of the file cannot be read")
            return
        more = file.read(wanted)
        ended, wanted = not more, 2 * wanted  # doubling, so that a long row is not parsed again for every small chunk
        buffer, place = buffer[place:] + text_of.decode(more, final=ended), 0
    if buffer[place + 1 :].strip() or file.read(_CHUNK).strip():
        yield f"row {number + 1}", Unreadable("text after the end of the JSON array")


# ---- through `datasets` ----


def _table_rows(kind: str, path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset
    from pyarrow.parquet import read_metadata

    try:
        if kind == "parquet" and not read_metadata(path).num_rows:  # an error in `datasets`
            return
        rows = load_dataset(kind, data_files=glob.escape(str(path)), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"row {number}", without_nulls(row)
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise UserError(f"Cannot read {path} as {kind.capitalize()}: {_first_line(error)}. {READABLE}") from None


def _hub_rows(source: Prompts) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(
            source.dataset, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
        if source.limit is not None:  # only the beginning will be read
            seed = source.seed
            rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_ROWS) if source.streaming else rows.shuffle(seed=seed)
        for number, row in enumerate(rows, 1):
            yield f"row {number}", without_nulls(row)
    except Exception as error:  # the Hub client, pyarrow and datasets raise many kinds
        raise UserError(
            f"Cannot read the data set {source.dataset} (split {source.split}) from the Hugging Face Hub: "
            f"{_first_line(error)}. Check `dataset`, `config`, `split` and `revision`, the network, and your login if the data set "
            "requires one; or download it and give its `path`."
        ) from None


def without_nulls(value: Any) -> Any:
    """The value without null keys: in tables every object has the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0][:300]}".rstrip(".")
