"""What a vLLM engine needs of a GPU's memory, and how many fit side by side. Arithmetic: no GPU, no vLLM.

vLLM measures what it needs itself, as it starts, and makes a KV cache of what is left of its share. This says before any engine
starts whether that will be enough, so it counts on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.run.errors import UserError
from draftsmith.run.safetensors_io import read_header

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOATS = ("F32", "F16", "BF16", "F64")
"""What safetensors calls the types that vLLM casts to the engine's dtype as it loads."""
_FIXED = 2 * GIB
"""CUDA's context, workspaces of kernels and of NCCL, and captured CUDA graphs: a guess, not measured."""
_STEP_TOKENS = 16384
"""Tokens of a prefill step: vLLM's default for `LLM` on GPUs of 70 GiB and more, and the most of all GPUs that it knows."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each of the GPUs that an engine is split over."""

    target: int
    drafter: int
    kv_cache: int
    working: int
    """What a step computes with, and what CUDA takes."""

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.kv_cache + self.working

    def in_words(self) -> str:
        parts = {
            "target": self.target, "drafter": self.drafter, "KV cache": self.kv_cache, "working memory": self.working,
        }  # fmt: skip
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)


def engine_memory(
    config: PretrainedConfig, *, target_bytes: int, drafter_bytes: int, dtype: str, tokens: int, gpus: int
) -> EngineMemory:
    """What one engine needs.

    Args:
        config: the target's, of its language model.
        target_bytes: of its weights, as they are served.
        drafter_bytes: of the drafter's; 0 for plain decoding and for methods without one.
        dtype: what is computed in.
        tokens: that the KV cache has to hold: sequences at once times their length.
        gpus: that the target is split over. The drafter is on each of them whole.
    """
    number = BYTES[dtype]
    # The drafter has keys and values of its own, about as many for its size as the target.
    kv = tokens * kv_values(config) * number * (1 + drafter_bytes / target_bytes)
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # Of a layer: states and residuals, queries, keys and values, and the two halves of the MLP and their product.
    step = _STEP_TOKENS * (6 * config.hidden_size + 3 * intermediate) * number
    return EngineMemory(
        target=math.ceil(target_bytes / gpus), drafter=drafter_bytes, kv_cache=math.ceil(kv / gpus),
        working=_FIXED + math.ceil(step / gpus),
    )  # fmt: skip


def kv_values(config: PretrainedConfig) -> int:
    """Numbers in the KV cache a token, summed over layers: keys and values, heads times head size.

    With multi-head latent attention (DeepSeek's) one compressed vector and one rotated key.
    """
    layers = int(config.num_hidden_layers)
    if getattr(config, "kv_lora_rank", None):
        return layers * int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * 2 * int((getattr(config, "num_key_value_heads", None) or heads) * head_dim)


def weight_bytes(directory: Path, dtype: str) -> int:
    """Bytes of a model's weights in an engine that computes in `dtype`, by its files' headers: 8-bit ones stay as they are.

    Raises:
        UserError: a file is no safetensors file.
    """
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        try:
            for entry in read_header(path).tensors.values():
                is_float = entry.dtype in _FLOATS
                total += math.prod(entry.shape) * BYTES[dtype] if is_float else entry.end - entry.start
        except (ValueError, TypeError):
            raise UserError(f"{path} is not a whole safetensors file. Download or save the model again.") from None
    return total


def side_by_side(needs: Iterable[EngineMemory], gpu_bytes: int, utilization: float) -> int:
    """How many engines fit into one GPU, each with the same share of it: as many as would if all needed what the largest does.

    Args:
        gpu_bytes: the GPU's memory.
        utilization: the part of it that engines may take (`engine.gpu_memory_utilization`).
    """
    return int(gpu_bytes * utilization // max(need.total for need in needs))
