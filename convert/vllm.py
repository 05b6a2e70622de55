"""Our checkpoint to the directory that stock vLLM loads: `config.json` and `model.safetensors`.

vLLM reads what it knows and keeps silent about the rest, so the conversion is a closed table: every tensor of the
checkpoint has a place, every place of the layout is filled, and anything else is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.checkpoint import Checkpoint
from draftsmith.drafters.eagle3 import Eagle3Config
from draftsmith.errors import DraftsmithError


def eagle3_to_vllm(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`config.json` and tensors for vLLM's `Eagle3LlamaForCausalLM` (vllm/model_executor/models/llama_eagle3.py).

    The drafter's module already uses vLLM's tensor names. `d2t` holds offsets, target id = draft id + d2t[draft id],
    and is left out with a full vocabulary, as vLLM expects; so is the embedding, which vLLM shares from the target.

    Args:
        checkpoint: of kind `eagle3`.
        dtype: torch dtype name of the floating-point tensors, and the config's.

    Raises:
        DraftsmithError: the checkpoint's tensors are not exactly those of its config.
    """
    config = Eagle3Config.from_dict(checkpoint.config)
    expected = eagle3_shapes(config)
    found = {name: tuple(value.shape) for name, value in checkpoint.tensors.items()}
    if found != expected:
        wrong = sorted(set(expected.items()) ^ set(found.items()))
        raise DraftsmithError(
            f"The checkpoint's tensors are not those of its config: {wrong[:6]}. It is damaged or was made by another "
            "version; train again."
        )
    tensors = {name: value.to(getattr(torch, dtype)) for name, value in checkpoint.tensors.items()}
    if config.draft_vocab_size != config.vocab_size:
        ids = checkpoint.draft_token_ids
        tensors["d2t"] = ids - torch.arange(len(ids))
        in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
        in_draft[ids] = True
        tensors["t2d"] = in_draft
    llama = config.llama().to_dict()
    keep = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size",
    )  # fmt: skip
    json_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: llama[key] for key in keep},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "num_aux_hidden_states": len(config.layer_ids),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.layer_ids)},
        "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
    }
    return json_config, tensors


def eagle3_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an EAGLE-3 drafter."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.layer_ids) * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(config.layer_ids))}
    for i in range(config.num_layers):
        read = 2 * hidden if i == 0 else hidden
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (queries, read),
            f"layers.{i}.self_attn.k_proj.weight": (keys, read),
            f"layers.{i}.self_attn.v_proj.weight": (keys, read),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"layers.0.hidden_norm.weight": (hidden,)}
