"""Drafters made of decoder layers that run as a chain: what EAGLE and EAGLE-3 have in common.

At position p the first step reads the target's states h_p and the token x_{p+1}, and predicts x_{p+2}; RoPE position p.
Chain step k reads the output of step k-1 instead of h_p, the token x_{p+1+k} and RoPE position p+k, and predicts
x_{p+2+k}. It attends to the step-0 keys of positions <= p (in serving: the KV cache) and to its own chain's keys of steps
1..k (in serving: the entries just written behind them). A kind that drafts in parallel reads the same learned state and token
at every step after the first, instead of its own (`mask_inputs`).

Shape legend: T packed rows, Q rows that are predicted from (queries), M key/value heads, C head size, H hidden size,
V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.attention import Attention, Context, CosSin, KeysValues, attend, context_of
from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, Proposals
from draftsmith.drafters.layout import Entry, Rope
from draftsmith.drafters.norm import RMSNorm
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo

if TYPE_CHECKING:  # imported where they are used, since that takes seconds
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DrafterConfig):
    """See `DrafterConfig`; the shape of the layers."""

    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rope_parameters: dict[str, Any] = field(hash=False)
    max_position_embeddings: int
    attention_bias: bool = False
    """Queries, keys and values have a bias, as in Qwen2."""
    sliding_window: int | None = None
    """In every layer, a row sees at most so many rows of the context, the last up to its own; None: all of them."""

    def llama(self) -> LlamaConfig:
        """The layers as a Llama config, which transformers' modules are built from."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=self.rope_parameters,
            max_position_embeddings=self.max_position_embeddings,
            vocab_size=self.vocab_size,
        )

    def layer_matmul_counts(self, steps: int) -> dict[str, tuple[int, int]]:
        """`Drafter.matmul_counts` of the layers: rows without a prediction only give the last layer keys and values."""
        counts = {}
        for index in range(self.num_layers):
            for name in _MATRICES:
                used_by_all = index < self.num_layers - 1 or name in ("self_attn.k_proj", "self_attn.v_proj")
                counts[f"layers.{index}.{name}.weight"] = (int(used_by_all), steps)
        return counts


