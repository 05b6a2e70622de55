"""Drafters that are decoder layers run as a chain: what EAGLE and EAGLE-3 have in common.

At position p the first step reads the target's states h_p and the token x_{p+1}, and predicts x_{p+2}; RoPE position p.
Chain step k reads its own output of step k-1 instead of h_p, the token x_{p+1+k} and RoPE position p+k, and predicts
x_{p+2+k}. It attends to the step-0 keys of positions <= p (in serving: what the cache holds) and to its own chain's keys
of steps 1..k (in serving: what it just wrote behind them).

Shape legend: T packed rows, Q rows that are predicted from (queries), N heads, M key/value heads, G = N / M, C head size,
H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.layout import Entry, Rope
from draftsmith.drafters.norm import RMSNorm
from draftsmith.target.info import TargetInfo

if TYPE_CHECKING:  # imported where it is used: that takes seconds, and checking a recipe imports the kinds
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DrafterConfig):
    """See `DrafterConfig`; the layers' shape."""

    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    attention_bias: bool = False
    """Queries, keys and values have a bias, as in Qwen2's layers."""

    def llama(self) -> LlamaConfig:
        """The decoder layer as a Llama config: what transformers' parts and the served checkpoint are built from."""
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

    def layer_shapes(self, index: int, *, reads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of a layer's tensors, norms on its way in excepted; `reads` is the width that attention reads."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        biases: dict[str, tuple[int, ...]] = {"q_proj": (queries,), "k_proj": (keys,), "v_proj": (keys,)}
        return {
            f"layers.{index}.self_attn.{name}.bias": shape for name, shape in biases.items() if self.attention_bias
        } | {
            f"layers.{index}.post_attention_layernorm.weight": (hidden,),
            f"layers.{index}.self_attn.q_proj.weight": (queries, reads),
            f"layers.{index}.self_attn.k_proj.weight": (keys, reads),
            f"layers.{index}.self_attn.v_proj.weight": (keys, reads),
            f"layers.{index}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{index}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.down_proj.weight": (hidden, inner),
        }

    def layer_matmul_counts(self, steps: int) -> dict[str, tuple[int, int]]:
        """`Drafter.passes` of the layers: rows without a prediction are attended to, and leave the last layer after that."""
        passes = {}
        for index in range(self.num_layers):
            for name, shape in self.layer_shapes(index, reads=0).items():
                attended_to = index < self.num_layers - 1 or ".k_proj." in name or ".v_proj." in name
                if len(shape) == 2:
                    passes[name] = (int(attended_to), steps)
        return passes


def layer_fields(prefix: str = "", *, old_rope: bool = False) -> tuple[Entry | Rope, ...]:
    """Where Llama configs keep `DecoderConfig`'s fields, `layer_ids` and the draft vocabulary excepted."""
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
"""Fields of a Llama config that change nothing of what its layers compute."""
LLAMA_FIXED = {"mlp_bias": False, "use_sliding_window": False, "sliding_window": None, "layer_types": None}
"""What would change it, and is not in our layers."""


def rotary_embedding(config: DecoderConfig) -> LlamaRotaryEmbedding:
    """Cosines and sines of positions, with the scaling that the target's config asks for."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config.llama())


def shape_of_target(target: TargetInfo) -> dict[str, Any]:
    """`DecoderConfig`'s fields as they are in the target's own layers."""
    text = target.config
    heads = text.num_attention_heads
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": text.rms_norm_eps,
        "rope_parameters": dict(text.rope_parameters),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": target.vocab_size,
    }


_KeysValues = tuple[torch.Tensor, torch.Tensor]


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def queries(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[Q, N, C]"""
        return _rotate(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)), rope)

    def keys_values(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, M, C] each"""
        keys = _rotate(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)), rope)
        return keys, self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))


class DecoderLayer(nn.Module):
    """A Llama layer's parts. Layer 0 of a drafter reads something of its own, and has norms of its own or none."""

    self_attn: _Attention
    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm

    def __init__(
        self, config: DecoderConfig, *, reads: int, input_norm: bool = True, hidden_norm: bool = False
    ) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        hidden, eps = config.hidden_size, config.rms_norm_eps
        if input_norm:
            self.input_layernorm = RMSNorm(hidden, eps)
        if hidden_norm:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(config, reads)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config.llama())


_QUERIES_IN_BLOCK = 128
"""A block of a document's queries meets the keys up to its last query: shorter blocks skip more of what none may see."""
_SCORES_IN_TILE = 1 << 21
"""Scores that are computed at once, where blocks are small enough: 8 MiB in float32."""
_SCORES_KEPT = 1 << 24
"""Scores that one attention keeps for the backward pass; where there are more, they are computed again."""
_AREA_OVER_NEEDED = 1.1
"""Blocks computed together may be padded by a tenth of their scores."""


