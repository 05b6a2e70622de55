"""Estimates of a vLLM engine's memory, and of how many engines fit side by side. Pure arithmetic: no GPU, no vLLM.

On a GPU vLLM measures what it needs as it starts, and uses the rest of its share for the KV cache. These estimates tell before any
engine starts whether that will be enough, so they err on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.config.recipe import EngineConfig
from draftsmith.run.errors import UserError
from draftsmith.run.safetensors_io import read_header
from draftsmith.run.weights import open_pickle
from draftsmith.target.family import dense_width, head_size, layer_configs
from draftsmith.target.quantization import weight_bits
from draftsmith.target.shards import shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CACHED = {"fp8": 1.0, "bfloat16": 2.0, "float16": 2.0}
"""Bytes of a key's or value's number in the types of `engine.options.kv_cache_dtype`, by how their names begin."""
_FLOATS = ("F32", "F16", "BF16", "F64")
"""Types, by their safetensors names, that vLLM casts to the engine's dtype as it loads."""
_WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")
_IN_WINDOWS = ("sliding_attention", "chunked_attention", "hybrid_sliding")
"""Kinds of layers, by transformers' names, that cache no keys and values, and that need those of a window only."""
_FIXED = 2 * GIB  # CUDA's context, workspaces of kernels and NCCL, and captured CUDA graphs: a guess, not measured
_ON_CPU = GIB // 2  # what an engine's process takes on a CPU beside weights, KV cache and activations
_CPU_STEP_TOKENS = 4096  # tokens of a prefill step on a CPU: vLLM's default for `LLM`
_STEP_TOKENS = 16384
"""Tokens of a prefill step: vLLM's default for `LLM` on GPUs of 70 GiB and more, the largest of its defaults."""
_MIN_BUFFER = 1 << 30
"""Bytes of the buffer through which states are copied: 32,768 tokens of the default layers of an 8B target, two of vLLM's largest prefill
steps."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each of an engine's GPUs; on a CPU, of the whole engine."""

    target: int
    drafter: int
    kv_cache: int
    working: int
    """Activations of a step, and what the process and CUDA take."""
    states: int = 0
    """Hidden states that extraction keeps until a sequence is finished. Always in ordinary memory, so not counted on GPUs."""

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.kv_cache + self.working + self.states

    def in_words(self) -> str:
        names = ("target", "drafter", "KV cache", "working memory", "hidden states")
        parts = zip(names, (self.target, self.drafter, self.kv_cache, self.working, self.states), strict=True)
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)


def engine_memory(
    config: PretrainedConfig,
    *,
    target_bytes: int,
    drafter_bytes: int,
    dtype: str,
    tokens: int,
    engine: EngineConfig,
    sequences: int,
    extracts: bool = False,
    drafter_split: int = 1,
) -> EngineMemory:
    """Estimate one engine's memory on GPUs.

    Args:
        config: of the target's language model.
        target_bytes: of the target's weights, as they are served.
        drafter_bytes: of the drafter's weights; 0 for the baseline and for methods without a drafter.
        tokens: in the KV cache: concurrent sequences times their length.
        engine: how the target is split over GPUs.
        sequences: that `tokens` are of: in a layer with a sliding window each holds no more than that and a prefill step
            (vllm/v1/kv_cache_interface.py, `SlidingWindowSpec`).
        extracts: whether vLLM caches one layer more (`kv_values`).
        drafter_split: GPUs that the drafter is split over; with 1 each holds all of it (`speculation.drafter_split`).
    """
    number, split = BYTES[dtype], engine.tensor_parallel_size
    kv = tokens * kv_values_on_each(config, engine, extracts=extracts)
    for layer in attending_layers(config)[1]:
        window = int(getattr(layer, "sliding_window", None) or tokens)
        kv -= max(0, tokens - sequences * (window + _STEP_TOKENS)) * _values_of_layer(layer, split)
    # The drafter has keys and values too, about as many in proportion to its size as the target.
    kv *= 1 + drafter_bytes / max(1, target_bytes)
    return EngineMemory(
        target=math.ceil(target_bytes / split),
        drafter=math.ceil(drafter_bytes / drafter_split),
        kv_cache=math.ceil(kv * cache_bytes(engine, dtype)),
        working=_FIXED + math.ceil(_step_bytes(config, _STEP_TOKENS, number) / split),
    )


