"""EAGLE-3 as the speculators project (0.9) writes it: the layer's config is a section of its own."""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.eagle3 import eagle3_layout
from draftsmith.drafters.layout import REQUIRED, Entry


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    kind = record.get("speculators_model_type")
    return (kind, f"its config says `speculators_model_type: {kind}`") if kind == "eagle3" else None


_LAYOUT = eagle3_layout(
    prefix="transformer_layer_config.",
    ids=Entry("layer_ids", tuple, "eagle_aux_hidden_state_layer_ids"),
    flags=True,
    norm_before_residual=REQUIRED,  # speculators and vLLM have different defaults for it
    fixed={"speculators_model_type": "eagle3"},
    derived={
        "architectures": lambda _: ["Eagle3Speculator"],
        "transformer_layer_config.model_type": lambda _: "llama",
        "speculators_config.algorithm": lambda _: "eagle3",
        "speculators_config.default_proposal_method": lambda _: "greedy",
        "speculators_config.proposal_methods": lambda _: [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "speculators_config.verifier": lambda _: {"name_or_path": None, "architectures": []},
    },
    irrelevant=frozenset({
        "auto_map", "dtype", "embed_requires_grad", "has_no_defaults_at_init", "speculators_version", "tie_word_embeddings",
        "torch_dtype", "transformers_version",
    }),
)  # fmt: skip

FORMAT = Format(
    name="speculators",
    title="EAGLE-3 as the speculators project writes it",
    layouts={"eagle3": _LAYOUT},
    recognize=_recognize,
    target_name="speculators_config.verifier.name_or_path",
)
