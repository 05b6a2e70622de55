"""One file per kind of drafter: its config, its module, its mathematics cited."""

from __future__ import annotations

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import EagleDrafter
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.medusa import MedusaDrafter
from draftsmith.drafters.mlp import MlpDrafter
from draftsmith.errors import UserError

KINDS: dict[str, type[Drafter]] = {
    "eagle": EagleDrafter,
    "eagle3": Eagle3Drafter,
    "medusa": MedusaDrafter,
    "mlp_speculator": MlpDrafter,
}
"""Every kind, by the name that recipes and checkpoints give it."""


def drafter_class(kind: str) -> type[Drafter]:
    """The kind's module.

    Raises:
        UserError: this version has no such kind.
    """
    if kind not in KINDS:
        raise UserError(
            f"This version of Draftsmith knows no drafter of the kind `{kind}`; it knows {', '.join(KINDS)}. "
            "Use the version that made it."
        )
    return KINDS[kind]
