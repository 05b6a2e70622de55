"""The hidden-state store: what extraction writes and every drafter trains on.

A store is a directory with `manifest.json` and `shard-NNNNN.safetensors`. A shard holds many sequences end
to end. With T tokens, S sequences, L saved layers and H the target's hidden size:

    offsets        int64 [S + 1]    sequence s is rows offsets[s] : offsets[s + 1]
    sample_ids     int64 [S]        hash of the conversation (`Prompt.sample_id`)
    checksums      int64 [S]        XXH3-64 of each sequence's bytes in `hidden_states` or `frames`
    token_ids      int32 [T]        tokens that were inputs of the target, so that each has a state
    next_token_ids int32 [S]        the token sampled after the last state, -1 where there is none: it ends the
                                    sequence, often with the end-of-turn token, and was never an input
    loss_mask      uint8 [T]        1 where the token is part of a response
    held_out       uint8 [S]        1 where the conversation is held out from training
    padding        uint8 [0 to 63]  so that what follows starts at a multiple of 64 bytes in the file

and last, uncompressed

    hidden_states  dtype [T, L, H]  the residual stream at that token, one row per layer id of the manifest

or, compressed,

    frame_offsets  int64 [S + 1]    (with the other int64) sequence s is frames[frame_offsets[s] : frame_offsets[s + 1]]
    frames         uint8 [bytes]    a frame of `draftsmith.codec` for each sequence

All before the states is the shard's head. Every byte is covered: the head by a checksum in the manifest, the states by
`checksums`, the manifest by its own last line. Heads and manifest are checked when a store is opened, states whenever
they are read. The checksum is XXH3: what it must find is damage, not forgery, and it is faster than memory is copied.

Shards are written whole and renamed into place; the manifest names the shards that count and is rewritten after each.
Whatever else lies in the directory is left over from a crash and is ignored. One process writes the manifest. Shard files
may come from several machines, each with names of its own, and count once that process has adopted them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from draftsmith.codec import LARGEST_RATIO, EncodedStates, Form, checksum_of, decode, encode_states
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.machine import step_back
from draftsmith.stage import write_bytes

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
LOCK = ".lock"
"""Locked by the process that writes; the system lets go of it when that process ends, however it ends."""
LAYER_ID_MEANING = (
    "id i is the residual stream entering decoder layer i; id num_hidden_layers is the last layer's output "
    "before the final norm"
)

# Python's own `mmap.madvise` would keep each file open.
_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


class StoreDamaged(DraftsmithError):
    """Bytes of a store are not the ones that were written."""

    def __init__(self, path: Path, start: int, end: int, what: str) -> None:
        self.path, self.start, self.end = path, start, end
        """Bytes `start : end` of the file at `path` hold the damage."""
        super().__init__(
            f"{path} is damaged in bytes {start} to {end - 1} ({what}): they are not the ones that were written. "
            "Restore the file from a copy, or delete the store and extract again."
        )


@dataclass(frozen=True)
class Sequence:
    """One conversation with its states, as training reads it.

    `token_ids` int32 [N] and `loss_mask` bool [N] cover the whole text. `hidden_states` is [M, L, H] with M = N
    (text only) or M = N - 1 (the last token was sampled and never fed back).
    """

    sample_id: int
    held_out: bool
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class EncodedSequence:
    """One conversation as extraction writes it: a `Sequence` whose states were encoded where they were made."""

    sample_id: int
    held_out: bool
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: EncodedStates


@dataclass(frozen=True)
class StoreIdentity:
    """What a store was made from; two stores with equal identities can be mixed."""

    target: str
    target_revision: str
    target_config_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    sampling: dict[str, Any]
    states: str = "exact"
    """`exact`, or `int8` where they were rounded to 8 bits."""

    def require(self, wanted: StoreIdentity, where: Path) -> None:
        """Refuse a store that is not the wanted one.

        Raises:
            UserError: naming every field that differs.
        """
        self.require_fields(vars(wanted), where, way_out="Delete it, or choose another run with `-s name=OTHER`.")

    def require_fields(self, wanted: dict[str, Any], where: Path, *, way_out: str) -> None:
        """Refuse a store whose `wanted` fields differ, as `require` does for all of them."""
        differences = [
            f"{name} is {getattr(self, name)!r} there and {value!r} in this run"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]
        if differences:
            raise UserError(f"The store at {where} was made for something else: {'; '.join(differences)}. {way_out}")


@dataclass
class Shard:
    """A shard's entry in the manifest."""

    file: str
    compression: Form
    bytes: int
    head_bytes: int
    head_checksum: str
    """XXH3-64 of the first `head_bytes` bytes, hex."""
    sequences: int
    tokens: int
    response_tokens: int
    held_out_sequences: int


