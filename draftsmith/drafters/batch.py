"""What a drafter is trained on: sequences packed end to end, with the tokens that follow each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """Packed sequences. Built by the trainer's loader, read by the drafters.

    T rows in D documents, n saved states per row, K chain steps. Row t is position `positions[t]` of document
    `documents[t]`, written p below.
    """

    hidden_states: torch.Tensor
    """[T, n, H]: the target's states at p, one per layer id."""
    next_tokens: torch.Tensor
    """int64 [T, K + 1]: the tokens x_{p+1} ... x_{p+1+K}; 0 past the document's end."""
    loss_weights: torch.Tensor
    """[T, K]: weight in the loss of predicting x_{p+2+k}; 0 past the document's end."""
    positions: torch.Tensor
    """int64 [T]: position in the document."""
    documents: torch.Tensor
    """int64 [T]: index of the document, ascending."""
    last_states: torch.Tensor | None = None
    """[T, H]: the output of the target's last layer at p, before its final norm; None where only the chain runs."""

    def with_layers(self, columns: list[int], last_column: int | None = None) -> Batch:
        """The batch for a drafter that reads those of the saved states, in this order; one of all becomes `last_states`. Both are
        contiguous: of a view, pinned memory would hold all that it skips, and a GPU could not copy it by itself."""
        states = self.hidden_states
        last_states = None if last_column is None else states[:, last_column].contiguous()
        chosen = states.index_select(1, torch.tensor(columns, device=states.device))
        return replace(self, hidden_states=chosen, last_states=last_states)

    def divided(self, scales: Sequence[float]) -> Batch:
        """The batch for a drafter that reads each state divided by its scale, one a layer id (`Drafter.scales_states`); none: as it is."""
        if not scales:
            return self
        # In float16 a quotient can be too large.
        states = self.hidden_states.to(torch.promote_types(self.hidden_states.dtype, torch.float32))
        return replace(self, hidden_states=states / states.new_tensor(scales)[:, None])

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

    def pinned(self) -> Batch:
        """The same batch in memory that a GPU copies from by itself."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.pin_memory() for name, value in tensors.items()})

    def to_dtype(self, dtype: torch.dtype) -> Batch:
        """The same batch with its states in another dtype."""
        last_states = None if self.last_states is None else self.last_states.to(dtype)
        return replace(self, hidden_states=self.hidden_states.to(dtype), last_states=last_states)
