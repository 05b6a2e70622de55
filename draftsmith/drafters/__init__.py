"""Drafters. A kind is one file here, with the name that recipes and checkpoints use: its mathematics with their source, its config,
its module, and `DRAFTER`, the module's class. Its options and how it is served are in `draftsmith/config/drafters.py`.

Importing a kind imports torch; importing this package does not. To add a kind, see `docs/add-a-drafter.md`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from draftsmith.config.drafters import KINDS, DrafterOptions, kinds_of
from draftsmith.run.errors import UserError

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter
    from draftsmith.target.info import TargetInfo


def drafter_class(kind: str) -> type[Drafter]:
    """The module class of a kind. Raises UserError: this version has no such kind."""
    if kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`? It" if near else "it"
        raise UserError(
            f"This version of Draftsmith knows no drafter of the kind `{kind}`; {hint} knows {', '.join(KINDS)}."
        )
    drafter: type[Drafter] = importlib.import_module(f"{__name__}.{kind}").DRAFTER
    return drafter


def layer_ids_to_read(
    options: DrafterOptions, target: TargetInfo, saved: tuple[int, ...], *, where: str
) -> tuple[int, ...]:
    """The layer ids that a new drafter reads, ascending, as vLLM hands their states out.

    Args:
        options: the recipe's `train.drafter`.
        saved: layer ids of the store, or of the one to be made.
        where: names that store, in messages.

    Raises UserError: no drafter can be trained: the target's family is not known, or states that the drafter or its
    teacher reads are not saved.
    """
    lowest, last = target.facts.family.lowest_layer_id, target.num_hidden_layers
    if min(saved) < lowest:
        raise UserError(
            f"vLLM hands out states of {target.name} from layer id {lowest} on, and {where} has {list(saved)}. Leave the others out of "
            "`extract.layer_ids`."
        )
    if list(saved) != sorted(saved):
        raise UserError(
            f"The layers of {where} are listed as {list(saved)}. vLLM hands out states in ascending order, and earlier versions wrote "
            "them under ids in the order of the recipe, so nobody can tell which state is which. Extract again."
        )
    serving = options.serving
    if not target.facts.family.last_state_is_normed:
        raise UserError(
            f"vLLM 0.32 serves {target.name} (type `{target.config.model_type}`) with no trained drafter: its model of the type hands out no states "
            "of layers, and the last one before the final norm. What needs no training works (`serve.method`: ngram, suffix, draft_model, "
            "or mtp where the target has modules for it)."
        )
    if serving.shares_head and not target.facts.family.has_lm_head:
        raise UserError(
            f"vLLM 0.32 cannot serve {target.name} (type `{target.config.model_type}`) with drafters of the kind `{options.kind}`, which have the "
            "target's head, and finds none in its model of the type. Choose a kind with a head of its own (`train.drafter.kind`: "
            f"{kinds_of(lambda spec: not spec.shares_head)})."
        )
    if serving.shares_embedding and not target.facts.family.serves_eagle:
        raise UserError(
            f"vLLM cannot serve {target.name} (type `{target.config.model_type}`) with drafters of the kind `{options.kind}`. "
            f"Choose a kind without the target's embedding (`train.drafter.kind`: {kinds_of(lambda spec: not spec.shares_embedding)})."
        )
    ids = drafter_class(options.kind).layer_ids(options, saved, last)
    if len({*ids}) < len(ids):
        raise UserError(
            f"`train.drafter.layer_ids` names a layer more than once: {list(ids)}. vLLM passes each state once."
        )
    if missing := sorted({*ids, last} - {*saved}):
        raise UserError(
            f"Training needs hidden states of layers {missing}, and {where} has {list(saved)}. A drafter's `train.drafter.layer_ids` must "
            f"be a subset of these, and the last layer's output is for the teacher (`extract.layer_ids` with {last})."
        )
    return ids
