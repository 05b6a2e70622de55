"""An EAGLE-3 training step in the most direct code: the reference that the trainer's step is compared with.

Every row is drafted from, attention is over all rows of the step with a dense
mask, the head is trained, and the target's choice at every row is the argmax over its whole vocabulary.

Shape legend: T rows of a step, H hidden size, V the target's vocabulary, W the draft vocabulary, N heads, M key/value heads,
C head size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, INNER, VOCAB, DRAFT, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49152, 8192, 9, 3, 64
FUSED, STEPS, DECAY, THETA, EPS = 3, 3, 0.8, 100_000.0, 1e-5


class ReferenceEagle3(nn.Module):
    """One decoder layer over fused states, with its own head.

    Args:
        embedding: [V, H], the target's, tied to its head.
        kept: int64 [W] ascending, the draft vocabulary.
    """

    embedding: torch.Tensor
    kept: torch.Tensor

    def __init__(self, embedding: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__()
        queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.register_buffer("embedding", embedding)
        self.register_buffer("kept", kept)
        self.fc = nn.Linear(FUSED * HIDDEN, HIDDEN, bias=False)
        self.q, self.k, self.v = (nn.Linear(2 * HIDDEN, size, bias=False) for size in (queries, keys, keys))
        self.o = nn.Linear(queries, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, DRAFT, bias=False)
        # Of tokens, of states, after attention, before the head.
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, EPS) for _ in range(4))

    def loss(self, ids: torch.Tensor, states: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """Soft cross-entropy against the target, over chain steps.

        Args:
            ids: int64 [T].
            states: [T, 4, H]: the three that are fused, then the target's last, before its final norm.
            documents: int64 [T] ascending.
        """
        rows = torch.arange(len(ids))
        positions = rows - torch.searchsorted(documents, documents)
        with torch.no_grad():
            last = F.rms_norm(states[:, 3], (HIDDEN,), eps=EPS)
            teacher = F.linear(last, self.embedding[self.kept]).softmax(-1)
            proposable = torch.isin(F.linear(last, self.embedding).argmax(-1), self.kept)
        visible = (documents[:, None] == documents) & (rows[:, None] >= rows)
        state = self.fc(states[:, :3].flatten(1))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        total = state.new_zeros(())
        for step in range(STEPS):
            tokens = F.pad(ids[1 + step :], (0, 1 + step))
            read = torch.cat([self.norms[0](F.embedding(tokens, self.embedding)), self.norms[1](state)], dim=-1)
            queries = _rotate(self.q(read).unflatten(-1, (HEADS, HEAD_DIM)), positions + step)
            keys.append(_repeat(_rotate(self.k(read).unflatten(-1, (KV_HEADS, HEAD_DIM)), positions + step)))
            values.append(_repeat(self.v(read).unflatten(-1, (KV_HEADS, HEAD_DIM))))
            state = state + self.o(_attend(queries, keys, values, visible).flatten(1))
            normed = self.norms[2](state)
            state = state + self.down(F.silu(self.gate(normed)) * self.up(normed))
            log_probabilities = self.head(self.norms[3](state)).log_softmax(-1)
            taught = (rows + 1 + step).clamp(max=len(rows) - 2)
            counts = proposable[taught] & (documents[taught + 1] == documents)
            each = -(teacher[taught] * log_probabilities).sum(-1)
            total = total + DECAY**step * (each * counts).sum() / counts.sum().clamp(min=1)
        return total


def _repeat(x: torch.Tensor) -> torch.Tensor:
    """[T, M, C] to [T, N, C]: a key/value head for each head."""
    return x.repeat_interleave(HEADS // KV_HEADS, 1)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE on [T, heads, C]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def _attend(
    queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], visible: torch.Tensor
) -> torch.Tensor:
    """Over the rows of step 0 and the row's own keys of later steps: [T, N, C]."""
    scores = torch.einsum("tnc,snc->nts", queries, keys[0]).masked_fill(~visible, -torch.inf)
    own = [(queries * later).sum(-1).T[..., None] for later in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) / math.sqrt(HEAD_DIM)).softmax(-1)
    mixed = torch.einsum("nts,snc->tnc", weights[..., : len(queries)], values[0])
    for column, later in enumerate(values[1:], start=len(queries)):
        mixed = mixed + weights[..., column].T[..., None] * later
    return mixed
