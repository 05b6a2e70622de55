"""Encode a sequence's states for a compressed store, lossless or in 8 bits.

**Lossless.** A float's bits rotated left by one put the exponent into the top byte and the sign behind the mantissa.
The exponents of one layer take few values, so their byte plane is entropy-coded; mantissas are noise and stay as they
are. Every bit pattern is restored, NaN payloads and -0 included. docs/log.md has what was tried and measured.

**int8.** A value becomes an 8-bit integer times its token's scale times its channel's. Channels of a residual stream
differ in scale by orders of magnitude, and with one scale for all of a token's channels (measured: docs/log.md) the small
ones are lost. Token and channel scales belong to one layer of one sequence; channel scales are powers of two.

A frame is `uint32 [P]` plane sizes, then the planes. Planes are grouped by layer, because layers differ in scale by
orders of magnitude. A plane whose size is its uncompressed size is stored uncompressed.

States are checked, encoded and given a checksum where they are produced (`encode_states`), and are bytes from then on.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard

Form = Literal["none", "lossless", "int8"]

LARGEST_RATIO: dict[tuple[str, str], float] = {
    ("lossless", "bfloat16"): 0.75,
    ("lossless", "float16"): 0.95,
    ("lossless", "float32"): 0.9,
    ("int8", "bfloat16"): 0.52,
    ("int8", "float16"): 0.52,
    ("int8", "float32"): 0.26,
}
"""Frame bytes / uncompressed bytes to plan with: larger than measured on real states."""

assert sys.byteorder == "little", "stores are little-endian"

_SAMPLE = 8192  # bytes of a plane that are compressed on trial, so that noise costs no more than that

# Entropy coding with hardly any search for matches, which rarely occur among exponents.
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=1
)

_Words = npt.NDArray[Any]  # uint16 or uint32
_Plane = tuple[npt.NDArray[Any], type[np.generic]]
"""Values, and the type that they are stored as: the low bytes of wider integers."""


@dataclass(frozen=True)
class EncodedStates:
    """A sequence's states [M, L, H] as a store holds them."""

    data: memoryview
    """A frame, or the values themselves if `form` is `none`."""
    checksum: int
    """`checksum_of(data)`."""
    shape: tuple[int, int, int]
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    form: Form


def encode_states(states: torch.Tensor, form: Form) -> EncodedStates:
    """Check states [M, L, H] and encode them. With `none` the result shares their memory.
    Raises ValueError: there are no states, one is not finite, or a token's are all zero."""
    if states.dim() != 3 or not states.numel():
        raise ValueError(f"states have shape {tuple(states.shape)}, expected [tokens, layers, hidden size]")
    largest = states.abs().amax(dim=-1)  # NaN if one is; one pass, because all states go through here
    if not torch.isfinite(largest).all():
        raise ValueError("states are not all finite")
    if (largest == 0).any():
        raise ValueError("a token's state is all zeros: the target never wrote it")
    states = states.contiguous()
    data = states.view(-1).view(torch.uint8).numpy().data if form == "none" else encode(states, form)
    tokens, layers, hidden_size = states.shape
    return EncodedStates(
        data, checksum_of(data), (tokens, layers, hidden_size), str(states.dtype).removeprefix("torch."), form
    )


