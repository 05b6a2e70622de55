"""Layer ids: which of a target's hidden states are saved."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.run.errors import UserError


def default_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """The hidden states to save if a recipe names none: EAGLE-3's usual three and the last, in vLLM's numbering.

    (2, n//2, n-3, n); fewer for a target of fewer than seven layers, where some of these coincide.
    """
    n = num_hidden_layers
    return tuple(sorted({min(2, n), n // 2, max(n - 3, 0), n}))


def check_layer_ids(ids: Sequence[int], num_hidden_layers: int) -> None:
    """
    Raises:
        UserError: an id is outside 0..num_hidden_layers, one is named twice, or there is none.
    """
    valid = (
        f"This target has the ids 0 (the embedding) to {num_hidden_layers} (the last layer's output); "
        "id i is what enters decoder layer i."
    )
    if not ids:
        raise UserError(f"`layer_ids` is empty. {valid}")
    outside = [i for i in ids if not 0 <= i <= num_hidden_layers]
    if outside:
        raise UserError(f"`layer_ids` names {', '.join(map(str, outside))}, outside the model. {valid}")
    twice = sorted({i for i in ids if list(ids).count(i) > 1})
    if twice:
        raise UserError(f"`layer_ids` names {', '.join(map(str, twice))} more than once. {valid}")
