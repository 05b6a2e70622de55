"""Drafters that are decoder layers run as a chain: what EAGLE and EAGLE-3 have in common.

At position p the first step reads the target's states h_p and the token x_{p+1}, and predicts x_{p+2}; RoPE position p.
Chain step k reads its own output of step k-1 instead of h_p, the token x_{p+1+k} and RoPE position p+k, and predicts
x_{p+2+k}. It attends to the step-0 keys of positions <= p (in serving: what the cache holds) and to its own chain's keys
of steps 1..k (in serving: what it just wrote behind them).

Shape legend: T packed rows, Q rows that are predicted from (queries), D documents, L rows of the longest document,
N heads, M key/value heads, C head size, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig
from draftsmith.drafters.batch import Batch
from draftsmith.target import TargetInfo

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

    def vllm_fields(self) -> dict[str, Any]:
        """What `config.json` says of the layers."""
        llama = self.llama().to_dict()
        keep = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size",
        )  # fmt: skip
        fixed = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
        return {key: llama[key] for key in keep} | fixed

    def layer_shapes(self, index: int, *, reads: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of a layer's tensors, norms on its way in excepted; `reads` is the width that attention reads."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            f"layers.{index}.post_attention_layernorm.weight": (hidden,),
            f"layers.{index}.self_attn.q_proj.weight": (queries, reads),
            f"layers.{index}.self_attn.k_proj.weight": (keys, reads),
            f"layers.{index}.self_attn.v_proj.weight": (keys, reads),
            f"layers.{index}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{index}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.down_proj.weight": (hidden, inner),
        }

    def layer_passes(self, steps: int) -> dict[str, tuple[int, int]]:
        """`Drafter.passes` of the layers: rows without a prediction are attended to, and leave the last layer after that."""
        passes = {}
        for index in range(self.num_layers):
            for name, shape in self.layer_shapes(index, reads=0).items():
                attended_to = index < self.num_layers - 1 or ".k_proj." in name or ".v_proj." in name
                if len(shape) == 2:
                    passes[name] = (int(attended_to), steps)
        return passes


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
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
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
            self.input_layernorm = nn.RMSNorm(hidden, eps)
        if hidden_norm:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = _Attention(config, reads)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(config.llama())


class _Grid:
    """Which rows see which: documents side by side as a padded [D, L] grid, for attention alone.

    Everything else runs on packed rows, so padding costs no more than attention's own (small) share.
    """

    def __init__(self, batch: Batch, queries: torch.Tensor) -> None:
        documents = int(batch.documents[-1]) + 1
        self.queries = queries
        self._key_shape, self._key_cell = _cells(batch.documents, documents)
        self._query_shape, self._query_cell = _cells(batch.documents[queries], documents)
        positions = self.pad_queries(batch.positions[queries])  # padded cells: position 0, which sees key 0
        keys = torch.arange(self._key_shape[1], device=positions.device)
        self.visible = positions[:, :, None] >= keys  # [D, L_q, L]

    def pad_keys(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] to [D, L, ...]"""
        return _pad(x, self._key_shape, self._key_cell)

    def pad_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[Q, ...] to [D, L_q, ...]"""
        return _pad(x, self._query_shape, self._query_cell)

    def unpad_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[D, L_q, ...] to [Q, ...]"""
        return x.flatten(0, 1)[self._query_cell]


def _cells(documents: torch.Tensor, count: int) -> tuple[tuple[int, int], torch.Tensor]:
    """Shape of the grid that holds these rows, and each row's cell in it, flattened."""
    lengths = torch.bincount(documents, minlength=count)
    first = lengths.cumsum(0) - lengths
    longest = int(lengths.max())
    return (count, longest), documents * longest + torch.arange(len(documents), device=documents.device) - first[
        documents
    ]


