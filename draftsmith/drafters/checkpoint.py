"""A drafter's checkpoint: `draft.safetensors` and `draft.json`.

Training writes one, and every conversion reads or makes one: other formats are read into a `Checkpoint` and written from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.drafters import drafter_class
from draftsmith.run.atomic_io import read_json, sha256_of, write_json
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight, listed, open_safetensors, write_safetensors

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter, DrafterConfig
    from draftsmith.target.tensors import TargetTensors

WEIGHTS = "draft.safetensors"
RECORD = "draft.json"
TREES = "trees.json"
"""Beside the checkpoint's folder: what trees of its draft tokens would have accepted (`train.predict.predict_trees`)."""
FORMAT_VERSION = 1
EMBEDDING = "embed_tokens.weight"
"""[vocab, H]: the drafter's own embedding, if it does not share the target's."""
UNKNOWN_TARGET: dict[str, str | None] = {"name": None, "revision": None, "config_hash": None}
"""`target` of a drafter whose format does not name it."""


def checkpoint_sha256(directory: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files, by name."""
    return {name: sha256_of(directory / name) for name in (WEIGHTS, RECORD)}


class CorruptCheckpoint(UserError):
    """The files of a checkpoint are incomplete or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A drafter with all that is known about it. Its weights need not be in memory."""

    kind: str
    """Kind of drafter: a key of `KINDS`."""
    config: dict[str, Any]
    """The kind's config, as its `to_dict` returns it."""
    target: dict[str, Any]
    """The target that it drafts for: name, revision, config_hash; None where unknown. And hf_overrides, where vLLM serves the two with such
    alone (`engine.speculation.target_arguments`)."""
    draft_token_ids: torch.Tensor
    """int64 [V] ascending: target id of each draft token."""
    weights: Mapping[str, Weight]
    """The module's state dict, with names and shapes as in the kind's `shapes`; and `EMBEDDING`, if the drafter has its own."""
    training: dict[str, Any] = field(default_factory=dict)
    """Figures of the training run, such as the predicted acceptance length; empty if it was trained elsewhere."""

    @classmethod
    def load(cls, directory: Path) -> Checkpoint:
        """Open a checkpoint. Whether its tensors fit its config is left to `check`.

        Raises:
            UserError: the directory holds no checkpoint, or one of another version.
            CorruptCheckpoint: its files are damaged.
        """
        if not (directory / RECORD).is_file() or not (directory / WEIGHTS).is_file():
            raise UserError(
                f"There is no checkpoint at {directory}: it needs {RECORD} and {WEIGHTS}. Run the train stage first."
            )
        try:
            record, weights = read_json(directory / RECORD), open_safetensors(directory / WEIGHTS)
        except UserError as error:
            raise CorruptCheckpoint(str(error)) from None
        if record.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{directory / RECORD} has checkpoint format {record.get('format_version')}, and this version of Draftsmith "
                f"reads {FORMAT_VERSION}. Use the version that wrote it, or train again."
            )
        sections = {"kind": str, "config": dict, "target": dict, "training": dict}
        if wrong := [name for name, kind in sections.items() if not isinstance(record.get(name), kind)]:
            raise CorruptCheckpoint(f"{directory / RECORD} has no valid {listed(wrong)}. Get the checkpoint again.")
        ids = weights.pop("draft_token_ids", None)
        if ids is None:
            raise CorruptCheckpoint(f"{directory / WEIGHTS} has no `draft_token_ids`. Get the checkpoint again.")
        return cls(record["kind"], record["config"], record["target"], ids.tensor(), weights, record["training"])

    def save(self, directory: Path) -> None:
        """Write both files atomically, the record last."""
        tensors = {"draft_token_ids": Weight.of(self.draft_token_ids), **self.weights}
        write_safetensors(directory / WEIGHTS, tensors, metadata=None)
        self.save_record(directory)

    def save_record(self, directory: Path) -> None:
        """Write the record alone, beside its weights."""
        fields = {"kind": self.kind, "config": self.config, "target": self.target, "training": self.training}
        write_json(directory / RECORD, {"format_version": FORMAT_VERSION, **fields})

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights, read into memory."""
        return {name: weight.tensor() for name, weight in self.weights.items()}

    def to(self, dtype: str | None) -> Checkpoint:
        """With floating-point weights in another dtype, by torch's name of it; None keeps theirs."""
        if dtype is None:
            return self
        return replace(self, weights={name: each.to(getattr(torch, dtype)) for name, each in self.weights.items()})

    def drafter_config(self) -> DrafterConfig:
        """`config` as an object of the kind's config class.

        Raises:
            UserError: this version has no such kind.
            CorruptCheckpoint: the fields are not those of the kind's config.
        """
        kind = drafter_class(self.kind)
        try:
            return kind.config_class.from_dict(self.config)
        except (TypeError, ValueError, KeyError) as error:
            raise CorruptCheckpoint(f"The config is not that of a drafter of the kind {self.kind}: {error}.") from None

    def drafter(self, target: TargetTensors) -> Drafter:
        """The module in float32, for evaluation, with its own embedding if it has one instead of the target's."""
        tensors = {name: weight.tensor().float() for name, weight in self.weights.items()}
        if EMBEDDING in tensors:
            target = replace(target, embedding=tensors.pop(EMBEDDING))
        drafter = drafter_class(self.kind).from_target(self.drafter_config(), target, self.draft_token_ids)
        drafter.load_state_dict(tensors)
        return drafter.float().eval()

    def check(self) -> Checkpoint:
        """Return the checkpoint itself if its parts agree.

        Raises:
            UserError: this version has no such kind.
            CorruptCheckpoint: listing tensors that are missing, unknown or of the wrong shape or dtype, or what else disagrees.
        """
        kind, config = drafter_class(self.kind), self.drafter_config()
        try:
            expected = kind.shapes(config)
        except Exception as error:  # what a wrong value breaks depends on the kind's module
            raise CorruptCheckpoint(
                f"No drafter of the kind {self.kind} can be made of the config ({error}). The checkpoint is damaged."
            ) from None
        if kind.has_embedding and EMBEDDING in self.weights:
            expected = {**expected, EMBEDDING: (config.vocab_size, config.hidden_size)}
        found = {name: weight.shape for name, weight in self.weights.items()}
        problems = []
        if missing := sorted(expected.keys() - found.keys()):
            problems.append(f"missing: {listed(missing)}")
        if unknown := sorted(found.keys() - expected.keys()):
            problems.append(f"unknown: {listed(unknown)}")
        for name in sorted(expected.keys() & found.keys()):
            if found[name] != expected[name]:
                problems.append(f"{name} is {list(found[name])}, and the config says {list(expected[name])}")
        if problems:
            raise CorruptCheckpoint(
                f"The tensors are not those of the config: {'; '.join(problems[:6])}. The checkpoint is damaged, or of "
                "another kind than detected."
            )
        integers = sorted(name for name, weight in self.weights.items() if not weight.dtype.is_floating_point)
        if integers:
            raise CorruptCheckpoint(
                f"{listed(integers)} must be floating point, not {self.weights[integers[0]].dtype}."
            )
        predicted = self.training.get("predicted_acceptance_length") or {}
        if (
            not UNKNOWN_TARGET.keys() <= self.target.keys()
            or not all(isinstance(self.target[name], str | None) for name in UNKNOWN_TARGET)
            or not isinstance(self.target.get("hf_overrides", {}), dict)
            or not (isinstance(predicted, dict) and all(isinstance(value, int | float) for value in predicted.values()))
        ):
            raise CorruptCheckpoint(
                "The checkpoint's record of its target or its training is malformed. It is damaged."
            )
        ids = self.draft_token_ids
        if len(ids) != config.draft_vocab_size or ids.dtype != torch.int64:
            raise CorruptCheckpoint(
                f"The draft vocabulary has {len(ids)} tokens, and the config says {config.draft_vocab_size}. The checkpoint "
                "is damaged."
            )
        if len(ids) and not (ids[0] >= 0 and ids[-1] < config.vocab_size and bool((ids[1:] > ids[:-1]).all())):
            raise CorruptCheckpoint(
                "The draft vocabulary is not an ascending list of the target's token ids. It is damaged."
            )
        return self
