"""Predicted acceptance length of trees of draft tokens, without an engine.

A tree holds several continuations of the text, and the target checks them in one forward pass. On text that the target wrote greedily,
its choice after any accepted token is the text's next token: the accepted tokens are found by walking down the tree as long as one
child is the text's next token. So the prediction is exact, as that of a chain is (`acceptance.py`).

How a tree is chosen, by the drafter's probabilities; a node is worth the product of those on its path from the root:

- One forward pass per level (EAGLE-2, arXiv 2406.16858; SGLang's EAGLE trees): of every level the `top_k` nodes worth most are extended,
  each by its `top_k` likeliest tokens. Of all nodes, the best N are the tree. The drafter reads its own draft tokens along each branch.
- One forward pass in all (`Drafter.drafts_at_once`; DDTree, arXiv 2604.12989): every node can be extended at no cost, so the tree is the
  N nodes worth most of all that there could be, level by level down to the drafter's last slot.

A node is worth no more than its parent, so the best N nodes are a tree; and trees of fewer nodes are contained in those of more.

Shape legend: Q positions that are drafted from, N tokens of the largest tree, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Proposals
from draftsmith.train.acceptance import count_accepted, evaluated, responses, walk
from draftsmith.train.loss import row_chunks

_POSITIONS_AT_ONCE = 256  # their branches' keys, values and scores are in memory together


@dataclass(frozen=True)
class TreeShape:
    """What bounds the trees of a drafter."""

    tokens: tuple[int, ...]
    """Draft tokens of each tree, ascending; the target checks one more, the last one that is known."""
    depth: int
    """Levels: draft tokens on the longest path."""
    top_k: int | None
    """Nodes extended on a level, and children of each; None: the best of all trees, for a drafter that drafts at once."""


@dataclass(frozen=True)
class Estimate:
    """An acceptance length over a sample of sequences."""

    acceptance_length: float
    """Tokens per step of the target, the bonus token included."""
    interval: tuple[float, float]
    """95%, over the choice of sequences."""
    drafts: int


@dataclass(frozen=True)
class TreeAcceptance:
    """Predicted acceptance lengths on the same sequences."""

    chains: dict[int, Estimate]
    """By K."""
    trees: dict[int, Estimate]
    """By the number of draft tokens."""


def predict_tree_acceptance(drafter: Drafter, sequences: Iterable[Batch], *, shape: TreeShape) -> TreeAcceptance:
    """Predict what trees and chains of a drafter have accepted.

    Args:
        sequences: batches of one held-out conversation each, which the target answered greedily, with `shape.depth` columns; iterated
            once.
    """
    chains: dict[int, list[tuple[int, int]]] = {k: [] for k in range(1, shape.depth + 1)}
    trees: dict[int, list[tuple[int, int]]] = {tokens: [] for tokens in shape.tokens}
    for batch in evaluated(drafter, sequences):
        for k, counts in count_accepted(drafter, [batch], k=shape.depth).items():
            chains[k].append(counts)
        for tokens, counts in count_in_trees(drafter, batch, shape=shape).items():
            trees[tokens].append(counts)
    return TreeAcceptance(
        {k: _estimate(counts) for k, counts in chains.items()},
        {tokens: _estimate(counts) for tokens, counts in trees.items()},
    )


def count_in_trees(drafter: Drafter, batch: Batch, *, shape: TreeShape) -> dict[int, tuple[int, int]]:
    """The counts of a batch by the number of draft tokens of the tree: (tokens accepted, drafts made), at the positions that serving
    with such trees would draft from."""
    rows = (batch.loss_weights[:, 0] > 0).nonzero()[:, 0]
    split = rows.split(_POSITIONS_AT_ONCE) if len(rows) else ()
    parts = [accepted_in_trees(drafter, batch, part, shape=shape) for part in split]
    accepted = torch.cat(parts).cpu() if parts else torch.zeros(0, len(shape.tokens), dtype=torch.long)
    counts = {}
    for column, tokens in enumerate(shape.tokens):
        hits = [hit for response in responses(batch, rows) for hit in walk(accepted[response, column].tolist())]
        counts[tokens] = sum(hits), len(hits)
    return counts


@torch.no_grad()
def accepted_in_trees(drafter: Drafter, batch: Batch, rows: torch.Tensor, *, shape: TreeShape) -> torch.Tensor:
    """Draft a tree from each of some rows and walk down it along the text.

    Args:
        drafter: in evaluation mode.
        batch: packed rows with `shape.depth` columns.
        rows: int64 [Q] ascending.

    Returns:
        int64 [Q, len(shape.tokens)]: draft tokens accepted by the size of the tree.
    """
    most = shape.tokens[-1]
    wide = shape.top_k or most
    branches = drafter.branches(batch, rows, steps=shape.depth)
    count = len(rows)
    first = torch.arange(count, device=rows.device)[:, None]
    parents, tokens = first, batch.next_tokens[rows, :1]  # [Q, B]: the nodes that are extended, B of each row
    worth = batch.hidden_states.new_zeros(count, 1)  # the logarithm
    true = torch.ones(count, 1, dtype=torch.bool, device=rows.device)  # the path to the node is the text's
    worths, trues = [], []
    for level in range(shape.depth):
        scores, ids = _likeliest(branches.step(parents.flatten(), tokens.flatten()), wide)
        scores, ids = (each.view(count, -1, each.shape[1]) for each in (scores, ids))  # [Q, B, children]
        children = drafter.draft_token_ids[ids]
        in_text = (children == batch.next_tokens[rows, level + 1, None, None]) & true[..., None]
        in_text &= batch.loss_weights[rows, level, None, None] > 0
        # Nodes beyond the most that a tree holds have as many better ones on their own level.
        worth, order = (worth[..., None] + scores).flatten(1).sort(descending=True, stable=True)
        worth, order = worth[:, :most], order[:, :most]
        true = in_text.flatten(1).gather(1, order)
        worths.append(worth)
        trues.append(true)
        order, worth, true = order[:, :wide], worth[:, :wide], true[:, :wide]
        tokens = children.flatten(1).gather(1, order)
        # Among the branches of this step, row after row; in ascending order, as `Branches.step` wants them.
        parents, ascending = (order // ids.shape[2]).sort(dim=1, stable=True)
        parents = parents + first * ids.shape[1]
        worth, true, tokens = (each.gather(1, ascending) for each in (worth, true, tokens))
    # Where a child is worth as much as its parent, the parent comes first: it is on an earlier level, and the sort is stable.
    order = torch.cat(worths, dim=1).argsort(dim=1, descending=True, stable=True)
    best = torch.cat(trues, dim=1).gather(1, order)
    return torch.stack([best[:, :size].sum(1) for size in shape.tokens], dim=1)


def _likeliest(proposals: Proposals, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each branch's likeliest tokens: log-probabilities over the draft vocabulary, and places in it (int64), [branches, count] each."""
    normed, head = proposals.normed, proposals.head
    count = min(count, len(head))
    scores, ids = normed.new_empty(len(normed), count), torch.empty(len(normed), count, dtype=torch.long)
    ids = ids.to(normed.device)
    for rows in row_chunks(len(normed), len(head), normed.device.type):
        scores[rows], ids[rows] = proposals.logits(rows).log_softmax(-1).topk(count, dim=-1)
    return scores[proposals.of_branch], ids[proposals.of_branch]


def _estimate(counts: Sequence[tuple[int, int]]) -> Estimate:
    """Of tokens accepted and drafts made, sequence by sequence: their ratio, and its error over clusters, by linearization."""
    accepted, drafts = sum(hits for hits, _ in counts), sum(made for _, made in counts)
    ratio, number = accepted / max(drafts, 1), len(counts)
    squares = sum((hits - ratio * made) ** 2 for hits, made in counts)
    error = 1.96 * math.sqrt(squares * number / max(number - 1, 1)) / max(drafts, 1)
    return Estimate(1 + ratio, (1 + max(ratio - error, 0.0), 1 + ratio + error), drafts)
