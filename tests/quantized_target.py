"""Make a saved target a quantized one: W8A8 as compressed-tensors stores it, AWQ and GPTQ in 4 bits, FP8."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
# Asymmetric: in float32, vLLM's kernel for symmetric inputs fails on CPUs with AMX.
INPUTS = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}


def quantize(directory: Path, *, head: bool = False) -> None:
    """Quantize the linear layers of a target in one safetensors file to W8A8, as vLLM's CPU build runs it, with one scale for each row.

    Args:
        head: also the vocabulary head, which most checkpoints leave alone.
    """
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": SCHEME})
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    written = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if (
            kind != "weight"
            or weight.ndim != 2
            or module.endswith("embed_tokens")
            or (module == "lm_head" and not head)
        ):
            written[name] = weight
            continue
        scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
        parts = compressor.compress({"weight": weight, "weight_scale": scale.to(weight.dtype)}, scheme)
        written |= {f"{module}.{part}": parts[part].contiguous() for part in ("weight", "weight_scale")}
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": [] if head else ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME, "input_activations": INPUTS}},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


# ---- AWQ, GPTQ and FP8 checkpoints, as their tools write them ----

GROUP = 32
"""Weights in a row that share a scale, in 4 bits."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight values AWQ puts into an integer's lowest four bits, and so on."""
_Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A layer's tensors in the file, by their names without the layer's, and its weight in float32 as these mean it."""


def quantize_awq(directory: Path) -> dict[str, torch.Tensor]:
    """4 bits with zero points. See `_rewrite`."""
    return _rewrite(
        directory, _awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    )


def quantize_gptq(directory: Path) -> dict[str, torch.Tensor]:
    """4 bits around zero. See `_rewrite`."""
    described = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }
    return _rewrite(directory, _gptq, described)


def quantize_fp8_rows(directory: Path) -> dict[str, torch.Tensor]:
    """8-bit floats with a scale for each row, as compressed-tensors stores them; inputs are rounded likewise, token by token. See `_rewrite`."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = weights | {"strategy": "token", "dynamic": True}
    described = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }  # fmt: skip
    return _rewrite(directory, _fp8_rows, described)


def _rewrite(
    directory: Path, form: Callable[[torch.Tensor], _Parts], described: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Quantize the layers of a target in one safetensors file, and say so in its config; embedding, norms and head stay.

    Returns:
        The layers' weights in float32, by name, as the file means them.
    """
    written, meant = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or weight.ndim != 2 or module.endswith(("embed_tokens", "lm_head")):
            written[name] = weight
            continue
        parts, meant[name] = form(weight)
        written |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return meant


def _awq(weight: torch.Tensor) -> _Parts:
    rows, columns = weight.shape
    groups = weight.T.reshape(-1, GROUP, rows)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    values = (groups / scales + zeros).round().clamp(0, 15)
    parts = {
        "qweight": _packed(values.reshape(columns, rows), _AWQ_ORDER), "qzeros": _packed(zeros[:, 0], _AWQ_ORDER),
        "scales": scales[:, 0].half(),
    }  # fmt: skip
    return parts, ((values - zeros) * scales).reshape(columns, rows).T


def _gptq(weight: torch.Tensor) -> _Parts:
    rows, columns = weight.shape
    groups = weight.T.reshape(-1, GROUP, rows)
    scales = (groups.abs().amax(1, keepdim=True) / 7).half().float()
    values = (groups / scales).round().clamp(-8, 7)
    eights = torch.full((len(groups), rows), 7.0)  # this format's files hold zero points less 1
    parts = {
        "qweight": _packed((values + 8).reshape(columns, rows).T, range(8)).T, "qzeros": _packed(eights, range(8)),
        "scales": scales[:, 0].half(), "g_idx": (torch.arange(columns) // GROUP).int(),
    }  # fmt: skip
    return parts, (values * scales).reshape(columns, rows).T


def _fp8_rows(weight: torch.Tensor) -> _Parts:
    scales = _row_scales(weight)
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}, in_fp8(weight)


def _row_scales(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max


def in_fp8(values: torch.Tensor) -> torch.Tensor:
    """What is left of rows [..., N] in 8-bit floats with a scale for each; float32 too."""
    scales = _row_scales(values)
    return (values / scales).to(torch.float8_e4m3fn).float() * scales


def _packed(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Eight 4-bit values of a row in an integer: int32 [rows, columns / 8]."""
    eights = values.to(torch.int64).reshape(len(values), -1, 8)
    packed = sum(eights[..., value] << 4 * place for place, value in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int()
