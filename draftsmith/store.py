"""The hidden-state store: what extraction writes and every drafter trains on.

A store is a directory with `manifest.json` and `shard-NNNNN.safetensors`. A shard holds many sequences end
to end. With T tokens, S sequences, L saved layers and H the target's hidden size:

    token_ids      int32 [T]        tokens that were inputs of the target, so that each has a state
    loss_mask      uint8 [T]        1 where the token is part of a response
    hidden_states  dtype [T, L, H]  the residual stream at that token, one row per layer id of the manifest
    next_token_ids int32 [S]        the token sampled after the last state, -1 where there is none: it ends the
                                    sequence, often with the end-of-turn token, and was never an input
    offsets        int64 [S + 1]    sequence s is rows offsets[s] : offsets[s + 1]
    sample_ids     int64 [S]        hash of the conversation (`Prompt.sample_id`)
    held_out       uint8 [S]        1 where the conversation is held out from training

Shards are written whole and renamed into place; the manifest names the shards that count, with checksums, and
is rewritten after each. Whatever else lies in the directory is left over from a crash and is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from draftsmith.errors import UserError
from draftsmith.stage import sha256_of, write_bytes, write_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
LAYER_ID_MEANING = (
    "id i is the residual stream entering decoder layer i; id num_hidden_layers is the last layer's output "
    "before the final norm"
)


@dataclass(frozen=True)
class Sequence:
    """One conversation with its states: written by extraction, read by training.

    `token_ids` int32 [N] and `loss_mask` bool [N] cover the whole text. `hidden_states` is [M, L, H] with M = N
    (text only) or M = N - 1 (the last token was sampled and never fed back).
    """

    sample_id: int
    held_out: bool
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


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

    def require(self, wanted: StoreIdentity, where: Path) -> None:
        """Refuse a store that is not the wanted one.

        Raises:
            UserError: naming every field that differs.
        """
        differences = [
            f"{name} is {getattr(self, name)!r} there and {getattr(wanted, name)!r} in this run"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(wanted, name)
        ]
        if differences:
            raise UserError(
                f"The store at {where} was made for something else: {'; '.join(differences)}. "
                "Delete it, or choose another run with `-s name=OTHER`."
            )


@dataclass
class _Shard:
    file: str
    sha256: str
    bytes: int
    sequences: int
    tokens: int
    response_tokens: int
    held_out_sequences: int
    sample_ids: list[int] = field(repr=False)


class StoreWriter:
    """Appends sequences to a store and can be killed at any moment: what is in the manifest stays.

    Opening a directory that holds an unfinished store of the same identity continues it; `sample_ids` says
    which conversations it already has.
    """

    def __init__(self, directory: Path, identity: StoreIdentity, *, shard_tokens: int) -> None:
        self._directory, self._identity, self._shard_tokens = directory, identity, shard_tokens
        self._open: list[Sequence] = []
        self._open_tokens = 0
        self._shards: list[_Shard] = []
        if (directory / MANIFEST).exists():
            earlier = _read_manifest(directory)
            _identity_of(earlier, directory).require(identity, directory)
            self._shards = [_Shard(**entry) for entry in earlier["shards"]]
        self._publish_manifest()

    @property
    def sample_ids(self) -> set[int]:
        """Conversations that are safely on disk."""
        return {sample_id for shard in self._shards for sample_id in shard.sample_ids}

    @property
    def tokens(self) -> int:
        """Tokens with states, those of the open shard included."""
        return sum(shard.tokens for shard in self._shards) + self._open_tokens

    def append(self, sequence: Sequence) -> None:
        """Check a sequence and add it.

        Raises:
            ValueError: the sequence does not hold what a store promises (lengths, shape, finite, not all zero).
        """
        _check(sequence, len(self._identity.layer_ids), self._identity.hidden_size)
        self._open.append(sequence)
        self._open_tokens += len(sequence.hidden_states)
        if self._open_tokens >= self._shard_tokens:
            self._close_shard()

    def close(self) -> dict[str, Any]:
        """Write what is open; return the manifest's counts."""
        if self._open:
            self._close_shard()
        return self._counts()

    def _close_shard(self) -> None:
        file = f"shard-{len(self._shards):05d}.safetensors"
        write_bytes(self._directory / file, save(_pack(self._open)))
        self._shards.append(
            _Shard(
                file=file,
                sha256=sha256_of(self._directory / file),
                bytes=(self._directory / file).stat().st_size,
                sequences=len(self._open),
                tokens=self._open_tokens,
                response_tokens=sum(int(s.loss_mask.sum()) for s in self._open),
                held_out_sequences=sum(s.held_out for s in self._open),
                sample_ids=[s.sample_id for s in self._open],
            )
        )
        self._publish_manifest()
        self._open, self._open_tokens = [], 0

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
        write_json(self._directory / MANIFEST, manifest)


