"""How many tokens vLLM's KV cache holds at once during extraction, by vLLM's own arithmetic and without an engine.

Hybrid targets have layers with a sliding window beside layers without one. vLLM puts them into groups of equally many layers, whose
blocks are all as wide as a group. Ways of keeping the hidden states of four layers:

    cache        vLLM's: in a group of one layer, so that a block holds states in one layer's part of its width
    lcm          the same with blocks of states as large as that part allows; now they have to divide the other groups' block size
    one group    the same without the hybrid KV cache manager: all layers keep all tokens, and states lie beside them
    handed over  ours: states in ordinary memory, and one layer's cache more, for its block table (`serve/plugin`)

Sequences have 4,096 tokens and decode: a layer with a window keeps that window.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.benchmarks.figures import Figure, figure

GIB = 1024**3
LAYER_IDS, BLOCK_SIZE, LONGEST = 4, 16, 4096
WAYS = ("alone", "cache", "lcm", "one group", "handed over")


class Hybrid(NamedTuple):
    """A target's sizes, on each of its GPUs."""

    layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    window: int | None
    every: int
    """One layer of so many has no window."""


TARGETS = {
    "gpt-oss-20b": Hybrid(24, 2880, 8, 64, 128, 2),
    "gpt-oss-120b": Hybrid(36, 2880, 8, 64, 128, 2),
    "gpt-oss-120b on 8 GPUs": Hybrid(36, 2880, 1, 64, 128, 2),
    "Gemma 3 1B": Hybrid(26, 1152, 1, 256, 512, 6),
    "Gemma 3 4B": Hybrid(34, 2560, 4, 256, 1024, 6),
    "Gemma 3 27B": Hybrid(62, 5376, 16, 128, 1024, 6),
    "Llama-3.1-8B": Hybrid(32, 4096, 8, 128, None, 1),
    "Llama-3.3-70B on 8 GPUs": Hybrid(80, 8192, 1, 128, None, 1),
}


def tokens_at_once() -> dict[str, Figure]:
    """`extract.tokens_at_once.TARGET`."""
    figures = {}
    for name, target in TARGETS.items():
        found = {way: tokens(target, way) for way in WAYS}
        others = ", ".join(f"{way} {count:,.0f}" for way, count in found.items() if way != "handed over")
        figures[f"extract.tokens_at_once.{name.lower().replace(' ', '_')}"] = figure(
            [found["handed over"]],
            "tokens/GiB",
            f"{others}; {found['handed over'] / found['cache']:.1f} times the cache",
            direction="higher",
        )
    return figures


def tokens(target: Hybrid, way: str) -> float:
    """Tokens in a GiB of KV cache, of sequences that decode."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec, KVCacheSpec, SlidingWindowSpec

    sizes: dict[str, Any] = {
        "block_size": BLOCK_SIZE, "num_kv_heads": target.kv_heads, "head_size": target.head_dim, "dtype": torch.bfloat16
    }  # fmt: skip
    specs: dict[str, KVCacheSpec] = {
        f"layers.{number}": FullAttentionSpec(**sizes)
        if target.window is None or (number + 1) % target.every == 0
        else SlidingWindowSpec(**sizes, sliding_window=target.window)
        for number in range(target.layers)
    }
    config = _config(specs, hybrid=way != "one group")
    if way == "handed over":
        specs["states"] = _handed_over(config)
    elif way != "alone":
        of_states = {"num_kv_heads": LAYER_IDS, "head_size": target.hidden_size}
        specs["states"] = HiddenStateCacheSpec(**sizes | of_states)
    any_size = mock.patch.object(kv_cache_utils, "_largest_divisor_at_most", lambda value, limit: limit)
    if way == "lcm":
        with any_size:
            groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    else:
        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 64 * GIB)
    return LONGEST * kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache) / 64


def _config(specs: dict[str, Any], *, hybrid: bool) -> Any:
    """What vLLM's arithmetic reads of its config."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    class Layer(AttentionLayerBase):
        def __init__(self, spec: Any) -> None:
            self.spec = spec

        def get_attn_backend(self) -> Any:
            return CacheOnlyAttentionBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self.spec

    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=LONGEST),
        compilation_config=SimpleNamespace(static_forward_context={name: Layer(spec) for name, spec in specs.items()}),
        speculative_config=None,
        max_in_flight_tokens=1,
    )


def _handed_over(config: Any) -> Any:
    from draftsmith.serve import plugin

    return plugin._whole_sequence_spec(config, apart_from=type(None))
