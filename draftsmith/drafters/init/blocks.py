"""A start for the layers of block drafters (`dflash.py`), which know the text before a block only through attention.

Without one, a small store is used up before attention has found the last positions, which tell most about the next token. Here the heads
of every layer start by attending to one position each, a fixed distance back: the block's anchor, and the last positions of the
context. What they read is given (`Values`), and what is made of it is fitted layer by layer: the output projection that, by least
squares, brings the sum of what the layers have said so far nearest to the target's next state.

A head attends to a distance with queries and keys that are the same everywhere up to RoPE, as the first heads of EAGLE-3's start do: a
direction in which all inputs of the layer are about the same, and fast rotary pairs. A part of each query and key stays random, so that
training can find other things to attend to.

Shape legend: T rows of a batch, Q blocks, R rows of a block, N heads, M key/value heads, C head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init.least_squares import factor, flop_of_eigenvectors, solve, unit_rms

if TYPE_CHECKING:
    from draftsmith.drafters.attention import Attention
    from draftsmith.drafters.dflash import DFlashDrafter

ANCHORS_TO_FIT = 16_384
"""Blocks to fit on, every `SPACING`-th position with a token to predict. An eighth of them, with outputs fitted to what they happen to
hold, cost a quarter of the first draft tokens that were right (docs/log.md)."""
SPACING = 2
ANCHORS_TO_COMPARE = 2048
"""Blocks among which a direction is sought that all inputs have in common."""
_DISTANCES = 3  # different distances of the heads of a group
_FAST = 0.03  # radians per position, as in EAGLE-3's start
_LEAD = 6.0  # how much the score of a head's position exceeds those beside it, in logits
_STRENGTH = 6.0  # of the constant part of a query or key before its norm; the random part's numbers are about 0.6 each
_LATER_ROWS = 0.3  # weight of a row in a fit relative to the one before: about as often as it decides on anything


@torch.no_grad()
def start_layers(
    drafter: DFlashDrafter, batches: Iterable[Batch], values: list[torch.Tensor], *, centered: bool
) -> None:
    """Set the attention of every layer; their outputs are 0 before.

    Args:
        drafter: with everything else initialized.
        batches: see `Drafter.init_from_target`.
        values: for each layer [at most M * C, H], the first rows of its value projection. What a layer without any reads stays random.
        centered: see `unit_rms`.
    """
    with _without_mlps(drafter):
        for index, (layer, rows) in enumerate(zip(drafter.decoder_layers(), values, strict=True)):
            attention = layer.self_attn
            attention.v_proj.weight[: len(rows)] = rows
            constant = _constant(drafter, attention, batches)
            # The anchor is one position before a block's first mask, or where the first draft token is predicted from; the context ends before it.
            first = drafter.config.known_rows + min(index, 1)
            _attend_to_distances(attention, constant, drafter.inverse_frequencies(), first=first)
            attention.o_proj.weight.copy_(_fitted_output(drafter, attention, batches, centered=centered))


@torch.no_grad()
def fit_outputs_again(drafter: DFlashDrafter, batches: Iterable[Batch], *, centered: bool) -> None:
    """Fit the output projections of all layers once more, to what `DFlashDrafter.said_by_tokens` leaves to be said."""
    attentions = [layer.self_attn for layer in drafter.decoder_layers()]
    for attention in attentions:
        attention.o_proj.weight.zero_()
    with _without_mlps(drafter):
        for attention in attentions:
            attention.o_proj.weight.copy_(_fitted_output(drafter, attention, batches, centered=centered))


@torch.no_grad()
def fit_tokens(
    drafter: DFlashDrafter, batches: Iterable[Batch], *, rank: int, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Least squares of what blocks lack after the start of their layers, at draft tokens after the first, on the token before.

    Returns A [H, rank] and B [rank, H], so that (normed embedding) @ A @ B is nearest to the target's state less the block's; and the mean
    RMS of the blocks' states, which the final norm makes 1.
    """
    steps, hidden = drafter.config.max_draft_tokens, drafter.config.hidden_size
    gram = drafter.embedding.new_zeros(hidden, hidden)
    cross, size, count = gram.clone(), 0.0, 0
    for batch, rows in positions_of_blocks(batches, ANCHORS_TO_FIT):
        with _inputs_of(drafter.norm) as states, _without_mlps(drafter):
            drafter.block(batch, rows, steps)
        x, wanted, weights = _left_to_say(drafter, batch, rows, states[0], centered=centered)
        weights = weights.unflatten(0, (len(rows), -1)).clone()
        weights[:, 0] = 0  # the block itself has read the token before its first draft token
        weights = weights.flatten(0, 1)
        gram.addmm_(x.T, x * weights)
        cross.addmm_(x.T, wanted * weights)
        size += float(states[0].pow(2).mean(-1).sqrt().sum())
        count += len(states[0])
    full = solve(factor(gram.clone()), cross)
    kept = torch.linalg.eigh(full.T @ (gram @ full)).eigenvectors[:, -rank:]
    return full @ kept, kept.T, size / max(count, 1)


