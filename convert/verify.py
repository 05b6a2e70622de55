"""Verify a conversion: run source and result on the same inputs and compare their logits."""

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run.errors import DraftsmithError
from draftsmith.target.tensors import TargetTensors

_ROWS, _STEPS = 64, 3
_ROUNDING = 0.1  # largest relative difference of the logits that a change of the floating-point type explains
_SUMS = 1e-4  # the same where float32 sums are taken in another order
_ROUNDING_TO_8_BITS = 0.5
"""The same for 8-bit weights, on random inputs; unrelated logits differ by 1.4. Evaluation measures what 8 bits cost."""


def compare(
    source: Checkpoint,
    result: Checkpoint,
    target: TargetTensors | None = None,
    *,
    rounded: bool = False,
    folded: bool = False,
) -> dict[str, float]:
    """Run a checkpoint and what it was converted to, read back, on the same random hidden states and tokens.

    Args:
        target: the target's tensors, which drafters share; None for random ones.
        rounded: the result has 8-bit weights.
        folded: its biases are sums and products of the source's weights, rounded to their type.

    Returns, over the draft tokens that both have, `relative_difference` of the logits (norm of the difference over the
    norm), and `same_first_choice`, the share of rows with the same top-1 token. Raises DraftsmithError: the logits
    differ by more than the change of weight types explains; with the same types, at all.
    """
    generator = torch.Generator().manual_seed(0)
    config = source.drafter_config()
    if target is None:
        table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        target = TargetTensors(table, table, torch.ones(config.hidden_size))
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    tokens = torch.randint(0, config.vocab_size, (_ROWS + _STEPS + 1,), generator=generator)
    batch = Batch(
        hidden_states=torch.randn(_ROWS, len(config.layer_ids), width, generator=generator),
        next_tokens=tokens[1:].unfold(0, _STEPS + 1, 1)[:_ROWS],
        loss_weights=torch.ones(_ROWS, _STEPS),
        positions=torch.arange(_ROWS),
        documents=torch.zeros(_ROWS, dtype=torch.long),
    )
    common = source.draft_token_ids[torch.isin(source.draft_token_ids, result.draft_token_ids)]
    before = _logits(source, batch, target, common)
    after = _logits(result, batch, target, common)
    apart = ((before - after).norm() / before.norm()).item()
    types = [{weight.dtype for weight in checkpoint.weights.values()} for checkpoint in (source, result)]
    narrow = any(weight.itemsize < 4 for weight in types[0] | types[1])
    inexact = types[0] != types[1] or (folded and narrow)
    allowed = _ROUNDING_TO_8_BITS if rounded else _ROUNDING if inexact else _SUMS if folded else 0
    if not apart <= allowed:
        raise DraftsmithError(
            f"The result computes something else than its source: their logits differ by {apart:.3g} of their norm, where at most "
            f"{allowed} is expected. Nothing was written. Please report this with the source's config.json."
        )
    same = (before.argmax(-1) == after.argmax(-1)).double().mean().item()
    return {"relative_difference": apart, "same_first_choice": same}


@torch.no_grad()
def _logits(checkpoint: Checkpoint, batch: Batch, target: TargetTensors, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of some tokens: float32 [steps * rows, tokens]."""
    drafter = checkpoint.drafter(target)
    steps = min(drafter.max_draft_tokens or _STEPS, _STEPS)
    columns = torch.searchsorted(checkpoint.draft_token_ids, tokens)
    chain = drafter.chain(batch, steps=steps)
    return torch.cat([F.linear(step.normed, step.head[columns].float()) for step in chain])
