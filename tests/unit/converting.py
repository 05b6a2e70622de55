"""Checkpoints in memory as vLLM's layout would hold them."""

from typing import Any

import torch

from draftsmith.checkpoint import Checkpoint
from draftsmith.convert.contents import Contents
from draftsmith.convert.formats import FORMATS


def to_vllm(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`config.json` and the tensors."""
    record, weights = FORMATS["vllm"].written(Contents.of(checkpoint), dtype=dtype)
    return record, {name: weight.tensor() for name, weight in weights.items()}
