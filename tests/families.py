"""Families of targets, each as a tiny model with random weights: what tests of facts and of whole runs go through.

Every model has four layers, a hidden size of 64, heads of 32 (vLLM's CPU kernels take no smaller ones) and a vocabulary of bytes.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

HIDDEN, LAYERS, HEAD, VOCAB, LONGEST = 64, 4, 32, 320, 512
_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 0,
    "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
_GATED = _COMMON | {"intermediate_size": 96, "num_key_value_heads": 1}
_HEAD: dict[str, Any] = {"head_dim": HEAD}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_SLIDING: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class TinyFamily:
    """A family's tiny model."""

    name: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda weights: weights
    """What is done to the file, for tensors that transformers' model does not have."""

    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **copy.deepcopy(self.fields))

    def model(self) -> Any:
        """The model in float32, with norms and biases that are not ones and zeros."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32).eval()
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(std=0.1)  # the padding token has zeros
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.rand_like(parameter) * 0.5)
        return model

    def save(self, directory: Path) -> Any:
        """Write model and tokenizer as a Hugging Face directory; returns the model."""
        model = self.model()
        model.save_pretrained(directory)
        weights = load_file(directory / "model.safetensors")
        save_file(self.change(weights), directory / "model.safetensors", {"format": "pt"})
        save_tokenizer(directory)
        return model


def with_mtp_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a layer for multi-token prediction beside the model, as DeepSeek and GLM store it: its embedding and head are copies.
    Here they differ, so that reading them shows."""
    prefix = f"model.layers.{LAYERS}."
    layer = {
        name.replace(f"model.layers.{LAYERS - 1}.", prefix): value.clone()
        for name, value in weights.items()
        if name.startswith(f"model.layers.{LAYERS - 1}.")
    }
    table = weights["model.embed_tokens.weight"]
    return weights | layer | {
        f"{prefix}embed_tokens.weight": table + 1, f"{prefix}shared_head.head.weight": table - 1,
        f"{prefix}shared_head.norm.weight": torch.ones(HIDDEN), f"{prefix}enorm.weight": torch.ones(HIDDEN),
        f"{prefix}hnorm.weight": torch.ones(HIDDEN), f"{prefix}eh_proj.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
    }  # fmt: skip


FAMILIES = [
    TinyFamily("Llama", "llama", _GATED),
    TinyFamily("Mistral", "mistral", _GATED | _HEAD | {"sliding_window": 256}),
    TinyFamily("Qwen2", "qwen2", _GATED | {"tie_word_embeddings": True}),
    TinyFamily("Qwen3", "qwen3", _GATED | _HEAD),
    TinyFamily("Qwen3-MoE", "qwen3_moe", _GATED | _HEAD | _EXPERTS),
    TinyFamily(
        "Qwen3-Next", "qwen3_next", _GATED | _HEAD | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32}
    ),
    TinyFamily("Qwen3.5", "qwen3_5_text", _GATED | _HEAD | _LINEAR),
    TinyFamily(
        "Gemma 2", "gemma2",
        _GATED | _HEAD | _SLIDING | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0},
    ),
    TinyFamily("Gemma 3", "gemma3_text", _GATED | _HEAD | _SLIDING | {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    TinyFamily("gpt-oss", "gpt_oss", _GATED | _HEAD | _SLIDING | _LOCAL_EXPERTS),
    TinyFamily("Phi-3", "phi3", _GATED | {"original_max_position_embeddings": LONGEST}),
    TinyFamily(
        "Granite", "granite",
        _GATED | {"logits_scaling": 7.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    ),
    TinyFamily("Cohere", "cohere", _GATED | {"tie_word_embeddings": True, "logit_scale": 0.3}),
    TinyFamily("Cohere 2", "cohere2", _GATED | _SLIDING | {"tie_word_embeddings": True, "logit_scale": 0.3}),
    TinyFamily("GLM-4 MoE", "glm4_moe", _GATED | _HEAD | _ROUTED, with_mtp_layer),
    TinyFamily(
        "DeepSeek-V3", "deepseek_v3",
        _GATED | _ROUTED | {
            "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,  # AMX kernels take multiples of 32
            "v_head_dim": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
        with_mtp_layer,
    ),
    TinyFamily("OPT", "opt", _COMMON | {"ffn_dim": 96, "dropout": 0.0}),
    TinyFamily("Mixtral", "mixtral", _GATED | _HEAD | _LOCAL_EXPERTS),
    TinyFamily("MiniMax", "minimax", _GATED | _HEAD | _LOCAL_EXPERTS | {"block_size": 16}),
    TinyFamily("MiniMax-M2", "minimax_m2", _GATED | _HEAD | _LOCAL_EXPERTS | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}),
    TinyFamily("OLMo 2", "olmo2", _GATED),
    TinyFamily("StarCoder2", "starcoder2", _GATED),
    TinyFamily("StableLM", "stablelm", _GATED),
    TinyFamily("Nemotron", "nemotron", _GATED | _HEAD),
    TinyFamily("GPT-NeoX", "gpt_neox", _COMMON | {"intermediate_size": 96}),
]  # fmt: skip


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


def change_config(directory: Path, **fields: Any) -> None:
    """Set keys of a saved model's config.json; None removes one."""
    path = directory / "config.json"
    config = {name: value for name, value in (json.loads(path.read_text()) | fields).items() if value is not None}
    path.write_text(json.dumps(config))