class Store:
    """A finished store, memory-mapped: sequences come in the order of their sample ids.

    That order does not depend on the order in which the target happened to finish them, so neither does what is
    trained from it.

    Raises:
        UserError: the directory holds no store, one of another schema, or one whose bytes changed.
    """

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.directory = directory
        manifest = _read_manifest(directory)
        self.identity = _identity_of(manifest, directory)
        self.counts: dict[str, int] = manifest["counts"]
        self._files = []
        for entry in manifest["shards"]:
            path = directory / entry["file"]
            if not path.is_file():
                raise UserError(
                    f"{directory} is damaged: its manifest names {entry['file']}, which is not there. Extract again."
                )
            if verify and (path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]):
                raise UserError(
                    f"{path} is damaged: its bytes are not the ones that were written. Delete the store and extract again."
                )
            self._files.append(safe_open(path, framework="pt"))
        self._index = []  # (sample id, shard, first row, last row + 1, next token, held out)
        for number, shard in enumerate(self._files):
            offsets = shard.get_tensor("offsets").tolist()
            names = ("sample_ids", "next_token_ids", "held_out")
            columns = zip(*(shard.get_tensor(name).tolist() for name in names), strict=True)
            for row, (sample_id, next_token, held_out) in enumerate(columns):
                self._index.append((sample_id, number, offsets[row], offsets[row + 1], next_token, bool(held_out)))
        self._index.sort()

    def __len__(self) -> int:
        return len(self._index)

    def rows(self, *, held_out: bool) -> list[int]:
        """Indices of the sequences of one part of the split, in order."""
        return [i for i, entry in enumerate(self._index) if entry[5] == held_out]

    def length(self, index: int) -> int:
        """Tokens with states of a sequence."""
        return self._index[index][3] - self._index[index][2]

    def __getitem__(self, index: int) -> Sequence:
        sample_id, number, start, end, next_token, held_out = self._index[index]
        shard = self._files[number]
        token_ids = shard.get_slice("token_ids")[start:end]
        loss_mask = shard.get_slice("loss_mask")[start:end].bool()
        if next_token >= 0:  # a sampled token is always part of a response
            token_ids = torch.cat([token_ids, token_ids.new_tensor([next_token])])
            loss_mask = torch.cat([loss_mask, loss_mask.new_tensor([True])])
        return Sequence(sample_id, held_out, token_ids, loss_mask, shard.get_slice("hidden_states")[start:end])

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs in the responses of the training part: int64 [vocab_size]."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for shard in self._files:
            train = shard.get_tensor("held_out") == 0
            offsets = shard.get_tensor("offsets")
            row_is_train = torch.repeat_interleave(train, offsets.diff())
            chosen = shard.get_tensor("token_ids")[shard.get_tensor("loss_mask").bool() & row_is_train]
            last = shard.get_tensor("next_token_ids")[train]
            for ids in (chosen, last[last >= 0]):
                counts += torch.bincount(ids.long(), minlength=vocab_size)
        return counts

    def __iter__(self) -> Iterator[Sequence]:
        return (self[i] for i in range(len(self)))


def _check(sequence: Sequence, layers: int, hidden_size: int) -> None:
    tokens, states = len(sequence.token_ids), sequence.hidden_states
    if len(sequence.loss_mask) != tokens or len(states) not in (tokens, tokens - 1):
        raise ValueError(
            f"{tokens} tokens, {len(sequence.loss_mask)} mask values and {len(states)} states do not go together"
        )
    if states.shape[1:] != (layers, hidden_size) or len(states) == 0:
        raise ValueError(f"states have shape {tuple(states.shape)}, expected [tokens, {layers}, {hidden_size}]")
    if not torch.isfinite(states).all():
        raise ValueError("states are not all finite")
    if (states == 0).all(dim=-1).any():
        raise ValueError("a token's state is all zeros: the target never wrote it")
    if len(states) == tokens - 1 and not sequence.loss_mask[-1]:
        raise ValueError("the last token has no state and is not part of a response")


def _pack(sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    lengths = [len(s.hidden_states) for s in sequences]
    pairs = list(zip(sequences, lengths, strict=True))
    return {
        "token_ids": torch.cat([s.token_ids[:n] for s, n in pairs]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask[:n] for s, n in pairs]).to(torch.uint8),
        "hidden_states": torch.cat([s.hidden_states for s in sequences]),
        "next_token_ids": torch.tensor(
            [int(s.token_ids[-1]) if len(s.token_ids) > n else -1 for s, n in pairs], dtype=torch.int32
        ),
        "offsets": torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        "sample_ids": torch.tensor([s.sample_id for s in sequences], dtype=torch.int64),
        "held_out": torch.tensor([s.held_out for s in sequences], dtype=torch.uint8),
    }


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"There is no store at {directory}: it has no {MANIFEST}. Run the extract stage first.")
    try:
        manifest = json.loads(path.read_text())
        version = manifest["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a store's manifest. Delete {directory} and extract again.") from None
    if version != SCHEMA_VERSION:
        raise UserError(f"{directory} has store schema {version}, and this version of Draftsmith reads schema {SCHEMA_VERSION}. "
                        "Use the version that wrote it, or extract again.")  # fmt: skip
    return manifest


def _identity_of(manifest: dict[str, Any], directory: Path) -> StoreIdentity:
    try:
        fields = manifest["identity"]
        return StoreIdentity(**fields | {"layer_ids": tuple(fields["layer_ids"])})
    except (KeyError, TypeError):
        raise UserError(f"{directory / MANIFEST} is incomplete. Delete {directory} and extract again.") from None
