"""What vLLM loads: each kind's own layout, in the kind's file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from draftsmith.config.drafters import KINDS
from draftsmith.convert.formats.base import Format
from draftsmith.drafters import drafter_class
from draftsmith.drafters.layout import EXTRA, Layout, look_up


class _Layouts(Mapping[str, Layout]):
    """Of the kinds there are; a kind is imported when it is asked for."""

    def __getitem__(self, kind: str) -> Layout:
        if kind not in KINDS:
            raise KeyError(kind)
        return drafter_class(kind).vllm_layout

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    said = record.get("architectures")
    if "speculators_model_type" in record or any(name.startswith("midlayer.") for name in names):
        return None
    if said == ["Eagle3LlamaForCausalLM"]:  # what vLLM makes of EAGLE-3's LlamaForCausalLM
        return "eagle3", "its architecture is Eagle3LlamaForCausalLM"
    fitting = [kind for kind, options in KINDS.items() if said == [options.serving.architecture]]
    if (
        not fitting
        or not isinstance(said, list)
        or ("medusa" in fitting and not any(n.startswith("blocks.") for n in names))
    ):
        return None
    stated = look_up(record, f"{EXTRA}.kind")
    return stated if stated in fitting else fitting[0], f"its architecture is {said[0]}"


FORMAT = Format(
    name="vllm",
    title="what vLLM serves, in its own names",
    layouts=_Layouts(),
    recognize=_recognize,
)
