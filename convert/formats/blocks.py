"""What the published formats of block drafters (DFlash, DSpark) have in common.

Their mask is a row of the target's embedding, and with the whole vocabulary their head is the target's: neither is in their files. Layers
without a window see each other's rows of a block in both directions.
"""

from collections.abc import Callable
from typing import Any

from draftsmith.drafters.decoder import LLAMA_FIXED, LLAMA_IRRELEVANT
from draftsmith.drafters.layout import FULL, Rows, Source, look_up

DRAFTS_FROM_ANCHOR = "dflash_config.sample_from_anchor"
"""Where a DFlash drafter that vLLM loads says that the anchor's row predicts too. vLLM's first runner passes over it, and takes each token from
the next row."""


def fixed_fields() -> dict[str, Any]:
    """`Layout.fixed` of layers without windows; `layer_types` is `needs_full_attention`'s."""
    fields = {**LLAMA_FIXED, "attention_bias": False}
    return {name: value for name, value in fields.items() if name != "layer_types"}


def irrelevant_fields(prefix: str = "") -> frozenset[str]:
    """`Layout.irrelevant` of the layers."""
    return frozenset(f"{prefix}{name}" for name in LLAMA_IRRELEVANT)


def layer_types(config: Any) -> list[str]:
    """The config's `layer_types`."""
    return [FULL] * int(config.num_layers)


# ---- what is not implemented ----


def needs_full_attention(source: Source) -> str | None:
    """Refuses layers with a sliding window, in formats for which it is not known what their readers make of it."""
    found = look_up(source.record, "layer_types")
    if found is None or (isinstance(found, list) and all(each == FULL for each in found)):
        return None
    return f"its layers are `layer_types: {str(found)[:80]}`, and only layers with full attention are implemented"


def needs_no_draft_from_anchor(path: str) -> Callable[[Source], str | None]:
    """Refuses drafters that predict a token from the anchor's row as well, for kinds without that option."""

    def reason(source: Source) -> str | None:
        found = look_up(source.record, path)
        if found is None or found is False:
            return None
        return f"it also predicts from the row of the last known token (`{path}: {str(found)[:20]}`), which is not implemented"

    return reason


def needs_markov_head(source: Source) -> str | None:
    """Refuses the Markov heads that vLLM does not know either, and none, as DeepSpec's DFlash is written."""
    rank = look_up(source.record, "markov_rank")
    if rank == 0 and type(rank) is int:
        return "it has no Markov head (`markov_rank: 0`): DFlash whose blocks draft from the last known token's row, which is not implemented"
    found = look_up(source.record, "markov_head_type")
    if found in (None, "vanilla"):
        return None
    return f"its Markov head is `markov_head_type: {str(found)[:20]}`, and only vanilla ones are implemented"


# ---- what is the target's ----

HEAD = "lm_head.weight"
MASK = "mask_embedding"


def head_of_target(*, kept: bool) -> dict[str, Rows]:
    """`Layout.shared` of the head: the target's, if it is over the whole vocabulary. `kept`: the format can hold another."""

    def which(config: Any, ids: Any) -> Any:
        return ids if config.draft_vocab_size == config.vocab_size else None

    return {HEAD: Rows("lm_head", which, "stored" if kept else "refused")}


def mask_of_target(*, kept: bool) -> dict[str, Rows]:
    """`Layout.shared` of the learned embedding of DFlash's mask: the row of the mask's token. `kept`: the format can hold another, in an
    embedding of the drafter's own."""
    return {MASK: Rows("embedding", lambda config, _: config.mask_token_id, "in_embedding" if kept else "refused")}