# ---- writing ----


class ShardMaker:
    """Gathers sequences and makes shard files of them, on any machine. A shard counts once a `StoreWriter` has it."""

    def __init__(self, identity: StoreIdentity, compression: Form) -> None:
        if (compression == "int8") != (identity.states == "int8"):
            raise ValueError(f"compression {compression} does not go with states {identity.states}")
        self._identity, self._compression = identity, compression
        self._waiting: list[EncodedSequence] = []
        self.tokens = 0
        """Tokens with states that wait to be written."""

    @property
    def sample_ids(self) -> list[int]:
        """Conversations that wait to be written."""
        return [one.sample_id for one in self._waiting]

    def add(self, sequence: Sequence | EncodedSequence) -> None:
        """Check a sequence and keep it, encoded, for the next shard.

        Raises:
            ValueError: the sequence does not hold what a store promises (lengths, shape, finite, not all zero).
        """
        if isinstance(sequence, Sequence):
            about, states = sequence, encode_states(sequence.hidden_states, self._compression)
            sequence = EncodedSequence(about.sample_id, about.held_out, about.token_ids, about.loss_mask, states)
        _check(sequence, self._identity, self._compression)
        self._waiting.append(sequence)
        self.tokens += sequence.states.shape[0]

    def write(self, path: Path) -> Shard:
        """Write what waits as a shard file, and begin the next.

        Raises:
            DraftsmithError: there is no room on the disk; everything still waits.
        """
        head = _head(self._waiting, self._identity, self._compression)
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


