"""DSpark as DeepSpec, its authors' repository, writes it (`deepseek-ai/dspark_*`): a Qwen3 config with the drafter's fields beside its own, with
embedding and head in the files. `target_layer_ids` count the outputs of the target's layers, as z-lab's do.

Its drafters always predict from the anchor's row, for which the config has no key.
"""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats import blocks
from draftsmith.convert.formats.base import Format
from draftsmith.drafters.decoder import layer_fields
from draftsmith.drafters.layout import Entry, Layout, same_names


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if record.get("architectures") != ["Qwen3DSparkModel"] or "target_layer_ids" not in record:
        return None
    return "dspark", "its architecture is Qwen3DSparkModel, and its config has `target_layer_ids`"


FORMAT = Format(
    name="deepspec",
    title="DSpark as DeepSpec writes it, read only",
    layouts={
        "dspark": Layout(
            fields=(
                *layer_fields(),
                Entry("layer_ids", tuple, "target_layer_ids", shift=-1),
                Entry("draft_vocab_size", int, default=lambda _, config: config["vocab_size"]),
                Entry("block_size", int),
                Entry("mask_token_id", int),
                Entry("causal", bool, default=False),
                Entry("markov_rank", int),
                Entry("sample_from_anchor", bool, default=True),
                Entry("enable_confidence_head", bool, default=False),
                Entry("confidence_head_with_markov", bool, default=False),
            ),
            names=same_names,
            fixed={**blocks.fixed_fields(), "markov_head_type": "vanilla"},
            irrelevant=blocks.irrelevant_fields() | {"auto_map", "layer_types", "num_anchors", "num_target_layers"},
            maps_vocabulary=True,
            refused=(blocks.needs_full_attention(), blocks.needs_vanilla_markov_head),
            shared=blocks.head_of_target(kept=True),
        )
    },
    recognize=_recognize,
    read_only="its drafters all predict from the row of the last known token, for which its config has no key",
    loaded_by_vllm="on GPUs",
)
