"""The trainer's checkpoint: `draft.safetensors` and `draft.json`, which every conversion starts from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from draftsmith.run.atomic_io import write_bytes, write_json
from draftsmith.run.errors import UserError

WEIGHTS = "draft.safetensors"
RECORD = "draft.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A trained drafter, self-describing. Written by training, read by conversion and by whoever resumes from it."""

    kind: str
    """Kind of drafter: a file of `draftsmith/drafters/`."""
    config: dict[str, Any]
    """The kind's own config, as its `to_dict` gives it."""
    target: dict[str, Any]
    """Whose drafter it is: name, revision, config_hash."""
    draft_token_ids: torch.Tensor
    """int64 [V] ascending: target id of each draft token."""
    tensors: dict[str, torch.Tensor]
    """The module's state dict."""
    training: dict[str, Any] = field(default_factory=dict)
    """Figures of the training run, predicted acceptance length among them."""

    def save(self, directory: Path) -> None:
        """Write both files atomically, the record last."""
        tensors = {"draft_token_ids": self.draft_token_ids, **self.tensors}
        write_bytes(
            directory / WEIGHTS, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        )
        fields = asdict(self)
        del fields["tensors"], fields["draft_token_ids"]
        write_json(directory / RECORD, {"format_version": FORMAT_VERSION, **fields})

    @classmethod
    def load(cls, directory: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            UserError: the directory holds none, or one of another version.
        """
        path = directory / RECORD
        if not path.is_file() or not (directory / WEIGHTS).is_file():
            raise UserError(
                f"There is no checkpoint at {directory}: it needs {RECORD} and {WEIGHTS}. Run the train stage first."
            )
        record = json.loads(path.read_text())
        if record.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path} has checkpoint format {record.get('format_version')}, and this version of Draftsmith reads "
                f"{FORMAT_VERSION}. Use the version that wrote it, or train again."
            )
        tensors = load_file(directory / WEIGHTS)
        draft_token_ids = tensors.pop("draft_token_ids")
        return cls(record["kind"], record["config"], record["target"], draft_token_ids, tensors, record["training"])
