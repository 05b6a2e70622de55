"""EAGLE as its authors publish it (SafeAILab's `yuhuili/EAGLE-*`).

Tensor names are those of our module. Files have a bias of `fc` even where their config says `bias: false`, because the
authors' training always creates one; so the tensors decide, also about the attention biases that drafters for Qwen2 have.
The file includes the embedding, a copy of the target's.
"""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.decoder import LLAMA_FIXED, LLAMA_IRRELEVANT, layer_fields
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
                    "attention_bias",
                    bool,
                    f"{EXTRA}.attention_bias",
                    default=lambda source, _: "layers.0.self_attn.q_proj.bias" in source.shapes,
                ),
                Entry("fc_bias", bool, f"{EXTRA}.fc_bias", default=lambda source, _: "fc.bias" in source.shapes),
                Entry("output_bias", bool, f"{EXTRA}.output_bias", default=False),
            ),
            names=same_names,
            fixed=LLAMA_FIXED,
            derived={
                "architectures": lambda _: ["LlamaForCausalLM"],
                "model_type": lambda _: "llama",
                "bias": lambda config: config.fc_bias,
            },
            irrelevant=LLAMA_IRRELEVANT | {"attention_bias"},
            supported={"output_bias": (False,)},
        )
    },
    recognize=_recognize,
)
