"""EAGLE-3 as its authors publish it (SafeAILab's `yuhuili/EAGLE3-*`).

Its only layer is called `midlayer`. The config does not name the target's layers whose hidden states are fused: they are
those entering layers 2, n // 2 and n - 3 of n. The draft vocabulary is `d2t` (offsets) and `t2d`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.eagle3 import eagle3_layout
from draftsmith.drafters.layout import EXTRA, Entry


def by_midlayer(config: Any, tensors: tuple[str, ...]) -> dict[str, str]:
    """`Layout.names` of a drafter with one layer, called `midlayer`."""
    return {name.replace("layers.0.", "midlayer."): name for name in tensors}


def _are_the_usual(layer_ids: tuple[int, ...]) -> bool:
    """Whether these are the default ids of a target of some depth, which a reader finds without a key."""
    layers = layer_ids[-1] + 3
    return layer_ids == (2, layers // 2, layers - 3)


def recognize_midlayer(
    record: Mapping[str, Any], names: Collection[str], *, architecture: str = "LlamaForCausalLM"
) -> tuple[str, str] | None:
    if any(name.startswith("midlayer.") for name in names) and record.get("architectures") == [architecture]:
        return "eagle3", f"its layer is called `midlayer` and its architecture {architecture}"
    return None


FORMAT = Format(
    name="eagle3",
    title="EAGLE-3 as its authors publish it",
    layouts={
        "eagle3": eagle3_layout(
            old_rope=True,
            ids=Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"),
            flags=(),
            several_layers=False,
            names=by_midlayer,
            supported={"layer_ids": _are_the_usual},
            derived={"architectures": lambda _: ["LlamaForCausalLM"], "model_type": lambda _: "llama"},
        )
    },
    recognize=recognize_midlayer,
)
