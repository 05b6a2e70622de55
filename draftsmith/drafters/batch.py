"""What a drafter is trained on: sequences packed end to end, with what follows each token beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """Packed sequences. Built by the trainer's loader, read by the drafters.

    T rows in D documents, n saved states per row, K chain steps. Row t is position `positions[t]` of document
    `documents[t]`, written p below.
    """

    hidden_states: torch.Tensor
    """[T, n, H]: the target's states at p, one per layer id, in the store's order."""
    next_tokens: torch.Tensor
    """int64 [T, K + 1]: the tokens x_{p+1} ... x_{p+1+K}; 0 past the document's end."""
    loss_weights: torch.Tensor
    """[T, K]: weight in the loss of predicting x_{p+2+k}; 0 past the document's end."""
    positions: torch.Tensor
    """int64 [T]: position in the document."""
    documents: torch.Tensor
    """int64 [T]: index of the document, ascending."""

    def with_layers(self, columns: list[int]) -> Batch:
        """The same batch with only these of its states, in this order."""
        return replace(self, hidden_states=self.hidden_states[:, columns])

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})
