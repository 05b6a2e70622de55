"""MLP speculators as IBM publishes them (`ibm-fms/*-accelerator`, `ibm-granite/*-accelerator`)."""

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.convert.formats.base import Format
from draftsmith.drafters.mlp_speculator import PUBLISHED


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    if record.get("model_type") == "mlp_speculator":
        return "mlp_speculator", "its config says `model_type: mlp_speculator`"
    return None


FORMAT = Format(
    name="ibm",
    title="MLP speculators as IBM publishes them",
    layouts={"mlp_speculator": PUBLISHED},
    recognize=_recognize,
    target_name="base_model_name_or_path",
)
