"""Drafters. A kind is one file here, with the name that recipes and checkpoints use: its mathematics with their source, its config,
its module, and `DRAFTER`, the module's class. Its options and how it is served are in `draftsmith/config/drafters.py`.

Importing a kind imports torch; importing this package does not. To add a kind, see `docs/add-a-drafter.md`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from draftsmith.config.drafters import KINDS
from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter


def drafter_class(kind: str) -> type[Drafter]:
    """The module class of a kind.

    Raises:
        UserError: this version has no such kind.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`? It" if near else "it"
        raise UserError(
            f"This version of Draftsmith knows no drafter of the kind `{kind}`; {hint} knows {', '.join(KINDS)}."
        )
    drafter: type[Drafter] = importlib.import_module(f"{__name__}.{kind}").DRAFTER
    return drafter
