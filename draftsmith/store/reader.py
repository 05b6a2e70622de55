"""Read a store: sequences in the order of their sample ids, with every byte checked."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from draftsmith.run.errors import UserError
from draftsmith.run.safetensors_io import DTYPES, parse_header
from draftsmith.store.codec import checksum_of, decode
from draftsmith.store.format import CorruptStore, Sequence, Shard, StoreIdentity, counts_of, nth_sample, read_manifest

# Python's `mmap.madvise` would keep each file open.
_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_OWN_MAPPINGS = 4000  # of libraries, threads and memory: Python with torch has about 1,500


class _Entry(NamedTuple):
    """Where a sequence is stored; ordered by sample id."""

    sample_id: int
    shard: int
    row: int
    start: int
    end: int
    next_token: int
    held_out: bool


class Store:
    """A store, memory-mapped: sequences come in the order of their sample ids.

    That order, and so what is trained, does not depend on the order in which engines finished requests. Several stores of one
    identity read as one: a conversation in several of them is read from the first, and held out if it is in any. Safe to read
    from several threads.

    Raises:
        UserError: a directory holds no store, or one of another schema, or stores differ in identity.
        CorruptStore: a manifest, a shard's size or a shard's head is not as it was written.
    """

    def __init__(self, directory: Path, *more: Path) -> None:
        self.directory = directory
        self._shards: list[OpenShard] = []
        entries: dict[int, _Entry] = {}
        for number, folder in enumerate((directory, *more)):
            identity, shards = read_manifest(folder)
            if number == 0:
                self.identity = identity
            samplings = [{k: v for k, v in one.sampling.items() if k != "seed"} for one in (identity, self.identity)]
            same_but_seed = samplings[0] == samplings[1]  # stores may differ in their seed
            wanted = vars(self.identity) | {"sampling": identity.sampling if same_but_seed else self.identity.sampling}
            identity.require_fields(
                wanted, folder, way_out=f"Only stores of one identity mix; the first is {directory}."
            )
            _require_mappings(folder, len(self._shards) + len(shards))
            for about in shards:
                shard = OpenShard(folder, about, identity)
                self._shards.append(shard)
                for entry in shard.entries(len(self._shards) - 1):
                    first = entries.get(entry.sample_id, entry)
                    entries[entry.sample_id] = first._replace(held_out=True) if entry.held_out else first
        if more:
            # A held-out conversation has one answer, and in another store, where it is trained on, it may have several.
            for sample_id in [one.sample_id for one in entries.values() if one.held_out]:
                for number in range(1, self.identity.sampling.get("samples", 1)):
                    entries.pop(nth_sample(sample_id, number), None)
        self._index = sorted(entries.values())
        self.counts = counts_of(shard.about for shard in self._shards)  # as in the manifest, summed over stores

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

    def rows_to_predict(self) -> list[int]:
        """Held-out rows on which acceptance is predicted: those without images, which evaluation measures; all if every one has images."""
        rows = self.rows(held_out=True)
        return [row for row in rows if not self._shards[self._index[row].shard].images(self._index[row].row)] or rows

    def length(self, index: int) -> int:
        """A sequence's tokens with states."""
        return self._index[index].end - self._index[index].start

    def sample_id(self, index: int) -> int:
        """A sequence's id in extraction."""
        return self._index[index].sample_id

    def __getitem__(self, index: int) -> Sequence:
        """A sequence, its bytes checked. Uncompressed states are memory-mapped.
        Raises CorruptStore: the states are not as they were written."""
        entry = self._index[index]
        token_ids, loss_mask = self._text(entry)
        shard = self._shards[entry.shard]
        return Sequence(
            entry.sample_id, entry.held_out, token_ids, loss_mask, shard.states(entry.row), shard.images(entry.row)
        )

    def __iter__(self) -> Iterator[Sequence]:
        return (self[i] for i in range(len(self)))

    def read(self, indices: list[int]) -> Iterator[Sequence]:
        """Several sequences. The disk reads ahead while the first ones are checked."""
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

    def corruptions(self) -> Iterator[CorruptStore]:
        """Check every byte of the states; yield the damaged ones, in the order of the files."""
        for shard in self._shards:
            for row in range(shard.about.sequences):
                try:
                    shard.checked(row)
                except CorruptStore as damage:
                    yield damage

    def _text(self, entry: _Entry) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int32 [N] and loss mask bool [N] of the whole text."""
        shard = self._shards[entry.shard]
        token_ids = shard.tensors["token_ids"][entry.start : entry.end]
        loss_mask = shard.tensors["loss_mask"][entry.start : entry.end].view(torch.bool)  # it holds only 0 and 1
        if entry.next_token >= 0:  # a sampled token is always part of a response
            token_ids = torch.cat([token_ids, token_ids.new_tensor([entry.next_token])])
            loss_mask = torch.cat([loss_mask, loss_mask.new_tensor([True])])
        return token_ids, loss_mask


def _require_mappings(folder: Path, shards: int) -> None:
    """Raises UserError: the system lets a process map fewer files than a store's shards and the process's own."""
    limit = int(_MOST_MAPPINGS.read_text()) if _MOST_MAPPINGS.is_file() else shards + _OWN_MAPPINGS
    if shards + _OWN_MAPPINGS > limit:
        raise UserError(
            f"The store at {folder} has too many shards to map: {shards} with those before it, where this system lets a process map {limit} "
            f"pieces of files (vm.max_map_count). Raise that, `sudo sysctl -w vm.max_map_count={2 * (shards + _OWN_MAPPINGS)}`; stores that are "
            "extracted with a larger `extract.shard_tokens` have fewer."
        )


class OpenShard:
    """A memory-mapped shard, its head checked."""

    def __init__(self, directory: Path, about: Shard, identity: StoreIdentity) -> None:
        self.about, self.path = about, directory / about.file
        if not self.path.is_file():
            raise CorruptStore(self.path, 0, about.bytes, "the file is not there")
        with self.path.open("rb") as file:  # where it may not be read, torch names neither the file nor the reason
            size = os.fstat(file.fileno()).st_size
        if size != about.bytes:
            start, end = sorted((size, about.bytes))
            raise CorruptStore(self.path, start, end, f"the file has {size} bytes instead of {about.bytes}")
        # Mapped privately, and without keeping the file open: a store can have more shards than a process may have open files.
        mapped = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)
        self._bytes = mapped.numpy().data
        self._address = mapped.data_ptr()
        # By default the system reads megabytes around what is touched. Here and in `read_ahead` it is told what is needed.
        self._advise(0, size, mmap.MADV_RANDOM)
        self._advise(0, about.head_bytes, mmap.MADV_WILLNEED)
        head = self._bytes[: about.head_bytes]
        if xxhash.xxh3_64_hexdigest(head) != about.head_checksum:
            raise CorruptStore(self.path, 0, about.head_bytes, "the head")
        self.tensors = {
            name: mapped[entry.start : entry.end].view(DTYPES[entry.dtype])
            for name, entry in parse_header(head).tensors.items()
            if entry.end <= about.head_bytes
        }
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

    def held_out(self) -> dict[int, bool]:
        """Whether each conversation is held out, by sample id."""
        return dict(zip(self.sample_ids.tolist(), self.tensors["held_out"].bool().tolist(), strict=True))

    def images(self, row: int) -> tuple[str, ...]:
        """`Sequence.images` of a sequence."""
        if "image_counts" not in self.tensors:
            return ()
        counts = self.tensors["image_counts"]
        first = int(counts[:row].sum())
        digests = self.tensors["image_digests"].view(-1, 32)[first : first + int(counts[row])]
        return tuple(bytes(digest.tolist()).hex() for digest in digests)

    def read_ahead(self, row: int) -> None:
        """Have the system load a sequence's states into memory; returns at once."""
        self._advise(self._starts[row], self._starts[row + 1], mmap.MADV_WILLNEED)

    def _advise(self, start: int, end: int, advice: int) -> None:
        """Advise the system about bytes of the file; it is free to ignore that."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(self._address + start, end - start, advice)

    def checked(self, row: int) -> memoryview:
        """The bytes of a sequence's states, their checksum compared."""
        start, end = self._starts[row], self._starts[row + 1]
        self.read_ahead(row)
        data = self._bytes[start:end]
        if checksum_of(data) != self._checksums[row]:
            raise CorruptStore(self.path, start, end, f"the states of sequence {int(self.sample_ids[row])}")
        return data

    def states(self, row: int) -> torch.Tensor:
        data = self.checked(row)
        start, end = self._offsets[row : row + 2]
        if self.about.compression == "none":
            return self._plain[start:end]
        return decode(data, self.about.compression, (end - start, *self._shape), self._dtype)