@dataclass
class _Block:
    """Consecutive queries of a document with the keys that they see, as half-open ranges."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int

    @property
    def queries(self) -> int:
        return self.end_query - self.first_query

    @property
    def keys(self) -> int:
        return self.end_key - self.first_key


@dataclass
class _Tile:
    """S blocks side by side, B queries and E keys each (padded)."""

    queries: torch.Tensor
    """int64 [S * B], among the Q queries."""
    keys: torch.Tensor
    """int64 [S * E], among the T rows."""
    hidden: torch.Tensor
    """bool [S, B, 1, E]: keys that a query does not see."""


class _Tiles:
    """Which rows see which, as tiles that together hold every query once.

    A document of L rows costs no [L, L] tensor, and documents of different lengths little padding.
    """

    def __init__(self, batch: Batch, queries: torch.Tensor, heads: int) -> None:
        self.queries = queries
        rows, lengths = queries.tolist(), torch.bincount(batch.documents).tolist()
        groups = _side_by_side(_blocks(rows, lengths), most_area=_SCORES_IN_TILE // heads)
        self.tiles = [self._tile(group, len(batch.documents)) for group in groups]
        self.recompute = heads * sum(tile.hidden.numel() for tile in self.tiles) > _SCORES_KEPT
        cells = torch.cat([queries[:0], *(tile.queries for tile in self.tiles)])
        # Padding repeats a block's last query. Any of its cells holds the same; which one is written last does not matter.
        self._cell = torch.empty_like(queries).index_copy(0, cells, torch.arange(len(cells), device=cells.device))

    def _tile(self, blocks: list[_Block], rows: int) -> _Tile:
        device = self.queries.device
        ends = [(b.first_query, b.end_query - 1, b.first_key) for b in blocks]
        first_query, last_query, first_key = torch.tensor(ends, device=device)[:, :, None].unbind(1)  # [S, 1] each
        queries = first_query + torch.arange(max(b.queries for b in blocks), device=device)
        queries = queries.minimum(last_query)  # [S, B]
        keys = first_key + torch.arange(max(b.keys for b in blocks), device=device)  # [S, E]
        # A document's rows are in the order of its positions, and what pads its keys comes after all of its queries.
        hidden = keys[:, None] > self.queries[queries][:, :, None]
        return _Tile(queries.flatten(), keys.flatten().clamp(max=rows - 1), hidden[:, :, None])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Each tile's [M, S * B, ...] to [Q, M, ...]"""
        return torch.cat(parts, dim=1).index_select(1, self._cell).transpose(0, 1)


