"""EAGLE-3 (Li et al., arXiv 2503.01840): fuse states of several layers, draft a chain with one decoder layer.

Alignment. At position p the drafter takes the target's states h_p and the token x_{p+1}, and predicts x_{p+2};
RoPE position p. At chain step k it takes its own output of step k-1 instead of h_p, the token x_{p+1+k} and RoPE
position p+k, and predicts x_{p+2+k}. It attends to the step-0 keys of positions <= p (in serving: what the cache
holds) and to its own chain's keys of steps 1..k (in serving: what it just wrote behind them).

Mathematics of a step, for fused state f and token embedding e:

    x = [input_layernorm(e), hidden_norm(f)]          2H wide, read by q, k and v of layer 0
    r = f + o(attention(q(x), k(x), v(x)))            (norm_before_residual: hidden_norm(f) + ...)
    y = r + mlp(post_attention_layernorm(r))          y is the next step's state (norm_output: norm(y))
    logits = lm_head(norm(y))                         over the draft vocabulary

and at step 0  f = fc([fc_norm_1(h^1), ..., fc_norm_n(h^n)]).

Names and shapes of the tensors are those of published checkpoints and of vLLM's `llama_eagle3.py`.

Shape legend: T packed rows, Q rows that are predicted from (queries), D documents, L rows of the longest document,
N heads, M key/value heads, C head size, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.linear import RIDGE, ROWS_TO_FIT, unit_rms
from draftsmith.recipe import Eagle3Options
from draftsmith.target import TargetInfo, TargetTensors

_FAST = 0.03
"""Rotary pairs that turn by more than this many radians a position. The fastest tell neighbours apart; the slower ones
what is hundreds of positions away, where the fast ones happen to meet again: with pairs above 0.3 alone, a row 2,000
positions into a text of SmolLM2's frequencies gave itself 0.56 of its attention, with these 0.998."""
_OWN_POSITION_LEAD = 6.0
"""By how much a head's score of its own position exceeds that of the one before, in logits."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """See `DrafterConfig`; `layer_ids` are the fused states."""

    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool

    def llama(self) -> LlamaConfig:
        """The decoder layer as a Llama config: what transformers' parts and the served checkpoint are built from."""
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


