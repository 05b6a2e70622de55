"""Drafters. A kind is one file here, named as recipes and checkpoints name it: its options, its config, its module, its
mathematics cited, and the line `DRAFTER = ` its class. Nothing else knows which kinds there are.

Importing a kind imports torch, importing this does not.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter

_SHARED = ("base", "batch", "decoder", "layout", "linear", "norm", "recall")
"""Files here that are not kinds but what kinds have in common."""


def kinds() -> list[str]:
    """Every kind there is."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)


def check_kind(kind: object) -> None:
    """Refuse what is no kind; imports none.

    Raises:
        UserError: naming the nearest kind and all of them.
    """
    known = kinds()
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`? It" if near else "it"
        raise UserError(
            f"This version of Draftsmith knows no drafter of the kind `{kind}`; {hint} knows {', '.join(known)}."
        )


def drafter_class(kind: str) -> type[Drafter]:
    """The kind's module.

    Raises:
        UserError: this version has no such kind.
    """
    check_kind(kind)
    drafter: type[Drafter] = importlib.import_module(f"{__name__}.{kind}").DRAFTER
    return drafter