def checksum_of(data: bytes | memoryview) -> int:
    """XXH3-64 as the signed integer that fits an int64 tensor."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def encode(states: torch.Tensor, form: Form) -> memoryview:
    """The frame of states [N, L, H] (bfloat16, float16 or float32), `form` not being `none`."""
    raw_sizes = _raw_sizes(form, states.shape, states.element_size())
    planes = _lossless_planes(_words(states)) if form == "lossless" else _int8_planes(states)
    compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)  # one per call: threads must not share it
    # Planes are built in place: most of a frame is mantissas, and a pass over memory costs as much as coding.
    frame = np.empty(4 * len(raw_sizes) + sum(raw_sizes), np.uint8)
    sizes, end = frame[: 4 * len(raw_sizes)].view(np.uint32), 4 * len(raw_sizes)
    exponents = range(0, len(raw_sizes), 3 if states.element_size() == 4 else 2) if form == "lossless" else ()
    for number, ((values, dtype), raw_size) in enumerate(zip(planes, raw_sizes, strict=True)):
        plane = frame[end : end + raw_size]
        np.copyto(plane.view(dtype).reshape(values.shape), values, casting="unsafe")
        squeezed = _squeezed(plane.data, compressor, likely=number in exponents)
        if squeezed is not None:
            plane[: len(squeezed)] = np.frombuffer(squeezed, np.uint8)
        sizes[number] = raw_size if squeezed is None else len(squeezed)
        end += int(sizes[number])
    return frame[:end].data


def decode(data: bytes | memoryview, form: Form, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """The states [N, L, H] of a frame whose checksum has been compared.

    For `lossless`, bit-identical to what was encoded. For `int8`, a value of channel h differs by at most
    c[h] / 254 * max over channels j of |x[j]| / c[j], with c the channel scales of its layer (plus `dtype`'s rounding).
    """
    frame = np.frombuffer(data, dtype=np.uint8)
    itemsize = dtype.itemsize
    raw_sizes = _raw_sizes(form, shape, itemsize)
    sizes = frame[: 4 * len(raw_sizes)].view(np.uint32).tolist()
    decompressor = zstandard.ZstdDecompressor()
    planes, start = [], 4 * len(raw_sizes)
    for size, raw_size in zip(sizes, raw_sizes, strict=True):
        plane = frame[start : start + size]
        if size != raw_size:
            plane = np.frombuffer(decompressor.decompress(plane.data, max_output_size=raw_size), dtype=np.uint8)
        planes.append(plane)
        start += size
    if form == "lossless":
        return _from_lossless_planes(planes, shape, itemsize).view(dtype)
    return _from_int8_planes(planes, shape).to(dtype)


def _raw_sizes(form: Form, shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Uncompressed bytes of each plane."""
    tokens, layers, hidden = shape
    if form == "lossless":
        return [n * tokens * hidden for n in ([1, 1, 2] if itemsize == 4 else [1, 1])] * layers
    return [layers * hidden, 4 * tokens * layers] + [tokens * hidden] * layers


def _squeezed(plane: memoryview, compressor: zstandard.ZstdCompressor, *, likely: bool) -> bytes | None:
    """A plane compressed; None if that is not smaller. If it is not `likely` to be, a sample is tried first."""
    if not likely and plane.nbytes > 2 * _SAMPLE and len(compressor.compress(plane[:_SAMPLE])) > 0.97 * _SAMPLE:
        return None
    squeezed = compressor.compress(plane)
    return squeezed if len(squeezed) < plane.nbytes else None


def _words(states: torch.Tensor) -> _Words:
    """The bits of floats as unsigned integers of their size."""
    if states.element_size() == 2:
        return states.view(torch.int16).numpy().view(np.uint16)
    return states.view(torch.int32).numpy().view(np.uint32)


def _lossless_planes(words: _Words) -> Iterator[_Plane]:
    """Layer by layer: the top byte of the rotated words, then the rest (16 bits: a byte; 32: a byte and a half word)."""
    bits = 8 * words.itemsize
    for layer in range(words.shape[1]):
        plain = words[:, layer].copy()  # contiguous, and modified in place
        rotated = plain << 1
        np.right_shift(plain, bits - 1, out=plain)
        rotated |= plain
        single = rotated.view(np.uint8).reshape(*rotated.shape, -1)  # little-endian: the top byte is the last
        yield single[..., -1], np.uint8
        yield single[..., -2], np.uint8
        if bits == 32:
            yield rotated, np.uint16


def _from_lossless_planes(
    planes: list[npt.NDArray[np.uint8]], shape: tuple[int, int, int], itemsize: int
) -> torch.Tensor:
    tokens, layers, hidden = shape
    words: _Words = np.empty(shape, np.uint16 if itemsize == 2 else np.uint32)
    for layer in range(layers):
        if itemsize == 2:
            top, rest = planes[2 * layer : 2 * layer + 2]
            rotated: _Words = np.left_shift(top, 8, dtype=np.uint16)
            rotated |= rest
        else:
            top, middle, low = planes[3 * layer : 3 * layer + 3]
            rotated = np.left_shift(top, 24, dtype=np.uint32)
            rotated |= np.left_shift(middle, 16, dtype=np.uint32)
            rotated |= low.view(np.uint16)
        plain = rotated >> 1
        rotated <<= 8 * itemsize - 1
        np.bitwise_or(plain.reshape(tokens, hidden), rotated.reshape(tokens, hidden), out=words[:, layer])
    return torch.from_numpy(words.view(np.int16 if itemsize == 2 else np.int32))


def channel_exponents(states: torch.Tensor) -> torch.Tensor:
    """The powers of two that the channels of states [N, L, H] are divided by before rounding: int32 [L, H].

    A channel's exponent is that of its median magnitude over a sample of tokens; the median, because in a few channels the
    first token of a text can be thousands of times larger than the others.
    """
    some = states[:: max(1, len(states) // 32)].float().abs()
    _, exponents = torch.frexp(some.permute(1, 2, 0).contiguous().median(dim=-1).values)
    _, largest = torch.frexp(states.abs().amax(dim=(0, 2)).float())
    typical = exponents.median(dim=1).values
    least = torch.maximum(typical - 6, largest - 30)  # near-zero channels must not dominate the others
    return torch.maximum(exponents, least.unsqueeze(1)).clamp(-120, 120)


def _int8_planes(states: torch.Tensor) -> Iterator[_Plane]:
    """Channel exponents int8 [L, H], token scales float32 [N, L], then the integers layer by layer."""
    exponents = channel_exponents(states)
    scaled = torch.ldexp(states.float(), -exponents)
    scales = scaled.abs().amax(dim=-1) / 127
    divisors = torch.where(scales > 0, scales, 1)  # zero only if all values are zero, or nearly
    integers = scaled.div_(divisors.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
    yield exponents.numpy(), np.int8
    yield scales.numpy(), np.float32
    for layer in integers.transpose(0, 1).numpy():
        yield layer, np.int8


def _from_int8_planes(planes: list[npt.NDArray[np.uint8]], shape: tuple[int, int, int]) -> torch.Tensor:
    tokens, layers, hidden = shape
    channels = np.ldexp(np.float32(1), planes[0].view(np.int8).reshape(layers, hidden).astype(np.int32))
    scales = planes[1].view(np.float32).reshape(tokens, layers, 1)
    states = np.empty(shape, np.float32)
    for layer, integers in enumerate(planes[2:]):
        np.multiply(integers.view(np.int8).reshape(tokens, hidden), scales[:, layer], out=states[:, layer])
        states[:, layer] *= channels[layer]
    return torch.from_numpy(states)