_KeysValues = tuple[torch.Tensor, torch.Tensor]


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config, input_size: int) -> None:
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
    self_attn: _Attention
    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm
    """Layer 0 only."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        if index == 0:
            self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = _Attention(config, 2 * hidden if index == 0 else hidden)
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


class Eagle3Drafter(Drafter):
    """The drafter as it is trained. The target's embedding is shared.

    Args:
        config: shapes.
        embedding: float [vocab, H], the target's.
        draft_token_ids: int64 [V] ascending: target id of each draft token.
    """

    config_class: ClassVar = Eagle3Config
    vllm_method: ClassVar = "eagle3"
    config: Eagle3Config
    embedding: torch.Tensor
    fc: nn.Linear
    lm_head: nn.Linear

    def __init__(self, config: Eagle3Config, embedding: torch.Tensor, draft_token_ids: torch.Tensor) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps) for _ in config.layer_ids) if config.fc_norm else None
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config.llama())
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    @staticmethod
    def layer_ids(options: Eagle3Options, saved: tuple[int, ...], last: int) -> tuple[int, ...]:
        return options.layer_ids or saved

    @classmethod
    def make_config(
        cls, options: Eagle3Options, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
    ) -> Eagle3Config:
        """The target's decoder layer, with what the recipe sets."""
        text = target.config
        heads = text.num_attention_heads
        return Eagle3Config(
            layer_ids=layer_ids,
            hidden_size=text.hidden_size,
            intermediate_size=options.intermediate_size or text.intermediate_size,
            num_layers=options.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            hidden_act="silu",
            rms_norm_eps=text.rms_norm_eps,
            rope_parameters=dict(text.rope_parameters),
            max_position_embeddings=text.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=options.norm_before_residual,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
        )

    @classmethod
    def make(cls, config: Eagle3Config, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        return cls(config, tensors.embedding.float(), draft_token_ids)

    @torch.no_grad()
    def start(self, tensors: TargetTensors, batches: Iterable[tuple[Batch, torch.Tensor]]) -> None:
        """Initialise the drafter in place so that, untrained, it is the best linear drafter of its shape.

        The head and the final norm are the target's own, so what the drafter has to produce at position p is the
        target's last state one position on, z_{p+1} (up to scale, which the norm takes away). Least squares on the store
        gives the best linear guess from what it reads there, the states h_p and the token's embedding e_{p+1}:

            z_{p+1} ~ W_h h_p + W_e e_{p+1}

        `fc` takes W_h, and one attention head of each key/value group takes its part of W_e, whose rank is cut to what
        the value projections hold (reduced-rank regression: Izenman 1975). Those heads must look at their own position
        only; see `_look_at_own_position`. Everything else starts at zero output, so training departs from this guess.
        """
        config = self.config
        self.lm_head.weight.copy_(tensors.lm_head[self.draft_token_ids])
        self.norm.weight.copy_(tensors.final_norm_weight)
        for layer in self.decoder_layers():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

        reads, wanted = _regression_rows(self, batches)
        rank = min(config.num_key_value_heads * config.head_dim, config.hidden_size)
        from_states, to_values, from_values = _reduced_rank_fit(reads, wanted, hidden=config.hidden_size, rank=rank)
        self.fc.weight.copy_(from_states.T)
        attention = self.decoder_layers()[0].self_attn
        attention.v_proj.weight.zero_()
        attention.v_proj.weight[:rank, : config.hidden_size] = to_values.T
        group = config.num_attention_heads // config.num_key_value_heads
        for first in range(0, rank, config.head_dim):
            head = first // config.head_dim * group  # the group's first head
            columns = from_values[first : first + config.head_dim].T
            attention.o_proj.weight[:, head * config.head_dim : head * config.head_dim + columns.shape[1]] = columns
        fused = reads[:, : -config.hidden_size] @ from_states
        _look_at_own_position(
            self, torch.cat([fused, fused + reads[:, -config.hidden_size :] @ to_values @ from_values])
        )

    def head_parameters(self) -> list[nn.Parameter]:
        return [*self.lm_head.parameters()]

    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers`, typed."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def normed_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `fc` reads: [T, n, H] to [T, n * H]."""
        if self.fc_norm is not None:
            hidden_states = torch.stack([norm(hidden_states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        return hidden_states.flatten(1)

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """States of the config's layer ids [T, n, H] to the fused state [T, H]."""
        return self.fc(self.normed_states(hidden_states))

    def chain(self, batch: Batch, *, steps: int, own_guesses: bool = False) -> Iterator[ChainStep]:
        predicted = _Grid(batch, batch.counts[:, :steps].sum(1).nonzero()[:, 0])
        # Only rows that are predicted from run through the last layer; the others are there to be attended to.
        everything = _Grid(batch, torch.arange(len(batch.positions), device=predicted.queries.device))
        queries = predicted.queries
        state, tokens, positions = self.fuse(batch.hidden_states), batch.following[:, 0], batch.positions
        context: list[_KeysValues] = []  # per layer: step-0 keys and values of all rows, padded
        own: list[list[_KeysValues]] = [[] for _ in self.layers]  # per layer: one pair per later step, packed
        for k in range(steps):
            rope = self._rope(positions, state)
            embeds = F.embedding(tokens, self.embedding)
            for index, layer in enumerate(self.decoder_layers()):
                x, residual = self._inputs(layer, index, embeds, state)
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
            normed = self.norm(state)
            yield ChainStep(normed, self.lm_head.weight, batch.counts[queries, k])
            if self.config.norm_output:
                state = normed
            positions = batch.positions[queries] + k + 1
            if own_guesses:
                tokens = self.draft_token_ids[self.lm_head(normed).argmax(-1)]
            else:
                tokens = batch.following[queries, k + 1]

    def _inputs(
        self, layer: DecoderLayer, index: int, embeds: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's q, k and v read, and its residual."""
        if index > 0:
            return layer.input_layernorm(state), state
        normed = layer.hidden_norm(state)
        residual = normed if self.config.norm_before_residual else state
        return torch.cat([layer.input_layernorm(embeds), normed], dim=-1), residual

    def inverse_frequencies(self) -> torch.Tensor:
        """[C / 2]: radians that each rotary pair turns per position."""
        return torch.as_tensor(self._rotary.inv_freq)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(like, positions[None])
        return cos[0], sin[0]

    @staticmethod
    def shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(config.layer_ids) * hidden),
            "norm.weight": (hidden,),
            "lm_head.weight": (config.draft_vocab_size, hidden),
        }
        if config.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(config.layer_ids))}
        for i in range(config.num_layers):
            read = 2 * hidden if i == 0 else hidden
            shapes |= {
                f"layers.{i}.input_layernorm.weight": (hidden,),
                f"layers.{i}.post_attention_layernorm.weight": (hidden,),
                f"layers.{i}.self_attn.q_proj.weight": (queries, read),
                f"layers.{i}.self_attn.k_proj.weight": (keys, read),
                f"layers.{i}.self_attn.v_proj.weight": (keys, read),
                f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
                f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
                f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
                f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            }
        return shapes | {"layers.0.hidden_norm.weight": (hidden,)}

    @staticmethod
    def to_vllm(
        config: Eagle3Config, tensors: dict[str, torch.Tensor], draft_token_ids: torch.Tensor
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """For vLLM's `Eagle3LlamaForCausalLM` (vllm/model_executor/models/llama_eagle3.py).

        The module already uses vLLM's tensor names. `d2t` holds offsets, target id = draft id + d2t[draft id], and is
        left out with a full vocabulary, as vLLM expects; so is the embedding, which vLLM shares from the target.
        """
        if config.draft_vocab_size != config.vocab_size:
            in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
            in_draft[draft_token_ids] = True
            offsets = draft_token_ids - torch.arange(len(draft_token_ids))
            tensors = tensors | {"d2t": offsets, "t2d": in_draft}
        llama = config.llama().to_dict()
        keep = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size",
        )  # fmt: skip
        json_config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: llama[key] for key in keep},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "fc_norm": config.fc_norm,
            "num_aux_hidden_states": len(config.layer_ids),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.layer_ids)},
            "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
        }
        return json_config, tensors


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE on [rows, heads, C]."""
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


def _regression_rows(
    drafter: Eagle3Drafter, batches: Iterable[tuple[Batch, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the drafter reads, [rows, n*H + H] (fused states, then the normed embedding), and what it should say [rows, H]."""
    reads, wanted, count = [], [], 0
    for batch, last_states in batches:
        # Row p is paired with the last state of row p + 1, which is in the batch where a token is predicted from p.
        rows = (batch.counts[:-1, 0] > 0).nonzero()[:, 0]
        states = drafter.normed_states(batch.hidden_states[rows])
        embeds = drafter.decoder_layers()[0].input_layernorm(F.embedding(batch.following[rows, 0], drafter.embedding))
        reads.append(torch.cat([states, embeds], dim=1))
        wanted.append(unit_rms(last_states[rows + 1]))
        count += len(rows)
        if count >= ROWS_TO_FIT:
            break
    return torch.cat(reads), torch.cat(wanted)


def _reduced_rank_fit(
    reads: torch.Tensor, wanted: torch.Tensor, *, hidden: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ridge regression of `wanted` [rows, H] on `reads`, the last `hidden` columns of which go through `rank` values.

    Returns:
        A [n*H, H], B [H, rank], C [rank, H] with wanted ~ reads[:, :-hidden] @ A + reads[:, -hidden:] @ B @ C.
    """
    gram, cross = reads.T @ reads, reads.T @ wanted
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    full = torch.linalg.solve(gram, cross)
    split = len(gram) - hidden
    states, mixed, embeds = gram[:split, :split], gram[:split, split:], gram[split:, split:]
    # What embeddings add beyond the states has this covariance; keep the directions in which it says most.
    beyond = embeds - mixed.T @ torch.linalg.solve(states, mixed)
    says = torch.linalg.cholesky(beyond).T @ full[split:]
    kept = torch.linalg.svd(says).Vh[:rank]
    to_values = full[split:] @ kept.T
    from_states = torch.linalg.solve(states, cross[:split] - mixed @ to_values @ kept)
    return from_states, to_values, kept


def _look_at_own_position(drafter: Eagle3Drafter, states: torch.Tensor) -> None:
    """Make the first head of every key/value group attend to its own position.

    Queries and keys that are the same constant leave only RoPE: the score at distance d is the sum over rotary pairs
    of cos(d * frequency), largest at d = 0. A constant is read off the states themselves: some direction of the
    normed state is nearly the same everywhere (it is found by least squares). Only fast pairs are used; slow ones
    do not tell neighbours apart.

    Args:
        drafter: its q and k projections of layer 0 are set.
        states: [rows, H], samples of what `hidden_norm` will be given.
    """
    config = drafter.config
    attention, hidden = drafter.decoder_layers()[0].self_attn, config.hidden_size
    unit = unit_rms(states)
    gram = unit.T @ unit
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    constant = torch.linalg.solve(gram, unit.sum(0))  # unit @ constant ~ 1
    frequencies = drafter.inverse_frequencies()
    fast = (frequencies > _FAST).nonzero()[:, 0]
    one_away = (1 - frequencies[fast].cos()).sum()
    scale = (_OWN_POSITION_LEAD / one_away * config.head_dim**0.5).sqrt()
    q = attention.q_proj.weight.unflatten(0, (config.num_key_value_heads, -1, config.head_dim))  # [M, G, C, 2H]
    k = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, config.head_dim))  # [M, C, 2H]
    q[:, 0] = 0  # the group's first head reads the constant alone
    for pair in fast.tolist():
        for dimension in (pair, pair + config.head_dim // 2):  # no other head disturbs the pair
            q[:, :, dimension] = 0
            k[:, dimension] = 0
        q[:, 0, pair, hidden:] = scale * constant
        k[:, pair, hidden:] = scale * constant
