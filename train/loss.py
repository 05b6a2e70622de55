"""The loss of a chain drafter: at each step, the target's distribution against the drafter's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.eagle3 import Eagle3Drafter


@dataclass
class ChainLossOutput:
    """Loss of a batch and how often the drafter's first choice was the target's token."""

    loss: torch.Tensor
    """Scalar: sum over chain steps of decay^k times the mean over rows that count."""
    matches: torch.Tensor
    """[K]: share of the counted rows whose argmax is the true token, by chain step."""


class ChainLoss(nn.Module):
    """Soft cross-entropy between the target's next-token distribution and the drafter's, over the draft vocabulary.

    For the row at p and chain step k, the teacher is the target at position p+1+k, whose last state is in the same
    batch: its logits are `lm_head(norm(h))` restricted to the draft vocabulary. Rows whose true token is outside
    the draft vocabulary do not count: no answer there would be right.

    Args:
        drafter: the module to train.
        teacher_norm: the target's final norm.
        teacher_head: [V, H], the target's head rows for the draft vocabulary.
        chain_steps: K.
        chain_decay: weight of step k is chain_decay**k (EAGLE-3's reference code: 0.8).
        loss_vocab_size: take each batch's loss over this many tokens of the draft vocabulary, those that matter in
            the batch; None for all. The head is most of a small drafter's work.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        *,
        teacher_norm: nn.RMSNorm,
        teacher_head: torch.Tensor,
        chain_steps: int,
        chain_decay: float,
        loss_vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.chain_steps, self.chain_decay, self.loss_vocab_size = chain_steps, chain_decay, loss_vocab_size
        self.teacher_norm = teacher_norm.requires_grad_(False)
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        to_draft = torch.full((len(drafter.embedding),), -1)
        to_draft[drafter.draft_token_ids] = torch.arange(len(drafter.draft_token_ids))
        self.register_buffer("to_draft", to_draft, persistent=False)

    teacher_head: torch.Tensor
    to_draft: torch.Tensor

    def forward(self, batch: Batch, last_states: torch.Tensor) -> ChainLossOutput:
        """Loss of one batch.

        Args:
            batch: packed rows with the drafter's states; K columns.
            last_states: [T, H], the target's last layer's output before its final norm.
        """
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
            teacher = F.linear(self.teacher_norm(last_states[teacher_rows]), self.teacher_head).softmax(-1)
            columns = self._columns(teacher, labels)
            if columns is not None:
                teacher = teacher[:, columns]
                teacher = teacher / teacher.sum(-1, keepdim=True)
        head = self.drafter.lm_head.weight if columns is None else self.drafter.lm_head.weight[columns]
        total = last_states.new_zeros(())
        matches = []
        for k, step in enumerate(self.drafter.chain(batch, steps=steps)):
            weights = step.counts * (labels[:, k] >= 0)
            counted = weights.nonzero()[:, 0]
            logits = F.linear(step.normed[counted], head)
            each = F.cross_entropy(logits, teacher[where[rows[counted] + 1 + k]], reduction="none")
            weights = weights[counted]
            total = total + self.chain_decay**k * (each * weights).sum() / weights.sum().clamp(min=1)
            with torch.no_grad():
                guess = logits.argmax(-1) if columns is None else columns[logits.argmax(-1)]
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
