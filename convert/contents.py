"""What a drafter's checkpoint holds, whatever its format: what every reader gives and every writer takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.convert.weights import Weight, listed, open_safetensors, read_json, write_safetensors
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import DrafterConfig
from draftsmith.drafters.checkpoint import FORMAT_VERSION, RECORD, WEIGHTS, Checkpoint
from draftsmith.run.atomic_io import write_json
from draftsmith.run.errors import UserError

EMBEDDING = "embed_tokens.weight"
"""[vocab, H]: the drafter's own embedding, where it does not share the target's."""

UNKNOWN_TARGET: dict[str, str | None] = {"name": None, "revision": None, "config_hash": None}
"""The target of a drafter that does not name it."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """A drafter; its tensors are not in memory."""

    kind: str
    """A file of `draftsmith/drafters/`."""
    config: dict[str, Any]
    """The kind's own config, as its `to_dict` gives it."""
    draft_token_ids: torch.Tensor
    """int64 [V] ascending: target id of each draft token."""
    weights: dict[str, Weight]
    """Named and shaped as the kind's `shapes` say, and `EMBEDDING` where there is one."""
    target: dict[str, Any]
    """Whose drafter it is: name, revision, config_hash; None where a format does not say."""
    training: dict[str, Any] = field(default_factory=dict)
    """Figures of its training, where it was trained here."""

    def drafter_config(self) -> DrafterConfig:
        """`config`, typed.

        Raises:
            UserError: it has not the fields of the kind's config.
        """
        try:
            return drafter_class(self.kind).config_class.from_dict(self.config)
        except (TypeError, KeyError) as error:
            raise UserError(f"The config is not that of a drafter of the kind {self.kind}: {error}.") from None

    def check(self) -> DraftCheckpoint:
        """Itself, when its tensors are exactly those of its config.

        Raises:
            UserError: listing what is missing, too much, or of another shape.
        """
        kind, config = drafter_class(self.kind), self.drafter_config()
        expected = kind.shapes(config)
        if kind.has_embedding and EMBEDDING in self.weights:
            expected = {**expected, EMBEDDING: (config.vocab_size, config.hidden_size)}
        found = {name: weight.shape for name, weight in self.weights.items()}
        problems = []
        if missing := sorted(expected.keys() - found.keys()):
            problems.append(f"missing are {listed(missing)}")
        if unknown := sorted(found.keys() - expected.keys()):
            problems.append(f"no place is known for {listed(unknown)}")
        for name in sorted(expected.keys() & found.keys()):
            if found[name] != expected[name]:
                problems.append(
                    f"{name} has the shape {list(found[name])}, and the config asks for {list(expected[name])}"
                )
        if problems:
            raise UserError(
                f"The tensors are not those of the config: {'; '.join(problems[:6])}. The checkpoint is damaged, or of "
                "another kind than it seems."
            )
        integers = sorted(name for name, weight in self.weights.items() if not weight.dtype.is_floating_point)
        if integers:
            raise UserError(
                f"{listed(integers)} should hold floating-point numbers, and hold {self.weights[integers[0]].dtype}."
            )
        predicted = self.training.get("predicted_acceptance_length") or {}
        if not (
            UNKNOWN_TARGET.keys() <= self.target.keys() and all(isinstance(v, str | None) for v in self.target.values())
        ) or not (isinstance(predicted, dict) and all(isinstance(value, int | float) for value in predicted.values())):
            raise UserError("What the checkpoint says of its target or its training is not in its form. It is damaged.")
        ids = self.draft_token_ids
        if len(ids) != config.draft_vocab_size or ids.dtype != torch.int64:
            raise UserError(
                f"The draft vocabulary has {len(ids)} tokens, and the config says {config.draft_vocab_size}. The checkpoint "
                "is damaged."
            )
        if len(ids) and not (ids[0] >= 0 and ids[-1] < config.vocab_size and bool((ids[1:] > ids[:-1]).all())):
            raise UserError("The draft vocabulary is not an ascending list of the target's token ids. It is damaged.")
        return self

    def to(self, dtype: str | None) -> DraftCheckpoint:
        """With floating-point tensors in another type, by torch's name of it; None for their own."""
        if dtype is None:
            return self
        return replace(self, weights={name: each.to(getattr(torch, dtype)) for name, each in self.weights.items()})

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> DraftCheckpoint:
        """Of a checkpoint in memory."""
        weights = {name: Weight.of(tensor) for name, tensor in checkpoint.tensors.items()}
        return cls(
            checkpoint.kind, checkpoint.config, checkpoint.draft_token_ids, weights, UNKNOWN_TARGET | checkpoint.target,
            checkpoint.training,
        ).check()  # fmt: skip


def read_own(directory: Path) -> DraftCheckpoint:
    """The trainer's checkpoint.

    Raises:
        UserError: it is damaged, or of another version.
    """
    record = read_json(directory / RECORD)
    if record.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{directory / RECORD} has checkpoint format {record.get('format_version')}, and this version of Draftsmith "
            f"reads {FORMAT_VERSION}. Use the version that wrote it."
        )
    sections = {"kind": str, "config": dict, "target": dict, "training": dict}
    if wrong := [name for name, kind in sections.items() if not isinstance(record.get(name), kind)]:
        raise UserError(f"{directory / RECORD} lacks {listed(wrong)}, or has something else there. Get it again.")
    if not (directory / WEIGHTS).is_file():
        raise UserError(f"There is no {WEIGHTS} in {directory}: the checkpoint is incomplete.")
    weights = open_safetensors(directory / WEIGHTS)
    ids = weights.pop("draft_token_ids", None)
    if ids is None:
        raise UserError(f"{directory / WEIGHTS} has no `draft_token_ids`. The checkpoint is damaged; get it again.")
    return DraftCheckpoint(
        record["kind"], record["config"], ids.tensor(), weights, record["target"], record["training"]
    ).check()  # fmt: skip


def write_own(contents: DraftCheckpoint, directory: Path) -> None:
    """The trainer's checkpoint, the record last."""
    write_safetensors(directory / WEIGHTS, {"draft_token_ids": Weight.of(contents.draft_token_ids), **contents.weights})
    record = {
        "kind": contents.kind,
        "config": contents.config,
        "target": contents.target,
        "training": contents.training,
    }
    write_json(directory / RECORD, {"format_version": FORMAT_VERSION, **record})
