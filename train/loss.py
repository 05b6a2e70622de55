"""The loss of a chain drafter: at each step, the target's distribution against the drafter's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.base import Drafter, LossTerms
from draftsmith.drafters.batch import Batch

_LOGITS_AT_ONCE = 1 << 27
"""Logits of one step that are kept for the backward pass; where there are more, parts of them are computed again."""


@dataclass
class ChainLossOutput:
    """Loss of a batch and how often the drafter's first choice was the target's token."""

    loss: torch.Tensor
    """Scalar: sum over chain steps of decay^k times the mean over rows that count."""
    matches: torch.Tensor
    """[K]: share of the counted rows whose argmax is the true token, by chain step."""


class ChainLoss(nn.Module):
    """Cross-entropy between the target's next-token distribution and the drafter's, over the draft vocabulary.

    For the row at p and chain step k, the teacher is the target at position p+1+k, whose last state is in the same
    batch: its logits are `lm_head(norm(h))` restricted to the draft vocabulary. Rows whose true token is outside
    the draft vocabulary do not count: no answer there would be right. A kind may be taught what the target wrote instead
    of its distribution, and the target's normed state beside (`terms`).

    Args:
        drafter: the module to train.
        teacher_norm: the target's final norm.
        teacher_head: [V, H], the target's head rows for the draft vocabulary.
        chain_steps: K.
        chain_decay: weight of step k is chain_decay**k (EAGLE-3's reference code: 0.8).
        loss_vocab_size: take each batch's loss over this many tokens of the draft vocabulary, those that matter in
            the batch; None for all. The head is most of a small drafter's work.
        terms: what the drafter is taught; None for the target's distribution alone.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        teacher_norm: nn.RMSNorm,
        teacher_head: torch.Tensor,
        chain_steps: int,
        chain_decay: float,
        loss_vocab_size: int | None = None,
        terms: LossTerms | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.chain_steps, self.chain_decay, self.loss_vocab_size = chain_steps, chain_decay, loss_vocab_size
        self.terms = terms or LossTerms()
        self.teacher_norm = teacher_norm.requires_grad_(False)
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        to_draft = torch.full((drafter.config.vocab_size,), -1)
        to_draft[drafter.draft_token_ids] = torch.arange(len(drafter.draft_token_ids))
        self.register_buffer("to_draft", to_draft, persistent=False)

    teacher_head: torch.Tensor
    to_draft: torch.Tensor

    def weights(self, batch: Batch) -> torch.Tensor:
        """[K]: sum of the weights of the rows that count, by chain step. Reads no states."""
        known = self.to_draft[batch.following[:, 1:]] >= 0
        return (batch.counts * known)[:, : self.chain_steps].sum(0)

    def forward(self, batch: Batch, last_states: torch.Tensor, divisors: torch.Tensor | None = None) -> ChainLossOutput:
        """Loss of one batch.

        Args:
            batch: packed rows with the drafter's states; K columns.
            last_states: [T, H], the target's last layer's output before its final norm.
            divisors: [K], what each chain step's weighted sum is divided by, where this batch is a part of a larger one:
                the sum of `weights` over its parts. Absent: this batch's own.
        """
        if divisors is None:
            divisors = self.weights(batch)
        steps = self.chain_steps
        rows = batch.counts[:, :steps].sum(1).nonzero()[:, 0]
        labels = self.to_draft[batch.following[rows, 1:]]  # [Q, K], -1 outside the draft vocabulary
        # Several rows have the same teacher (row p at step 1 and row p+1 at step 0): compute each once.
        with torch.no_grad():
            needed = torch.zeros(len(last_states) + steps + 1, dtype=torch.bool, device=rows.device)
            for k in range(steps):
                needed[rows[(batch.counts[rows, k] > 0)] + 1 + k] = True
            teacher_rows = needed.nonzero()[:, 0]
            where = torch.full_like(needed, -1, dtype=torch.long)
            where[teacher_rows] = torch.arange(len(teacher_rows), device=rows.device)
            states = self.teacher_norm(last_states[teacher_rows])
            teacher, columns = None, None
            if self.terms.targets == "distribution" or self.loss_vocab_size is not None:
                teacher = F.linear(states, self.teacher_head).softmax(-1)
                columns = self._columns(teacher, labels)
            if teacher is not None and columns is not None:
                teacher = teacher[:, columns]
                teacher = teacher / teacher.sum(-1, keepdim=True)
        full: torch.Tensor | None = None
        head: torch.Tensor
        total = last_states.new_zeros(())
        matches = []
        for k, step in enumerate(self.drafter.chain(batch, steps=steps)):
            if step.head is not full:  # else the same as a step before
                full = step.head
                head = full if columns is None else full[columns]
            weights = step.counts * (labels[:, k] >= 0)
            counted = weights.nonzero()[:, 0]
            taught = where[rows[counted] + 1 + k]
            if self.terms.targets == "distribution":
                each, guess = _cross_entropy(step.normed[counted], head, teacher, taught)
            else:
                token = labels[counted, k] if columns is None else torch.searchsorted(columns, labels[counted, k])
                each, guess = _cross_entropy(step.normed[counted], head, None, token)
            if self.terms.token_weight != 1:
                each = each * self.terms.token_weight
            if self.terms.feature_weight:
                apart = F.smooth_l1_loss(step.normed[counted], states[taught], reduction="none").mean(-1)
                each = each + self.terms.feature_weight * apart
            weights = weights[counted]
            total = total + self.chain_decay**k * (each * weights).sum() / divisors[k].clamp(min=1)
            with torch.no_grad():
                guess = guess if columns is None else columns[guess]
                right = (guess == labels[counted, k]).to(weights.dtype)
                matches.append((right * weights).sum() / step.counts.sum().clamp(min=1))
        return ChainLossOutput(total, torch.stack(matches))

    def _columns(self, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """The part of the draft vocabulary that this batch's loss is taken over; None for all of it.

        What the teacher holds likely anywhere in the batch, and every true token: the rest has next to no
        probability in any row, and costs as much. int64 [loss_vocab_size] ascending.
        """
        if self.loss_vocab_size is None or self.loss_vocab_size >= teacher.shape[1]:
            return None
        mass = teacher.sum(0)
        mass[labels[labels >= 0]] = torch.inf
        return mass.topk(self.loss_vocab_size).indices.sort().values


def _cross_entropy(
    normed: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor | None, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and first choice of each row; logits are never all there where they would take too much memory.

    Args:
        normed: [Q, H].
        head: [V, H].
        teacher: [R, V], distributions; None where tokens are wanted.
        wanted: int64 [Q]: each row's distribution in `teacher`, or its token.

    Returns:
        [Q] and int64 [Q].
    """

    def part(normed: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(normed, head)
        each = F.cross_entropy(logits, wanted if teacher is None else teacher[wanted], reduction="none")
        return each, logits.detach().argmax(-1)

    rows = max(1, _LOGITS_AT_ONCE // len(head))
    if len(normed) <= rows:
        return part(normed, wanted)
    parts = zip(normed.split(rows), wanted.split(rows), strict=True)
    each, guesses = zip(*(checkpoint(part, *of, use_reentrant=False) for of in parts), strict=True)
    return torch.cat(each), torch.cat(guesses)
