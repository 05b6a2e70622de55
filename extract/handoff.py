"""Handoff files: a finished request's states on their way from the engine to the program that asked for them.

A handoff file is a safetensors file that appears whole. For any program it holds `token_ids` int64 [M] and `hidden_states`
dtype [M, L, H]; for our own driver `token_ids` int32 [M] and `encoded` uint8, the states as they go into the store, with the other
fields of `EncodedStates` in the file's metadata.

Most of the cost of a file is its memory: allocating, clearing and mapping a new file's pages takes several times as long as
copying the states into them. So our own driver renames the files that it has read, and the engine writes over them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import torch

from draftsmith.run.safetensors_io import header_bytes, parse_header
from draftsmith.store.codec import EncodedStates

_READ = ".read"
"""Suffix of a file that was read and may be written over."""
_MAX_KEPT_BYTES = 4 << 20
"""Larger files are deleted instead: the system would eventually write a kept one to the disk."""


def handoff_file(name: str) -> str:
    """The file name of a request's states in the handoff directory; never a path that `name` chooses."""
    return hashlib.sha256(name.encode()).hexdigest()[:32] + ".safetensors"


def take_handoff_file(path: Path) -> tuple[torch.Tensor, EncodedStates]:
    """Token ids and encoded states of a file, which is then deleted or kept for the engine to write over."""
    if path.stat().st_size > _MAX_KEPT_BYTES:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        path.unlink()
    else:
        content = memoryview(path.read_bytes())
        path.replace(path.with_suffix(_READ))
    header = parse_header(content)
    token_ids, encoded = (
        content[header.tensors[name].start : header.tensors[name].end] for name in ("token_ids", "encoded")
    )
    fields = json.loads(header.metadata["states"])
    states = EncodedStates(encoded, **fields | {"shape": tuple(fields["shape"])})
    return torch.tensor(np.frombuffer(token_ids, np.int32)), states


class HandoffWriter:
    """Writes the handoff files of one engine. Safe to use from several threads.

    Args:
        reuse_files: whether `take_handoff_file` takes every file, so that there are files to write over. A server's clients
            delete their files themselves, or keep them.
    """

    def __init__(self, directory: Path, *, reuse_files: bool) -> None:
        self._directory, self._reuse_files = directory, reuse_files
        self._written: deque[Path] = deque()  # not known to be taken yet; oldest first

    def write(self, file: str, token_ids: list[int], states: torch.Tensor | EncodedStates) -> None:
        """Write the states of M tokens, encoded or as a contiguous tensor [M, L, H].

        Raises:
            OSError: the file could not be written, for example because the disk is full.
        """
        metadata = None
        if isinstance(states, EncodedStates):
            name, dtype, shape, data = "encoded", torch.uint8, [len(states.data)], states.data
            fields = {key: value for key, value in vars(states).items() if key != "data"}
            metadata = {"states": json.dumps(fields)}  # metadata values are strings
        else:
            name, dtype, shape = "hidden_states", states.dtype, list(states.shape)
            data = states.view(-1).view(torch.uint8).numpy().data
        tokens = torch.tensor(token_ids, dtype=torch.int32 if metadata else torch.int64)
        header = header_bytes({name: (dtype, shape), "token_ids": (tokens.dtype, tokens.shape)}, metadata=metadata)

        path = self._directory / file
        temporary = path.with_suffix(".tmp")
        self._reuse_oldest(temporary)
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666), "wb"
        ) as out:  # not truncated: its pages are reused
            out.write(header)
            out.write(data)
            out.write(tokens.numpy().data)
            out.truncate()
        temporary.replace(path)
        if self._reuse_files:
            self._written.append(path)

    def _reuse_oldest(self, temporary: Path) -> None:
        """Rename the oldest file to `temporary` if it has been taken."""
        while self._written:
            try:
                path = self._written.popleft()
            except IndexError:  # another thread took it
                return
            # Asked first: a file that is taken after a rename failed would be in nobody's hands.
            if path.exists():  # not taken yet, and neither are those after it
                self._written.appendleft(path)
                return
            with suppress(FileNotFoundError):  # it was large, and is deleted
                path.with_suffix(_READ).rename(temporary)
                return


class FileLocks:
    """A locked file `NAME.lock` beside each handoff file until that is written, as vLLM's example connector has it. Its clients wait
    for the lock, and remove the lock file."""

    def __init__(self) -> None:
        self._held: dict[str, IO[str]] = {}  # by request id

    def hold(self, request_id: str, path: Path) -> None:
        """Create the lock file of a request's handoff file."""
        lock = self._held[request_id] = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

    def release(self, request_ids: Iterable[str]) -> None:
        """Release those of these requests that have one."""
        for request_id in self._held.keys() & set(request_ids):
            self._held.pop(request_id).close()
