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
    frames         uint8 [bytes]    a frame of `draftsmith.store.codec` for each sequence

All before the states is the shard's head. Every byte is covered: the head by a checksum in the manifest, the states by
`checksums`, the manifest by its own last line. Heads and manifest are checked when a store is opened, states whenever
they are read. The checksum is XXH3: what it must find is damage, not forgery, and it is faster than memory is copied.

Shards are written whole and renamed into place; the manifest names the shards that count and is rewritten after each.
Whatever else lies in the directory is left over from a crash and is ignored. One process writes the manifest. Shard files
may come from several machines, each with names of its own, and count once that process has adopted them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.store.codec import EncodedStates, Form

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
LOCK = ".lock"
"""Locked by the process that writes; the system lets go of it when that process ends, however it ends."""
LAYER_ID_MEANING = (
    "id i is the residual stream entering decoder layer i; id num_hidden_layers is the last layer's output "
    "before the final norm"
)


class CorruptStore(DraftsmithError):
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


def check_sequence(sequence: EncodedSequence, identity: StoreIdentity, compression: Form) -> None:
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


DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}
STATES_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def shard_head(sequences: list[EncodedSequence], identity: StoreIdentity, compression: Form) -> bytes:
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
            STATES_DTYPES[identity.dtype],
            [sum(lengths), len(identity.layer_ids), identity.hidden_size],
        )
    else:
        tensors = {"frame_offsets": torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0), **tensors}
        states = ("frames", "U8", [sum(sizes)])
    tensors["padding"] = torch.zeros(-sum(t.nbytes for t in tensors.values()) % 64, dtype=torch.uint8)

    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    name, dtype, shape = states
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + sum(sizes)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the format allows spaces after the header
    return b"".join([len(text).to_bytes(8, "little"), text, *(bytes_of(t) for t in tensors.values())])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def last_lines(body: bytes) -> bytes:
    """What ends a manifest: the checksum of all before it."""
    return b',\n  "checksum": "%s"\n}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"There is no store at {directory}: it has no {MANIFEST}. Run the extract stage first.")
    text = path.read_bytes()
    body = text[: -len(last_lines(b""))]
    whole = text == body + last_lines(body)
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
        raise CorruptStore(path, 0, len(text), "the manifest")
    return manifest


def identity_of(manifest: dict[str, Any]) -> StoreIdentity:
    fields = manifest["identity"]
    return StoreIdentity(**fields | {"layer_ids": tuple(fields["layer_ids"])})
