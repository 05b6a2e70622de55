"""The base class of a recipe's sections, and types of their keys."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo


class Section(BaseModel):
    """A section of a recipe: immutable, without unknown keys, and with finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _absolute(path: str, info: ValidationInfo) -> str:
    # The context is the recipe's folder. A recipe derived from another one is validated without it, and has absolute paths.
    if not info.context:
        return path
    try:
        return str((info.context / Path(path).expanduser()).resolve())
    except RuntimeError as error:  # a user that does not exist, or a circle of links
        raise ValueError(str(error)) from None


def _absolute_if_local(model: str, info: ValidationInfo) -> str:
    return _absolute(model, info) if model.startswith((".", "~", "/")) else model


LocalPath = Annotated[str, AfterValidator(_absolute)]
"""A path, relative to the recipe's folder unless absolute."""
ModelName = Annotated[str, AfterValidator(_absolute_if_local)]
"""A Hub id, or a folder whose path begins with `.`, `~` or `/`, relative to the recipe's folder unless absolute."""
LayerIds = Annotated[tuple[int, ...], AfterValidator(lambda ids: tuple(sorted(ids)))]
"""Layer ids in any order. vLLM hands out states in ascending order whatever it is asked, so that is the order everywhere."""
