"""Cost of a decoding step by arithmetic: the target's FLOP and bytes, and the time that they take on given hardware.

Units: FLOP are floating-point operations, two per weight and token in a matrix product; bytes; seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftsmith.config.hardware import Hardware
from draftsmith.engine.memory import attending_layers, kv_values
from draftsmith.run.errors import UserError
from draftsmith.target.family import active_experts, head_size
from draftsmith.target.quantization import weight_bits

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TargetSizes:
    """The sizes of a target that its cost depends on."""

    parameters: int
    multiplied: int
    """Weights that each token is multiplied by: all matrices but embedding tables; of experts, those it is routed to."""
    attention_width: int
    """Query heads times head size, summed over layers with attention."""
    kv_values: int
    """Values per token in the KV cache (`memory.kv_values`)."""
    quantized: int = 0
    """Parameters that are quantized: the matrices of the layers, in a quantized target."""
    bits: float = 0
    """Of each of these (`weight_bits`)."""
    experts: int = 0
    """Weights of all experts that tokens are routed to."""
    routed_experts: int = 0
    """Of these, what a token is multiplied by; part of `multiplied`."""

    def weights_read(self, tokens: float) -> float:
        """Weights that a step of so many tokens reads: matrices once, of experts those that at least one token is routed to.

        As if tokens were routed independently and evenly, which is the most: tokens that follow one another share experts.
        """
        if not self.experts:
            return self.multiplied
        share = self.routed_experts / self.experts
        return self.multiplied - self.routed_experts + self.experts * (1 - (1 - share) ** tokens)

    def weight_bytes(self, number: int) -> int:
        """Bytes of all weights as they are served, with `number` for each that is not quantized."""
        return (self.parameters - self.quantized) * number + math.ceil(self.quantized * self.bits / 8)


def target_sizes(
    config: PretrainedConfig, *, quantization: str | None = None, trust_remote_code: bool = False
) -> TargetSizes:
    """Sizes of a causal language model, counted on torch's meta device.

    Args:
        quantization: the recipe's `engine.options.quantization`.
        trust_remote_code: whether the target's own code may run.

    Raises:
        UserError: transformers has no such model, or none without the target's own code, or a value of the config makes no sense.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # what a wrong value breaks depends on the model's class
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"transformers cannot count the parameters of a model of the type `{config.model_type}`: {why or type(error).__name__}"
        ) from error
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = table if head is None else head.weight
    # Gemma 3n and 4 have a table for their layers too. A lookup reads a row of a table, and multiplies nothing.
    tables = {id(table)} | {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    if config.tie_word_embeddings:  # it is the head
        tables.remove(id(table))
    bits = weight_bits(config, quantization)
    sent_to = active_experts(config)
    matrices = experts = routed = 0
    for parameter in model.parameters():
        if parameter.ndim == 2 and id(parameter) not in tables:
            matrices += parameter.numel()
        elif parameter.ndim == 3 and sent_to:  # [experts, out, in]
            experts += parameter.numel()
            routed += parameter.numel() * sent_to // len(parameter)
    full, windowed = attending_layers(config)
    return TargetSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiplied=matrices + routed,
        attention_width=sum(layer.num_attention_heads * head_size(layer) for layer in full + windowed),
        kv_values=kv_values(config),
        quantized=sum(
            parameter.numel()
            for parameter in model.parameters()
            if bits and parameter.ndim > 1 and parameter is not head and id(parameter) not in tables
        ),
        bits=bits or 0,
        experts=experts,
        routed_experts=routed,
    )


def flop_of_text(sizes: TargetSizes, *, first: float, last: float) -> float:
    """FLOP of the target for the tokens at the positions `first` to `last` of a text.

    Each token is multiplied by every weight once, and attends to all tokens before it (scores, then values: 4 FLOP each).
    """
    return (last - first) * 2 * sizes.multiplied + 4 * sizes.attention_width * (last**2 - first**2) / 2


@dataclass(frozen=True)
class EngineStep:
    """A decoding step of the target with `sequences` concurrent sequences of `context` tokens on average."""

    sizes: TargetSizes
    bytes_per_value: int
    devices: int
    """GPUs that the target is split over."""
    sequences: float
    context: float
    tokens: int = 1
    """Per sequence and step: 1 + K with K speculative tokens."""
    cached: float | None = None
    """Bytes of a number in the KV cache (`memory.cache_bytes`); None: `bytes_per_value`."""

    def flop(self) -> float:
        """FLOP of the step."""
        width = 4 * self.sizes.attention_width * self.context
        return self.sequences * self.tokens * (2 * self.sizes.multiplied + width)

    def bytes_read(self) -> float:
        """Bytes read in the step: every weight that is used once, and each sequence's keys and values."""
        cache = self.sequences * self.context * self.sizes.kv_values
        used = self.sizes.weights_read(self.sequences * self.tokens)
        weights = self.sizes.weight_bytes(self.bytes_per_value) * used / self.sizes.parameters
        return weights + (self.bytes_per_value if self.cached is None else self.cached) * cache

    def seconds(self, hardware: Hardware) -> float:
        """Time of the step: computing or reading memory, whichever takes longer."""
        return decoding_seconds(hardware, flop=self.flop(), bytes_read=self.bytes_read(), devices=self.devices)


def decoding_seconds(hardware: Hardware, *, flop: float, bytes_read: float, devices: int = 1) -> float:
    """Time of a forward pass in decoding: computing or reading memory, whichever takes longer."""
    computing = flop / (devices * hardware.matmul_tflops * 1e12)
    reading = bytes_read / (devices * hardware.memory_gb_per_second * 1e9)
    return max(computing, reading) / hardware.decode_utilization
