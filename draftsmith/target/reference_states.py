"""A target's hidden states by transformers, the reference for engines' states and proposals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.target.pretrained import config_of, language_config, model_of


def reference_model(path: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The target as transformers has it, on the CPU (`pretrained.model_of`).

    torch's fused attention leaves out the soft cap of attention scores (Gemma 2), without an error.
    """
    config = language_config(config_of(path, trust_remote_code=trust_remote_code))
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    return model_of(path, dtype, trust_remote_code=trust_remote_code, attention=attention)


@torch.no_grad()
def states_of(
    model: Any, token_ids: torch.Tensor, layer_ids: tuple[int, ...], images: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """The inputs of decoder layers and the output of the last, from one forward pass over a text.

    Args:
        model: a causal language model from transformers.
        token_ids: [T].
        layer_ids: id i is the input of layer i; the number of layers is the last one's output, before the final norm.
        images: what the target's processor makes of the text's images, beside token ids.

    Returns:
        [T, len(layer_ids), hidden], on the CPU, in the model's dtype.
    """
    layers = model.get_decoder().layers
    caught: dict[int, torch.Tensor] = {}

    def entering(layer_id: int) -> Any:
        def hook(module: Any, arguments: Any, named: Any) -> None:
            caught[layer_id] = arguments[0] if arguments else named["hidden_states"]

        return hook

    def leaving(module: Any, arguments: Any, output: Any) -> None:
        caught[len(layers)] = output[0] if isinstance(output, tuple) else output

    hooks = [layers[i].register_forward_pre_hook(entering(i), with_kwargs=True) for i in layer_ids if i < len(layers)]
    hooks.append(layers[-1].register_forward_hook(leaving))
    try:
        reader = model if images else model.get_decoder()
        reader(token_ids[None].to(model.device), use_cache=False, **(images or {}))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([caught[i].reshape(len(token_ids), -1) for i in layer_ids], dim=1).cpu()
