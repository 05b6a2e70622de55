"""Handoff files: a finished request's states on their way from an engine to whoever asked for them.

A handoff file is safetensors and appears whole. For any program it has `token_ids` int32 [M] and `hidden_states` dtype [M, L, H]; for
our own driver `token_ids` and `encoded` uint8, the states as they go into the store, with what else there is to know of
them in the file's metadata.

Most of what a file costs is its memory: a new one's pages have to be found, cleared and entered, and that takes several times
as long as copying the states into them. So our own driver leaves the files that it has read, under another name, and
the engine writes over them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.store.codec import EncodedStates

_LEFT = ".left"
"""Suffix of a file that was read and may be written over."""
_LARGEST_LEFT = 4 << 20
"""Bytes. A larger file is deleted: the system would write what is kept to the disk in the end."""
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def handoff_file(name: str) -> str:
    """The file name of a request's states in its handoff directory. Never a path of `name`'s choice."""
    return hashlib.sha256(name.encode()).hexdigest()[:32] + ".safetensors"


def take_handoff_file(path: Path) -> tuple[torch.Tensor, EncodedStates]:
    """Token ids and encoded states of a file that nobody else needs. It is gone then, or left to be written over."""
    if path.stat().st_size > _LARGEST_LEFT:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        path.unlink()
    else:
        content = memoryview(path.read_bytes())
        path.replace(path.with_suffix(_LEFT))
    # Not by the safetensors library, which copies every tensor once more.
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    parts = {name: content[start:][slice(*header[name]["data_offsets"])] for name in ("token_ids", "encoded")}
    about = json.loads(header["__metadata__"]["states"])
    states = EncodedStates(parts["encoded"], about["checksum"], tuple(about["shape"]), about["dtype"], about["form"])
    return torch.tensor(np.frombuffer(parts["token_ids"], np.int32)), states


class HandoffWriter:
    """Writes the handoff files of one engine. Safe to use from several threads.

    Args:
        reuse_files: whether `take_handoff_file` takes every file, so that there are some to write over. A server's clients delete
            theirs, or do not.
    """

    def __init__(self, directory: Path, *, reuse_files: bool) -> None:
        self._directory, self._reuse_files = directory, reuse_files
        self._written: deque[Path] = deque()  # to be taken, or left for us; oldest first

    def write(self, file: str, token_ids: list[int], states: torch.Tensor | EncodedStates) -> None:
        """Write the states of M tokens: [M, L, H], encoded or as they are, contiguous.

        Raises:
            OSError: it could not be written, the disk being full for one.
        """
        header: dict[str, Any] = {}
        if isinstance(states, EncodedStates):
            name, dtype, shape, data = "encoded", "U8", [len(states.data)], states.data
            about = {key: value for key, value in vars(states).items() if key != "data"}
            header["__metadata__"] = {"states": json.dumps(about)}  # the format has room for strings
        else:
            name, dtype, shape = "hidden_states", _DTYPES[states.dtype], list(states.shape)
            data = states.view(-1).view(torch.uint8).numpy().data
        tokens = np.array(token_ids, np.int32)
        end = len(data) + tokens.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
        header["token_ids"] = {"dtype": "I32", "shape": [len(tokens)], "data_offsets": [len(data), end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # states that begin at a multiple of 8 bytes can be mapped

        path = self._directory / file
        temporary = path.with_suffix(".tmp")
        self._find_left(temporary)
        # Not by the safetensors library, which cuts an existing file to nothing first.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.write(data)
            out.write(tokens.data)
            out.truncate()
        temporary.replace(path)
        if self._reuse_files:
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