def _blocks(queries: list[int], lengths: list[int]) -> list[_Block]:
    """Cut each document's queries into blocks of about equal size.

    Args:
        queries: rows that are predicted from, ascending.
        lengths: rows of each document.
    """
    blocks = []
    first_key, place = 0, 0
    for length in lengths:
        end_place = bisect_left(queries, first_key + length, lo=place)
        count = math.ceil((end_place - place) / _QUERIES_IN_BLOCK)
        cuts = [place + (end_place - place) * i // count for i in range(count + 1)] if count else []
        blocks += [_Block(start, end, first_key, queries[end - 1] + 1) for start, end in pairwise(cuts)]
        first_key, place = first_key + length, end_place
    return blocks


def _side_by_side(blocks: list[_Block], *, most_area: int) -> list[list[_Block]]:
    """Group blocks of about the same shape; a group's padded area is at most `most_area`, or it is a single block."""
    groups: list[list[_Block]] = []
    needed = 0
    for block in sorted(blocks, key=lambda block: (block.keys, block.queries), reverse=True):
        area = block.queries * block.keys
        if groups:
            together = [*groups[-1], block]
            padded = len(together) * max(b.queries for b in together) * together[0].keys
            if padded <= min(most_area, _AREA_OVER_NEEDED * (needed + area)):
                groups[-1] = together
                needed += area
                continue
        groups.append([block])
        needed = area
    return groups


class DecoderDrafter(Drafter):
    """The chain. A kind says what the layers read and what the head reads.

    Its `__init__` makes `layers` (of `DecoderLayer`), `_rotary`, and the buffers `embedding` (float [vocab, H], the
    target's) and `draft_token_ids`.
    """

    config: DecoderConfig
    embedding: torch.Tensor
    layers: nn.ModuleList
    _rotary: LlamaRotaryEmbedding

    @abstractmethod
    def first_state(self, batch: Batch) -> torch.Tensor:
        """The state that step 0 reads [T, H], of the target's states."""

    @abstractmethod
    def inputs(
        self, layer: DecoderLayer, index: int, embeds: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's q, k and v read, and its residual."""

    @abstractmethod
    def outputs(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads, and what the next step does: of the last layer's output, [Q, H] each."""

    @abstractmethod
    def head(self) -> torch.Tensor:
        """[V, H]"""

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        return {"layer_ids": (target.num_hidden_layers,)}

    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def recompute_modules(self) -> list[nn.Module]:
        return [layer.mlp for layer in self.decoder_layers()]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        heads = self.config.num_attention_heads
        queries = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        # Only rows that are predicted from run through the last layer; the others are there to be attended to.
        predicted = _Tiles(batch, queries, heads)
        everything: _Tiles | None = None
        state, tokens, positions = self.first_state(batch), batch.next_tokens[:, 0], batch.positions
        context: list[_KeysValues] = []  # per layer: step-0 keys and values of all rows, [M, T, C]
        own: list[list[_KeysValues]] = [[] for _ in self.layers]  # per layer: one pair per later step, packed
        for k in range(steps):
            rope = self._rope(positions, state)
            embeds = F.embedding(tokens, self.embedding)
            for index, layer in enumerate(self.decoder_layers()):
                x, residual = self.inputs(layer, index, embeds, state)
                keys_values = layer.self_attn.keys_values(x, rope)
                tiles = predicted
                if k > 0:
                    own[index].append(keys_values)
                else:
                    keys, values = keys_values
                    context.append((keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()))
                    if index < len(self.layers) - 1:
                        tiles = everything = everything or _Tiles(batch, torch.arange(len(x), device=x.device), heads)
                    else:
                        # x[queries] would be the same, with a gradient that is scattered one element at a time.
                        x, residual = x.index_select(0, queries), residual.index_select(0, queries)
                        rope = (rope[0][queries], rope[1][queries])
                mixed = _attend(layer.self_attn.queries(x, rope), context[index], own[index], tiles)
                state = residual + layer.self_attn.o_proj(mixed)
                state = state + layer.mlp(layer.post_attention_layernorm(state))
            read, state = self.outputs(state)
            yield ChainStep(read, self.head(), batch.loss_weights[queries, k])
            positions = batch.positions[queries] + k + 1
            if autoregressive:
                tokens = self.draft_token_ids[F.linear(read, self.head()).argmax(-1)]
            else:
                tokens = batch.next_tokens[queries, k + 1]

    def inverse_frequencies(self) -> torch.Tensor:
        """[C / 2]: radians that each rotary pair turns per position."""
        return torch.as_tensor(self._rotary.inv_freq)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(like, positions[None])
        return cos[0], sin[0]


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE on [rows, heads, C]."""
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = rope
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def _attend(queries: torch.Tensor, context: _KeysValues, own: list[_KeysValues], tiles: _Tiles) -> torch.Tensor:
    """Attention over the document's step-0 keys up to the row's position, and over the row's own chain.

    Args:
        queries: [Q, N, C].
        context: keys and values [M, T, C].
        own: of each later chain step so far, keys and values [Q, M, C]; a row sees only its own.
        tiles: which of the T rows each of the Q sees.

    Returns:
        [Q, N * C]
    """
    if not len(queries):
        return queries.flatten(1)
    kv_heads = context[0].shape[0]
    grouped = queries.unflatten(1, (kv_heads, -1)) / math.sqrt(queries.shape[-1])  # [Q, M, G, C]
    own_scores = [(grouped * keys[:, :, None]).sum(-1) for keys, _ in own]  # [Q, M, G] each
    by_head = grouped.transpose(0, 1).contiguous()
    own_by_head = torch.stack(own_scores, dim=-1).transpose(0, 1).contiguous() if own else None
    arguments = (by_head, own_by_head, *context)
    if tiles.recompute and torch.is_grad_enabled():
        parts = [
            checkpoint(_attend_tile, tile, *arguments, use_reentrant=False, preserve_rng_state=False)
            for tile in tiles.tiles
        ]
    else:
        parts = [_attend_tile(tile, *arguments) for tile in tiles.tiles]
    mixed = tiles.join([mixed for mixed, _ in parts])  # [Q, M, G, C]
    if own:
        own_weights = tiles.join([weights for _, weights in parts])  # [Q, M, G, k]
        mixed = mixed + sum(own_weights[..., j, None] * values[:, :, None] for j, (_, values) in enumerate(own))
    return mixed.flatten(1)


def _attend_tile(
    tile: _Tile, queries: torch.Tensor, own_scores: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tile's share of `_attend`, for the part of the keys that rows have in common.

    Args:
        tile: S blocks of B queries and E keys.
        queries: [M, Q, G, C], scaled.
        own_scores: [M, Q, G, k], or None at the first step.
        keys: [M, T, C].
        values: [M, T, C].

    Returns:
        Mixed values [M, S * B, G, C], and the weights of the own chain [M, S * B, G, k].
    """
    kv_heads, _, group, size = queries.shape
    blocks, rows, _, length = tile.hidden.shape
    q = queries.index_select(1, tile.queries).view(kv_heads * blocks, rows * group, size)
    k = keys.index_select(1, tile.keys).view(kv_heads * blocks, length, size)
    v = values.index_select(1, tile.keys).view(kv_heads * blocks, length, size)
    scores = (q @ k.transpose(1, 2)).view(kv_heads, blocks, rows, group, length).masked_fill(tile.hidden, -torch.inf)
    if own_scores is not None:
        own = own_scores.index_select(1, tile.queries).view(kv_heads, blocks, rows, group, -1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype).flatten(2, 3)
    mixed = weights[..., :length].flatten(0, 1) @ v
    return mixed.view(kv_heads, blocks * rows, group, size), weights[..., length:].reshape(
        kv_heads, blocks * rows, group, -1
    )
