"""Faults planted into a drafter's module, each of which its comparison with plain formulas must notice."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.norm import RMSNorm

Fault = Callable[[Any, pytest.MonkeyPatch], None]
"""Plants it into a drafter."""


def norms_of(drafter: nn.Module) -> set[str]:
    return {name for name, module in drafter.named_modules() if isinstance(module, RMSNorm)}


def without(norm: str) -> Fault:
    def plant(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(drafter.get_submodule(norm), "forward", lambda x: x)

    return plant


def as_in(norm: str, other: str) -> Fault:
    """A norm with the weights of another one."""

    def plant(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(drafter.get_submodule(norm), "forward", drafter.get_submodule(other).forward)

    return plant


def other_config(**changes: Any) -> Fault:
    def plant(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(drafter, "config", replace(drafter.config, **changes))

    return plant


def late(positions: int) -> Fault:
    """RoPE of everything but the context, whose turn is the first: so many positions late."""

    def plant(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        rope, calls = drafter._rope, count()
        patch.setattr(drafter, "_rope", lambda at, like: rope(at + positions * (next(calls) > 0), like))

    return plant


def sees(module: Any, *, further: int = 0, other_documents: bool = False) -> Fault:
    """Rows see the context up to `further` rows beyond their own, or that of all documents; `module` calls `context_of`."""

    def plant(_: Any, patch: pytest.MonkeyPatch) -> None:
        right = module.context_of

        def wrong(batch: Batch, queries: torch.Tensor, **options: Any) -> Any:
            documents = torch.zeros_like(batch.documents) if other_documents else batch.documents
            seen = (queries + further).clamp(0, len(batch.positions) - 1)
            return right(replace(batch, documents=documents), seen, **options)

        patch.setattr(module, "context_of", wrong)

    return plant


def shifted(batch: Batch, by: int) -> Batch:
    """The tokens after each position, `by` too late."""
    return replace(batch, next_tokens=batch.next_tokens.roll(-by, dims=1))


def reads_next_token(method: str) -> Fault:
    """A method of the drafter whose first argument is the batch reads each token one too late."""

    def plant(drafter: Any, patch: pytest.MonkeyPatch) -> None:
        right = getattr(drafter, method)
        patch.setattr(drafter, method, lambda batch, *rest, **options: right(shifted(batch, 1), *rest, **options))

    return plant
