"""Checkpoints in memory as a published layout would hold them."""

from typing import Any

import torch

from draftsmith.convert.contents import DraftCheckpoint
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters.checkpoint import Checkpoint


def to_vllm(checkpoint: Checkpoint, dtype: str, layout: str = "vllm") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`config.json` and the tensors."""
    record, weights = FORMATS[layout].written(DraftCheckpoint.of(checkpoint), dtype=dtype)
    return record, {name: weight.tensor() for name, weight in weights.items()}
