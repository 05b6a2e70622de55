"""EAGLE-3 as its authors publish it (SafeAILab's `yuhuili/EAGLE3-*`).

The one layer is called `midlayer`. Which of the target's states are fused is not said: they are those that enter the layers
2, n // 2 and n - 3 of the target's n. The draft vocabulary is `d2t`, offsets, and `t2d`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.eagle3 import eagle3_layout
from draftsmith.drafters.layout import EXTRA, Entry


def by_midlayer(config: Any, ours: tuple[str, ...]) -> dict[str, str]:
    """Our tensor names, of a drafter with one layer, as EAGLE-3's authors call them."""
    return {name.replace("layers.0.", "midlayer."): name for name in ours}


def _are_the_usual(layer_ids: tuple[int, ...]) -> bool:
    """Whether a reader who is not told finds these ids: those of a target of some depth."""
    layers = layer_ids[-1] + 3
    return layer_ids == (2, layers // 2, layers - 3)


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if any(name.startswith("midlayer.") for name in names) and record.get("architectures") == ["LlamaForCausalLM"]:
        return "eagle3", "its layer is called `midlayer` and its architecture LlamaForCausalLM"
    return None


FORMAT = Format(
    name="eagle3",
    title="EAGLE-3 as its authors publish it",
    layouts={
        "eagle3": eagle3_layout(
            old_rope=True,
            ids=Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"),
            flags=False,
            names=by_midlayer,
            only={"layer_ids": _are_the_usual},
            written={"architectures": lambda _: ["LlamaForCausalLM"], "model_type": lambda _: "llama"},
        )
    },
    recognize=_recognize,
)
