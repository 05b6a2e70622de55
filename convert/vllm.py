"""Our checkpoint to the directory that stock vLLM loads: `config.json` and `model.safetensors`.

vLLM reads what it knows and keeps silent about the rest, so the conversion is a closed table: every tensor of the
checkpoint has a place, every place of the layout is filled, and anything else is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.checkpoint import Checkpoint
from draftsmith.drafters import drafter_class
from draftsmith.errors import DraftsmithError


def to_vllm(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`config.json` and tensors for vLLM; the layout is the kind's own (`Drafter.to_vllm`).

    Args:
        checkpoint: of any kind.
        dtype: torch dtype name of the floating-point tensors, and the config's.

    Raises:
        DraftsmithError: the checkpoint's tensors are not exactly those of its config.
    """
    kind = drafter_class(checkpoint.kind)
    config = kind.config_class.from_dict(checkpoint.config)
    expected = kind.shapes(config)
    found = {name: tuple(value.shape) for name, value in checkpoint.tensors.items()}
    if found != expected:
        wrong = sorted(set(expected.items()) ^ set(found.items()))
        raise DraftsmithError(
            f"The checkpoint's tensors are not those of its config: {wrong[:6]}. It is damaged or was made by another "
            "version; train again."
        )
    tensors = {name: value.to(getattr(torch, dtype)) for name, value in checkpoint.tensors.items()}
    json_config, tensors = kind.to_vllm(config, tensors, checkpoint.draft_token_ids)
    return json_config | {"torch_dtype": dtype}, tensors