def attending_layers(
    config: PretrainedConfig, *, extracts: bool = False
) -> tuple[list[PretrainedConfig], list[PretrainedConfig]]:
    """Configs of a target's layers with attention to all tokens before, and to those in a window. There may be others, without keys and values.

    Args:
        extracts: with the layer that extraction adds (`kv_values`), which is like the first that attends.
    """
    layers = layer_configs(config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    of_kinds = list(zip(kinds, layers, strict=False))
    full = [layer for kind, layer in of_kinds if kind not in (*_WITHOUT_ATTENTION, *_IN_WINDOWS)]
    windowed = [layer for kind, layer in of_kinds if kind in _IN_WINDOWS]
    return (full + (full or windowed or layers)[:1] if extracts else full), windowed


def cpu_engine_memory(
    config: PretrainedConfig,
    *,
    target_bytes: int,
    drafter_bytes: int,
    dtype: str,
    kv_cache_bytes: float,
    processes: int = 1,
    step_tokens: int = _CPU_STEP_TOKENS,
    states: int = 0,
) -> EngineMemory:
    """Estimate one engine's memory on a CPU, where its part of `engine.kv_cache_gib` is the size of the KV cache; otherwise as
    `engine_memory`, split over `processes`, with prefill steps of `step_tokens`, and `states` bytes of hidden states that extraction
    keeps (`state_bytes`)."""
    working = processes * _ON_CPU + _step_bytes(config, step_tokens, BYTES[dtype])
    return EngineMemory(target_bytes, drafter_bytes, math.ceil(kv_cache_bytes), working, states)


def cache_bytes(engine: EngineConfig, dtype: str) -> float:
    """Bytes of a number in the KV cache of an engine that computes in `dtype`. Types with fewer than 8 bits count as `dtype`."""
    asked = str(engine.options.get("kv_cache_dtype", "auto"))
    return next((size for name, size in _CACHED.items() if asked.startswith(name)), float(BYTES[dtype]))


def state_bytes(
    config: PretrainedConfig, *, layers: int, dtype: str, engine: EngineConfig, kv_cache_bytes: float, tokens: int
) -> int:
    """The most bytes of hidden states that an extraction engine keeps in ordinary memory: of sequences that are not finished.

    Args:
        config: of the target's language model.
        layers: number of layer ids.
        dtype: of the computation.
        engine: how the recipe runs vLLM.
        kv_cache_bytes: memory of the KV cache, which limits the tokens.
        tokens: of the longest sequences that the recipe lets run at once, which limit them too.
    """
    full, _ = attending_layers(config, extracts=True)  # others need less the longer a sequence is
    fitting = kv_cache_bytes / (sum(map(_values_of_layer, full)) * cache_bytes(engine, dtype))
    return math.ceil(min(tokens, fitting) * layers * config.hidden_size * BYTES[dtype])


def copy_buffer_bytes(step_bytes: int, step_tokens: int) -> int:
    """Bytes of the pinned buffer through which an extraction engine copies hidden states from its GPU (`extract/gpu_copy.py`).

    Args:
        step_bytes: states of the largest step.
        step_tokens: its tokens, each with a slot of 8 bytes.
    """
    return 1 << (max(_MIN_BUFFER, step_bytes + 8 * step_tokens) - 1).bit_length()  # torch pins powers of two anyway


def _step_bytes(config: PretrainedConfig, tokens: int, number: int) -> int:
    """Activations of a step in a layer: states and residuals, queries, keys and values, and the MLP's two halves and their product."""
    return tokens * (6 * int(config.hidden_size) + 3 * dense_width(config)) * number


def kv_values(config: PretrainedConfig, *, extracts: bool = False) -> int:
    """Values per token in the KV cache, summed over layers with attention: keys and values, heads times head size.

    With multi-head latent attention (DeepSeek's), one compressed vector and one rotated key. Layers with a sliding window are counted
    as if they had none.

    Args:
        extracts: count the layer whose block table extraction uses for hidden states, and whose cache stays empty (`serve/plugin`).
    """
    full, windowed = attending_layers(config, extracts=extracts)
    return int(sum(map(_values_of_layer, full + windowed)))


def kv_values_on_each(config: PretrainedConfig, engine: EngineConfig, *, extracts: bool = False) -> float:
    """`kv_values` in the KV cache of one process of an engine.

    Tensor-parallel ranks divide the heads, of which each has one at least. A compressed vector is whole on every rank.
    """
    full, windowed = attending_layers(config, extracts=extracts)
    return sum(_values_of_layer(layer, engine.tensor_parallel_size) for layer in full + windowed)


def _values_of_layer(layer: PretrainedConfig, split: int = 1) -> float:
    """Values per token that one of `split` processes caches of a layer."""
    if getattr(layer, "kv_lora_rank", None):
        return int(layer.kv_lora_rank + layer.qk_rope_head_dim)
    heads = int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
    return 2 * heads * head_size(layer) / min(split, heads)


def weight_bytes(
    directory: Path, dtype: str, quantization: str | None = None, *, only: Collection[str] | None = None
) -> int:
    """Bytes of a model's weights in an engine that computes in `dtype`, from its files' headers. 8-bit weights stay 8-bit.

    Args:
        quantization: the recipe's `engine.options.quantization`, which shrinks matrices as they are loaded.
        only: the names of the tensors that are counted, with `*` as in file names; None for all.

    Raises:
        UserError: a file is damaged.
    """

    matrix = min(BYTES[dtype], (weight_bits(None, quantization) or math.inf) / 8)
    total = 0.0
    for shape, stored in _tensors(directory, only):
        each = matrix if len(shape) > 1 else BYTES[dtype]
        total += math.prod(shape) * each if stored is None else stored
    return math.ceil(total)


def matrix_weights(directory: Path, *, only: Collection[str] | None = None) -> int:
    """Weights of a model's matrices, from its files' headers: what each row of a forward pass is multiplied by. Of 8-bit weights, one a byte.
    `only` and errors: as `weight_bytes`."""
    found = (
        math.prod(shape) if stored is None else stored for shape, stored in _tensors(directory, only) if len(shape) > 1
    )
    return sum(found)


def _tensors(directory: Path, only: Collection[str] | None) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """Shape of each tensor of a model, and its bytes where an engine keeps them; None where it casts the numbers to its dtype. See
    `weight_bytes`."""

    def counts(name: str) -> bool:
        return only is None or any(fnmatchcase(name, pattern) for pattern in only)

    files = _safetensors(directory)
    for path in () if files else sorted(directory.glob("pytorch_model*.bin")):
        for name, weight in open_pickle(path).items():
            if counts(name):
                is_float = weight.dtype.itemsize > 1 and weight.dtype.is_floating_point
                yield weight.shape, None if is_float else weight.bytes
    for path in files:
        try:
            tensors = read_header(path).tensors
            found = [
                (entry.shape, None if entry.dtype in _FLOATS else entry.end - entry.start)
                for name, entry in tensors.items()
                if counts(name)
            ]
        except (ValueError, TypeError):
            raise UserError(f"{path} is not a whole safetensors file. Download or save the model again.") from None
        yield from found


def _safetensors(directory: Path) -> list[Path]:
    """The files that vLLM loads: those of an index if there is one (vllm/model_executor/model_loader/weight_utils.py,
    `filter_duplicate_safetensors_files`). Mistral's folders have the same weights again, in `consolidated.safetensors`."""
    files = sorted(directory.glob("*.safetensors"))
    if (places := shards(directory, "model.safetensors")) is not None:
        named = set(places.values())
        return [path for path in files if path.name in named]
    return [path for path in files if not path.name.startswith("consolidated")] or files


def side_by_side(needs: Iterable[EngineMemory], gpu_bytes: int, utilization: float) -> int:
    """How many engines fit into one GPU with equal shares of what they may use (`utilization`), the largest one's need deciding."""
    return int(gpu_bytes * utilization // max(need.total for need in needs))
