"""Whether a conversion kept what a drafter computes: source and result run on the same inputs, their logits compared."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from draftsmith.convert.contents import EMBEDDING, DraftCheckpoint
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch
from draftsmith.run.errors import DraftsmithError
from draftsmith.target.tensors import TargetTensors

_ROWS, _STEPS = 64, 3
_ROUNDING = 0.1
"""Relative difference of all logits that another floating-point type may make."""
_ROUNDING_TO_8_BITS = 0.5
"""And that 8-bit weights may make, on random inputs: logits that have nothing to do with each other are 1.4 apart. What 8
bits cost is measured by evaluation."""


def compare(
    source: DraftCheckpoint, result: DraftCheckpoint, target: TargetTensors | None = None, *, rounded: bool = False
) -> dict[str, float]:
    """Run both on random states and tokens, at every chain step with the same tokens.

    Args:
        source: as it was read.
        result: as what was written reads.
        target: the target's tensors, which drafters share; None for random ones.
        rounded: the result's weights were, by more than their type says (they are in 8 bits).

    Returns:
        `relative_difference` of the logits (norm of the difference, over the norm) of the tokens that both have;
        `same_first_choice`, the share of rows in which both prefer the same one of them.

    Raises:
        DraftsmithError: they differ by more than the floating-point types explain: at all, where those are the same.
    """
    generator = torch.Generator().manual_seed(0)
    config = source.drafter_config()
    if target is None:
        table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        target = TargetTensors(table, table, torch.ones(config.hidden_size), {}, "")
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
    types = [{weight.dtype for weight in contents.weights.values()} for contents in (source, result)]
    allowed = _ROUNDING_TO_8_BITS if rounded else _ROUNDING if types[0] != types[1] else 0
    if not apart <= allowed:
        raise DraftsmithError(
            f"What was written computes something else than its source: its logits are apart by {apart:.3g} of their "
            f"size, and at most {allowed} was to be expected. Nothing was left; please report it with the source's config.json."
        )
    same = (before.argmax(-1) == after.argmax(-1)).double().mean().item()
    return {"relative_difference": apart, "same_first_choice": same}


def drafter_of(contents: DraftCheckpoint, target: TargetTensors) -> Drafter:
    """The drafter as a module, in float32; its own embedding instead of the target's, where it has one."""
    tensors = {name: weight.tensor().float() for name, weight in contents.weights.items()}
    own = tensors.pop(EMBEDDING, None)
    if own is not None:
        target = TargetTensors(own, target.lm_head, target.final_norm_weight, {}, "")
    drafter = drafter_class(contents.kind).from_target(contents.drafter_config(), target, contents.draft_token_ids)
    drafter.load_state_dict(tensors)
    return drafter.float().eval()


@torch.no_grad()
def _logits(contents: DraftCheckpoint, batch: Batch, target: TargetTensors, tokens: torch.Tensor) -> torch.Tensor:
    """Of some tokens, in float32: [steps * rows, tokens]."""
    drafter = drafter_of(contents, target)
    steps = min(drafter.max_draft_tokens or _STEPS, _STEPS)
    columns = torch.searchsorted(contents.draft_token_ids, tokens)
    return torch.cat([
        F.linear(step.normed, step.head[columns].float()) for step in drafter.chain(batch, steps=steps)
    ])  # fmt: skip
