"""Check before startup whether vLLM 0.32 can run a quantized target; vLLM says so only after downloads, in terms of its kernels.

Facts of vllm/model_executor/layers/quantization, vllm/model_executor/kernels/linear and vllm/v1/attention/backends/cpu_attn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment
from draftsmith.run.errors import UserError
from draftsmith.target.family import head_size, layer_configs
from draftsmith.target.quantization import stated_quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_IN_FLOAT32 = ("compressed-tensors", "torchao")
"""Methods whose layers vLLM also runs in float32; all others take bfloat16 and float16 only."""
_CACHES_ON_CPU = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


def require_quantization(engine: EngineConfig, config: PretrainedConfig, *, target: str, dtype: str) -> None:
    """Check that vLLM runs a target, quantized or not, with the recipe's `engine.options` on a machine like this one.

    Args:
        engine: how the recipe runs vLLM.
        config: of the target's language model.
        target: its name.
        dtype: of the computation.

    Raises:
        UserError: it does not.
    """
    stated, asked = stated_quantization(config), engine.options.get("quantization")
    method = str(stated.get("quant_method") or asked or "").lower()
    if asked == "fp8" and not stated:
        raise UserError(
            f"`engine.options.quantization: fp8` is for checkpoints in FP8, and {target} is in floating point. To quantize it as it is loaded, "
            "vLLM 0.32 has fp8_per_tensor, fp8_per_channel and fp8_per_block."
        )
    if method and dtype == "float32" and method not in _IN_FLOAT32:
        whose = f"{target} is quantized ({method})" if stated else f"`engine.options.quantization` is {method}"
        raise UserError(
            f"{whose}, and vLLM computes with such weights in bfloat16 and float16 only. Set `target.dtype: bfloat16`, and leave "
            "float32 out of `evaluate.dtypes`."
        )
    if environment.is_cpu():
        if method:
            _require_kernels(stated, method, target)
        _require_cache(engine, config)


def require_drafter_dtype(dtype: str, *, drafter: str) -> None:
    """Check that vLLM computes a drafter with 8-bit weights in a dtype on a machine like this one.

    Args:
        dtype: of the computation.
        drafter: which one, for the error.

    Raises:
        UserError: it does not: of its kernels for such weights on GPUs, none computes in float32.
    """
    if dtype == "float32" and not environment.is_cpu():
        raise UserError(
            f"The drafter {drafter} has quantized weights, and on GPUs vLLM computes with such weights in bfloat16 and float16 only. Set "
            "`target.dtype: bfloat16`, and leave float32 out of `evaluate.dtypes`; or take a drafter in floating point."
        )


def _require_kernels(stated: Mapping[str, Any], method: str, target: str) -> None:
    """
    Raises:
        UserError: vLLM's CPU build multiplies by no such weights, or cannot load them.
    """
    bits, block = stated.get("bits") or stated.get("w_bit") or 4, stated.get("weight_block_size")
    why = ""
    if method in ("awq", "gptq") and bits != 4:
        why = f"{method.upper()} in 4 bits, not in {bits}"
    elif method in ("awq", "gptq") and not _has_avx512():
        # The build for other processors lacks the operation (cpu_gemm_wna16), which only the first request finds out.
        why = f"{method.upper()} on processors with AVX-512 only"
    elif block or method == "fp8_per_block":
        why = "" if _has_amx() else "FP8 with a scale for each block of a weight on processors with AMX only"
    elif method in ("fp8", "fp8_per_tensor") or _one_scale_in_fp8(stated):
        # It loads such weights with an operation that the build lacks (layers/quantization/utils/w8a8_utils.py).
        why = "FP8 with a scale for each row of a weight, not with one for all of it"
    if why:
        raise UserError(
            f"vLLM's CPU build runs {why}, so it does not run {target} on this machine as the recipe asks. Use a GPU, or a checkpoint of the "
            f"target in another form (in floating point, in 8 bits with a scale for each row{', in 4 bits as AWQ or GPTQ' if _has_avx512() else ''})."
        )


def _one_scale_in_fp8(stated: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors has weights in FP8 with one scale for each."""
    weights = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
    return any(
        one.get("type") == "float" and one.get("num_bits") == 8 and one.get("strategy") == "tensor" for one in weights
    )


def _require_cache(engine: EngineConfig, config: PretrainedConfig) -> None:
    """
    Raises:
        UserError: vLLM's CPU build keeps no keys and values of this type, or not on this processor.
    """
    asked = engine.options.get("kv_cache_dtype", "auto")
    if asked not in _CACHES_ON_CPU:
        raise UserError(
            f"`engine.options.kv_cache_dtype: {asked}`: vLLM's CPU build has {', '.join(_CACHES_ON_CPU)}. Use one of them."
        )
    if not asked.startswith("fp8"):
        return
    odd = [size for size in map(head_size, layer_configs(config)) if size % 32]
    if odd or not (_has_amx() or _has_avx512()):
        why = f"heads that are a multiple of 32 wide, not {odd[0]}" if odd else "a processor with AVX-512 or AMX"
        raise UserError(
            f"`engine.options.kv_cache_dtype: {asked}`: on a CPU, vLLM needs {why} for it. Leave it out here."
        )


def _has_amx() -> bool:
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def _has_avx512() -> bool:
    import torch

    return bool(torch.cpu._is_avx512_supported())
