"""A start for block drafters (`dflash.py`), which know the text before a block only through attention.

Without one, a small store is used up before attention has found the last positions, which tell most about the next token. Head and final
norm are the target's own, so the rows of a block should come near the target's next state. Most heads start by attending to one position,
a fixed distance back: the block's anchor, and the last positions of the context. In the second layer the first head of every key/value
group is an induction head instead (see `codes.py` and `induction.py`): it looks for an earlier position whose context resembles the one
that is expected after the anchor, and brings back what the target's state there said of its next token.

`fc` gives the context three parts, which take up orthogonal directions of it:

- what the best linear prediction of the next state from the states h_p and the embedding e_{p+1} of the anchor takes from the states, in the
  directions that the first layer's values read of the anchor's embedding,
- the code of the state, which induction heads look for,
- the target's own last state as far as it follows from the states that are read, the directions that matter most to the head first, for
  the other layers' values.

Layer 0 also has the rows hold the code of the state that is expected, in directions that matter little to the head, where layer 1's queries
find it. What is made of the values is fitted by least squares: first layer by layer, then all output projections together.

A head attends to a distance with queries and keys that are the same everywhere up to RoPE, as the first heads of EAGLE-3's start do: a
direction in which all inputs of the layer are about the same, and fast rotary pairs. A part of each query and key stays random, so that
training can find other things to attend to.

Shape legend: T rows of a batch, Q blocks, R rows of a block, N heads, M key/value heads, C head size, H hidden size, S width of all states
that are read, P components of a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init.block_context import CODE_SCALE, FAST, ContextCodes, fit_context
from draftsmith.drafters.init.codes import slow_pairs
from draftsmith.drafters.init.least_squares import factor, flop_of_eigenvectors, flop_of_solve, solve, unit_rms
from draftsmith.target.tensors import TargetTensors

if TYPE_CHECKING:
    from draftsmith.drafters.attention import Attention
    from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter

_ROWS_AT_ONCE = 4096  # for each of which a block has rows of its own in memory
ANCHORS_TO_FIT = 32_768
"""Blocks to fit on. An eighth of 16,384, with outputs fitted to what they happen to hold, cost a quarter of the first draft tokens that
were right (docs/log.md)."""
ANCHORS_TO_COMPARE = 2048
"""Blocks among which a direction is sought that all inputs have in common."""
_DISTANCES = 3  # different distances of the heads of a group
_LEAD = 6.0  # how much the score of a head's position exceeds those beside it, in logits
_STRENGTH = 6.0  # of the constant part of a query or key before its norm; the random part's numbers are about 0.6 each
_LATER_ROWS = 0.3  # weight of a row in a fit relative to the one before: about as often as it decides on anything
_CODE_STRENGTH = 2.0  # of a code in queries and keys before their norms, which the constant part should decide


@torch.no_grad()
def start(drafter: DFlashDrafter, tensors: TargetTensors, batches: Iterable[Batch]) -> ContextCodes:
    """Set `fc` and the attention of every layer. Everything else is initialized before, outputs of attention and MLPs to 0."""
    codes, values = fit_context(drafter, batches, centered=tensors.centered_norm)
    _start_layers(drafter, batches, codes, values, centered=tensors.centered_norm)
    fit_outputs(drafter, batches, codes, centered=tensors.centered_norm)
    return codes


def _start_layers(
    drafter: DFlashDrafter, batches: Iterable[Batch], codes: ContextCodes, values: list[torch.Tensor], *, centered: bool
) -> None:
    """Set the attention of every layer, one after the other.

    Args:
        values: for each layer [at most M * C, H], the first rows of its value projection. What a layer without any reads stays random.
    """
    with _without_mlps(drafter):
        for index, (layer, rows) in enumerate(zip(drafter.decoder_layers(), values, strict=True)):
            attention = layer.self_attn
            attention.v_proj.weight[: len(rows)] = rows
            constant = _constant(drafter, attention, batches)
            by_codes = index == 1 and len(codes.weights) > 0
            # The anchor is one position before a block's first mask, or where the first draft token is predicted from; the context ends
            # before it, where layers after the first begin: with their first head, or with their second where that is an induction head.
            first = drafter.config.known_rows + (1 if index and not by_codes else 0)
            _attend_to_distances(attention, constant, drafter.inverse_frequencies(), first=first)
            if by_codes:
                size = _size_of_rows(drafter, batches)
                _attend_by_codes(attention, constant, drafter.inverse_frequencies(), codes, size=size)
            held = codes if index == 0 else None
            (fitted,) = _fitted_outputs(drafter, [attention], batches, held, centered=centered)
            attention.o_proj.weight.copy_(fitted)


@torch.no_grad()
def fit_outputs(drafter: DFlashDrafter, batches: Iterable[Batch], codes: ContextCodes, *, centered: bool) -> None:
    """Fit the output projections of all layers together, to what `DFlashDrafter.said_by_tokens` leaves to be said. What layer 0 writes for
    layer 1's queries stays."""
    first, *others = (layer.self_attn for layer in drafter.decoder_layers())
    with _without_mlps(drafter):
        new, *_ = _fitted_outputs(drafter, [first, *others], batches, centered=centered)
        new += codes.spared @ (codes.spared.T @ (first.o_proj.weight - new))
        first.o_proj.weight.copy_(new)
        if others:  # the rest of what is in those directions
            fitted = _fitted_outputs(drafter, others, batches, centered=centered)
            for attention, weight in zip(others, fitted, strict=True):
                attention.o_proj.weight.copy_(weight)


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
        x, wanted, weights = _left_to_say(drafter, batch, rows, states[0], None, centered=centered)
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


