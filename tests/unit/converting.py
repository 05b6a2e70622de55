"""Checkpoints in memory as a published layout would hold them."""

from dataclasses import replace
from typing import Any

import torch

from draftsmith.convert.formats import FORMATS
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint


def to_vllm(checkpoint: Checkpoint, dtype: str, layout: str = "vllm") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`config.json` and the tensors."""
    whole = replace(checkpoint, target=UNKNOWN_TARGET | checkpoint.target)
    record, weights = FORMATS[layout].to_files(whole.check(), dtype=dtype)
    return record, {name: weight.tensor() for name, weight in weights.items()}
