"""Draft vocabularies: how checkpoints store them, and resizing one after training."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight

MAPS = ("d2t", "t2d")
"""d2t, int64 [V]: of each draft token, its target id minus its draft id, or the target id itself. t2d, bool [vocab]: which of
the target's tokens are in the draft vocabulary."""


def from_tensors(
    maps: Mapping[str, torch.Tensor], *, vocabulary: int, size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read the draft vocabulary from a checkpoint's maps.

    Some trainers write `d2t` as offsets, others as ids, and a drafter that is read the wrong way proposes wrong tokens without
    an error. The values tell which it is: only one reading gives distinct ids within the vocabulary that agree with `t2d`.

    Args:
        maps: `MAPS`, one, both or none of them.
        vocabulary: size of the target's vocabulary.
        size: V, from the config.

    Returns int64 [V] ascending target ids; and the order that sorts the rows of draft tokens, None if they are sorted.
    Raises UserError: the maps are damaged or ambiguous, or contradict each other.
    """
    if not maps:
        if size != vocabulary:
            raise UserError(
                f"The draft vocabulary has {size} of the target's {vocabulary} tokens, but there is no `d2t` to say which. The "
                "checkpoint is incomplete."
            )
        return torch.arange(size), None
    if "t2d" in maps:
        mask = maps["t2d"]
        if mask.shape != (vocabulary,) or mask.dtype not in (torch.bool, torch.uint8, torch.int64):
            raise UserError(f"`t2d` is {mask.dtype} {list(mask.shape)}, but should be a mask of {vocabulary} tokens.")
        marked = mask.nonzero()[:, 0]
        if len(marked) != size:
            raise UserError(
                f"`t2d` marks {len(marked)} tokens, but the draft vocabulary has {size}. One of them is damaged."
            )
        if "d2t" not in maps:
            return marked, None
    given = maps["d2t"]
    if given.shape != (size,) or given.dtype not in (torch.int64, torch.int32):
        raise UserError(f"`d2t` is {given.dtype} {list(given.shape)}, but should be {size} integers.")
    given = given.long()
    readings = []
    for ids in (given + torch.arange(size), given):
        inside = bool((ids >= 0).all() and (ids < vocabulary).all())
        if inside and len(ids.unique()) == size and ("t2d" not in maps or torch.equal(ids.sort().values, marked)):
            readings.append(ids)
    if not readings:
        raise UserError(
            "`d2t` does not give distinct tokens of the target, neither as offsets nor as ids"
            f"{', that agree with `t2d`' if 't2d' in maps else ''}. The checkpoint is damaged."
        )
    if len(readings) == 2 and not torch.equal(*readings):
        raise UserError(
            "`d2t` could be offsets or ids, and there is no `t2d` to tell which. Add `t2d`, the mask of the target's tokens that are "
            "in the draft vocabulary, to the checkpoint."
        )
    ids = readings[0]
    order = ids.argsort()
    return ids[order], None if torch.equal(order, torch.arange(size)) else order


def reads_as_offsets(d2t: torch.Tensor, t2d: torch.Tensor | None, *, vocabulary: int) -> bool:
    """Whether the map `d2t` (int [V]) gives distinct tokens of the target as offsets, which is how vLLM reads it, those of the mask `t2d`."""
    ids = (d2t.long() + torch.arange(len(d2t))).sort().values
    inside = len(ids) == 0 or bool(ids[0] >= 0 and ids[-1] < vocabulary and (ids[1:] > ids[:-1]).all())
    return inside and (t2d is None or torch.equal(ids, t2d.nonzero()[:, 0]))


def with_vocabulary(checkpoint: Checkpoint, ids: torch.Tensor, target_head: torch.Tensor | None) -> Checkpoint:
    """Change the draft vocabulary to `ids` (int64 [V] ascending target ids). Rows of the head for new tokens come from the target's
    head [vocab, H], which is needed only for them; rows of a Markov head are 0 for them. The others keep theirs.
    Raises UserError: the kind drafts over the target's whole vocabulary, or there is no fitting head for new tokens."""
    kind = drafter_class(checkpoint.kind)
    if not kind.vllm_layout.maps_vocabulary:
        raise UserError(f"Drafters of the kind {checkpoint.kind} always draft over their target's whole vocabulary.")
    old = checkpoint.draft_token_ids
    place = torch.searchsorted(old, ids).clamp(max=len(old) - 1)
    index = torch.where(old[place] == ids, place, -1)
    new = int((index < 0).sum())
    if new and target_head is None:
        raise UserError(
            f"{new} of the {len(ids)} tokens are not in the draft vocabulary yet. Their rows of the head come from the target: "
            "name it with --target."
        )
    head = checkpoint.weights["lm_head.weight"]
    if target_head is not None and target_head.shape != (checkpoint.config["vocab_size"], *head.shape[1:]):
        raise UserError(
            f"The target's head is {list(target_head.shape)}, and the drafter's {list(head.shape)} for a vocabulary of "
            f"{checkpoint.config['vocab_size']}: this is another target, or the drafter has another width."
        )
    weights = {**checkpoint.weights}
    for name in kind.rows_by_draft_token:
        old_rows, new_rows = weights[name], None
        if new:
            assert target_head is not None
            # Only the head has a counterpart in the target; the others add to its logits.
            new_rows = target_head[ids] if name == "lm_head.weight" else torch.zeros(len(ids), *old_rows.shape[1:])
        weights[name] = old_rows.rows(index, new_rows)
    config = checkpoint.config | {"draft_vocab_size": len(ids)}
    # Predictions and coverage are of the old vocabulary.
    training = {
        name: figure
        for name, figure in checkpoint.training.items()
        if not name.startswith("predicted_") and name != "draft_vocabulary_coverage"
    }
    return replace(checkpoint, config=config, draft_token_ids=ids, weights=weights, training=training).check()


def to_tensors(draft_token_ids: torch.Tensor, *, vocabulary: int) -> dict[str, Weight]:
    """`d2t` as offsets, and `t2d`; readers take their absence for the whole vocabulary."""
    if len(draft_token_ids) == vocabulary:
        return {}
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[draft_token_ids] = True
    offsets = draft_token_ids - torch.arange(len(draft_token_ids))
    return {"d2t": Weight.of(offsets), "t2d": Weight.of(mask)}
