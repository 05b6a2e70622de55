"""Write a store: shards, and the manifest that names them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import xxhash

from draftsmith.run.atomic_io import no_locks, write_bytes
from draftsmith.run.errors import UserError
from draftsmith.run.process import lower_priority
from draftsmith.store.codec import LARGEST_RATIO, Form, encode_states
from draftsmith.store.format import (
    LOCK,
    MANIFEST,
    EncodedSequence,
    Sequence,
    Shard,
    StoreIdentity,
    check_sequence,
    counts_of,
    manifest_bytes,
    read_manifest,
    shard_head,
)
from draftsmith.store.reader import OpenShard


class ShardMaker:
    """Collects sequences and writes them as shard files, on any machine. A shard counts once a `StoreWriter` has adopted it."""

    def __init__(self, identity: StoreIdentity, compression: Form) -> None:
        if (compression == "int8") != (identity.states == "int8"):
            raise ValueError(f"compression {compression} does not fit states {identity.states}")
        self._identity, self._compression = identity, compression
        self._waiting: list[EncodedSequence] = []
        self.tokens = 0  # tokens with states in the open shard

    @property
    def sample_ids(self) -> list[int]:
        """Conversations in the open shard."""
        return [one.sample_id for one in self._waiting]

    @property
    def held_out(self) -> dict[int, bool]:
        """The same, each with whether it is held out."""
        return {one.sample_id: one.held_out for one in self._waiting}

    def add(self, sequence: Sequence | EncodedSequence) -> None:
        """Check a sequence, encode its states if they are not yet, and add it to the open shard.
        Raises ValueError: the sequence is not as a store requires (lengths, shape, finite, not all zero)."""
        if isinstance(sequence, Sequence):
            about, states = sequence, encode_states(sequence.hidden_states, self._compression)
            sequence = EncodedSequence(
                about.sample_id, about.held_out, about.token_ids, about.loss_mask, states, about.images
            )
        check_sequence(sequence, self._identity, self._compression)
        self._waiting.append(sequence)
        self.tokens += sequence.states.shape[0]

    def write(self, path: Path) -> Shard:
        """Write the open shard to a file and begin the next.
        Raises DraftsmithError: the disk is full. The shard stays open."""
        head = shard_head(self._waiting, self._identity, self._compression)
        write_bytes(path, head, *(one.states.data for one in self._waiting))
        shard = Shard(
            file=path.name,
            compression=self._compression,
            bytes=len(head) + sum(len(one.states.data) for one in self._waiting),
            head_bytes=len(head),
            head_checksum=xxhash.xxh3_64_hexdigest(head),
            sequences=len(self._waiting),
            tokens=self.tokens,
            response_tokens=sum(int(one.loss_mask.sum()) for one in self._waiting),
            held_out_sequences=sum(one.held_out for one in self._waiting),
        )
        self._waiting, self.tokens = [], 0
        return shard


class BackgroundShards:
    """Fills shards of `shard_tokens` one after the other; a background thread of the lowest priority calls `write` for each full one
    while the next fills."""

    def __init__(
        self, identity: StoreIdentity, compression: Form, *, shard_tokens: int, write: Callable[[ShardMaker], None]
    ) -> None:
        self._new_shard = partial(ShardMaker, identity, compression)
        self._shard_tokens, self._write = shard_tokens, write
        self._open = self._new_shard()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-store", initializer=lower_priority)
        self._writing: Future[None] | None = None

    def add(self, sequence: Sequence | EncodedSequence) -> None:
        """Add a sequence, as `ShardMaker.add`. Raises as `flush` does if that fills the shard."""
        self._open.add(sequence)
        if self._open.tokens >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Start writing the open shard, if it holds anything. Waits for the one before, so that memory holds two at most.
        Raises DraftsmithError: the disk had no room for the one before."""
        self.wait()
        if self._open.tokens:
            full, self._open = self._open, self._new_shard()
            self._writing = self._thread.submit(self._write, full)

    def wait(self) -> None:
        """Wait for the shard being written; raises as `flush`."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Finish the shard being written and drop the open one."""
        self._thread.shutdown()


