"""EAGLE's `fc.bias` as biases of the layer after it, for vLLM, whose `fc` has none.

Layer 0 has no norm before it, so its input x = W u + b reaches the rest linearly, twice: through q, k and v, each A x + a =
A W u + (A b + a); and as the residual, x + o(m) = W u + (o(m) + b), which is b more on the attention's output. All else reads that
sum. vLLM's layer (vllm/model_executor/models/llama_eagle.py) has both kinds of bias. Only rounding to the weights' type differs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run.weights import Weight


def needs_folding(checkpoint: Checkpoint) -> bool:
    """Whether its config, which only EAGLE's can, has a bias of `fc`."""
    return bool(checkpoint.config.get("fc_bias"))


def folded(checkpoint: Checkpoint) -> Checkpoint:
    """The same EAGLE drafter without a bias of `fc`, and with biases in its layers, which are zero after the first."""
    weights = dict(checkpoint.weights)
    bias = weights.pop("fc.bias").tensor().double()
    for layer in range(int(checkpoint.config["num_layers"])):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"layers.{layer}.self_attn.{name}"
            matrix = weights[f"{module}.weight"]
            total = torch.zeros(matrix.shape[0], dtype=torch.float64)
            if f"{module}.bias" in weights:
                total += weights[f"{module}.bias"].tensor()
            if layer == 0:
                total += bias if name == "o_proj" else matrix.tensor().double() @ bias
            weights[f"{module}.bias"] = Weight.of(total.to(matrix.dtype))
    config = checkpoint.config | {"fc_bias": False, "attention_bias": True, "output_bias": True}
    return replace(checkpoint, config=config, weights=weights).check()
