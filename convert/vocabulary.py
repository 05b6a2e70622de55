"""Draft vocabularies: the maps that checkpoints hold them in, and cutting or growing one after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from draftsmith.convert.contents import DraftCheckpoint
from draftsmith.convert.weights import Weight
from draftsmith.drafters import drafter_class
from draftsmith.run.errors import UserError

MAPS = ("d2t", "t2d")
"""d2t, int64 [V]: target id less draft id, or the target id itself, of each draft token. t2d, bool [vocab]: which of the
target's tokens there are."""


def from_tensors(
    maps: Mapping[str, torch.Tensor], *, vocabulary: int, size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The draft vocabulary of a checkpoint's maps.

    Some trainers write `d2t` as offsets, some as ids, and a drafter read the wrong way proposes wrong tokens without any
    error. The values tell: only one of the two gives different ids inside the vocabulary that agree with `t2d`.

    Args:
        maps: `d2t` and `t2d`, either or both or none.
        vocabulary: the target's.
        size: V, as the config says.

    Returns:
        int64 [V] ascending target ids, and, where the checkpoint has its rows in another order, the order that sorts them.

    Raises:
        UserError: they are damaged, contradict each other, or can be read both ways.
    """
    if not maps:
        if size != vocabulary:
            raise UserError(
                f"The draft vocabulary has {size} of the target's {vocabulary} tokens, and no `d2t` says which. The "
                "checkpoint is incomplete."
            )
        return torch.arange(size), None
    if "t2d" in maps:
        mask = maps["t2d"]
        if mask.shape != (vocabulary,) or mask.dtype not in (torch.bool, torch.uint8, torch.int64):
            raise UserError(f"`t2d` is {mask.dtype} {list(mask.shape)}, and should be a mask of {vocabulary} tokens.")
        marked = mask.nonzero()[:, 0]
        if len(marked) != size:
            raise UserError(f"`t2d` marks {len(marked)} tokens, and the draft vocabulary has {size}. One is damaged.")
        if "d2t" not in maps:
            return marked, None
    given = maps["d2t"]
    if given.shape != (size,) or given.dtype not in (torch.int64, torch.int32):
        raise UserError(f"`d2t` is {given.dtype} {list(given.shape)}, and should be {size} whole numbers.")
    given = given.long()
    readings = []
    for ids in (given + torch.arange(size), given):
        inside = bool((ids >= 0).all() and (ids < vocabulary).all())
        if inside and len(ids.unique()) == size and ("t2d" not in maps or torch.equal(ids.sort().values, marked)):
            readings.append(ids)
    if not readings:
        raise UserError(
            "`d2t` gives no set of different tokens of the target, neither as offsets nor as ids"
            f"{', that agrees with `t2d`' if 't2d' in maps else ''}. The checkpoint is damaged."
        )
    if len(readings) == 2 and not torch.equal(*readings):
        # Offsets of ascending ids never descend. Ids that would also do as offsets are told apart by a mask alone.
        raise UserError(
            "`d2t` can be read as offsets and as ids, and there is no `t2d` to tell which it is. Add `t2d`, the mask of "
            "the target's tokens that are in the draft vocabulary, to the checkpoint."
        )
    ids = readings[0]
    order = ids.argsort()
    return ids[order], None if torch.equal(order, torch.arange(size)) else order


def with_vocabulary(contents: DraftCheckpoint, ids: torch.Tensor, target_head: torch.Tensor | None) -> DraftCheckpoint:
    """The drafter with another draft vocabulary: it keeps its rows of the head, and takes new ones from the target's head.

    Logits of tokens that stay are what they were.

    Args:
        contents: of a kind that maps its vocabulary (EAGLE-3).
        ids: int64 [V] ascending target ids.
        target_head: [vocab, H], the target's; only where tokens come in.

    Raises:
        UserError: the kind drafts over the target's whole vocabulary, or tokens come in and there is no head for them.
    """
    if not drafter_class(contents.kind).vllm_layout.maps_vocabulary:
        raise UserError(
            f"A drafter of the kind {contents.kind} drafts over its target's whole vocabulary in every format that holds it."
        )
    old = contents.draft_token_ids
    place = torch.searchsorted(old, ids).clamp(max=len(old) - 1)
    index = torch.where(old[place] == ids, place, -1)
    new = int((index < 0).sum())
    if new and target_head is None:
        raise UserError(
            f"{new} of the {len(ids)} tokens wanted are not in the drafter's vocabulary. Their rows of the head come from the "
            "target's: name it with --target."
        )
    head = contents.weights["lm_head.weight"]
    if target_head is not None and target_head.shape != (contents.config["vocab_size"], *head.shape[1:]):
        raise UserError(
            f"The target's head is {list(target_head.shape)}, and the drafter's {list(head.shape)} over a vocabulary of "
            f"{contents.config['vocab_size']}: it is another target, or the drafter is of another width."
        )
    weights = {
        **contents.weights,
        "lm_head.weight": head.rows(index, None if target_head is None else target_head[ids]),
    }
    config = contents.config | {"draft_vocab_size": len(ids)}
    return replace(contents, config=config, draft_token_ids=ids, weights=weights).check()


def to_tensors(draft_token_ids: torch.Tensor, *, vocabulary: int) -> dict[str, Weight]:
    """`d2t` as offsets, and `t2d`; nothing for a whole vocabulary, which is how readers know one."""
    if len(draft_token_ids) == vocabulary:
        return {}
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[draft_token_ids] = True
    offsets = draft_token_ids - torch.arange(len(draft_token_ids))
    return {"d2t": Weight.of(offsets), "t2d": Weight.of(mask)}