def _pad(x: torch.Tensor, shape: tuple[int, int], cell: torch.Tensor) -> torch.Tensor:
    return x.new_zeros((shape[0] * shape[1], *x.shape[1:])).index_copy(0, cell, x).unflatten(0, shape)


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

    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def wide_modules(self) -> list[nn.Module]:
        return [layer.mlp for layer in self.decoder_layers()]

    def chain(self, batch: Batch, *, steps: int, own_guesses: bool = False) -> Iterator[ChainStep]:
        predicted = _Grid(batch, batch.counts[:, :steps].sum(1).nonzero()[:, 0])
        # Only rows that are predicted from run through the last layer; the others are there to be attended to.
        everything = _Grid(batch, torch.arange(len(batch.positions), device=predicted.queries.device))
        queries = predicted.queries
        state, tokens, positions = self.first_state(batch), batch.following[:, 0], batch.positions
        context: list[_KeysValues] = []  # per layer: step-0 keys and values of all rows, padded
        own: list[list[_KeysValues]] = [[] for _ in self.layers]  # per layer: one pair per later step, packed
        for k in range(steps):
            rope = self._rope(positions, state)
            embeds = F.embedding(tokens, self.embedding)
            for index, layer in enumerate(self.decoder_layers()):
                x, residual = self.inputs(layer, index, embeds, state)
                keys_values = layer.self_attn.keys_values(x, rope)
                grid = predicted
                if k > 0:
                    own[index].append(keys_values)
                else:
                    context.append((predicted.pad_keys(keys_values[0]), predicted.pad_keys(keys_values[1])))
                    if index < len(self.layers) - 1:
                        grid = everything
                    else:
                        x, residual, rope = x[queries], residual[queries], (rope[0][queries], rope[1][queries])
                mixed = _attend(layer.self_attn.queries(x, rope), context[index], own[index], grid)
                state = residual + layer.self_attn.o_proj(mixed)
                state = state + layer.mlp(layer.post_attention_layernorm(state))
            read, state = self.outputs(state)
            yield ChainStep(read, self.head(), batch.counts[queries, k])
            positions = batch.positions[queries] + k + 1
            if own_guesses:
                tokens = self.draft_token_ids[F.linear(read, self.head()).argmax(-1)]
            else:
                tokens = batch.following[queries, k + 1]

    def inverse_frequencies(self) -> torch.Tensor:
        """[C / 2]: radians that each rotary pair turns per position."""
        return torch.as_tensor(self._rotary.inv_freq)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(like, positions[None])
        return cos[0], sin[0]


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE on [rows, heads, C]."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, x, *rope, unsqueeze_dim=1)[0]


def _attend(queries: torch.Tensor, context: _KeysValues, own: list[_KeysValues], grid: _Grid) -> torch.Tensor:
    """Attention over the document's step-0 keys up to the row's position, and over the row's own chain.

    Args:
        queries: [Q, N, C].
        context: keys and values [D, L, M, C].
        own: of each later chain step so far, keys and values [Q, M, C]; a row sees only its own.

    Returns:
        [Q, N * C]
    """
    kv_heads = context[0].shape[2]
    grouped = queries.unflatten(1, (kv_heads, -1)) / math.sqrt(queries.shape[-1])  # [Q, M, G, C]
    scores = torch.einsum("dqmgc,dkmc->dmgqk", grid.pad_queries(grouped), context[0])
    scores = scores.masked_fill(~grid.visible[:, None, None], -torch.inf)
    if own:
        own_scores = torch.stack([(grouped * keys[:, :, None]).sum(-1) for keys, _ in own], dim=-1)  # [Q, M, G, k]
        scores = torch.cat([scores, grid.pad_queries(own_scores).permute(0, 2, 3, 1, 4)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    length = context[0].shape[1]
    mixed = grid.unpad_queries(torch.einsum("dmgqk,dkmc->dqmgc", weights[..., :length], context[1]))
    if own:
        own_weights = grid.unpad_queries(weights[..., length:].permute(0, 3, 1, 2, 4))  # [Q, M, G, k]
        mixed = mixed + sum(own_weights[..., j, None] * values[:, :, None] for j, (_, values) in enumerate(own))
    return mixed.flatten(1)
