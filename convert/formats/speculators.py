"""EAGLE-3, P-EAGLE, DFlash and DSpark as the speculators project (0.9) writes them: the layers' config is a section of its own.

Of P-EAGLE, the number of trained draft tokens is that of the proposal method. Its DFlash and DSpark read the embedding, and the head over the
whole vocabulary, from the target that the config names, whatever the file has. `aux_hidden_state_layer_ids` are vLLM's ids.

By default its trainer gives all layers a sliding window, of 2048 positions (`--sliding-window`, `--full-attention-indices`), and all kinds but
EAGLE-3 Qwen3's layers. Layers with full attention see all rows of a block, those with a window no later ones, unless
`sliding_window_non_causal`. vLLM, which loads this format itself, takes the direction of all layers of DFlash from that key, which speculators
leaves false: that it is written as true where no layer has a window makes both agree.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.convert.formats import blocks
from draftsmith.convert.formats.base import Format
from draftsmith.drafters.decoder import LLAMA_FIXED_BUT_WINDOW, layer_fields
from draftsmith.drafters.eagle3 import FLAGS, eagle3_layout
from draftsmith.drafters.layout import REQUIRED, Entry, Layout, Source, Window, look_up, put, same_names
from draftsmith.run.errors import UserError

_KINDS = {"eagle3": "eagle3", "peagle": "p_eagle", "dflash": "dflash", "dspark": "dspark"}
"""Kinds of drafter, by `speculators_model_type`."""
_LAYERS = "transformer_layer_config."
_METHODS = "speculators_config.proposal_methods"


def _recognize(record: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    stated = record.get("speculators_model_type")
    kind = _KINDS.get(stated) if isinstance(stated, str) else None
    return None if kind is None else (kind, f"its config says `speculators_model_type: {stated}`")


def _proposes(tokens: int) -> list[dict[str, Any]]:
    return [{"proposal_type": "greedy", "speculative_tokens": tokens}]


def _derived(
    algorithm: str, architecture: str, *, tokens: Callable[[Any], int] | None
) -> dict[str, Callable[[Any], Any]]:
    """`Layout.derived`; `tokens`: draft tokens of a step, unless a field says it."""
    found: dict[str, Callable[[Any], Any]] = {
        "architectures": lambda _: [architecture],
        "speculators_config.algorithm": lambda _: algorithm,
        "speculators_config.default_proposal_method": lambda _: "greedy",
        "speculators_config.verifier": lambda _: {"name_or_path": None, "architectures": []},
    }
    return found if tokens is None else found | {_METHODS: lambda config: _proposes(tokens(config))}


_IRRELEVANT = frozenset({
    "auto_map", "dtype", "embed_requires_grad", "has_no_defaults_at_init", "speculators_version", "tie_word_embeddings",
    "torch_dtype", "transformers_version",
    "down_sample_ratio", "down_sample_ratio_min", "max_anchors",  # how it was trained, in files of before 0.7
})  # fmt: skip

_EAGLE3 = replace(
    eagle3_layout(
        prefix=_LAYERS,
        ids=Entry("layer_ids", tuple, "eagle_aux_hidden_state_layer_ids"),
        flags=FLAGS,
        any_layers=True,
        norm_before_residual=REQUIRED,  # speculators and vLLM have different defaults for it
        fixed={"speculators_model_type": "eagle3"},
        derived=_derived("eagle3", "Eagle3Speculator", tokens=lambda _: 3),
        irrelevant=_IRRELEVANT,
    ),
    # Their class takes the target's if its own is not a number, and what it does not load is whatever was in memory.
    wants_embedding=True,
)


def _proposed(record: Mapping[str, Any]) -> Any:
    """The tokens of the first proposal method; None if it does not say."""
    methods = look_up(record, _METHODS)
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None


@dataclass(frozen=True)
class _Proposed(Entry):
    """The tokens of the first proposal method, or the key of files of before 0.7."""

    def read(self, source: Source, config: dict[str, Any]) -> Any:
        older = next((value for path in self.other_keys if (value := look_up(source.record, path)) is not None), None)
        if older is not None:
            return self._checked(older, self.field)
        tokens = _proposed(source.record)
        if type(tokens) is not int or not 0 < tokens < 1 << 31:
            raise UserError(
                f"The config does not say how many tokens the drafter proposes (`{self.path}[0].speculative_tokens`)."
            )
        return tokens

    def write(self, record: dict[str, Any], value: Any) -> None:
        put(record, self.path, _proposes(value))


_P_EAGLE = replace(
    _EAGLE3,
    fields=(
        *(
            replace(each, default=False) if isinstance(each, Entry) and each.field == "norm_before_residual" else each
            for each in _EAGLE3.fields
        ),
        _Proposed("num_depths", int, _METHODS, other_keys=("num_depths",)),
        Entry("mask_token_id", int, least=0),
    ),
    fixed={**_EAGLE3.fixed, "speculators_model_type": "peagle"},
    derived=_derived("peagle", "PEagleSpeculator", tokens=None),
)


@dataclass(frozen=True)
class _Causal(Entry):
    """Only layers with a window may be causal."""

    def read(self, source: Source, config: dict[str, Any]) -> bool:
        bidirectional = look_up(source.record, self.path)
        if bidirectional not in (None, False, True) or type(bidirectional) is int:
            raise UserError(f"`{self.path}` is {str(bidirectional)[:80]!r} in the config, where bool should be.")
        return config["sliding_window"] is not None and not bidirectional

    def write(self, record: dict[str, Any], value: bool) -> None:
        put(record, self.path, not value)


def _all_rows_draft(source: Source, config: dict[str, Any]) -> bool:
    """Whether the anchor's row of a DSpark drafts too where the config does not say. Before July 2026 speculators' did not, and had no key for
    it; vLLM takes such files so too (`update_dspark`). The key's later default is that it does, and the proposal's tokens tell the two apart."""
    return bool(_proposed(source.record) == config["block_size"])


def _cannot_express(config: Any) -> str | None:
    return "`causal: True` without a `sliding_window`" if config.causal and config.sliding_window is None else None


def _blocks_layout(
    kind: str,
    architecture: str,
    *,
    more: tuple[Entry, ...] = (),
    fixed: Mapping[str, Any] = {},
    refused: tuple[Callable[[Source], str | None], ...] = (),
    learns_mask: bool = False,
) -> Layout:
    """The layout of a kind of block drafters.

    Args:
        more: fields that the others do not have.
        learns_mask: the kind's mask has an embedding of its own.
    """
    from_target = {"embed_tokens.weight"}
    return Layout(
        fields=(
            *layer_fields(_LAYERS),
            Window(_LAYERS, types=True),
            Entry("layer_ids", tuple, "aux_hidden_state_layer_ids"),
            Entry("draft_vocab_size", int),
            Entry("block_size", int),
            Entry("mask_token_id", int, least=0),
            _Causal("causal", bool, "sliding_window_non_causal"),
            *more,
        ),
        names=same_names,
        fixed={
            **{f"{_LAYERS}{name}": value for name, value in LLAMA_FIXED_BUT_WINDOW.items()},
            f"{_LAYERS}attention_bias": False,
            "speculators_model_type": kind,
            **fixed,
        },
        derived={
            **_derived(kind, architecture, tokens=lambda config: config.max_draft_tokens),
            f"{_LAYERS}model_type": lambda _: "qwen3",
        },
        irrelevant=blocks.irrelevant_fields(_LAYERS)
        | _IRRELEVANT
        | {"target_hidden_size"},  # their class does not use it; another than the drafter's gives `fc` another shape
        supported={"attention_bias": (False,)},
        inexpressible=_cannot_express,
        maps_vocabulary=True,
        refused=refused,
        shared=(blocks.mask_of_target(kept=True) if learns_mask else {}) | blocks.head_of_target(kept=True),
        taken_from_target=lambda config: frozenset(
            from_target | ({blocks.HEAD} if config.draft_vocab_size == config.vocab_size else set())
        ),
    )


_DFLASH = _blocks_layout(
    "dflash",
    "DFlashSpeculator",
    fixed={"sample_from_anchor": False},
    refused=(blocks.needs_no_draft_from_anchor("sample_from_anchor"),),
    learns_mask=True,
)
_DSPARK = _blocks_layout(
    "dspark",
    "DSparkSpeculator",
    more=(
        Entry("markov_rank", int),
        Entry("sample_from_anchor", bool, default=_all_rows_draft),
        Entry("enable_confidence_head", bool, default=True),
        Entry("confidence_head_with_markov", bool, default=True),
    ),
    fixed={"markov_head_type": "vanilla"},
    refused=(blocks.needs_markov_head,),
)

FORMAT = Format(
    name="speculators",
    title="EAGLE-3, P-EAGLE, DFlash and DSpark as the speculators project writes them",
    layouts={"eagle3": _EAGLE3, "p_eagle": _P_EAGLE, "dflash": _DFLASH, "dspark": _DSPARK},
    recognize=_recognize,
    target_name="speculators_config.verifier.name_or_path",
)
