"""What a decoding step costs by arithmetic: FLOP and bytes of the target, and the time they take on stated hardware.

Units: FLOP are floating-point operations, two for each weight that a token meets in a product; bytes; seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftsmith.config.hardware import Hardware
from draftsmith.engine.memory import kv_values

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TargetSizes:
    """What the arithmetic needs to know about a target."""

    parameters: int
    multiplied: int
    """Weights that a token meets in products: all matrices but the embedding table; of experts, those that it is sent to."""
    attention_width: int
    """Query heads times head size, summed over layers."""
    kv_values: int
    """Numbers in the KV cache a token: keys and values, heads times head size, summed over layers."""


def target_sizes(config: PretrainedConfig) -> TargetSizes:
    """Sizes of a causal language model, counted on a model without memory (torch's meta device)."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    table = model.get_input_embeddings().weight
    sent_to = getattr(config, "num_experts_per_tok", None)
    multiplied = 0
    for parameter in model.parameters():
        if parameter.ndim == 2 and (parameter is not table or config.tie_word_embeddings):
            multiplied += parameter.numel()
        elif parameter.ndim == 3 and sent_to:  # [experts, out, in]
            multiplied += parameter.numel() * sent_to // len(parameter)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return TargetSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiplied=multiplied,
        attention_width=config.num_hidden_layers * heads * head_dim,
        kv_values=kv_values(config),
    )


def flop_of_text(sizes: TargetSizes, *, first: float, last: float) -> float:
    """FLOP of the target for the tokens at the positions `first` to `last` of a text.

    A token meets every weight once, and with attention (scores, then values: 4 FLOP a number) all tokens before it.
    """
    return (last - first) * 2 * sizes.multiplied + 4 * sizes.attention_width * (last**2 - first**2) / 2


@dataclass(frozen=True)
class EngineStep:
    """An engine that holds the target and answers `sequences` at once, each of `context` tokens on average."""

    sizes: TargetSizes
    bytes_a_number: int
    devices: int
    """That the target is split over."""
    sequences: float
    context: float
    tokens: int = 1
    """Checked at once for each sequence: 1 + K with K speculative ones."""

    def flop(self) -> float:
        """Of one step."""
        width = 4 * self.sizes.attention_width * self.context
        return self.sequences * self.tokens * (2 * self.sizes.multiplied + width)

    def bytes_read(self) -> float:
        """Of one step: every weight once, and each sequence's keys and values."""
        cache = self.sequences * self.context * self.sizes.kv_values
        return self.bytes_a_number * (self.sizes.multiplied + cache)

    def seconds(self, hardware: Hardware) -> float:
        """Of one step: products or memory, whichever takes longer."""
        computing = self.flop() / (self.devices * hardware.matmul_tflops * 1e12)
        reading = self.bytes_read() / (self.devices * hardware.memory_gb_per_second * 1e9)
        return max(computing, reading) / hardware.decode_utilization