class StoreWriter:
    """Appends sequences to a store and can be killed at any moment: what is in the manifest stays.

    Opening a directory that holds an unfinished store of the same identity continues it; `sample_ids` says
    which conversations it already has. Shard files that the manifest does not name are removed then, and on closing.
    A shard is written while the next one is gathered, at the lowest priority.

    Raises:
        UserError: the store there is another's, or another process is writing to it.
        StoreDamaged: the store there is not as it was written.
    """

    def __init__(
        self, directory: Path, identity: StoreIdentity, *, shard_tokens: int, compression: Form = "none"
    ) -> None:
        self._maker = ShardMaker(identity, compression)
        self._directory, self._identity = directory, identity
        self._shard_tokens, self._compression = shard_tokens, compression
        self._shards: list[Shard] = []
        self._sample_ids: set[int] = set()
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-store", initializer=step_back)
        self._writing: Future[None] | None = None  # the last full shard
        self._lock = (directory / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing to the store at {directory}. Wait for it or stop it, or choose another run "
                "with `-s name=OTHER`."
            ) from None
        if (directory / MANIFEST).exists():
            earlier = _read_manifest(directory)
            _identity_of(earlier).require(identity, directory)
            self._shards = [Shard(**entry) for entry in earlier["shards"]]
            for shard in self._shards:
                self._sample_ids.update(_OpenShard(directory, shard, identity).sample_ids.tolist())
        self._publish_manifest()
        self._remove_leftovers()

    @property
    def sample_ids(self) -> set[int]:
        """Conversations that are safely on disk; those being written are waited for."""
        self._wait_for_shard()
        return set(self._sample_ids)

    def append(self, sequence: Sequence | EncodedSequence) -> None:
        """Check a sequence and add it. Its states are written later, and must not change.

        Raises:
            ValueError: the sequence does not hold what a store promises (lengths, shape, finite, not all zero).
            DraftsmithError: there is no room on the disk, for this shard or the one before. What is on disk already stays
                and can be continued.
        """
        self._maker.add(sequence)
        if self._maker.tokens >= self._shard_tokens:
            self._close_shard()

    def adopt(self, shard: Shard) -> list[int]:
        """Add a shard that another process wrote into this directory; return the ids of its conversations.

        Raises:
            StoreDamaged: the file is not there, or its length or head is not as it was written.
            ValueError: it holds a conversation that the store has already, or holds one twice.
            DraftsmithError: there is no room on the disk for the manifest.
        """
        self._wait_for_shard()
        sample_ids: list[int] = _OpenShard(self._directory, shard, self._identity).sample_ids.tolist()
        if len(set(sample_ids)) < len(sample_ids) or not self._sample_ids.isdisjoint(sample_ids):
            raise ValueError(f"{shard.file} holds conversations that are in the store already")
        self._add_shard(shard, sample_ids)
        return sample_ids

    def close(self) -> dict[str, Any]:
        """Write what is open and let go of the store; return the manifest's counts."""
        if self._maker.tokens:
            self._close_shard()
        self._wait_for_shard()
        self._remove_leftovers()
        self.let_go()
        return self._counts()

    def let_go(self) -> None:
        """Finish the shard that is being written, leave out what is open, and let others write to the store."""
        self._behind.shutdown()
        self._lock.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _close_shard(self) -> None:
        """Have the open shard written. The one before is waited for, so that memory holds two at most."""
        self._wait_for_shard()
        full, self._maker = self._maker, ShardMaker(self._identity, self._compression)
        self._writing = self._behind.submit(self._write_shard, full)

    def _write_shard(self, full: ShardMaker) -> None:
        sample_ids = full.sample_ids
        self._add_shard(full.write(self._directory / f"shard-{len(self._shards):05d}.safetensors"), sample_ids)

    def _wait_for_shard(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _add_shard(self, shard: Shard, sample_ids: list[int]) -> None:
        self._shards.append(shard)
        self._publish_manifest()
        self._sample_ids.update(sample_ids)

    def _remove_leftovers(self) -> None:
        """A machine that is thought dead may still write some, under names that nobody uses again."""
        named = {shard.file for shard in self._shards}
        for path in self._directory.glob("shard-*"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _counts(self) -> dict[str, int]:
        names = ("sequences", "held_out_sequences", "tokens", "response_tokens", "bytes")
        return {name: sum(getattr(shard, name) for shard in self._shards) for name in names}

    def _publish_manifest(self) -> None:
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "identity": vars(self._identity) | {"layer_ids": list(self._identity.layer_ids)},
            "layer_id_meaning": LAYER_ID_MEANING,
            "counts": self._counts(),
            "shards": [vars(shard) for shard in self._shards],
        }
        body = json.dumps(manifest, indent=2).removesuffix("\n}").encode()
        write_bytes(self._directory / MANIFEST, body, _last_lines(body))


def most_bytes(identity: StoreIdentity, compression: Form, *, tokens: int, sequences: int) -> int:
    """Bytes that a store of so many tokens and sequences takes at most, as far as states like those measured go."""
    dtype = getattr(torch, identity.dtype)
    states = tokens * len(identity.layer_ids) * identity.hidden_size * dtype.itemsize
    if compression != "none":
        states = int(states * LARGEST_RATIO[compression, identity.dtype])
    return states + 5 * tokens + 64 * sequences + 4096


def require_room(directory: Path, needed: int, *, way_out: str) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        UserError: naming what is needed, what is free, and `way_out`.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"The extraction needs up to {needed / 1e9:.2f} GB in {directory}, where {free / 1e9:.2f} GB are free. {way_out}"
        )


def _check(sequence: EncodedSequence, identity: StoreIdentity, compression: Form) -> None:
    tokens, states = len(sequence.token_ids), sequence.states
    rows, *layout = states.shape
    if len(sequence.loss_mask) != tokens or rows not in (tokens, tokens - 1):
        raise ValueError(f"{tokens} tokens, {len(sequence.loss_mask)} mask values and {rows} states do not go together")
    wanted = [len(identity.layer_ids), identity.hidden_size]
    if layout != wanted:
        raise ValueError(f"states have shape {states.shape}, expected [tokens, {wanted[0]}, {wanted[1]}]")
    if (states.dtype, states.form) != (identity.dtype, compression):
        raise ValueError(
            f"states are {states.dtype} in the form {states.form}, and the store is of {identity.dtype} in the form "
            f"{compression}"
        )
    if rows == tokens - 1 and not sequence.loss_mask[-1]:
        raise ValueError("the last token has no state and is not part of a response")


_DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}
_STATES_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _head(sequences: list[EncodedSequence], identity: StoreIdentity, compression: Form) -> bytes:
    """A safetensors file up to where the states begin.

    Written here and not by the safetensors library because that orders tensors by size of element, and the states must
    come last, at a multiple of 64 bytes.
    """
    lengths = [s.states.shape[0] for s in sequences]
    pairs = list(zip(sequences, lengths, strict=True))
    tensors = {
        "offsets": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        "sample_ids": torch.tensor([s.sample_id for s in sequences], dtype=torch.int64),
        "checksums": torch.tensor([s.states.checksum for s in sequences], dtype=torch.int64),
        "token_ids": torch.cat([s.token_ids[:n] for s, n in pairs]).to(torch.int32),
        "next_token_ids": torch.tensor(
            [int(s.token_ids[-1]) if len(s.token_ids) > n else -1 for s, n in pairs], dtype=torch.int32
        ),
        "loss_mask": torch.cat([s.loss_mask[:n] for s, n in pairs]).to(torch.uint8),
        "held_out": torch.tensor([s.held_out for s in sequences], dtype=torch.uint8),
    }
    sizes = [len(s.states.data) for s in sequences]
    if compression == "none":
        states = (
            "hidden_states",
            _STATES_DTYPES[identity.dtype],
            [sum(lengths), len(identity.layer_ids), identity.hidden_size],
        )
    else:
        tensors = {"frame_offsets": torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0), **tensors}
        states = ("frames", "U8", [sum(sizes)])
    tensors["padding"] = torch.zeros(-sum(t.nbytes for t in tensors.values()) % 64, dtype=torch.uint8)

    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    name, dtype, shape = states
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + sum(sizes)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the format allows spaces after the header
    return b"".join([len(text).to_bytes(8, "little"), text, *(_bytes_of(t) for t in tensors.values())])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# ---- reading ----


class _Entry(NamedTuple):
    """Where a sequence lies; ordered by sample id."""

    sample_id: int
    shard: int
    row: int
    start: int
    end: int
    next_token: int
    held_out: bool


