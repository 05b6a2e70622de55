"""The codec: every bit pattern comes back, the 8-bit form stays within its bound, real shapes of data get smaller."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.store.codec import LARGEST_RATIO, Form, channel_exponents, decode, encode

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def through(states: torch.Tensor, form: Form) -> torch.Tensor:
    return decode(encode(states, form), form, tuple(states.shape), states.dtype)  # type: ignore[arg-type]


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.uint8)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 33),
    st.binary(min_size=1, max_size=64),
)
def test_every_bit_pattern_comes_back(
    dtype: torch.dtype, tokens: int, layers: int, hidden: int, pattern: bytes
) -> None:
    size = tokens * layers * hidden * dtype.itemsize
    data = bytearray((pattern * (size // len(pattern) + 1))[:size])
    states = torch.frombuffer(data, dtype=dtype).view(tokens, layers, hidden)
    assert torch.equal(bits(through(states, "lossless")), bits(states))


def test_all_patterns_of_16_bits_and_special_values() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        states = every.view(dtype).view(64, 2, 512)
        assert torch.equal(bits(through(states, "lossless")), bits(states))
    special = torch.tensor([0x7F800000, 0x7FC00001, 0x00000001, 0x3F800000, 0x7F800001, 0x007FFFFF], dtype=torch.int32)
    special = torch.cat([special, special | -(2**31)]).view(torch.float32).view(2, 2, 3)  # NaN, inf, -0, subnormal
    assert torch.equal(bits(through(special, "lossless")), bits(special))


def realistic(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Layers that differ in scale, and channels within a layer too, as a residual stream has them."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, 3, 256, generator=generator) * torch.tensor([0.5, 4.0, 30.0]).view(1, 3, 1)
    return (states * torch.exp(0.7 * torch.randn(1, 3, 256, generator=generator))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["lossless", "int8"])
def test_smaller_as_the_estimate_says(dtype: torch.dtype, form: Form) -> None:
    states = realistic(400, dtype)
    ratio = len(encode(states, form)) / states.nbytes
    assert ratio <= LARGEST_RATIO[form, str(dtype).removeprefix("torch.")]
    if form == "lossless":
        assert torch.equal(bits(through(states, form)), bits(states))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 1000), st.floats(-30, 4))
def test_int8_stays_within_its_bound(dtype: torch.dtype, seed: int, exponent: float) -> None:
    states = (realistic(7, torch.float32, seed) * 10**exponent).clamp(-60000, 60000).to(dtype)
    found = through(states, "int8")
    assert found.dtype == dtype
    channels = torch.exp2(channel_exponents(states).double())
    largest = channels * (states.double().abs() / channels).amax(dim=-1, keepdim=True)
    smallest = torch.finfo(dtype).smallest_normal  # below it a dtype's steps are absolute
    rounding = found.double().abs() * torch.finfo(dtype).eps + smallest * torch.finfo(dtype).eps
    assert ((found.double() - states.double()).abs() <= largest / 254 * (1 + 1e-5) + rounding).all()


def test_int8_keeps_quiet_channels_beside_loud_ones() -> None:
    states = realistic(200, torch.bfloat16).float()
    states[:, :, 7] *= 1000
    states[0, :, 9] = 20_000  # the first token alone, as attention sinks do
    states = states.bfloat16()
    error, size = (through(states, "int8").float() - states.float())[1:], states.float()[1:]
    relative = (error.pow(2).mean(0) / size.pow(2).mean(0)).sqrt()
    assert float(relative.max()) < 0.1
    assert float(relative.median()) < 0.03


def test_int8_of_extreme_values() -> None:
    states = torch.zeros(2, 1, 4)
    assert torch.equal(through(states, "int8"), states)
    states[1, 0, 2] = 1e-45
    assert (through(states, "int8").abs() <= 1e-44).all()
    states = torch.zeros(70, 1, 8)
    states[3, 0, 5] = 3e38  # a channel that is silent but for one token
    assert torch.isfinite(found := through(states, "int8")).all()
    assert float(found[3, 0, 5]) == pytest.approx(3e38, rel=0.01)
