"""Convert drafters to 8-bit weights that vLLM loads (`compressed-tensors`), and back to floating point.

Arithmetic and packing are done by the library that vLLM and llm-compressor use too. This module selects the tensors and
keeps them out of memory until they are written.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight, listed

SECTION = "quantization_config"
_METHOD = "compressed-tensors"
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_PACKED, _NAIVE = ".weight_packed", ".weight"
_SCALE, _SHAPE = ".weight_scale", ".weight_shape"


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is quantized."""

    title: str
    format: str
    """compressed-tensors' name of the file format."""
    weights: Mapping[str, Any]
    """compressed-tensors' `QuantizationArgs` of the weights, with one scale per output channel."""
    inputs: Mapping[str, Any] | None = None
    """The same for the layer's inputs, quantized on the fly; None leaves them in floating point."""

    def section(self, but: Collection[str]) -> dict[str, Any]:
        """Return `quantization_config` for `config.json`; see `quantized`."""
        groups = {"targets": ["Linear", "re:.*lm_head"], "weights": dict(self.weights)}
        if self.inputs is not None:
            groups["input_activations"] = dict(self.inputs)
        return {
            "quant_method": _METHOD, "format": self.format, "quantization_status": "compressed",
            "ignore": [rf"re:(.*\.)?{module}$" for module in but], "config_groups": {"group_0": groups},
        }  # fmt: skip


SCHEMES = {
    "int8": Scheme("8-bit integers, computed in floating point", "pack-quantized", _INT8),
    "fp8": Scheme("8-bit floats (E4M3), computed in floating point", "float-quantized", {**_INT8, "type": "float"}),
    "int8-dynamic": Scheme(
        "8-bit integers, computed as such: inputs are rounded too, token by token", "int-quantized", _INT8,
        # Asymmetric: with symmetric inputs vLLM 0.32 selects a kernel for 16-bit activations on CPUs with AMX, and fails in float32.
        {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True},
    ),
}  # fmt: skip


def scheme_of(record: Mapping[str, Any]) -> str | None:
    """The scheme of a checkpoint by its `config.json`; None for floating point and unknown schemes."""
    section = record.get(SECTION)
    formats = {scheme.format: name for name, scheme in SCHEMES.items()}
    return formats.get(str(section.get("format"))) if isinstance(section, Mapping) else None


def quantized(
    record: Mapping[str, Any], weights: Mapping[str, Weight], name: str, *, but: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Weight]]:
    """Quantize the weights of a checkpoint's linear layers by a scheme of that name; embeddings and norms stay as they are, and so do
    modules whose names end in a part that `but` has. `record` is `config.json`, and weights are named as vLLM names them."""
    scheme = SCHEMES[name]
    written: dict[str, Weight] = {}
    for name_of_weight, weight in weights.items():
        module = name_of_weight.removesuffix(_NAIVE)
        if not weight.dtype.is_floating_point or not _quantizes(name_of_weight, weight.shape, but):
            written[name_of_weight] = weight
            continue
        rows, columns = weight.shape
        compressed = _part_of(weight, scheme)
        written[module + _SCALE] = Weight((rows, 1), weight.dtype, compressed("weight_scale"))
        if scheme.format == "pack-quantized":
            words = math.ceil(columns / 4)
            written[module + _PACKED] = Weight((rows, words), torch.int32, compressed("weight_packed"))
            written[module + _SHAPE] = Weight.of(torch.tensor([rows, columns]))
        else:
            dtype = torch.int8 if scheme.weights["type"] == "int" else torch.float8_e4m3fn
            written[module + _NAIVE] = Weight((rows, columns), dtype, compressed("weight"))
    return {**record, SECTION: scheme.section(but)}, written


def quantized_bytes(shapes: Mapping[str, Sequence[int]], *, but: Collection[str], scale_bytes: int) -> int:
    """Size of a checkpoint's tensors after `quantized`, by their shapes before it; scales and all else have so many bytes a number."""
    total = 0
    for name, shape in shapes.items():
        quantizes = _quantizes(name, shape, but)
        total += math.prod(shape) + shape[0] * scale_bytes if quantizes else math.prod(shape) * scale_bytes
    return total


def _quantizes(name: str, shape: Sequence[int], but: Collection[str]) -> bool:
    linear = name.endswith(_NAIVE) and "embed" not in name and len(shape) == 2
    return linear and name.removesuffix(_NAIVE).split(".")[-1] not in but


