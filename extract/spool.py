"""Spool files: a finished request's states on their way from an engine to whoever asked for them.

A spool file is safetensors with `token_ids` int32 [M] and `hidden_states` dtype [M, L, H]. It appears whole.

Most of what a file costs is its memory: a new one's pages have to be found, cleared and entered, and that takes several times
as long as copying the states into them. So our own driver leaves the files that it has read, under another name, and
the engine writes over them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from pathlib import Path

import torch
from safetensors.torch import load, load_file

_LEFT = ".left"
"""Suffix of a file that was read and may be written over."""
_LARGEST_LEFT = 4 << 20
"""Bytes. A larger file is deleted: the system would write what is kept to the disk in the end."""
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int32: "I32"}


def spool_file(name: str) -> str:
    """The file name of a request's states in its spool directory. Never a path of `name`'s choice."""
    return hashlib.sha256(name.encode()).hexdigest()[:32] + ".safetensors"


def take_spool_file(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and states of a file that nobody else needs. It is gone then, or left to be written over."""
    if path.stat().st_size > _LARGEST_LEFT:
        tensors = load_file(path)  # mapped, not read
        path.unlink()
    else:
        tensors = load(path.read_bytes())
        path.replace(path.with_suffix(_LEFT))
    return tensors["token_ids"], tensors["hidden_states"]


class SpoolWriter:
    """Writes the spool files of one engine. Safe to use from several threads.

    Args:
        writes_over: whether `take_spool_file` takes every file, so that there are some to write over. A server's clients delete
            theirs, or do not.
    """

    def __init__(self, directory: Path, *, writes_over: bool) -> None:
        self._directory, self._writes_over = directory, writes_over
        self._written: deque[Path] = deque()  # to be taken, or left for us; oldest first

    def write(self, file: str, token_ids: list[int], states: torch.Tensor) -> None:
        """Write a contiguous `states` [M, L, H] of M tokens.

        Raises:
            OSError: it could not be written, the disk being full for one.
        """
        tensors = {"hidden_states": states, "token_ids": torch.tensor(token_ids, dtype=torch.int32)}
        header, end = {}, 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # states that begin at a multiple of 8 bytes can be mapped

        path = self._directory / file
        temporary = path.with_suffix(".tmp")
        self._find_left(temporary)
        # Not by the safetensors library, which cuts an existing file to nothing first.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            out.truncate()
        temporary.replace(path)
        if self._writes_over:
            self._written.append(path)

    def _find_left(self, temporary: Path) -> None:
        """Make `temporary` of the oldest file that was left for us, if there is one."""
        while self._written:
            try:
                path = self._written.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                path.with_suffix(_LEFT).rename(temporary)
                return
            except FileNotFoundError:
                if path.exists():  # not read yet, and neither are those after it
                    self._written.appendleft(path)
                    return