@dataclass(frozen=True)
class CostOfPass:
    """Of the drafter's pass over some blocks, without MLPs."""

    flop: float
    blocks: int
    rows_read: int
    """Rows of the store."""


def flop_of_start(config: DFlashConfig, fitting: CostOfPass, comparing: CostOfPass, *, size: int) -> float:
    """FLOP of setting the layers in `start`, given passes over the blocks that they are fitted on and those that are compared."""
    hidden, compared = config.hidden_size, comparing.rows_read + comparing.blocks * config.block_size
    of_layer = comparing.flop + 2.0 * compared * hidden**2 + hidden**3 / 3 + _flop_of_outputs(config, fitting, layers=1)
    codes = 2.0 * fitting.blocks * config.max_draft_tokens * hidden * 6 * size + comparing.flop * bool(size)
    return config.num_layers * of_layer + codes + flop_of_fit_outputs(config, fitting)


def flop_of_fit_outputs(config: DFlashConfig, fitting: CostOfPass) -> float:
    """FLOP of `fit_outputs`."""
    layers = config.num_layers
    return sum(_flop_of_outputs(config, fitting, layers=one) for one in (layers, layers - 1) if one)


def _flop_of_outputs(config: DFlashConfig, fitting: CostOfPass, *, layers: int) -> float:
    """FLOP of fitting the output projections of so many layers together."""
    hidden, mixed = config.hidden_size, layers * config.num_attention_heads * config.head_dim
    rows = fitting.blocks * config.max_draft_tokens
    return fitting.flop + 2.0 * rows * mixed * (mixed + 2 * hidden) + flop_of_solve(mixed, hidden)


def flop_of_fit_tokens(config: DFlashConfig, fitting: CostOfPass, *, rank: int) -> float:
    """FLOP of `fit_tokens`."""
    hidden, rows = config.hidden_size, fitting.blocks * config.max_draft_tokens
    flop = fitting.flop + 4.0 * rows * hidden**2 + 19.0 / 3 * hidden**3 + flop_of_eigenvectors(hidden)
    return flop + 4.0 * hidden**2 * rank


