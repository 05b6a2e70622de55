"""The start of P-EAGLE's later draft tokens: its second layer drafts them from the first one's.

After EAGLE-3's start the output of layer 0 at position p, y_p, is near the target's next last state z_{p+1}, which the head reads
the first draft token from. The slots of the other tokens know nothing but their position. So the heads of layer 1 make them look
at the last real position, and map y_p to the states further on, by the best linear prediction (least squares on the store):

    z_{p+1+d} ~ A_d y_p          of reduced rank, since the values of all heads of a group are the same

Three heads that share their values work together, a, b and c. At real positions all three have the same scores, and their output
projections add up to zero, so that the first draft token stays EAGLE-3's. A slot's head a attends to the last
real position, b to the slots, whose values are zero, and c to the last real position if that is one step away, and otherwise
to the slots. With outputs A for a, D for c and -(A + D) for b, the first slot gets (A + D) y_p and the others A y_p.

Slots are told from real positions by the state that they all read: it is put into a direction that matters little to the head.
Which position is the last real one, RoPE says: with constant queries and keys a score is a function of the distance alone, a sum
of the cosines and sines of its product with each rotary pair's frequency, fitted to fall by several logits per step.

Shape legend: H hidden size, C head size, R rank of the values (C for each unit of three heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init.least_squares import (
    ROWS_AT_ONCE,
    factor,
    flop_of_eigenvectors,
    flop_of_solve,
    rows_until,
    solve,
    unit_rms,
)

if TYPE_CHECKING:
    from draftsmith.drafters.p_eagle import PEagleConfig, PEagleDrafter

ROWS_TO_FIT = 32_768
"""Rows to fit the second layer on."""
_MASK_SIZE = 0.25
"""RMS of the fused state that slots read; a state that the head reads is about one. With less, more of the third draft tokens are right."""
_SLOW = 0.003
"""Radians per position: a rotary pair that turns less tells slots from real positions at any distance."""
_STEP, _TO_SLOTS, _NO_SCORE = 4.0, 8.0, 2.0
"""Logits: how much the last real position leads the one before it; slots what is not near; what is not near may have."""
_RIDGE = 0.3
"""Larger coefficients follow the wanted scores more closely, and a small change of a frequency changes them more."""
_TURNS = 50
_FAR = 2048
"""Distances up to here are fitted."""


@dataclass
class _Sums:
    """Sums over real rows p; x is layer 1's input at p, z the target's last states after its norm without a weight."""

    gram: torch.Tensor  # [H, H]: x x^T
    total: torch.Tensor  # [H]: x
    cross: torch.Tensor  # [H, 2 H]: x [z_{p+2}, z_{p+3}]^T


def units(config: PEagleConfig) -> list[tuple[list[int], list[int]]]:
    """Key/value heads with the same keys and values, and three query heads that read them, of layer 1; [] where there are none."""
    if config.num_layers < 2 or config.num_depths < 3:
        return []
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = heads // kv_heads
    if group >= 3:
        return [([index], [index * group + head for head in range(3)]) for index in range(kv_heads)]
    if group == 1:
        return [([3 * index + head for head in range(3)],) * 2 for index in range(kv_heads // 3)]
    # Two heads a group: two groups make a unit, and one of their four heads is left over.
    return [([2 * index, 2 * index + 1], [4 * index, 4 * index + 1, 4 * index + 2]) for index in range(kv_heads // 2)]


def draft_from_last_position(drafter: PEagleDrafter, batches: Iterable[Batch], *, centered: bool) -> bool:
    """Write layer 1's attention and `mask_hidden`; False, and nothing is written, where the drafter's shape does not allow it.

    Args:
        drafter: after EAGLE-3's start.
        batches: of at least three draft tokens.
        centered: see `unit_rms`.
    """
    of_units = units(drafter.config)
    slow = (drafter.inverse_frequencies() < _SLOW).nonzero()[:, 0]
    if not of_units or not len(slow):
        return False
    hidden = drafter.config.hidden_size
    sums = _sums(drafter, batches, centered)
    if sums is None:
        return False
    direction = _direction_of_slots(drafter)
    _read_the_same(drafter, direction * (_MASK_SIZE * hidden**0.5))
    at_slots = _output_at_slots(drafter, batches)
    slot = unit_rms(at_slots)
    sums.gram.addr_(slot, slot, alpha=float(sums.gram.diagonal().sum()) / hidden)  # as heavy as all real rows
    lower = factor(sums.gram.clone())
    # Linear detectors: x @ real is about 1 at real positions and 0 at slots, x @ masked the other way around.
    real, masked = solve(lower, torch.stack([sums.total, slot], dim=1)).unbind(1)
    masked = masked / slot.dot(masked)
    real = real - masked * slot.dot(real)

    rest = at_slots - direction * direction.dot(at_slots)  # what the direction holds stays: the head sees little of it
    wanted = sums.cross - torch.outer(sums.total, rest.repeat(2))
    full = solve(lower, wanted)  # [H, 2 H]
    rank = len(of_units) * drafter.config.head_dim
    kept = torch.linalg.eigh(full.T @ (sums.gram @ full)).eigenvectors[:, -min(rank, hidden) :]  # [2 H, R]
    to_values = full @ kept
    to_values -= torch.outer(masked, slot @ to_values)  # none at slots
    _write(drafter, of_units, slow, real, masked, to_values, kept)
    return True


def cost_of_start(
    config: PEagleConfig, *, rows: int, answered: int, matmuls: Callable[[int], tuple[float, float]]
) -> tuple[float, int]:
    """FLOP of `draft_from_last_position`, and the rows that it reads.

    Args:
        rows, answered: see `Drafter.init_cost`.
        matmuls: FLOP of the drafter's products in a chain of so many steps, for a row without a prediction and one with.
    """
    hidden, states, vocabulary = config.hidden_size, config.fused_size, config.draft_vocab_size
    rank = config.num_key_value_heads * config.head_dim
    flop, read = 6.0 * min(answered, ROWS_TO_FIT) * hidden**2, 0
    for steps, wanted in ((1, ROWS_TO_FIT), (2, ROWS_AT_ONCE)):
        seen, predicted = rows_until(wanted, rows=rows, answered=answered), min(answered, wanted)
        without, with_one = matmuls(steps)
        flop += without * (seen - predicted) + with_one * predicted
        read += seen
    flop += 2.0 * states * hidden**2 + 4.0 * _TURNS * (states * hidden + hidden**2)  # `_read_the_same`
    flop += 2.0 * vocabulary * hidden**2 + 9 * flop_of_eigenvectors(hidden)  # of the head; of twice the size
    flop += flop_of_solve(hidden, 2 * hidden) + 12.0 * hidden**3 + 4.0 * hidden**2 * rank
    return flop, read


def _direction_of_slots(drafter: PEagleDrafter) -> torch.Tensor:
    """The direction [H] of the state that slots read. It lies among the half of all that matter neither least to the head, where codes of
    induction heads may be, nor most; in it is what layer 0's first heads find their own position by, as far as it goes, so that slots attend
    to themselves too. Otherwise a slot's output would be some mix of the context's, unlike that of other slots."""
    head = drafter.lm_head.weight * drafter.norm.weight
    head = head - head.mean(0)
    hidden = len(head.T)
    middle = torch.linalg.eigh(head.T @ head).eigenvectors[:, hidden // 4 : hidden - hidden // 4]
    # As `Eagle3Drafter.init_from_target` wrote it, in one of the pairs that turn fast.
    fastest = int(drafter.inverse_frequencies().argmax())
    constant = drafter.decoder_layers()[0].self_attn.k_proj.weight[fastest, hidden:]
    return F.normalize(middle @ (middle.T @ constant), dim=0)


def _sums(drafter: PEagleDrafter, batches: Iterable[Batch], centered: bool) -> _Sums | None:
    """See `_Sums`; None where no text is long enough."""
    hidden, new_zeros = drafter.config.hidden_size, drafter.fc.weight.new_zeros
    sums, count = _Sums(new_zeros(hidden, hidden), new_zeros(hidden), new_zeros(hidden, 2 * hidden)), 0
    for batch in batches:
        assert batch.last_states is not None
        inputs = _inputs_of_second_layer(drafter, batch, steps=1)[0]
        for rows in (batch.loss_weights[:, 2] > 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
            x = unit_rms(inputs[rows])
            z = unit_rms(batch.last_states, centered=centered)
            sums.gram.addmm_(x.T, x)
            sums.total += x.sum(0)
            sums.cross.addmm_(x.T, torch.cat([z[rows + 2], z[rows + 3]], dim=1))
            count += len(rows)
        if count >= ROWS_TO_FIT:
            break
    return sums if count else None


def _inputs_of_second_layer(drafter: PEagleDrafter, batch: Batch, *, steps: int) -> list[torch.Tensor]:
    """Output of layer 0, which layer 1 reads, [rows, H] for each draft token."""
    caught: list[torch.Tensor] = []
    hook = drafter.decoder_layers()[1].input_layernorm.register_forward_pre_hook(lambda _, read: caught.append(read[0]))
    for _ in drafter.chain(batch, steps=steps):
        pass
    hook.remove()
    return caught


def _read_the_same(drafter: PEagleDrafter, state: torch.Tensor) -> None:
    """Make slots read a vector that `fc` maps to `state` [H], as nearly as its norms allow: by turns as the norms make it, and moved the
    shortest way to where `fc` gives `state`."""
    weight, states = drafter.fc.weight, len(drafter.config.layer_ids)
    lower = factor(weight @ weight.T)
    read = weight.T @ solve(lower, state[:, None])[:, 0]
    for _ in range(_TURNS):
        read = drafter.normed_states(read.view(1, states, -1))[0]
        read = read + weight.T @ solve(lower, (state - weight @ read)[:, None])[:, 0]
    drafter.mask_hidden.copy_(read.view(1, 1, -1))


def _output_at_slots(drafter: PEagleDrafter, batches: Iterable[Batch]) -> torch.Tensor:
    """Mean output of layer 0 at the slots of the second draft token, [H]."""
    total, count = drafter.fc.weight.new_zeros(drafter.config.hidden_size), 0
    for batch in batches:
        outputs = _inputs_of_second_layer(drafter, batch, steps=2)[1:]
        total += sum(one.sum(0) for one in outputs)
        count += sum(map(len, outputs))
        if count >= ROWS_AT_ONCE:
            break
    return total / max(count, 1)


def _write(
    drafter: PEagleDrafter,
    of_units: list[tuple[list[int], list[int]]],
    slow: torch.Tensor,
    real: torch.Tensor,
    masked: torch.Tensor,
    to_values: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Write layer 1's projections; see the module's docstring.

    Args:
        slow: rotary pairs that hardly turn.
        real, masked: [H] each, the detectors.
        to_values: [H, R].
        kept: [2 H, R], from values to the states of the first slot and of the others.
    """
    config, attention = drafter.config, drafter.decoder_layers()[1].self_attn
    size, hidden = config.head_dim, config.hidden_size
    frequencies = drafter.inverse_frequencies()
    turning = torch.ones_like(frequencies, dtype=torch.bool)
    turning[slow] = False
    fast = turning.nonzero()[:, 0]
    pairs = len(frequencies)
    depths = config.num_depths
    scores = [_fit_scores(frequencies[fast], *wanted) for wanted in (_falling(depths), _one_step_away())]

    q = attention.q_proj.weight.unflatten(0, (-1, size))
    k = attention.k_proj.weight.unflatten(0, (-1, size))
    v = attention.v_proj.weight.unflatten(0, (-1, size))
    o = attention.o_proj.weight.unflatten(1, (-1, size))  # [H, heads, C]
    divided = size**0.5  # of scores
    for number, (kv_heads, (a, b, c)) in enumerate(of_units):
        columns = slice(number * size, (number + 1) * size)
        values, outputs = to_values[:, columns], kept[:, columns]
        for index in kv_heads:
            k[index] = 0
            k[index, fast] = real
            k[index, slow[-1]] = masked
            v[index] = 0
            v[index, : values.shape[1]] = values.T
        q[[a, b, c]] = 0
        for head, (cosines, sines) in ((a, scores[0]), (c, scores[1])):
            q[head, fast] = divided * cosines[:, None] * masked
            q[head, fast + pairs] = -divided * sines[:, None] * masked
        for head in (b, c):
            q[head, slow[-1]] = divided * _TO_SLOTS * masked
        first, others = outputs[:hidden], outputs[hidden:]
        for head, matrix in ((a, others), (b, -first), (c, first - others)):
            o[:, head] = 0
            o[:, head, : matrix.shape[1]] = matrix


