"""A good start: a drafter whose vocabulary comes from the store and whose weights come from the target."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.recipe import Eagle3Options
from draftsmith.target import TargetInfo, TargetTensors

_RIDGE = 3e-3
"""Ridge of the least squares, relative to the mean diagonal."""
_FAST = 0.03
"""Rotary pairs that turn by more than this many radians a position. The fastest tell neighbours apart; the slower ones
what is hundreds of positions away, where the fast ones happen to meet again: with pairs above 0.3 alone, a row 2,000
positions into a text of SmolLM2's frequencies gave itself 0.56 of its attention, with these 0.998."""
_OWN_POSITION_LEAD = 6.0
"""By how much a head's score of its own position exceeds that of the one before, in logits."""


def choose_draft_vocabulary(counts: torch.Tensor, size: int | None) -> torch.Tensor:
    """The most frequent tokens of the training responses.

    Args:
        counts: int64 [vocab]; how often each token occurs.
        size: how many to keep; all when None or larger than the vocabulary.

    Returns:
        int64 [V], ascending target ids. Tokens that never occur fill up by lowest id, which byte-pair
        vocabularies give to the pieces merged first, the common ones.
    """
    size = min(size or len(counts), len(counts))
    order = torch.sort(counts, descending=True, stable=True).indices  # stable: ties and zeros by lowest id
    return order[:size].sort().values


def eagle3_config(
    options: Eagle3Options, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
) -> Eagle3Config:
    """The drafter's shape: the target's decoder layer, with what the recipe sets."""
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


@torch.no_grad()
def start_from_target(
    drafter: Eagle3Drafter,
    tensors: TargetTensors,
    batches: Iterable[tuple[Batch, torch.Tensor]],
    *,
    max_rows: int = 65_536,
) -> None:
    """Initialise the drafter in place so that, untrained, it is the best linear drafter of its shape.

    The head and the final norm are the target's own, so what the drafter has to produce at position p is the
    target's last state one position on, z_{p+1} (up to scale, which the norm takes away). Least squares on the store
    gives the best linear guess from what it reads there, the states h_p and the token's embedding e_{p+1}:

        z_{p+1} ~ W_h h_p + W_e e_{p+1}

    `fc` takes W_h, and one attention head of each key/value group takes its part of W_e, whose rank is cut to what
    the value projections hold (reduced-rank regression: Izenman 1975). Those heads must look at their own position
    only; see `_look_at_own_position`. Everything else starts at zero output, so training departs from this guess.

    Args:
        drafter: to be initialised.
        tensors: the target's.
        batches: packed rows of the store with the target's last states [T, H], as for the loss; rows that count at
            step 0 are used.
        max_rows: rows to fit on. Each costs (n + 1)^2 H^2 products; on small stores every row still helps.
    """
    config = drafter.config
    drafter.lm_head.weight.copy_(tensors.lm_head[drafter.draft_token_ids])
    drafter.norm.weight.copy_(tensors.final_norm_weight)
    for layer in drafter.decoder_layers():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    reads, wanted = _regression_rows(drafter, batches, max_rows)
    rank = min(config.num_key_value_heads * config.head_dim, config.hidden_size)
    from_states, to_values, from_values = _reduced_rank_fit(reads, wanted, hidden=config.hidden_size, rank=rank)
    drafter.fc.weight.copy_(from_states.T)
    attention = drafter.decoder_layers()[0].self_attn
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, : config.hidden_size] = to_values.T
    group = config.num_attention_heads // config.num_key_value_heads
    for first in range(0, rank, config.head_dim):
        head = first // config.head_dim * group  # the group's first head
        columns = from_values[first : first + config.head_dim].T
        attention.o_proj.weight[:, head * config.head_dim : head * config.head_dim + columns.shape[1]] = columns
    fused = reads[:, : -config.hidden_size] @ from_states
    _look_at_own_position(
        drafter, torch.cat([fused, fused + reads[:, -config.hidden_size :] @ to_values @ from_values])
    )


def _regression_rows(
    drafter: Eagle3Drafter, batches: Iterable[tuple[Batch, torch.Tensor]], max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the drafter reads, [rows, n*H + H] (fused states, then the normed embedding), and what it should say [rows, H]."""
    reads, wanted, count = [], [], 0
    for batch, last_states in batches:
        # Row p is paired with the last state of row p + 1, which is in the batch where a token is predicted from p.
        rows = (batch.counts[:-1, 0] > 0).nonzero()[:, 0]
        states = drafter.normed_states(batch.hidden_states[rows])
        embeds = drafter.decoder_layers()[0].input_layernorm(F.embedding(batch.following[rows, 0], drafter.embedding))
        reads.append(torch.cat([states, embeds], dim=1))
        wanted.append(_normed(last_states[rows + 1]))
        count += len(rows)
        if count >= max_rows:
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
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
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
    normed = _normed(states)
    gram = normed.T @ normed
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    constant = torch.linalg.solve(gram, normed.sum(0))  # normed @ constant ~ 1
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


def _normed(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