class StoreWriter:
    """Appends sequences to a store. It can be killed at any moment: shards in the manifest are kept.

    Opening a directory with an unfinished store of the same identity continues it; `sample_ids` are the conversations that it
    already has. Shard files that the manifest does not name are removed on opening and on closing. Shards are written in the
    background.

    Raises:
        UserError: the directory holds a store of another identity, or another process is writing to it.
        CorruptStore: the store in the directory is not as it was written.
    """

    def __init__(
        self, directory: Path, identity: StoreIdentity, *, shard_tokens: int, compression: Form = "none"
    ) -> None:
        self._directory, self._identity = directory, identity
        self._shards: list[Shard] = []
        self._held_out: dict[int, bool] = {}  # by sample id
        self._unwritten = BackgroundShards(identity, compression, shard_tokens=shard_tokens, write=self._write_shard)
        self._lock = (directory / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing to the store at {directory}. Wait for it or stop it, or choose another run "
                "with `-s name=OTHER`."
            ) from None
        except OSError as error:  # as on Lustre without `flock`
            raise UserError(f"{no_locks(directory, error)} (`--runs`).") from None
        if (directory / MANIFEST).exists():
            earlier, self._shards = read_manifest(directory)
            earlier.require(identity, directory)
            for shard in self._shards:
                self._held_out.update(OpenShard(directory, shard, identity).held_out())
        self._publish_manifest()
        self._remove_leftovers()

    @property
    def sample_ids(self) -> set[int]:
        """Conversations that are safely on disk. Waits for the shard being written."""
        return set(self.held_out)

    @property
    def held_out(self) -> dict[int, bool]:
        """The same, each with whether it is held out."""
        self._unwritten.wait()
        return dict(self._held_out)

    def append(self, sequence: Sequence | EncodedSequence) -> None:
        """Check a sequence and add it. Its states are written later and must not change.

        Raises:
            ValueError: the sequence is not as a store requires (lengths, shape, finite, not all zero).
            DraftsmithError: the disk has no room for this shard or the one before. Shards in the manifest are kept, and the
                store can be continued.
        """
        self._unwritten.add(sequence)

    def adopt(self, shard: Shard) -> list[int]:
        """Add a shard that another process wrote into this directory; return the ids of its conversations.

        Raises:
            CorruptStore: the file is missing, or its length or head is not as it was written.
            ValueError: it holds a conversation twice, or one that the store already has.
            DraftsmithError: the disk has no room for the manifest.
        """
        self._unwritten.wait()
        opened = OpenShard(self._directory, shard, self._identity)
        sample_ids: list[int] = opened.sample_ids.tolist()
        if len(set(sample_ids)) < len(sample_ids) or not self._held_out.keys().isdisjoint(sample_ids):
            raise ValueError(f"{shard.file} holds conversations that are in the store already")
        self._add_shard(shard, opened.held_out())
        return sample_ids

    def close(self) -> dict[str, int]:
        """Write the open shard and release the store; return the manifest's counts."""
        self._unwritten.flush()
        self._unwritten.wait()
        self._remove_leftovers()
        self.release()
        return counts_of(self._shards)

    def release(self) -> None:
        """Finish the shard that is being written, drop the open one, and let others write to the store."""
        self._unwritten.close()
        self._lock.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _write_shard(self, full: ShardMaker) -> None:
        held_out = full.held_out
        self._add_shard(full.write(self._directory / f"shard-{len(self._shards):05d}.safetensors"), held_out)

    def _add_shard(self, shard: Shard, held_out: dict[int, bool]) -> None:
        self._shards.append(shard)
        self._publish_manifest()
        self._held_out.update(held_out)

    def _remove_leftovers(self) -> None:
        """A machine that is thought dead may still write files, under names that are never used again."""
        named = {shard.file for shard in self._shards}
        for path in self._directory.glob("shard-*"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _publish_manifest(self) -> None:
        write_bytes(self._directory / MANIFEST, manifest_bytes(self._identity, self._shards))


def most_bytes(identity: StoreIdentity, compression: Form, *, tokens: int, sequences: int) -> int:
    """The most bytes that a store of so many tokens and sequences takes, if its states compress as measured (`LARGEST_RATIO`)."""
    dtype = getattr(torch, identity.dtype)
    states = tokens * len(identity.layer_ids) * identity.hidden_size * dtype.itemsize
    if compression != "none":
        states = int(states * LARGEST_RATIO[compression, identity.dtype])
    return states + 5 * tokens + 64 * sequences + 4096


def require_free_space(directory: Path, needed: int, *, way_out: str) -> None:
    """Raises UserError: less than `needed` bytes are free in `directory`; names both, and `way_out`."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"The extraction needs up to {needed / 1e9:.2f} GB in {directory}, where {free / 1e9:.2f} GB are free. {way_out}"
        )
