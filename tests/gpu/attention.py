"""Attention in training by flex attention and by tiles, at a real target's shape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from draftsmith.drafters.attention import KeysValues, attend
from draftsmith.drafters.flex import FlexContext
from draftsmith.drafters.tiles import Tiles
from draftsmith.store.format import Sequence
from draftsmith.train.packing import pack
from tests.gpu.torch_alone import device_of, seconds_of, wait_for

_ON_GPU = (32, 8, 128, 4096, 450, 200)  # Llama-3.1-8B's heads; the rows of a micro-batch
_ON_CPU = (4, 2, 16, 96, 40, 20)
_STEPS = 7  # of an EAGLE-3 chain in training


def attention(cpu: bool) -> dict[str, str]:
    """A chain's attention forward and backward under autocast to bfloat16, as in training.

    Raises:
        AssertionError: flex attention and tiles differ.
    """
    device = device_of(cpu)
    heads, kv_heads, size, rows, length, prompt = _ON_CPU if cpu else _ON_GPU
    sequences: list[Sequence] = []
    left = rows
    while left > 0:
        some = min(length, left)
        answered = torch.arange(some + 1) >= min(prompt, some // 2)
        sequences.append(
            Sequence(len(sequences), False, torch.zeros(some + 1, dtype=torch.long), answered, torch.zeros(some, 1, 1))
        )
        left -= some
    batch = pack(sequences, steps=_STEPS).to(device)
    queries = batch.loss_weights.sum(1).nonzero()[:, 0]
    torch.manual_seed(0)
    asked = torch.randn(len(queries), heads, size, device=device, requires_grad=True)
    context = tuple(torch.randn(kv_heads, rows, size, device=device, requires_grad=True) for _ in "kv")
    own: list[KeysValues] = [
        tuple(torch.randn(len(queries), kv_heads, size, device=device, requires_grad=True) for _ in "kv")  # type: ignore[misc]
        for _ in range(_STEPS - 1)
    ]

    def chain(visible: Tiles | FlexContext) -> list[torch.Tensor]:
        total = asked.new_zeros(())
        for step in range(_STEPS):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                mixed = attend(asked, context, own[:step], visible)  # type: ignore[arg-type]
            total = total + (mixed.float() * (step + 1)).square().mean()
        return [mixed.detach(), *torch.autograd.grad(total, [asked, *context])]

    found, results = {}, []
    with _flex_on_cpu() if cpu else nullcontext():
        wait_for(device)
        begun = time.perf_counter()
        chain(FlexContext(batch, queries))
        wait_for(device)
        found["flex, first time"] = f"{time.perf_counter() - begun:.1f} s, with what has to be compiled"
        for name, make in (
            ("flex", lambda: FlexContext(batch, queries)),
            ("tiles", lambda: Tiles(batch, queries, heads)),
        ):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            results.append(chain(make()))
            peak = f", {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else ""
            seconds = seconds_of(lambda make=make: chain(make()), device, repeats=3)  # type: ignore[misc]
            found[name] = f"{seconds * 1000:.1f} ms for {_STEPS} steps of {len(queries)} of {rows} rows{peak}"
    errors = [
        float((one.float() - other.float()).norm() / other.float().norm()) for one, other in zip(*results, strict=True)
    ]
    assert max(errors) < 0.03, f"flex attention and tiles differ by {max(errors):.3f} of a result or gradient"
    found["difference"] = f"at most {max(errors):.4f} of a result or gradient"
    return found


@contextmanager
def _flex_on_cpu() -> Iterator[None]:
    import pytest  # here alone: a machine with a GPU may have torch and no more

    from tests.unit.flex_on_cpu import use_flex

    with pytest.MonkeyPatch.context() as monkeypatch:
        use_flex(monkeypatch)
        yield
