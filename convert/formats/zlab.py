"""DFlash as its authors publish it (`z-lab/*-DFlash*`), which vLLM and SGLang serve as it is.

The files have the layers alone: embedding, mask and head are the target's. `target_layer_ids` count the outputs of the target's layers: output
i is what enters layer i + 1. Where they are left out they follow from the depths of target and drafter, as in the authors'
`build_target_layer_ids` (dflash/model.py).
"""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats import blocks
from draftsmith.convert.formats.base import Format
from draftsmith.drafters.decoder import layer_fields
from draftsmith.drafters.layout import Entry, Layout, Source, look_up, same_names
from draftsmith.run.errors import UserError


def _usual_ids(source: Source, config: dict[str, Any]) -> tuple[int, ...]:
    depth, layers = look_up(source.record, "num_target_layers"), config["num_layers"]
    if type(depth) is not int or not 4 <= depth < 10_000 or layers > depth:
        raise UserError(
            "The config does not say which of the target's states the drafter reads (`dflash_config.target_layer_ids`)."
        )
    if layers == 1:
        return (depth // 2 + 1,)
    return tuple(round(1 + place * (depth - 4) / (layers - 1)) + 1 for place in range(layers))


def _states_layers(record: Mapping[str, Any], kind: str) -> bool:
    """vLLM looks at both keys. Where both are absent it takes EAGLE-3's layers, which are others than `_usual_ids`."""
    return bool(look_up(record, "dflash_config.target_layer_ids") or record.get("eagle_aux_hidden_state_layer_ids"))


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if record.get("architectures") != ["DFlashDraftModel"] or blocks.MASK in names:
        return None
    if "speculators_model_type" in record or not any(name.startswith("layers.") for name in names):
        return None
    return "dflash", "its architecture is DFlashDraftModel, and it has no mask of its own"


FORMAT = Format(
    name="zlab",
    title="DFlash as its authors (z-lab) publish it",
    layouts={
        "dflash": Layout(
            fields=(
                *layer_fields(old_rope=True),
                Entry("layer_ids", tuple, "dflash_config.target_layer_ids", default=_usual_ids, shift=-1),
                Entry("draft_vocab_size", int, default=lambda _, config: config["vocab_size"]),
                # Files of Qwen3.5 and later have it in the section.
                Entry("block_size", int, other_keys=("dflash_config.block_size",)),
                Entry("mask_token_id", int, "dflash_config.mask_token_id", least=0),
                Entry("causal", bool, "dflash_config.causal", default=False),
            ),
            names=same_names,
            fixed=blocks.fixed_fields(),
            derived={
                "architectures": lambda _: ["DFlashDraftModel"],
                "model_type": lambda _: "qwen3",
                "tie_word_embeddings": lambda _: False,
                "layer_types": blocks.layer_types,
                # Their class wants it, and uses it only where the layer ids are left out. Usually the last of them is the third layer from
                # the end, counted from 0.
                "num_target_layers": lambda config: max(config.layer_ids) + 2,
            },
            irrelevant=blocks.irrelevant_fields() | {"auto_map", blocks.DRAFTS_FROM_ANCHOR},
            supported={
                "layer_ids": lambda ids: min(ids) > 0,
                "causal": (False,),
                "attention_bias": (False,),
                "sliding_window": (None,),
            },
            maps_vocabulary=True,
            refused=(
                blocks.needs_full_attention,
                blocks.needs_no_draft_from_anchor(blocks.DRAFTS_FROM_ANCHOR),
            ),
            shared=blocks.mask_of_target(kept=False) | blocks.head_of_target(kept=False),
            has_embedding=False,
        )
    },
    recognize=_recognize,
    loaded_by_vllm="everywhere",
    complete_for_vllm=_states_layers,
    # Layers with a sliding window are not among them: vLLM's second runner serves them, and its first says that it does not.
    misread_by_vllm=(blocks.needs_no_draft_from_anchor(blocks.DRAFTS_FROM_ANCHOR),),
)
