"""The format that vLLM loads. The layouts are in the kinds' files."""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.config.drafters import KINDS, MASK_OF_P_EAGLE
from draftsmith.convert.formats import blocks
from draftsmith.convert.formats.base import Format
from draftsmith.drafters import drafter_class
from draftsmith.drafters.eagle3 import IDS_IN_SECTION
from draftsmith.drafters.layout import EXTRA, look_up


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    named = record.get("architectures")
    if "speculators_model_type" in record or any(name.startswith("midlayer.") for name in names):
        return None
    fuses = "p_eagle" if MASK_OF_P_EAGLE in names else "eagle3"
    if named == ["Eagle3LlamaForCausalLM"]:  # vLLM's name for EAGLE-3's LlamaForCausalLM
        return fuses, "its architecture is Eagle3LlamaForCausalLM"
    fitting = [kind for kind, options in KINDS.items() if named in [[each] for each in options.serving.architectures]]
    if not fitting or not isinstance(named, list):
        return None
    stated = look_up(record, f"{EXTRA}.kind")
    if stated not in fitting:
        stated = fuses if fuses in fitting else fitting[0]
    return stated, f"its architecture is {named[0]}"


def _runners_read_the_layers(record: Mapping[str, Any], kind: str) -> bool:
    """Both of vLLM's runners look at the first key. Of the section, one of them does not, and takes the target's default layers
    without a word (vllm/v1/worker/gpu_model_runner.py, vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py)."""
    if record.get("eagle_aux_hidden_state_layer_ids"):
        return True
    if not KINDS[kind].serving.runner_v2 and look_up(record, IDS_IN_SECTION[0]):
        return True
    return not any(look_up(record, path) for path in IDS_IN_SECTION)


FORMAT = Format(
    name="vllm",
    title="the format that vLLM serves",
    layouts={kind: drafter_class(kind).vllm_layout for kind in KINDS},
    recognize=_recognize,
    complete_for_vllm=_runners_read_the_layers,
    misread_by_vllm=(blocks.needs_no_draft_from_anchor(blocks.DRAFTS_FROM_ANCHOR),),
)
