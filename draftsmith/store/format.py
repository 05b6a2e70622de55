"""The format of a hidden-state store, which extraction writes and training reads.

A store is a directory with `manifest.json` and `shard-NNNNN.safetensors`. A shard holds many sequences end
to end. With T tokens, S sequences, L saved layers and H the target's hidden size:

    offsets        int64 [S + 1]    sequence s is rows offsets[s] : offsets[s + 1]
    sample_ids     int64 [S]        hash of the conversation (`Conversation.sample_id`) and the number of the sample
    checksums      int64 [S]        XXH3-64 of each sequence's bytes in `hidden_states` or `frames`
    token_ids      int32 [T]        the tokens that the target read, so that each has a state
    next_token_ids int32 [S]        the token sampled after the last state, or -1: it ends the sequence, often with
                                    the end-of-turn token, and was never read
    loss_mask      uint8 [T]        1 where the token is part of a response
    held_out       uint8 [S]        1 where the conversation is held out from training
    image_counts   int32 [S]        (only with images) the number of images in each prompt
    image_digests  uint8 [I, 32]    (only with images) SHA-256 of the bytes of each image, in order
    padding        uint8 [0 to 63]  so that the states start at a multiple of 64 bytes in the file

and last, uncompressed

    hidden_states  dtype [T, L, H]  the residual stream at each token, one row per layer id of the manifest

or, compressed,

    frame_offsets  int64 [S + 1]    (with the other int64) sequence s is frames[frame_offsets[s] : frame_offsets[s + 1]]
    frames         uint8 [bytes]    a frame of `draftsmith.store.codec` for each sequence

Everything before the states is the shard's head. Checksums cover every byte: the manifest has each head's, `checksums` are
the states', and the manifest's last line is its own. Heads and manifest are checked when a store is opened, states whenever
they are read. XXH3 detects damage, not forgery, and is faster than copying memory.

Shards are written whole and renamed into place. The manifest names the shards that count and is rewritten after each; other
shard files in the directory are left over from a crash and are ignored. One process writes the manifest. Shard files may come
from several processes and machines, under names of their own, and count once that process has adopted them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from draftsmith.config.sampling import Sampling
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.safetensors_io import header_bytes
from draftsmith.store.codec import EncodedStates, Form

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
LOCK = ".lock"
"""Locked by the process that writes. The system releases the lock when that process ends, however it ends."""
LAYER_ID_MEANING = (
    "id i is the residual stream entering decoder layer i; id num_hidden_layers is the last layer's output "
    "before the final norm"
)


class CorruptStore(DraftsmithError):
    """A store holds other bytes than were written."""

    def __init__(self, path: Path, start: int, end: int, what: str) -> None:
        self.path, self.start, self.end = path, start, end  # bytes `start : end` of the file at `path` hold the damage
        super().__init__(
            f"{path} is damaged in bytes {start} to {end - 1} ({what}): they differ from what was written. "
            "Restore the file from a copy, or delete the store and extract again."
        )


@dataclass(frozen=True)
class Sequence:
    """A conversation with its states, as training reads it.

    `token_ids` int32 [N] and `loss_mask` bool [N] cover the whole text. `hidden_states` is [M, L, H] with M = N
    (text only) or M = N - 1 (the last token was sampled and never fed back).
    """

    sample_id: int
    held_out: bool
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor
    images: tuple[str, ...] = ()
    """SHA-256 of the bytes of each image in the prompt, hex. Their tokens are the target's placeholders."""


