"""What every part of a recipe is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
