"""What every part of a recipe is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _absolute(path: str, info: ValidationInfo) -> str:
    # The context is the recipe's folder. A recipe made of another one has no context, and absolute paths already.
    return str((info.context / Path(path).expanduser()).resolve()) if info.context else path


def _absolute_if_local(model: str, info: ValidationInfo) -> str:
    return _absolute(model, info) if model.startswith((".", "~", "/")) else model


LocalPath = Annotated[str, AfterValidator(_absolute)]
"""A path; relative ones are relative to the recipe's folder."""
ModelName = Annotated[str, AfterValidator(_absolute_if_local)]
"""A Hub id, or a folder whose path begins with `.`, `~` or `/`; relative ones are relative to the recipe's folder."""