class Store:
    """A store, memory-mapped: sequences come in the order of their sample ids.

    That order does not depend on the order in which the target happened to finish them, so neither does what is
    trained from it. Several stores of one identity read as one: a conversation that several hold is the first one's, and
    held out if it is held out in any. Safe to read from several threads.

    Raises:
        UserError: a directory holds no store, or one of another schema, or stores differ in identity.
        StoreDamaged: a manifest, a shard's size or a shard's head is not as it was written.
    """

    def __init__(self, directory: Path, *more: Path) -> None:
        self.directory = directory
        self.counts: dict[str, int] = {}
        self._shards: list[_OpenShard] = []
        entries: dict[int, _Entry] = {}
        for number, folder in enumerate((directory, *more)):
            manifest = _read_manifest(folder)
            identity = _identity_of(manifest)
            if number == 0:
                self.identity = identity
            samplings = [{k: v for k, v in one.sampling.items() if k != "seed"} for one in (identity, self.identity)]
            same_but_seed = samplings[0] == samplings[1]  # several seeds are a good reason to have several stores
            wanted = vars(self.identity) | {"sampling": identity.sampling if same_but_seed else self.identity.sampling}
            identity.require_fields(
                wanted, folder, way_out=f"Only stores of one identity mix; the first is {directory}."
            )
            for fields in manifest["shards"]:
                shard = _OpenShard(folder, Shard(**fields), identity)
                self._shards.append(shard)
                for entry in shard.entries(len(self._shards) - 1):
                    first = entries.get(entry.sample_id, entry)
                    entries[entry.sample_id] = first._replace(held_out=True) if entry.held_out else first
        self._index = sorted(entries.values())
        for name in ("sequences", "held_out_sequences", "tokens", "response_tokens", "bytes"):
            self.counts[name] = sum(getattr(shard.about, name) for shard in self._shards)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the states as the target computed them, uncompressed."""
        identity = self.identity
        row = len(identity.layer_ids) * identity.hidden_size * getattr(torch, identity.dtype).itemsize
        return int(self.counts["tokens"] * row)

    def rows(self, *, held_out: bool) -> list[int]:
        """Indices of the sequences of one part of the split, in order."""
        return [i for i, entry in enumerate(self._index) if entry.held_out == held_out]

    def length(self, index: int) -> int:
        """Tokens with states of a sequence."""
        return self._index[index].end - self._index[index].start

    def sample_id(self, index: int) -> int:
        """What extraction calls a sequence."""
        return self._index[index].sample_id

    def __getitem__(self, index: int) -> Sequence:
        """A sequence, its bytes checked; uncompressed states are mapped and take no memory of their own.

        Raises:
            StoreDamaged: the states are not as they were written.
        """
        entry = self._index[index]
        token_ids, loss_mask = self._text(entry)
        states = self._shards[entry.shard].states(entry.row)
        return Sequence(entry.sample_id, entry.held_out, token_ids, loss_mask, states)

    def __iter__(self) -> Iterator[Sequence]:
        return (self[i] for i in range(len(self)))

    def read(self, indices: list[int]) -> Iterator[Sequence]:
        """Several sequences. The disk is asked for all of them at once, and works while the first are checked."""
        for index in indices:
            entry = self._index[index]
            self._shards[entry.shard].read_ahead(entry.row)
        return (self[index] for index in indices)

    def response_tokens(self, *, held_out: bool) -> torch.Tensor:
        """The tokens of all responses of one part of the split, end to end: int64 [tokens]."""
        texts = (self._text(entry) for entry in self._index if entry.held_out == held_out)
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(ids[mask].long() for ids, mask in texts)])

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs in the responses of the training part: int64 [vocab_size]."""
        return torch.bincount(self.response_tokens(held_out=False), minlength=vocab_size)

    def damages(self) -> Iterator[StoreDamaged]:
        """Read every byte of the states; yield what is damaged, in the order of the files."""
        for shard in self._shards:
            for row in range(shard.about.sequences):
                try:
                    shard.checked(row)
                except StoreDamaged as damage:
                    yield damage

    def _text(self, entry: _Entry) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int32 [N] and loss mask bool [N] of the whole text."""
        shard = self._shards[entry.shard]
        token_ids = shard.tensors["token_ids"][entry.start : entry.end]
        loss_mask = shard.tensors["loss_mask"][entry.start : entry.end].view(torch.bool)  # it holds 0 and 1 alone
        if entry.next_token >= 0:  # a sampled token is always part of a response
            token_ids = torch.cat([token_ids, token_ids.new_tensor([entry.next_token])])
            loss_mask = torch.cat([loss_mask, loss_mask.new_tensor([True])])
        return token_ids, loss_mask


class _OpenShard:
    """One shard, mapped, its head checked."""

    def __init__(self, directory: Path, about: Shard, identity: StoreIdentity) -> None:
        self.about, self.path = about, directory / about.file
        if not self.path.is_file():
            raise StoreDamaged(self.path, 0, about.bytes, "the file is not there")
        size = self.path.stat().st_size
        if size != about.bytes:
            start, end = sorted((size, about.bytes))
            raise StoreDamaged(self.path, start, end, f"the file has {size} bytes instead of {about.bytes}")
        # Mapped privately and without keeping the file open: a store has more shards than a process may open files.
        mapped = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)
        self._bytes = mapped.numpy().data
        self._address = mapped.data_ptr()
        # What is touched is asked for here and in `read_ahead`. Left to itself the system reads megabytes around it first.
        self._advise(0, size, mmap.MADV_RANDOM)
        self._advise(0, about.head_bytes, mmap.MADV_WILLNEED)
        head = self._bytes[: about.head_bytes]
        if xxhash.xxh3_64_hexdigest(head) != about.head_checksum:
            raise StoreDamaged(self.path, 0, about.head_bytes, "the head")
        end_of_header = 8 + int.from_bytes(head[:8], "little")
        header = json.loads(head[8:end_of_header].tobytes())
        self.tensors = {}
        for name, field in header.items():
            dtype = next((dtype for dtype, code in _DTYPES.items() if code == field["dtype"]), None)
            start, end = (end_of_header + offset for offset in field["data_offsets"])
            if end <= about.head_bytes and dtype is not None:
                self.tensors[name] = mapped[start:end].view(dtype)
        self.sample_ids = self.tensors["sample_ids"]
        self._dtype: torch.dtype = getattr(torch, identity.dtype)
        self._shape = (len(identity.layer_ids), identity.hidden_size)
        self._offsets: list[int] = self.tensors["offsets"].tolist()
        self._checksums: list[int] = self.tensors["checksums"].tolist()
        if about.compression == "none":
            row = self._dtype.itemsize * self._shape[0] * self._shape[1]
            self._starts = [about.head_bytes + row * offset for offset in self._offsets]
            self._plain = mapped[about.head_bytes :].view(self._dtype).view(-1, *self._shape)
        else:
            self._starts = [about.head_bytes + offset for offset in self.tensors["frame_offsets"].tolist()]

    def entries(self, number: int) -> Iterator[_Entry]:
        names = ("sample_ids", "next_token_ids", "held_out")
        columns = zip(*(self.tensors[name].tolist() for name in names), strict=True)
        for row, (sample_id, next_token, held_out) in enumerate(columns):
            yield _Entry(sample_id, number, row, self._offsets[row], self._offsets[row + 1], next_token, bool(held_out))

    def read_ahead(self, row: int) -> None:
        """Have the system bring a sequence's states into memory; returns at once."""
        self._advise(self._starts[row], self._starts[row + 1], mmap.MADV_WILLNEED)

    def _advise(self, start: int, end: int, advice: int) -> None:
        """Tell the system about bytes of the file; whether it follows does not matter."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(self._address + start, end - start, advice)

    def checked(self, row: int) -> memoryview:
        """The bytes of a sequence's states, after comparing their checksum."""
        start, end = self._starts[row], self._starts[row + 1]
        self.read_ahead(row)
        data = self._bytes[start:end]
        if checksum_of(data) != self._checksums[row]:
            raise StoreDamaged(self.path, start, end, f"the states of sequence {int(self.sample_ids[row])}")
        return data

    def states(self, row: int) -> torch.Tensor:
        data = self.checked(row)
        start, end = self._offsets[row : row + 2]
        if self.about.compression == "none":
            return self._plain[start:end]
        return decode(data, self.about.compression, (end - start, *self._shape), self._dtype)


