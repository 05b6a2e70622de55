"""How many bits the weights of a quantized target take, by what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BITS = {
    "fp8": 8, "fbgemm_fp8": 8, "ptpc_fp8": 8, "modelopt": 8, "int8": 8, "experts_int8": 8, "mxfp8": 8.25,
    "fp8_per_tensor": 8, "fp8_per_channel": 8, "fp8_per_block": 8,
    "mxfp4": 4.25, "nvfp4": 4.5, "modelopt_fp4": 4.5,
}  # fmt: skip
"""By vLLM's names of methods, scales of small groups included."""
_FEWEST = 4.0
"""Bits where a config does not say: rather too few bytes than a run refused that would fit."""


def stated_quantization(config: PretrainedConfig | None) -> Mapping[str, Any]:
    """What a target's config says of its quantization (`quantization_config`); empty for a target in floating point."""
    stated: Any = getattr(config, "quantization_config", None)
    return stated if isinstance(stated, Mapping) else stated.to_dict() if stated else {}


def weight_bits(config: PretrainedConfig | None, method: str | None = None) -> float | None:
    """Bits of a weight in a quantized target's layers, with its share of its group's scale; None if it is not quantized.

    Embedding and vocabulary head are hardly ever quantized. Where groups of layers differ, the largest counts.

    Args:
        config: of the target's language model; None for what the method makes of a plain checkpoint.
        method: the recipe's `engine.options.quantization`, by which vLLM also quantizes a plain checkpoint as it loads it.
    """
    fields = stated_quantization(config)
    if not fields and method is None:
        return None
    groups = [group.get("weights") for group in (fields.get("config_groups") or {}).values()]  # compressed-tensors
    found = [_with_scale(group) for group in groups if group and group.get("num_bits")]
    if found:
        return max(found)
    if bits := fields.get("bits") or fields.get("w_bit"):  # GPTQ, AWQ
        return _with_scale({"num_bits": bits, "group_size": fields.get("group_size") or fields.get("q_group_size")})
    if fields.get("load_in_8bit"):  # bitsandbytes
        return 8.0
    names = (str(name).lower() for name in (fields.get("quant_algo"), fields.get("quant_method"), method) if name)
    return next((float(_BITS[name]) for name in names if name in _BITS), _FEWEST)


def _with_scale(weights: Mapping[str, Any]) -> float:
    size = weights.get("group_size") or 0
    scale = 8 if weights.get("type") == "float" else 16  # bits
    return float(weights["num_bits"]) + (scale / size if size > 0 else 0)
