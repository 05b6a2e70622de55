"""EAGLE as its authors publish it (SafeAILab's `yuhuili/EAGLE-*`).

Theirs are the names that ours are; `fc` has a bias in files although their config may say `bias: false`, because their
training always made one, so the tensors decide. So they do of the attention's biases, which drafters for Qwen2 have. The
embedding, a copy of the target's, is in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.decoder import LLAMA_FIXED, LLAMA_IGNORED, layer_fields
from draftsmith.drafters.layout import EXTRA, Entry, Layout, same_names


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if "fc.weight" not in names or "layers.0.self_attn.q_proj.weight" not in names:
        return None
    if any("hidden_norm" in name or name in ("norm.weight", "d2t") for name in names):
        return None
    return "eagle", "it has `fc` and a decoder layer without a norm before it, and no head"


FORMAT = Format(
    name="eagle",
    title="EAGLE as its authors publish it",
    layouts={
        "eagle": Layout(
            fields=(
                *layer_fields(old_rope=True),
                Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"),
                Entry("draft_vocab_size", int, f"{EXTRA}.draft_vocab_size", default=lambda _, c: c["vocab_size"]),
                Entry("noise", float, f"{EXTRA}.noise", default=0.0),
                Entry(
                    "attention_bias", bool, f"{EXTRA}.attention_bias",
                    default=lambda source, _: "layers.0.self_attn.q_proj.bias" in source.shapes,
                ),
                Entry("fc_bias", bool, f"{EXTRA}.fc_bias", default=lambda source, _: "fc.bias" in source.shapes),
            ),
            names=same_names,
            fixed=LLAMA_FIXED,
            written={
                "architectures": lambda _: ["LlamaForCausalLM"], "model_type": lambda _: "llama",
                "bias": lambda config: config.fc_bias,
            },
            ignored=LLAMA_IGNORED | {"attention_bias"},
        )
    },
    recognize=_recognize,
)  # fmt: skip