def _falling(depths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and most of the scores by distance [distances] with which slots find the last real position, 1 to `depths` - 1 away."""
    far = torch.arange(_FAR, dtype=torch.float64)
    falling = _TO_SLOTS + _STEP * (depths - far)
    near = (far >= 1) & (far < depths)
    least = torch.where(near, falling, -torch.inf)
    most = torch.where(near, falling + _STEP / 2, torch.inf)
    most[far >= depths + 2] = _NO_SCORE
    return least, most


def _one_step_away() -> tuple[torch.Tensor, torch.Tensor]:
    """The same, to find it where it is one step away."""
    far = torch.arange(_FAR, dtype=torch.float64)
    return torch.where(far == 1, 2 * _TO_SLOTS, -torch.inf), torch.where(far > 1, _NO_SCORE, torch.inf)


def _fit_scores(
    frequencies: torch.Tensor, least: torch.Tensor, most: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients of cosines and sines, [pairs] each, whose sum at each distance from 1 on is within `least` and `most` [distances], as
    nearly as small coefficients can be: least squares again and again on the distances where it is not."""
    least, most = least[1:].to(frequencies.device), most[1:].to(frequencies.device)
    distances = torch.arange(1, len(least) + 1, dtype=torch.float64, device=frequencies.device)
    turned = distances[:, None] * frequencies
    waves = torch.cat([turned.cos(), turned.sin()], dim=1)
    weights = (1 + 3000 / (1 + distances) ** 2).sqrt()  # the nearest decide
    ridge = _RIDGE * torch.eye(waves.shape[1], dtype=torch.float64, device=frequencies.device)
    found = waves.new_zeros(waves.shape[1])
    for _ in range(_TURNS):
        scores = waves @ found
        wanted = scores.clamp(min=least, max=most)
        off = scores != wanted
        rows = torch.cat([weights[off, None] * waves[off], ridge])
        found = torch.linalg.lstsq(rows, torch.cat([(weights * wanted)[off], 0 * found])[:, None]).solution[:, 0]
    cosines, sines = found.to(frequencies.dtype).split(len(frequencies))
    return cosines, sines