def flop_of_start(
    fitting: float, comparing: float, *, hidden: int, mixed: int, layers: int, rows: int, compared: int
) -> float:
    """FLOP of `start_layers`, given those of one pass of the drafter over the blocks that it is fitted on, of `rows` draft tokens in all,
    and over those that are compared, of `compared` rows in all."""
    of_fits = 2.0 * compared * hidden**2 + 2.0 * rows * mixed * (mixed + hidden)
    return layers * (fitting + comparing + of_fits + hidden**3 / 3 + mixed**3 / 3 + 2.0 * mixed**2 * hidden)


def flop_of_fit_tokens(drafter_flop: float, *, hidden: int, mixed: int, layers: int, rows: int, rank: int) -> float:
    """FLOP of `fit_tokens` and `fit_outputs_again`; see `flop_of_start`."""
    again = drafter_flop + 2.0 * rows * (mixed * (mixed + hidden) + hidden**2)
    again += mixed**3 / 3 + 2.0 * mixed**2 * hidden
    fit = drafter_flop + 4.0 * rows * hidden**2 + 19.0 / 3 * hidden**3 + flop_of_eigenvectors(hidden)
    return layers * again + fit + 4.0 * hidden**2 * rank


def positions_of_blocks(batches: Iterable[Batch], most: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Each batch with some of its rows to draft from, about `most` in all."""
    count = 0
    for batch in batches:
        rows = (batch.loss_weights[:-1, 0] > 0).nonzero()[:, 0][::SPACING]
        if len(rows):
            yield batch, rows
        count += len(rows)
        if count >= most:
            break


@contextmanager
def _without_mlps(drafter: DFlashDrafter) -> Iterator[None]:
    """Leave out the MLPs, three quarters of a block's products, while they have no output."""
    layers = drafter.decoder_layers()
    for layer in layers:
        layer.mlp.forward = torch.zeros_like
    try:
        yield
    finally:
        for layer in layers:
            del layer.mlp.forward


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """What the module is called with, call by call."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()


def _constant(drafter: DFlashDrafter, attention: Attention, batches: Iterable[Batch]) -> torch.Tensor:
    """A direction [H] in which what a layer reads, of the context and of blocks, is nearly 1 everywhere."""
    steps = drafter.config.max_draft_tokens
    rows_of_block = steps + drafter.config.known_rows
    gram = attention.k_proj.weight.new_zeros(drafter.config.hidden_size, drafter.config.hidden_size)
    total = gram.new_zeros(len(gram))
    for batch, rows in positions_of_blocks(batches, ANCHORS_TO_COMPARE):
        with _inputs_of(attention.k_proj) as seen:
            drafter.block(batch, rows, steps)
        context, of_blocks = seen
        by_row = of_blocks.unflatten(0, (-1, rows_of_block))
        for x, weight in (
            (context, 1.0),
            (by_row[:, 0], 1.0),
            (by_row[:, 1:].flatten(0, 1), 1 / max(rows_of_block - 1, 1)),
        ):
            gram.addmm_(x.T, x, alpha=weight)
            total += x.sum(0) * weight
    return solve(factor(gram), total[:, None])[:, 0]


def _attend_to_distances(
    attention: Attention, constant: torch.Tensor, frequencies: torch.Tensor, *, first: int
) -> None:
    """Have the heads of each group attend to the positions `first`, `first` + 1, ... back."""
    fast = (frequencies > _FAST).nonzero()[:, 0]
    if not len(fast):
        return
    queries = attention.q_proj.weight.unflatten(0, (attention.heads, attention.head_dim))  # [N, C, H]
    keys = attention.k_proj.weight.unflatten(0, (attention.kv_heads, attention.head_dim))
    group = attention.heads // attention.kv_heads
    heads = torch.arange(attention.heads, device=constant.device)
    distances = first + (heads % group if group > 1 else heads) % _DISTANCES
    for pair in fast.tolist():
        other = pair + len(frequencies)
        angles = distances * frequencies[pair]
        # A query turned back by its distance: its own position, and RoPE, turn it to where the key at that distance is.
        queries[:, pair] = _STRENGTH * angles.cos()[:, None] * constant
        queries[:, other] = -_STRENGTH * angles.sin()[:, None] * constant
        keys[:, pair], keys[:, other] = _STRENGTH * constant, 0
    # The norms make the constant parts C / len(fast) in square for each pair, so with weights 1 a pair has this score, times the cosine.
    score = attention.head_dim**0.5 / len(fast)
    one_away = score * (1 - frequencies[fast].cos()).sum()
    for norm in (attention.q_norm, attention.k_norm):
        assert norm is not None
        norm.weight.fill_((_LEAD / one_away).sqrt())


def _fitted_output(
    drafter: DFlashDrafter, attention: Attention, batches: Iterable[Batch], *, centered: bool
) -> torch.Tensor:
    """The output projection [H, N * C] of a layer without output so far, and without layers after it that have some."""
    steps, mixed_size = drafter.config.max_draft_tokens, attention.o_proj.in_features
    gram = attention.o_proj.weight.new_zeros(mixed_size, mixed_size)
    cross = gram.new_zeros(mixed_size, drafter.config.hidden_size)
    for batch, rows in positions_of_blocks(batches, ANCHORS_TO_FIT):
        with _inputs_of(attention.o_proj) as mixed, _inputs_of(drafter.norm) as states:
            drafter.block(batch, rows, steps)
        x = mixed[0].unflatten(0, (len(rows), -1))[:, -steps:].flatten(0, 1)
        _, wanted, weights = _left_to_say(drafter, batch, rows, states[0], centered=centered)
        gram.addmm_(x.T, x * weights)
        cross.addmm_(x.T, wanted * weights)
    return solve(factor(gram), cross).T


def _left_to_say(
    drafter: DFlashDrafter, batch: Batch, rows: torch.Tensor, states: torch.Tensor, *, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every draft token of some blocks: the normed embedding of the token before it, what is to be added to the block's `states` for
    the target's state, and its weight in a fit; [Q * (R - 1), H], the same, and [Q * (R - 1), 1]."""
    assert batch.last_states is not None
    steps = len(states) // len(rows)
    before = unit_rms(F.embedding(batch.next_tokens[rows, :steps].flatten(), drafter.embedding))
    teachers = (rows[:, None] + 1 + torch.arange(steps, device=rows.device)).clamp(max=len(batch.positions) - 1)
    wanted = unit_rms(batch.last_states[teachers.flatten()], centered=centered) - states
    if (said := drafter.said_by_tokens(before)) is not None:
        wanted = wanted - said
    by_row = _LATER_ROWS ** torch.arange(steps, device=rows.device)
    return before, wanted, ((batch.loss_weights[rows] > 0) * by_row).flatten()[:, None]
