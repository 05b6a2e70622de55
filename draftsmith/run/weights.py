"""Tensors of a checkpoint without reading them: their shapes, their place in a file, and a stream of their elements.

Converting 70 GB must not take 70 GB of memory, and most bytes do not change. So a `Weight` yields its elements in parts of a
few megabytes, and if they are in a file exactly as they will be written, it knows where, and the writer copies the bytes from
file to file. A conversion is then as fast as a copy.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.run.atomic_io import new_file, read_json
from draftsmith.run.errors import UserError
from draftsmith.run.safetensors_io import DTYPE_NAMES, DTYPES, header_bytes, read_header

_AT_ONCE = 16 << 20  # bytes of a tensor in memory at a time
_METADATA = {"format": "pt"}  # metadata that transformers expects in the header of a model's file


@dataclass(frozen=True)
class Span:
    """A range of bytes in a file that holds a tensor's elements in order."""

    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class Weight:
    """A tensor that need not be in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterator[torch.Tensor]]
    """Yields its elements in order, as flat parts; may be called again."""
    span: Span | None = None
    """The place of its bytes, if they are in a file unchanged."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Weight:
        """The weight of a tensor in memory."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: iter(_pieces(tensor.detach().cpu())))

    def tensor(self) -> torch.Tensor:
        """Read the whole tensor into memory of its own."""
        whole = torch.empty(self.count, dtype=self.dtype)
        start = 0
        for part in self.parts():
            whole[start : start + len(part)] = part
            start += len(part)
        return whole.view(self.shape)

    def to(self, dtype: torch.dtype) -> Weight:
        """Convert floating-point elements to another dtype; others stay as they are. Reading the result raises UserError: a finite
        element would be infinite."""
        if dtype == self.dtype or not self.dtype.is_floating_point:
            return self

        def parts() -> Iterator[torch.Tensor]:
            for part in self.parts():
                converted = part.to(dtype)
                if (converted.isinf() & part.isfinite()).any():
                    raise UserError(
                        f"A weight is too large for {str(dtype).removeprefix('torch.')}, whose largest number is {torch.finfo(dtype).max:g}, and "
                        "would be infinite. Choose bfloat16 or float32."
                    )
                yield converted

        return Weight(self.shape, dtype, parts)

    def rows(self, index: torch.Tensor, others: torch.Tensor | None = None) -> Weight:
        """Select rows `index` (int64) of the first dimension; for a negative index, the row of `others` at its position."""

        def parts() -> Iterator[torch.Tensor]:
            whole = self.tensor()
            at_once = max(1, _AT_ONCE // max(1, whole[:1].nbytes))
            for start in range(0, len(index), at_once):
                some = index[start : start + at_once]
                found = whole[some.clamp(min=0)]
                if others is not None:
                    found[some < 0] = others[start : start + at_once][some < 0].to(found.dtype)
                yield found.flatten()

        return Weight((len(index), *self.shape[1:]), self.dtype, parts)


def in_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, Weight]:
    """Weights of a state dict."""
    return {name: Weight.of(tensor) for name, tensor in tensors.items()}


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = tensor.contiguous().flatten()
    return flat.split(_AT_ONCE // flat.dtype.itemsize) if len(flat) else ()


# ---- reading ----


def weight_files(directory: Path) -> list[Path]:
    """Files of a folder that by their names hold tensors."""
    return sorted(path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in directory.glob(pattern))


def open_weights(directory: Path) -> dict[str, Weight]:
    """Open all tensors of a checkpoint: safetensors or PyTorch files, sharded or not. Pickled code never runs. Raises
    UserError: there are none, a shard is missing or outside the folder, or a file is damaged or holds other objects."""
    for single, opened in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_pickle)):
        index = directory / f"{single}.index.json"
        if index.is_file():
            return _open_shards(index, opened)
        if (directory / single).is_file():
            return opened(directory / single)
    named = weight_files(directory)
    if len(named) == 1:
        return (open_safetensors if named[0].suffix == ".safetensors" else open_pickle)(named[0])
    found = f"several without an index ({', '.join(p.name for p in named[:5])})"
    raise UserError(
        f"A checkpoint has its tensors in model.safetensors or pytorch_model.bin; {directory} has "
        f"{found if named else 'neither'}. Name the folder that has them."
    )


def _open_shards(index: Path, opened: Callable[[Path], dict[str, Weight]]) -> dict[str, Weight]:
    record = read_json(index)
    places = record.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{index} has no `weight_map` from tensor to file. The checkpoint is damaged; get it again.")
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file or file in ("", ".", ".."):
            raise UserError(
                f"{index} refers to `{file}` outside its folder. A checkpoint's shards are beside their index; do not trust this "
                "checkpoint."
            )
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise UserError(
            f"The checkpoint in {index.parent} lacks {', '.join(missing)}, which its index names. Get it again."
        )
    shards = {file: opened(index.parent / file) for file in files}
    astray = sorted(name for name, file in places.items() if name not in shards[file])
    held = [name for shard in shards.values() for name in shard]
    astray += sorted({name for name in held if name not in places or held.count(name) > 1})
    if astray:
        raise UserError(
            f"{index} and its shards do not agree about {listed(astray)}. The checkpoint is damaged; get it again."
        )
    return {name: shards[file][name] for name, file in places.items()}


def open_safetensors(path: Path) -> dict[str, Weight]:
    try:
        header = read_header(path)
        with safe_open(path, framework="pt"):  # checks sizes, types, and that tensors fill the file without overlap
            pass
    except PermissionError:  # the file may be whole
        raise
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({error}). Get it again.") from None
    weights = {}
    for name, entry in header.tensors.items():
        if entry.dtype not in DTYPES:
            raise UserError(f"{path}: the tensor {name} has the type {entry.dtype}, which is not known here.")
        span = Span(path, entry.start, entry.end - entry.start)
        weights[name] = _on_disk(span, entry.shape, DTYPES[entry.dtype])
    return weights


def _on_disk(span: Span, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    def parts() -> Iterator[torch.Tensor]:
        with span.path.open("rb", buffering=0) as file:
            file.seek(span.start)
            left = span.length
            while left:
                buffer = bytearray(min(left, _AT_ONCE))
                view = memoryview(buffer)
                while view:
                    read = file.readinto(view)
                    if not read:
                        raise UserError(f"{span.path} became shorter while it was read. Run the command again.")
                    view = view[read:]
                left -= len(buffer)
                yield torch.frombuffer(buffer, dtype=dtype)

    return Weight(shape, dtype, parts, span)


def open_pickle(path: Path) -> dict[str, Weight]:
    """Open a file of torch.save. Only tensors are unpickled, so no code in the file runs.
    Raises UserError: the file is damaged or holds other objects."""
    try:
        try:
            record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            record = torch.load(path, map_location="cpu", weights_only=True)  # written by torch before 1.6
    except PermissionError:
        raise
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, and unpickling it could run its author's code, so it was not read. If you trust it, "
            "load it where it was made and save only the tensors, preferably as safetensors."
        ) from None
    except Exception as error:  # a damaged archive can raise anything
        text = str(error).splitlines() or [""]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {text[0][:200]}). Get it again.") from None
    if not isinstance(record, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in record.items()
    ):
        raise UserError(f"{path} is not a dictionary from names to tensors, as a checkpoint should be.")
    for name, value in record.items():
        if value.layout != torch.strided or value.dtype not in DTYPE_NAMES or value.device.type != "cpu":
            raise UserError(f"{path}: {name} is not a plain tensor ({value.layout}, {value.dtype}, {value.device}).")
        if value.nbytes > value.untyped_storage().nbytes():
            raise UserError(f"{path}: {name} claims {value.nbytes} bytes, more than the file holds for it.")
    return in_memory(record)


def listed(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 80 else f"{name[:77]}..." for name in names[:most]) + more


# ---- writing ----


def write_safetensors(
    path: Path, weights: Mapping[str, Weight], *, metadata: Mapping[str, str] | None = _METADATA
) -> int:
    """Write a safetensors file atomically, byte for byte as the library does; returns its size in bytes.
    Raises DraftsmithError: the disk is full; nothing is left behind."""
    rank = {dtype: place for place, dtype in enumerate(DTYPES.values())}
    ordered = sorted(weights.items(), key=lambda item: (rank[item[1].dtype], item[0]))
    header = header_bytes({name: (weight.dtype, weight.shape) for name, weight in ordered}, metadata=metadata)
    size = len(header) + sum(weight.bytes for _, weight in ordered)
    with new_file(path, size=size) as file:
        file.write(header)
        for _, weight in ordered:
            if weight.span is not None and sys.platform == "linux":  # elsewhere sendfile writes to sockets alone
                _copy(weight.span, file)
            else:
                for part in weight.parts():
                    file.write(part.contiguous().view(torch.uint8).numpy().data)
    return size


def _copy(span: Span, to: BinaryIO) -> None:
    """Copy bytes from file to file in the kernel."""
    to.flush()
    with span.path.open("rb") as file:
        start, left = span.start, span.length
        while left:
            sent = os.sendfile(to.fileno(), file.fileno(), start, left)
            if not sent:
                raise UserError(f"{span.path} became shorter while it was read. Run the command again.")
            start, left = start + sent, left - sent
