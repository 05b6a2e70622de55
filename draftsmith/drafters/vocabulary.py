"""The draft vocabulary."""

import torch


def choose_draft_vocabulary(counts: torch.Tensor, size: int | None) -> torch.Tensor:
    """The `size` most frequent tokens, or all, by how often each occurs in the training responses (int64 [vocab]).

    Returns int64 [V], ascending target ids. If too few tokens occur, those with the lowest ids are added: byte-pair
    vocabularies give low ids to the pieces merged first, which are common.
    """
    size = min(size or len(counts), len(counts))
    order = torch.sort(counts, descending=True, stable=True).indices  # stable: ties and zeros by lowest id
    return order[:size].sort().values
