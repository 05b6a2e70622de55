"""The files that a target's weights come in: safetensors or PyTorch's, and tensors in 8 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    import torch

    from draftsmith.run.weights import Weight


def names_in(path: Path) -> list[str]:
    """Names of a file's tensors.

    Raises:
        UserError: the file is damaged, or holds other objects than tensors.
    """
    if path.suffix == ".bin":
        return [*_pickled(path)]
    with _safetensors(path) as opened:
        return [*opened.keys()]


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """A tensor as the file holds it; the others stay on disk. Errors as for `names_in`."""
    if path.suffix == ".bin":
        return _pickled(path)[name].tensor()
    with _safetensors(path) as opened:
        return opened.get_tensor(name)


def _described(path: Path, name: str) -> tuple[Any, tuple[int, ...]]:
    """A tensor's dtype, by its name in the file where torch has none, and its shape. Errors as for `names_in`."""
    from draftsmith.run.safetensors_io import DTYPES

    if path.suffix == ".bin":
        weight = _pickled(path)[name]
        return weight.dtype, weight.shape
    with _safetensors(path) as opened:
        part = opened.get_slice(name)
        return DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape())


def _pickled(path: Path) -> dict[str, Weight]:
    from draftsmith.run.weights import open_pickle

    return open_pickle(path)


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. Download or save the model again.") from None


def read_weight(files: Mapping[str, Path], name: str) -> torch.Tensor:
    """A weight in floating point.

    8-bit integers and floats (E4M3) with one scale, or one for each row, are dequantized to float32: weight times scale, as
    compressed-tensors and FP8 checkpoints mean them.

    Args:
        files: the file of each of the target's tensors, by name.
        name: ends with `weight`.

    Raises:
        UserError: the weight is quantized in another way.
    """
    scale = scale_of(files, name)
    weight = read_tensor(files[name], name)
    return weight if scale is None else weight.float() * scale


def scale_of(files: Mapping[str, Path], name: str) -> torch.Tensor | None:
    """The factors of an 8-bit weight [1 or rows, 1]; None for one in floating point. The weight itself is not read.

    Arguments and errors as for `read_weight`.
    """
    import torch

    dtype, shape = _described(files[name], name)
    if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return None
    beside = {key: f"{name}_{key}" for key in ("scale", "zero_point") if f"{name}_{key}" in files}
    scale, zeros = (
        read_tensor(files[beside[key]], beside[key]) if key in beside else None for key in ("scale", "zero_point")
    )
    known = len(shape) == 2 and dtype in (torch.int8, torch.float8_e4m3fn)
    if not known or scale is None or scale.shape not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1)):
        scales = "no scale" if scale is None else f"scales of shape {list(scale.shape)}"
        raise _unread(files[name], name, f"{dtype}, {scales}")
    if zeros is not None and zeros.any():
        raise _unread(files[name], name, f"{dtype} with zero points")
    return scale.float().reshape(-1, 1)


def refuse_quantized(files: Mapping[str, Path], module: str) -> None:
    """For a module without a `weight`:

    Args:
        files: as for `read_weight`.

    Raises:
        UserError: it has other tensors, because it is quantized.
    """
    parts = [name for name in files if re.search(rf"(^|\.){module}\.\w+$", name)]
    if parts:
        raise _unread(files[parts[0]], f"{module}.weight", ", ".join(parts[:4]))


def _unread(file: Path, name: str, stored: str) -> UserError:
    return UserError(
        f"{name} in {file} is quantized in a way that Draftsmith does not read ({stored}). Training needs it in floating point, or in "
        "8 bits with one scale, or one for each row. Use a checkpoint that leaves embedding, final norm and vocabulary head "
        "unquantized, as most do."
    )