@dataclass(frozen=True)
class EncodedSequence:
    """A conversation as extraction writes it: a `Sequence` whose states are encoded already."""

    sample_id: int
    held_out: bool
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: EncodedStates
    images: tuple[str, ...] = ()


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with those of inner objects by a dotted name. Those of how answers were sampled are left out where none were: stores of
    before have them there too."""
    if fields.get("sampling", {}).get("mode") == "prefill":
        made_with = {name: value for name, value in fields["sampling"].items() if name in ("mode", "states")}
        fields = fields | {"sampling": made_with}
    inner = {name: value for name, value in fields.items() if isinstance(value, dict)}
    found = {name: value for name, value in fields.items() if name not in inner}
    return found | {f"{name}.{key}": value for name, values in inner.items() for key, value in values.items()}


def nth_sample(sample_id: int, number: int) -> int:
    """The id of a conversation's answer `number`: 63 bits; the conversation's own id for the first."""
    if number == 0:
        return sample_id
    return int.from_bytes(hashlib.sha256(f"{sample_id}/{number}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class StoreIdentity:
    """What a store was made from. Stores of equal identity can be mixed."""

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
    """`exact`, or `int8` if they were rounded to 8 bits."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """The recipe's `engine.options`."""

    @property
    def sampled_with(self) -> Sampling | None:
        """How the target sampled the responses; None if it wrote none of them here."""
        return Sampling.of(self.sampling) if self.sampling.get("mode") == "generate" else None

    def wrote_with(self, sampling: Sampling) -> bool:
        """Whether the target wrote the responses with these parameters and no others that change what is drawn, as penalties do."""
        others = {"min_tokens", "bad_words", "presence_penalty", "frequency_penalty", "repetition_penalty"}
        return self.sampled_with == sampling and not others & self.sampling.keys()

    def recorded(self) -> dict[str, Any]:
        """JSON values by name; without engine options if there are none, as when stores did not have them."""
        fields = vars(self) | {"layer_ids": list(self.layer_ids)}
        if not self.engine_options:
            fields.pop("engine_options")
        return fields

    def require(self, wanted: StoreIdentity, where: Path) -> None:
        """Raises UserError: the identities differ; names every field that does."""
        self.require_fields(vars(wanted), where, way_out="Delete it, or choose another run with `-s name=OTHER`.")

    def require_fields(self, wanted: dict[str, Any], where: Path, *, way_out: str) -> None:
        """As `require`, for some fields, with other advice."""
        there = _flat({name: getattr(self, name) for name in wanted})
        here = _flat(wanted)
        differences = [
            f"{name} is {there.get(name)!r} there and {here.get(name)!r} in this run"
            for name in {**there, **here}
            if there.get(name) != here.get(name)
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
    """Raises ValueError: lengths, shapes, dtype or encoding do not fit one another or the store."""
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


def shard_head(sequences: list[EncodedSequence], identity: StoreIdentity, compression: Form) -> bytes:
    """The bytes of a shard before its states."""
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
    images = [bytes.fromhex(digest) for s in sequences for digest in s.images]
    if images:  # the counts before the bytes: int32 begin at a multiple of 4
        counts = torch.tensor([len(s.images) for s in sequences], dtype=torch.int32)
        digests = torch.tensor([list(digest) for digest in images], dtype=torch.uint8)
        bytes_tensors = {name: tensors.pop(name) for name in ("loss_mask", "held_out")}
        tensors |= {"image_counts": counts, **bytes_tensors, "image_digests": digests}
    if compression == "none":
        shape = [sum(lengths), len(identity.layer_ids), identity.hidden_size]
        states = {"hidden_states": (getattr(torch, identity.dtype), shape)}
    else:
        sizes = [len(s.states.data) for s in sequences]
        tensors = {"frame_offsets": torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0), **tensors}
        states = {"frames": (torch.uint8, [sum(sizes)])}
    tensors["padding"] = torch.zeros(-sum(t.nbytes for t in tensors.values()) % 64, dtype=torch.uint8)
    layout: dict[str, tuple[torch.dtype, list[int]]] = {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    header = header_bytes(layout | states, alignment=64)
    return b"".join([header, *(t.view(torch.uint8).numpy().data for t in tensors.values())])


def counts_of(shards: Iterable[Shard]) -> dict[str, int]:
    """Sums over shards: sequences, tokens with states, and bytes."""
    shards = list(shards)
    names = ("sequences", "held_out_sequences", "tokens", "response_tokens", "bytes")
    return {name: sum(getattr(shard, name) for shard in shards) for name in names}


def manifest_bytes(identity: StoreIdentity, shards: list[Shard]) -> bytes:
    """The content of `manifest.json`."""
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "identity": identity.recorded(),
        "layer_id_meaning": LAYER_ID_MEANING,
        "counts": counts_of(shards),
        "shards": [vars(shard) for shard in shards],
    }
    body = json.dumps(manifest, indent=2).removesuffix("\n}").encode()
    return body + _checksum_line(body)


def _checksum_line(body: bytes) -> bytes:
    """The end of a manifest: a checksum of everything before."""
    return b',\n  "checksum": "%s"\n}\n' % xxhash.xxh3_64_hexdigest(body).encode()


def read_manifest(directory: Path) -> tuple[StoreIdentity, list[Shard]]:
    """
    Raises:
        UserError: the directory holds no store, or one of another schema.
        CorruptStore: the manifest is not as it was written.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"There is no store at {directory}: it has no {MANIFEST}. Run the extract stage first.")
    text = path.read_bytes()
    body = text[: -len(_checksum_line(b""))]
    whole = text == body + _checksum_line(body)
    try:
        manifest = json.loads(text)
        version = manifest["schema_version"]
    except (ValueError, KeyError, TypeError):
        version = None
    has_checksum = re.search(rb'"checksum": "[0-9a-f]{16}"\n\}\n$', text) is not None
    if version is None and not has_checksum and b'"schema_version"' not in text:
        raise UserError(f"{path} is not a store's manifest. If it was one, delete {directory} and extract again.")
    # Another schema is reported as such, but not a damaged version number of our own schema.
    if version is not None and version != SCHEMA_VERSION and (whole or not has_checksum):
        raise UserError(
            f"{directory} has store schema {version}, and this version of Draftsmith reads schema {SCHEMA_VERSION}. "
            "Use the version that wrote it, or extract again."
        )
    if not whole:
        raise CorruptStore(path, 0, len(text), "the manifest")
    fields = manifest["identity"]
    identity = StoreIdentity(**fields | {"layer_ids": tuple(fields["layer_ids"])})
    return identity, [Shard(**entry) for entry in manifest["shards"]]