def positions_of_blocks(batches: Iterable[Batch], most: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Each batch with rows to draft from, some at a time, about `most` in all."""
    count = 0
    for batch in batches:
        rows = (batch.loss_weights[:-1, 0] > 0).nonzero()[:, 0]
        for some in rows.split(_ROWS_AT_ONCE) if len(rows) else ():
            yield batch, some
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
        drafted_from = int((batch.loss_weights[:-1, 0] > 0).sum())
        for x, weight in (
            (context, len(rows) / drafted_from),  # it is here once for some rows at a time
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
    fast = (frequencies > FAST).nonzero()[:, 0]
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


def _size_of_rows(drafter: DFlashDrafter, batches: Iterable[Batch]) -> float:
    """Mean RMS of the rows' states that layer 1 reads, while it has no output."""
    total, count = 0.0, 0
    for batch, rows in positions_of_blocks(batches, ANCHORS_TO_COMPARE):
        with _inputs_of(drafter.norm) as states:
            drafter.block(batch, rows, drafter.config.max_draft_tokens)
        total += float(states[0].pow(2).mean(-1).sqrt().sum())
        count += len(states[0])
    return total / max(count, 1)


def _attend_by_codes(
    attention: Attention, constant: torch.Tensor, frequencies: torch.Tensor, codes: ContextCodes, *, size: float
) -> None:
    """Make the first head of every group attend by codes, after `_attend_to_distances`; without groups, every other head.

    The norms of queries and keys divide by what these are made of: keys mostly of the constant part, which the other heads look for, and the
    queries of induction heads of as large a one, in numbers in which keys have nothing. So their lengths are nearly the same everywhere.
    """
    components, pairs = len(codes.weights), slow_pairs(frequencies)[: len(codes.weights) // 2]
    fast = (frequencies > FAST).nonzero()[:, 0].tolist()
    slow_numbers, fast_numbers = ([n for pair in one for n in (pair, pair + len(frequencies))] for one in (pairs, fast))
    idle = [number for number in range(attention.head_dim) if number not in {*slow_numbers, *fast_numbers}]
    queries = attention.q_proj.weight.unflatten(0, (attention.heads, attention.head_dim))  # [N, C, H]
    keys = attention.k_proj.weight.unflatten(0, (attention.kv_heads, attention.head_dim))
    heads = list(range(0, attention.heads, max(attention.heads // attention.kv_heads, 2)))
    scale = _CODE_STRENGTH * codes.weights.sqrt()[:, None]
    keys[:, slow_numbers] = scale * codes.in_context.T
    keys[:, idle] = 0
    queries[:, slow_numbers] = 0
    for head in heads:
        queries[head] = 0
        queries[head, slow_numbers] = scale * size / CODE_SCALE * codes.in_rows.T
        queries[head, idle] = _STRENGTH * (len(fast) / max(len(idle), 1)) ** 0.5 * constant
    of_codes = _CODE_STRENGTH**2 * codes.weights.sum() / components * len(slow_numbers)
    of_constant = len(fast) * _STRENGTH**2
    squares = (of_constant + of_codes) * (of_constant * bool(idle) + of_codes)  # of a key's length times a query's
    # Scores are divided by the root of the head size, and norms make lengths that root.
    weight = squares.sqrt() / (attention.head_dim**0.5 * _CODE_STRENGTH**2)
    for norm in (attention.q_norm, attention.k_norm):
        assert norm is not None
        norm.weight[slow_numbers] = weight.sqrt()


def _fitted_outputs(
    drafter: DFlashDrafter,
    attentions: list[Attention],
    batches: Iterable[Batch],
    codes: ContextCodes | None = None,
    *,
    centered: bool,
) -> list[torch.Tensor]:
    """The output projections of some layers, [H, N * C] each, fitted together, the others' being given.

    Args:
        attentions: of the layers; later layers, if any, have no output yet.
        codes: the rows should hold what is expected of them; None where nothing reads them.
        centered: see `unit_rms`.
    """
    steps = drafter.config.max_draft_tokens
    weights = torch.cat([one.o_proj.weight for one in attentions], dim=1)
    gram = weights.new_zeros(weights.shape[1], weights.shape[1])
    cross = weights.new_zeros(weights.shape[1], weights.shape[0])
    for batch, rows in positions_of_blocks(batches, ANCHORS_TO_FIT):
        with ExitStack() as stack:
            mixed = [stack.enter_context(_inputs_of(one.o_proj)) for one in attentions]
            states = stack.enter_context(_inputs_of(drafter.norm))
            drafter.block(batch, rows, steps)
        x = torch.cat([one[0].unflatten(0, (len(rows), -1))[:, -steps:].flatten(0, 1) for one in mixed], dim=1)
        others = states[0] - x @ weights.T
        _, wanted, by_row = _left_to_say(drafter, batch, rows, others, codes, centered=centered)
        gram.addmm_(x.T, x * by_row)
        cross.addmm_(x.T, wanted * by_row)
    return list(solve(factor(gram), cross).T.split([one.o_proj.in_features for one in attentions], dim=1))


def _left_to_say(
    drafter: DFlashDrafter,
    batch: Batch,
    rows: torch.Tensor,
    states: torch.Tensor,
    codes: ContextCodes | None,
    *,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every draft token of some blocks: the normed embedding of the token before it, what is to be added to the block's `states` for
    the target's state, and its weight in a fit; [Q * (R - 1), H], the same, and [Q * (R - 1), 1].

    With `codes`, the state without what can be spared of it, and with the code of the state that it is."""
    assert batch.last_states is not None
    steps = len(states) // len(rows)
    before = unit_rms(F.embedding(batch.next_tokens[rows, :steps].flatten(), drafter.embedding))
    teachers = (
        (rows[:, None] + 1 + torch.arange(steps, device=rows.device)).clamp(max=len(batch.positions) - 1).flatten()
    )
    wanted = unit_rms(batch.last_states[teachers], centered=centered)
    if codes is not None:
        wanted = codes.with_codes(wanted, batch.hidden_states[teachers, codes.column])
    wanted = wanted - states
    if (said := drafter.said_by_tokens(before)) is not None:
        wanted = wanted - said
    by_row = _LATER_ROWS ** torch.arange(steps, device=rows.device)
    return before, wanted, ((batch.loss_weights[rows] > 0) * by_row).flatten()[:, None]
