"""The format that vLLM loads. The layouts are in the kinds' files."""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.config.drafters import KINDS
from draftsmith.convert.formats import blocks
from draftsmith.convert.formats.base import Format
from draftsmith.drafters import drafter_class
from draftsmith.drafters.layout import EXTRA, look_up


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    named = record.get("architectures")
    if "speculators_model_type" in record or any(name.startswith("midlayer.") for name in names):
        return None
    if named == ["Eagle3LlamaForCausalLM"]:  # vLLM's name for EAGLE-3's LlamaForCausalLM
        return "eagle3", "its architecture is Eagle3LlamaForCausalLM"
    fitting = [kind for kind, options in KINDS.items() if named == [options.serving.architecture]]
    if not fitting or not isinstance(named, list):
        return None
    stated = look_up(record, f"{EXTRA}.kind")
    return stated if stated in fitting else fitting[0], f"its architecture is {named[0]}"


FORMAT = Format(
    name="vllm",
    title="the format that vLLM serves",
    layouts={kind: drafter_class(kind).vllm_layout for kind in KINDS},
    recognize=_recognize,
    misread_by_vllm=(blocks.needs_no_draft_from_anchor(blocks.DRAFTS_FROM_ANCHOR),),
)
