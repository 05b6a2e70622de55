"""Medusa as its authors publish it (FasterDecoding): `{head}.{layer}.linear.*`, and vocabulary heads one layer further.

The sizes are those of the tensors; the config does not state them. It does state how many heads and layers there are, but the authors' own
configs say 2 heads where the files have 5 (their loader puts 5 in its place).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.layout import EXTRA, Entry, Layout, Source, look_up, target_fields
from draftsmith.drafters.medusa import MedusaConfig
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console


def _names(config: MedusaConfig, tensors: tuple[str, ...]) -> dict[str, str]:
    names = {}
    for name in tensors:
        stored = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        names[re.sub(r"^lm_heads\.(\d+)\.weight$", rf"\1.{config.num_layers}.weight", stored)] = name
    return names


def _head_shape(axis: int) -> Any:
    def read(source: Source, config: dict[str, Any]) -> int:
        shapes = [shape for name, shape in source.shapes.items() if re.fullmatch(r"\d+\.\d+\.weight", name)]
        if not shapes or len(shapes[0]) != 2:
            raise UserError("The checkpoint has no vocabulary heads, whose shapes give its sizes.")
        return shapes[0][axis]

    return read


@dataclass(frozen=True)
class _Counted(Entry):
    """A number that is counted among the tensors, whatever the config says."""

    pattern: str = ""
    """Of names of tensors, with a group for the number of what is counted."""

    def read(self, source: Source, config: dict[str, Any]) -> int:
        found = len({match[1] for name in source.shapes if (match := re.fullmatch(self.pattern, name))})
        if not found:
            raise UserError("The checkpoint has no heads with tensors called `{head}.{layer}.linear.weight`.")
        stated = look_up(source.record, self.path)
        if stated is not None and self._checked(stated, self.path) != found:
            console.print(
                f"convert: its config says `{self.path}: {stated}`, but its tensors are those of {found}, which is taken"
            )
        return found


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if any(re.fullmatch(r"\d+\.\d+\.linear\.weight", name) for name in names):
        return "medusa", "its tensors are called `{head}.{layer}.linear.weight`"
    return None


FORMAT = Format(
    name="medusa",
    title="Medusa as its authors publish it",
    layouts={
        "medusa": Layout(
            fields=(
                Entry("hidden_size", int, f"{EXTRA}.hidden_size", default=_head_shape(1)),
                Entry("vocab_size", int, f"{EXTRA}.vocab_size", default=_head_shape(0)),
                Entry("draft_vocab_size", int, f"{EXTRA}.draft_vocab_size", default=lambda _, c: c["vocab_size"]),
                _Counted("num_heads", int, "medusa_num_heads", pattern=r"(\d+)\.\d+\.linear\.weight"),
                _Counted("num_layers", int, "medusa_num_layers", pattern=r"\d+\.(\d+)\.linear\.weight"),
                Entry("bias", bool, f"{EXTRA}.bias", default=lambda source, _: "0.0.linear.bias" in source.shapes),
                Entry("shared_head", bool, f"{EXTRA}.shared_head", default=False),
                *target_fields(),
            ),
            names=_names,
            supported={"shared_head": (False,)},
            irrelevant=frozenset(
                {
                    "architectures",
                    "base_model_name_or_path",
                    "dtype",
                    "model_type",
                    "torch_dtype",
                    "transformers_version",
                    "version",
                }
            ),
        )
    },
    recognize=_recognize,
    target_name="base_model_name_or_path",
    weights_file="medusa_lm_head.safetensors",
)
