"""Make a saved target one with 8-bit weights and inputs (W8A8), as compressed-tensors stores it and vLLM's CPU build runs it."""

import json
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
# Asymmetric: in float32, vLLM's kernel for symmetric inputs fails on CPUs with AMX.
INPUTS = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}


def quantize(directory: Path, *, head: bool = False) -> None:
    """Quantize the linear layers of a target in one safetensors file, with one scale for each row.

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