_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""Weight matrices of a decoder layer."""
_WORTH_RUNNING = 0.8
"""Where fewer of the running rows have a prediction left, the others are dropped from the chain."""


def layer_fields(prefix: str = "", *, old_rope: bool = False) -> tuple[Entry | Rope, ...]:
    """Where Llama configs keep the fields of `DecoderConfig`, other than `layer_ids`, `draft_vocab_size` and `sliding_window` (see `Window`):
    paths with a prefix, and RoPE's settings as `rope_parameters` or, in `old_rope`, as `rope_theta` and `rope_scaling`."""
    return (
        Entry("hidden_size", int, f"{prefix}hidden_size"),
        Entry("intermediate_size", int, f"{prefix}intermediate_size"),
        Entry("num_layers", int, f"{prefix}num_hidden_layers", default=1),
        Entry("num_attention_heads", int, f"{prefix}num_attention_heads"),
        Entry(
            "num_key_value_heads", int, f"{prefix}num_key_value_heads", default=lambda _, c: c["num_attention_heads"]
        ),
        Entry("head_dim", int, f"{prefix}head_dim", default=lambda _, c: c["hidden_size"] // c["num_attention_heads"]),
        Entry("hidden_act", str, f"{prefix}hidden_act", default="silu"),
        Entry("rms_norm_eps", float, f"{prefix}rms_norm_eps", default=1e-6),
        Rope(prefix, old=old_rope),
        Entry("max_position_embeddings", int, f"{prefix}max_position_embeddings", default=2048),
        Entry("vocab_size", int, f"{prefix}vocab_size"),
    )


LLAMA_IRRELEVANT = frozenset({
    "_name_or_path", "add_cross_attention", "architectures", "attention_dropout", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers",
    "model_type", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tie_word_embeddings", "tokenizer_class",
    "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
})  # fmt: skip
"""Fields of a Llama config that do not change what its layers compute."""
LLAMA_FIXED_BUT_WINDOW = {"mlp_bias": False}
"""Fields that do, other than `Window`'s; only these values are implemented."""
LLAMA_FIXED = {**LLAMA_FIXED_BUT_WINDOW, "use_sliding_window": False, "sliding_window": None, "layer_types": None}
"""The same in formats for which windows are not implemented."""


def rotary_embedding(config: DecoderConfig) -> LlamaRotaryEmbedding:
    """RoPE with the scaling that the config asks for, of the first `partial_rotary_factor` of each head, as in vLLM's `get_rope`.
    transformers' Llama ignores that factor without scaling."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(config.rope_parameters)
    rotated = int(config.head_dim * rope.pop("partial_rotary_factor", 1.0))
    return LlamaRotaryEmbedding(replace(config, head_dim=rotated, rope_parameters=rope).llama())


def mask_token_of(chosen: int | None, target: TargetInfo) -> int:
    """The token that stands for draft tokens that are not known yet: as `chosen`, or the last of the vocabulary.
    Raises UserError: the target has no such token."""
    mask = target.vocab_size - 1 if chosen is None else chosen
    if mask >= target.vocab_size:
        raise UserError(
            f"`train.drafter.mask_token_id` is {mask}, and {target.name} has {target.vocab_size} tokens, from 0 on. Choose one of them, or "
            "leave it out."
        )
    return mask


def shape_of_target(target: TargetInfo) -> dict[str, Any]:
    """Fields of `DecoderConfig` for a new drafter, after the target's own layers (see `TargetFacts`)."""
    facts = target.facts
    return {
        "hidden_size": target.hidden_size, "intermediate_size": facts.intermediate_size, "hidden_act": "silu",
        "num_attention_heads": facts.num_attention_heads, "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim, "rms_norm_eps": facts.norm_eps, "rope_parameters": dict(facts.rope_parameters),
        "max_position_embeddings": facts.max_position_embeddings, "vocab_size": target.vocab_size,
    }  # fmt: skip


class DecoderLayer(nn.Module):
    """The parts of a Llama layer; a kind decides what layer 0 reads and which norms come before it.

    Args:
        reads: width of what queries, keys and values are projected from.
        input_norm: the layer has `input_layernorm`.
        hidden_norm: the layer has `hidden_norm`, EAGLE-3's on the fused state.
        output_bias: the attention's output has a bias.
        qk_norm: queries and keys are normed, as in Qwen3.
    """

    self_attn: Attention
    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm

    def __init__(
        self,
        config: DecoderConfig,
        *,
        reads: int,
        input_norm: bool = True,
        hidden_norm: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        hidden, eps = config.hidden_size, config.rms_norm_eps
        if input_norm:
            self.input_layernorm = RMSNorm(hidden, eps)
        if hidden_norm:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            reads,
            hidden,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=output_bias,
            qk_norm=eps if qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config.llama())


class DecoderDrafter(Drafter):
    """The chain. A kind defines what the layers read and what the head reads.

    Its `__init__` sets `layers` (of `DecoderLayer`), `_rotary`, and the buffers `embedding` (float [vocab, H], the
    target's) and `draft_token_ids`.
    """

    window_moves: ClassVar[bool] = False
    """With a sliding window, a later step sees one row of the context less than the step before, as its own slots come into the window."""
    config: DecoderConfig
    embedding: torch.Tensor
    layers: nn.ModuleList
    _rotary: LlamaRotaryEmbedding

    @abstractmethod
    def first_state(self, batch: Batch) -> torch.Tensor:
        """The state that step 0 reads [T, H], from the target's states."""

    @abstractmethod
    def inputs(
        self, layer: DecoderLayer, index: int, embeds: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of a layer's attention, and its residual."""

    @abstractmethod
    def outputs(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the head and the state that the next step reads, from the last layer's output; [Q, H] each."""

    @abstractmethod
    def head(self) -> torch.Tensor:
        """[V, H]"""

    def mask_inputs(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Embedding and state [1, H] that every step after the first reads; None where it reads its own token and state."""
        return None

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        return {"layer_ids": (target.num_hidden_layers,)}

    @classmethod
    def sizes(cls, target: TargetInfo) -> dict[str, Any]:
        return shape_of_target(target)

    def decoder_layers(self) -> list[DecoderLayer]:
        """The modules of `layers`."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def recompute_modules(self) -> list[nn.Module]:
        return [layer.mlp for layer in self.decoder_layers()]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        queries = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        predicted = self._visible(batch, queries)
        later = self._later_rows(batch, queries, predicted, steps)
        masks = self.mask_inputs() if steps > 1 else None
        own: list[list[KeysValues]] = [[] for _ in self.layers]  # per layer: one pair per later step, packed
        read, state, context = self._first_step(batch, queries, predicted)
        yield ChainStep(read, self.head(), batch.loss_weights[queries, 0])
        # Where no step reads what the one before gives, several are computed at once, with at most twice the rows of the first.
        for group in _together(later, rows=0 if masks is None else 2 * len(queries)):
            if masks is not None:
                embeds, state = masks
            else:
                (first, *_) = group
                if first.kept is not None:
                    read, state = read.index_select(0, first.kept), state.index_select(0, first.kept)
                if autoregressive:
                    embeds = F.embedding(self.draft_token_ids[F.linear(read, self.head()).argmax(-1)], self.embedding)
                else:
                    embeds = F.embedding(batch.next_tokens[first.rows, first.number], self.embedding)
            read, state = self._later_steps(embeds, state, group, context, own)
            for step, part in zip(group, read.split([len(step.rows) for step in group]), strict=True):
                normed = part
                if len(part) < len(queries):
                    normed = part.new_zeros(len(queries), part.shape[1]).index_copy(0, step.place, part)
                yield ChainStep(normed, self.head(), batch.loss_weights[queries, step.number])

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        return _Branches(self, batch, rows)

    def _first_step(
        self, batch: Batch, queries: torch.Tensor, predicted: Context
    ) -> tuple[torch.Tensor, torch.Tensor, list[KeysValues]]:
        """`outputs` of step 0 for the queries, and each layer's keys and values of all rows, [M, T, C].

        Only rows that are predicted from run through the whole last layer; the others only give it keys and values.
        """
        state = self.first_state(batch)
        embeds = F.embedding(batch.next_tokens[:, 0], self.embedding)
        rope = self._rope(batch.positions, state)
        every_row = torch.arange(len(state), device=state.device)
        everything = self._visible(batch, every_row) if len(self.layers) > 1 else predicted
        context = []
        for index, layer in enumerate(self.decoder_layers()):
            x, residual = self.inputs(layer, index, embeds, state)
            keys, values = layer.self_attn.keys_values(x, rope)
            context.append((keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()))
            visible = everything
            if index == len(self.layers) - 1:
                # x[queries] would be the same, with a gradient that is scattered one element at a time.
                x, residual = x.index_select(0, queries), residual.index_select(0, queries)
                rope, visible = (rope[0][queries], rope[1][queries]), predicted
            mixed = attend(layer.self_attn.queries(x, rope), context[index], [], visible)
            state = _rest_of_layer(layer, residual, mixed)
        return (*self.outputs(state), context)

    def _later_steps(
        self,
        embeds: torch.Tensor,
        state: torch.Tensor,
        steps: list[_LaterRows],
        context: list[KeysValues],
        own: list[list[KeysValues]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`outputs` of steps after the first, one after the other in one tensor; adds to `own`, which has a list per layer with the keys and
        values [rows, M, C] of each later step so far. Several steps have the same `embeds` and `state` [1, H]."""
        counts = [len(step.rows) for step in steps]
        rope = self._rope(torch.cat([step.positions for step in steps]), state)
        for index, layer in enumerate(self.decoder_layers()):
            x, residual = self.inputs(layer, index, embeds, state)
            keys, values = (_split(each, counts) for each in layer.self_attn.keys_values(x, rope))
            queries = layer.self_attn.queries(x, rope).split(counts)
            mixed = []
            for number, step in enumerate(steps):
                if step.kept is not None:
                    own[index] = [(_select(k, step.kept), _select(v, step.kept)) for k, v in own[index]]
                own[index].append((keys[number], values[number]))
                mixed.append(attend(queries[number], context[index], own[index], step.visible))
            state = _rest_of_layer(layer, residual, torch.cat(mixed))
        return self.outputs(state)

    def _later_rows(self, batch: Batch, queries: torch.Tensor, visible: Context, steps: int) -> list[_LaterRows]:
        """The rows of each step after the first: all queries, or clearly fewer from where they have no prediction left: at ends of texts, and
        where later steps are not trained."""
        # All at once and beforehand, since a device waits where its results decide on sizes.
        needed = batch.loss_weights[queries, :steps].flip(1).cumsum(1).flip(1).gt(0).cpu()
        found, rows, among = [], queries, torch.arange(len(queries))
        place = among.to(queries.device)
        moves = self.window_moves and self.config.sliding_window is not None
        for k in range(1, steps):
            left, kept = needed[among, k].nonzero()[:, 0], None
            if len(left) < _WORTH_RUNNING * len(among):
                among, kept = among[left], left.to(rows.device)
                place, rows = place[kept], rows[kept]
            if moves or kept is not None:
                visible = self._visible(batch, rows, step=k)
            found.append(_LaterRows(k, batch.positions[rows] + k, kept, place, rows, visible))
        return found

    def _visible(self, batch: Batch, rows: torch.Tensor, *, step: int = 0) -> Context:
        """What some rows of the batch see of it in a chain step."""
        config, window = self.config, self.config.sliding_window
        if window is not None and self.window_moves:
            window = max(1, window - step)  # a row always sees itself
        return context_of(batch, rows, heads=config.num_attention_heads, head_dim=config.head_dim, window=window)

    def inverse_frequencies(self) -> torch.Tensor:
        """[C / 2], or fewer where RoPE turns part of each head: radians that each rotary pair turns per position."""
        return torch.as_tensor(self._rotary.inv_freq)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> CosSin:
        cos, sin = self._rotary(like, positions[None])
        return cos[0], sin[0]


def _rest_of_layer(layer: DecoderLayer, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """What follows the attention."""
    state = residual + layer.self_attn.o_proj(mixed)
    rest: torch.Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
    return rest


class _Branches(Branches):
    """Branches that share the context of their row, and have the keys and values of their own chain steps."""

    def __init__(self, drafter: DecoderDrafter, batch: Batch, rows: torch.Tensor) -> None:
        self._drafter, self._batch, self._rows, self._depth = drafter, batch, rows, 0
        self._state, self._context = torch.empty(0), list[KeysValues]()
        self._own: list[list[KeysValues]] = [[] for _ in drafter.layers]

    def step(self, parents: torch.Tensor, tokens: torch.Tensor) -> Proposals:
        drafter, batch, depth = self._drafter, self._batch, self._depth
        self._rows = self._rows[parents]
        visible = drafter._visible(batch, self._rows)
        if depth == 0:
            read, self._state, self._context = drafter._first_step(batch, self._rows, visible)
        else:
            self._own = [[(keys[parents], values[parents]) for keys, values in pairs] for pairs in self._own]
            embeds, positions = F.embedding(tokens, drafter.embedding), batch.positions[self._rows] + depth
            every = torch.arange(len(tokens), device=tokens.device)
            step = _LaterRows(depth, positions, None, every, self._rows, visible)
            read, self._state = drafter._later_steps(embeds, self._state[parents], [step], self._context, self._own)
        self._depth += 1
        return Proposals(read, drafter.head(), torch.arange(len(tokens), device=tokens.device))


@dataclass
class _LaterRows:
    """The rows of a chain in a step after the first."""

    number: int
    """Of the step, from 1."""
    positions: torch.Tensor
    """int64, that they predict from."""
    kept: torch.Tensor | None
    """int64, among the rows of the step before; None for all."""
    place: torch.Tensor
    """int64, among the queries."""
    rows: torch.Tensor
    """int64, of the batch."""
    visible: Context


def _together(steps: list[_LaterRows], *, rows: int) -> list[list[_LaterRows]]:
    """Consecutive steps, as many as have so many rows in all; at least one."""
    groups: list[list[_LaterRows]] = []
    total = 0
    for step in steps:
        total += len(step.rows)
        if groups and total <= rows:
            groups[-1].append(step)
        else:
            groups.append([step])
            total = len(step.rows)
    return groups


def _split(x: torch.Tensor, counts: list[int]) -> Sequence[torch.Tensor]:
    """The rows of each step; a single row stands for all."""
    return [x] * len(counts) if len(x) == 1 else x.split(counts)


def _select(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows; a single row stands for all (values of masks, which have no position)."""
    return x if len(x) == 1 else x.index_select(0, rows)
