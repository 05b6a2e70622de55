"""Headers of safetensors files, for the few places where the safetensors library does not do.

The library serializes tensors that are all in memory, orders them by dtype and name, and aligns data to 8 bytes; reading, it
copies each tensor. Shards need the states last and at a multiple of 64 bytes, handoff files are written over older ones and
read without a copy, and conversions stream tensors larger than memory. Everything else uses the library.

A file is the header's length (uint64, little-endian), the header (JSON, padded with spaces), and the tensors' bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

DTYPES: dict[str, torch.dtype] = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the format's names, in the order in which the library writes tensors, which aligns them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class TensorEntry(NamedTuple):
    """A tensor's place in a file."""

    dtype: str
    """The format's name; `DTYPES` has those that torch knows."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file, not of its data section."""
    end: int


class Header(NamedTuple):
    """A parsed header."""

    tensors: dict[str, TensorEntry]
    """In the order of the header."""
    metadata: dict[str, str]


def header_bytes(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    *,
    metadata: Mapping[str, str] | None = None,
    alignment: int = 8,
) -> bytes:
    """The start of a file, up to the first tensor's bytes, in a multiple of `alignment` bytes. `tensors` has the dtype and shape of
    each by name, in the order of their bytes in the file."""
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def parse_header(data: bytes | memoryview) -> Header:
    """Parse the header at the start of a file's bytes.
    Raises ValueError: it is not a safetensors header, or `data` ends before it does."""
    length = int.from_bytes(data[:8], "little")
    text = bytes(data[8 : 8 + length])
    if len(data) < 8 or len(text) < length:
        raise ValueError("the header is cut off")
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__", {})
        tensors = {}
        for name, field in fields.items():
            start, end = field["data_offsets"]
            tensors[name] = TensorEntry(field["dtype"], tuple(field["shape"]), 8 + length + start, 8 + length + end)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header is malformed ({type(error).__name__}: {error})") from None
    return Header(tensors, metadata)


def read_header(path: Path) -> Header:
    """Parse a file's header.

    Raises:
        ValueError: it is not a safetensors header, or the file ends before it does.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        return parse_header(start + file.read(min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES)))