def prefetched(load: Callable[[Item], Loaded], items: Iterable[Item], *, ahead: int = 2) -> Iterator[Loaded]:
    """`load(item)` for each item in order, made by background threads up to `ahead` items early.

    `load` is called by several threads at once. What it raises is raised here, when its item is due.
    """
    waiting: deque[Future[Loaded]] = deque()
    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prefetch")  # reading and decoding leave Python's lock
    try:
        for item in items:
            waiting.append(pool.submit(load, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---- the manifest ----


def _last_lines(body: bytes) -> bytes:
    """What ends a manifest: the checksum of all before it."""
    return b',\n  "checksum": "%s"\n}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"There is no store at {directory}: it has no {MANIFEST}. Run the extract stage first.")
    text = path.read_bytes()
    body = text[: -len(_last_lines(b""))]
    whole = text == body + _last_lines(body)
    try:
        manifest = json.loads(text)
        version = manifest["schema_version"]
    except (ValueError, KeyError, TypeError):
        version = None
    has_checksum = re.search(rb'"checksum": "[0-9a-f]{16}"\n\}\n$', text) is not None
    if version is None and not has_checksum and b'"schema_version"' not in text:
        raise UserError(f"{path} is not a store's manifest. If it was one, delete {directory} and extract again.")
    # A store of another schema says so itself. Our own with a flipped byte in the version does not pass for one.
    if version is not None and version != SCHEMA_VERSION and (whole or not has_checksum):
        raise UserError(
            f"{directory} has store schema {version}, and this version of Draftsmith reads schema {SCHEMA_VERSION}. "
            "Use the version that wrote it, or extract again."
        )
    if not whole:
        raise StoreDamaged(path, 0, len(text), "the manifest")
    return manifest


def _identity_of(manifest: dict[str, Any]) -> StoreIdentity:
    fields = manifest["identity"]
    return StoreIdentity(**fields | {"layer_ids": tuple(fields["layer_ids"])})
