"""Time of one forward pass of a target over several new tokens: what checking draft tokens costs on this machine."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_PACKED_FOR = 32
"""Rows that weights are laid out for; vLLM's number."""


@torch.inference_mode()
def step_times(model: Any, counts: Iterable[int], *, context: int, repeats: int = 7) -> dict[int, float]:
    """Median seconds of a forward pass over so many new tokens of one sequence, logits of all of them included.

    The numbers of tokens alternate, so that a machine that slows down meanwhile slows all of them. On a CPU with the products of servers
    (`packed`).

    Args:
        model: a causal language model from transformers.
        counts: numbers of new tokens, 1 or more.
        context: tokens in the KV cache, 1 or more.
        repeats: timed passes over each number, after one that is not.
    """
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    each = sorted({*counts})

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (1, count), generator=generator).to(device)

    seconds: dict[int, list[float]] = {count: [] for count in each}
    with packed(model):
        cache = model(input_ids=tokens(context), use_cache=True).past_key_values
        for _ in range(repeats + 1):
            for count in each:
                own, new = copy.deepcopy(cache), tokens(count)  # a pass adds to its cache
                _wait(device)
                started = time.perf_counter()
                model(input_ids=new, past_key_values=own, use_cache=True)
                _wait(device)
                seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(times[1:]) for count, times in seconds.items()}


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Meanwhile, linear layers in float32 on a CPU multiply by weights packed for oneDNN, as vLLM's CPU build does. With AVX2 alone,
    torch's own products took 1.84 times as long over two tokens as over one (docs/log.md, 2026-11-25), so checking seemed dear.

    In a copy of the weights, as large as they are; nothing on other devices or in other dtypes.
    """
    layers = [
        layer
        for layer in model.modules()
        if type(layer) is torch.nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
    ]
    if not torch.backends.mkldnn.is_available():
        layers = []
    for layer in layers:
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _PACKED_FOR)
        vars(layer)["forward"] = partial(_product, weight, layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own is behind it


def _product(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
