"""Time of one forward pass of a target over several new tokens: what checking draft tokens costs on this machine."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch


@torch.inference_mode()
def step_times(model: Any, counts: Iterable[int], *, context: int, repeats: int = 7) -> dict[int, float]:
    """Median seconds of a forward pass over so many new tokens of one sequence, logits of all of them included.

    The numbers of tokens alternate, so that a machine that slows down meanwhile slows all of them.

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

    cache = model(input_ids=tokens(context), use_cache=True).past_key_values
    seconds: dict[int, list[float]] = {count: [] for count in each}
    for _ in range(repeats + 1):
        for count in each:
            own, new = copy.deepcopy(cache), tokens(count)  # a pass adds to its cache
            _wait(device)
            started = time.perf_counter()
            model(input_ids=new, past_key_values=own, use_cache=True)
            _wait(device)
            seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(times[1:]) for count, times in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
