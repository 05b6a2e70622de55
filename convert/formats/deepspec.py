"""DSpark as DeepSpec, its authors' repository, writes it (`deepseek-ai/dspark_*`): a Qwen3 config with the drafter's fields beside its own, with
embedding and head in the files. `target_layer_ids` count the outputs of the target's layers, as z-lab's do.

Its class (deepspec/modeling/dspark/qwen3/modeling.py) always predicts from the anchor's row, for which the config has no key, over the whole
vocabulary, and rows of a block see each other in both directions.
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
    title="DSpark as DeepSpec, its authors' repository, writes it",
    layouts={
        "dspark": Layout(
            fields=(
                *layer_fields(),
                Entry("layer_ids", tuple, "target_layer_ids", shift=-1),
                Entry("draft_vocab_size", int, default=lambda _, config: config["vocab_size"]),
                Entry("block_size", int),
                Entry("mask_token_id", int, least=0),
                Entry("causal", bool, default=False),
                Entry("markov_rank", int),
                Entry("sample_from_anchor", bool, default=True),
                Entry("enable_confidence_head", bool, default=False),
                Entry("confidence_head_with_markov", bool, default=False),
            ),
            names=same_names,
            fixed={**blocks.fixed_fields(), "markov_head_type": "vanilla"},
            derived={
                "architectures": lambda _: ["Qwen3DSparkModel"],
                "model_type": lambda _: "qwen3",
                "tie_word_embeddings": lambda _: False,
                "layer_types": blocks.layer_types,
                # Its class wants both, for training alone: the number that is published, and the depth at which the last of the states is
                # the third layer from the end, as it usually is.
                "num_anchors": lambda _: 512,
                "num_target_layers": lambda config: max(config.layer_ids) + 2,
            },
            irrelevant=blocks.irrelevant_fields() | {"auto_map"},
            supported={
                "sample_from_anchor": (True,),
                "causal": (False,),
                "attention_bias": (False,),
                "sliding_window": (None,),
            },
            whole_vocabulary=True,
            refused=(blocks.needs_full_attention, blocks.needs_markov_head),
            needs_embedding=True,
        )
    },
    recognize=_recognize,
    loaded_by_vllm="on GPUs",
)
