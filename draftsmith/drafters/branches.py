"""Draft tokens along several continuations of the same position, which trees of draft tokens are grown from (`train/trees.py`).

Shape legend: T packed rows, Q rows that are drafted from (roots), N branches in a step, M different ones, H and H' widths of what heads read,
V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch

if TYPE_CHECKING:
    from draftsmith.drafters.base import ChainStep, Drafter


@dataclass(frozen=True)
class OfRows:
    """A part of the logits that all branches of a row have in common, `normed @ head.T` as well."""

    normed: torch.Tensor
    """[Q, H]"""
    head: torch.Tensor
    """[V, H]"""
    rows: torch.Tensor
    """int64 [M] ascending: whose part each of the M has."""


@dataclass(frozen=True)
class Proposals:
    """What the drafter says of the next token of each branch."""

    normed: torch.Tensor
    """[M, H']: the head's inputs, M of them different."""
    head: torch.Tensor
    """[V, H']"""
    of_branch: torch.Tensor
    """int64 [N]: which of the M each branch has."""
    of_rows: OfRows | None = None
    """Added to `normed @ head.T`."""

    def logits(self, some: slice = slice(None)) -> torch.Tensor:
        """The logits [m, V] of some of the M. What branches of a row have in common is computed once for them."""
        normed = self.normed[some]
        if self.of_rows is None:
            return F.linear(normed, self.head)
        rows, place = self.of_rows.rows[some].unique_consecutive(return_inverse=True)
        common = F.linear(self.of_rows.normed[rows], self.of_rows.head)
        return common[place].addmm_(normed, self.head.T)


class Branches(ABC):
    """Branches that grow from Q rows of a batch by one token per step."""

    @abstractmethod
    def step(self, parents: torch.Tensor, tokens: torch.Tensor) -> Proposals:
        """Extend branches of the step before, each with a token, and say what comes next.

        Args:
            parents: int64 [N] ascending: index of the extended branch among those of the step before; one may be extended several
                times, or not at all. In the first step, the index of the row.
            tokens: int64 [N], the target's ids; in the first step the true x_{p+1} of each row.
        """


class IndependentSlots(Branches):
    """For kinds whose draft tokens do not depend on each other: every branch of a row has the same proposals."""

    def __init__(self, drafter: Drafter, batch: Batch, rows: torch.Tensor, *, steps: int) -> None:
        self._chain = list(drafter.chain(_from_rows(batch, rows), steps=steps))
        self._roots = torch.arange(len(rows), device=rows.device)
        self._depth = 0

    def step(self, parents: torch.Tensor, tokens: torch.Tensor) -> Proposals:
        self._roots, found = self._roots[parents], self._chain[self._depth]
        self._depth += 1
        return Proposals(found.normed, found.head, self._roots)


class RepeatedChains(Branches):
    """Fallback for any kind: each branch is put into the text as if it were true, and the chain is run from the start."""

    def __init__(self, drafter: Drafter, batch: Batch, rows: torch.Tensor, *, steps: int) -> None:
        self._drafter, self._batch, self._rows, self._steps = drafter, batch, rows, steps
        self._roots = torch.arange(len(rows), device=rows.device)
        self._paths = rows.new_empty(len(rows), 0)  # int64 [N, step]: the tokens of each branch

    def step(self, parents: torch.Tensor, tokens: torch.Tensor) -> Proposals:
        self._roots = self._roots[parents]
        self._paths = torch.cat([self._paths[parents], tokens[:, None]], dim=1)
        normed, head = None, None
        for branches in _one_of_each(self._roots):
            found = self._run(branches)
            if normed is None:
                normed = found.normed.new_empty(len(tokens), found.normed.shape[1])
            normed[branches], head = found.normed, found.head
        assert normed is not None
        assert head is not None
        return Proposals(normed, head, torch.arange(len(tokens), device=tokens.device))

    def _run(self, branches: torch.Tensor) -> ChainStep:
        """The last step so far of some branches, of different rows."""
        depth = self._paths.shape[1]
        rows = self._rows[self._roots[branches]]
        next_tokens = self._batch.next_tokens.clone()
        next_tokens[rows, :depth] = self._paths[branches]
        batch = _from_rows(replace(self._batch, next_tokens=next_tokens), rows)
        chain = self._drafter.chain(batch, steps=self._steps if self._drafter.depends_on_k else depth)
        return next(islice(chain, depth - 1, None))


def _from_rows(batch: Batch, rows: torch.Tensor) -> Batch:
    """The batch with these rows, and no others, to draft from."""
    weights = torch.zeros_like(batch.loss_weights)
    weights[rows] = 1
    return replace(batch, loss_weights=weights)


def _one_of_each(roots: torch.Tensor) -> list[torch.Tensor]:
    """Divide branches by their ascending roots (int64 [N]), so that each part has at most one of a root; ascending indices."""
    counts = torch.bincount(roots)
    numbers = torch.arange(len(roots), device=roots.device) - (counts.cumsum(0) - counts)[roots]
    return [(numbers == number).nonzero()[:, 0] for number in range(int(counts.max()) if len(roots) else 0)]