def _part_of(weight: Weight, scheme: Scheme) -> Callable[[str], Callable[[], Iterator[torch.Tensor]]]:
    """Return a function from the names of a layer's compressed tensors to their parts, which are computed on writing."""

    def compressed(name: str) -> Callable[[], Iterator[torch.Tensor]]:
        def parts() -> Iterator[torch.Tensor]:
            from compressed_tensors.compressors import BaseCompressor
            from compressed_tensors.quantization.utils import calculate_qparams

            whole, arguments = weight.tensor(), _library_scheme(scheme.weights, scheme.inputs)
            least, most = whole.amin(1, keepdim=True), whole.amax(1, keepdim=True)
            scale, _ = calculate_qparams(least, most, arguments.weights)
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            state = compressor.compress({"weight": whole, "weight_scale": scale.to(whole.dtype)}, arguments)
            yield state[name].contiguous().flatten()

        return parts

    return compressed


def _library_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": dict(weights), "input_activations": dict(inputs) if inputs else None}
    )


def dequantized(record: Mapping[str, Any], weights: Mapping[str, Weight]) -> tuple[dict[str, Any], dict[str, Weight]]:
    """Convert 8-bit weights to floating point, in the dtype of their scales. Other checkpoints are returned unchanged.
    Raises UserError: the checkpoint is quantized in an unsupported way, or damaged."""
    if SECTION not in record:
        return dict(record), dict(weights)
    section = record[SECTION]
    rest = {key: value for key, value in record.items() if key != SECTION}
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    if (
        not isinstance(section, Mapping)
        or section.get("quant_method") != _METHOD
        or str(section.get("format")) not in {scheme.format for scheme in SCHEMES.values()}
        or not isinstance(groups, Mapping)
        or len(groups) != 1
        or any(section.get(other) for other in ("kv_cache_scheme", "transform_config", "sparsity_config"))
    ):
        raise UserError(
            f"The weights are quantized in an unsupported way (`{SECTION}`: {str(section)[:120]}). Convert the original drafter "
            f"instead; supported are {', '.join(SCHEMES)} of {_METHOD}."
        )
    (group,) = groups.values()
    stated = group.get("weights") if isinstance(group, Mapping) else None
    try:
        scheme = _library_scheme(stated if isinstance(stated, Mapping) else {"num_bits": None}, None)
        known = scheme.weights.num_bits == 8 and scheme.weights.symmetric and scheme.weights.strategy in _STRATEGIES
    except (TypeError, ValueError) as error:
        raise UserError(f"`{SECTION}` is not valid for {_METHOD} ({str(error).splitlines()[0][:200]}).") from None
    if not known:
        raise UserError(
            f"`{SECTION}` asks for {str(stated)[:120]}; supported are 8 bits, symmetric, with a scale for each tensor or channel."
        )
    read = dict(weights)
    for name in [name for name in weights if name.endswith(_SCALE)]:
        module, scale = name.removesuffix(_SCALE), read.pop(name)
        read[module + _NAIVE] = _whole(module, scale, read, section["format"], scheme)
    return rest, read


_STRATEGIES = ("channel", "tensor")


def _whole(module: str, scale: Weight, read: dict[str, Weight], layout: str, scheme: Any) -> Weight:
    """A layer's weight in floating point; removes its compressed tensors from `read`."""
    packed = layout == "pack-quantized"
    stored = read.pop(module + (_PACKED if packed else _NAIVE), None)
    shape = read.pop(module + _SHAPE, None) if packed else None
    if stored is None or (packed and shape is None) or len(stored.shape) != 2:
        raise UserError(f"{module} has a scale but no weight. The checkpoint is incomplete.")
    rows, columns = stored.shape
    if shape is not None:
        said = shape.tensor().flatten().tolist() if shape.count == 2 and shape.dtype == torch.int64 else []
        if len(said) != 2 or said[0] != rows or math.ceil(said[1] / 4) != columns or said[1] < 1:
            raise UserError(
                f"{module}{_SHAPE} is {said}, but the packed weight is {list(stored.shape)}. One of them is damaged."
            )
        columns = said[1]
    kind = torch.int32 if packed else scheme.weights.pytorch_dtype()
    if stored.dtype != kind or not scale.dtype.is_floating_point or scale.shape not in ((rows, 1), (1,), ()):
        raise UserError(
            f"{listed([module])}: the weight is {stored.dtype} and its scale {scale.dtype} {list(scale.shape)}; expected are {kind} "
            "and floating point, one for each row or a single one."
        )

    def parts() -> Iterator[torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor

        state = {"weight_scale": scale.tensor(), (_PACKED if packed else _NAIVE)[1:]: stored.tensor()}
        if packed:
            state["weight_shape"] = torch.tensor([rows, columns])
        found = BaseCompressor.get_value_from_registry(layout).decompress(state, scheme)["weight"]
        yield found.to(scale.dtype).contiguous().flatten()

    return Weight((rows, columns), scale.dtype, parts)
