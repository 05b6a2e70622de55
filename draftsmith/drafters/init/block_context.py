"""What a block drafter's context holds at its start: `fc`, and the codes by which induction heads find rows; see `blocks.py`.

Shape legend: H hidden size, S width of all states that are read, P components of a code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init import least_squares
from draftsmith.drafters.init.codes import Moments, canonical_codes, directions_by_importance, slow_pairs
from draftsmith.drafters.init.least_squares import factor, flop_of_eigenvectors, solve, unit_rms

if TYPE_CHECKING:
    from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter

FAST = 0.03
"""Radians per position: rotary pairs that turn more tell positions apart, as in EAGLE-3's start."""
CODE_SCALE = 0.5
"""Of a code in the rows' states, whose numbers are about one."""
_SHARPNESS = 0.1  # EAGLE-3's start has 0.05; 0.1 was a little better here, on SmolLM2


@dataclass(frozen=True)
class ContextCodes:
    """What induction heads look for; P is 0 where there are none."""

    column: int
    """Which of the states that the drafter reads is coded."""
    found: torch.Tensor
    """[H, P]: code of that state."""
    weights: torch.Tensor
    """[P]: of the products of a code and its expectation, in the score of a row."""
    in_rows: torch.Tensor
    """[H, P], orthonormal: directions of the rows' states that hold the expected code."""
    in_context: torch.Tensor
    """[H, P], orthonormal, and orthogonal to `in_rows`: directions of the context that hold codes."""

    @property
    def spared(self) -> torch.Tensor:
        """[H, 2 P]: what rows hold nothing else in, between layer 0 and layer 1."""
        return torch.cat([self.in_rows, self.in_context], dim=1)

    def with_codes(self, wanted: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        """What rows should hold between layer 0 and layer 1: `wanted` [rows, H] where it is not spared, and the code of a state [rows, H]."""
        return wanted - wanted @ self.spared @ self.spared.T + CODE_SCALE * (coded @ self.found) @ self.in_rows.T


@dataclass
class _Sums:
    """Sums over positions p that a token is predicted from: of the states h_p and the normed embedding of the token after, x_p [S + H], and
    of the target's last states after its norm without a weight, z_p."""

    gram: torch.Tensor  # [S + H, S + H]: x x^T
    next_states: torch.Tensor  # [S + H, 2 H]: x z_{p+1}^T, and x times the state at p + 1 that codes are of
    own_states: torch.Tensor  # [S, H]: h_p z_p^T
    moments: Moments  # of z_{p+1}
    seen: torch.Tensor  # [vocabulary]: how often each token is predicted, plus one
    rows: int = 0


@torch.no_grad()
def fit_context(
    drafter: DFlashDrafter, batches: Iterable[Batch], *, centered: bool
) -> tuple[ContextCodes, list[torch.Tensor]]:
    """Set `fc`. Returns the codes, and for each layer the first rows of its value projection [at most M * C, H]."""
    config = drafter.config
    hidden, width = config.hidden_size, config.fused_size
    rank, size = _rank(config), components(config, drafter.inverse_frequencies())
    column = (len(config.layer_ids) - 1) // 2  # the middle state identifies the context best; see `induction.py`
    sums = _sums(drafter, batches, column, centered=centered)
    codes, lower, by_importance = _fit_codes(drafter, sums, column, size)
    wanted = codes.with_codes(sums.next_states[:, :hidden], sums.next_states[:, hidden:])
    from_states, to_values, _ = least_squares.reduced_rank_fit(sums.gram, wanted, rank=rank, lower=lower)
    of_states = least_squares.leading_factor(sums.gram, lower, width)
    del wanted, lower
    of_anchor = torch.linalg.qr(to_values - codes.in_context @ (codes.in_context.T @ to_values)).Q
    used = torch.cat([codes.in_context, of_anchor], dim=1)
    free = torch.linalg.qr(used, mode="complete").Q[:, used.shape[1] :]  # what is orthogonal to them
    predicted = of_states.T @ from_states  # has the same products as the predictions of all rows
    kept = torch.linalg.eigh(predicted.T @ predicted).eigenvectors[:, -of_anchor.shape[1] :]
    coded = from_states.new_zeros(width, size)
    coded[column * hidden : (column + 1) * hidden] = codes.found
    own = solve(of_states, sums.own_states) @ by_importance.flip(1)[:, : free.shape[1]]
    drafter.fc.weight.zero_()
    for place, read in ((of_anchor, from_states @ kept), (codes.in_context, coded), (free, own)):
        if read.shape[1]:  # in numbers of about one, which `hidden_norm` then hardly changes
            mean_square = (of_states.T @ read).pow(2).sum() / max(sums.rows, 1) / read.shape[1]
            drafter.fc.weight.addmm_(place, (read / mean_square.sqrt()).T)
    values = min(config.num_key_value_heads * config.head_dim, hidden)
    first = torch.cat([of_anchor, free], dim=1)[:, :values]
    return codes, [first.T, *(free[:, values * i : values * (i + 1)].T for i in range(config.num_layers - 1))]


def _rank(config: DFlashConfig) -> int:
    """Of what the first layer's values read of the anchor's embedding, and of the prediction from the states. A third of the hidden size,
    the values of a target with grouped queries, leaves room for the target's own last state."""
    return max(1, min(config.num_key_value_heads * config.head_dim, config.hidden_size // 3))


def components(config: DFlashConfig, frequencies: torch.Tensor) -> int:
    """P, by the frequencies of rotary pairs; 0 where the drafter's shape has no place for codes."""
    if config.num_layers == 1 or config.num_attention_heads == 1 or not (frequencies > FAST).any():
        return 0
    return 2 * min(len(slow_pairs(frequencies)), config.hidden_size // 16)


def _sums(drafter: DFlashDrafter, batches: Iterable[Batch], column: int, *, centered: bool) -> _Sums:
    config, zeros = drafter.config, drafter.fc.weight.new_zeros
    hidden, width = config.hidden_size, config.fused_size
    sums = _Sums(
        gram=zeros(width + hidden, width + hidden),
        next_states=zeros(width + hidden, 2 * hidden),
        own_states=zeros(width, hidden),
        moments=Moments(drafter.fc.weight, hidden),
        seen=zeros(config.vocab_size) + 1,
    )
    for batch, rows in least_squares.rows_to_fit(batches):
        assert batch.last_states is not None
        states = batch.hidden_states[rows].flatten(1)
        known = drafter.decoder_layers()[0].input_layernorm(F.embedding(batch.next_tokens[rows, 0], drafter.embedding))
        x = torch.cat([states, known], dim=1)
        z = unit_rms(batch.last_states[rows + 1], centered=centered)
        sums.gram.addmm_(x.T, x)
        sums.next_states[:, :hidden].addmm_(x.T, z)
        sums.next_states[:, hidden:].addmm_(x.T, batch.hidden_states[rows + 1, column])
        sums.own_states.addmm_(states.T, unit_rms(batch.last_states[rows], centered=centered))
        sums.moments.add(z)
        sums.seen += torch.bincount(batch.next_tokens[rows, 1], minlength=config.vocab_size)
        sums.rows += len(rows)
    return sums


def _fit_codes(
    drafter: DFlashDrafter, sums: _Sums, column: int, size: int
) -> tuple[ContextCodes, torch.Tensor, torch.Tensor]:
    """The codes, of `size` components; the factor of the Gram matrix; and `directions_by_importance`."""
    hidden = drafter.config.hidden_size
    coded = slice(column * hidden, (column + 1) * hidden)
    of_found = factor(sums.gram[coded, coded].clone())
    lower = factor(sums.gram)
    _, found, correlations = canonical_codes(lower, of_found, sums.next_states[:, hidden:], size=size)
    found = torch.linalg.solve_triangular(of_found.T, found, upper=True) * sums.rows**0.5
    head = drafter.lm_head.weight * drafter.norm.weight
    by_importance = directions_by_importance(head, sums.seen[drafter.draft_token_ids], sums.moments.covariance())
    codes = ContextCodes(
        column=column,
        found=found,
        weights=_SHARPNESS / (1 - correlations**2),  # times r a, which is what least squares makes of b
        in_rows=by_importance[:, :size],
        in_context=by_importance[:, size : 2 * size],
    )
    return codes, lower, by_importance


def cost_of_context(config: DFlashConfig, *, fitted: int, size: int) -> float:
    """FLOP of fitting codes and `fc` in `start`, on `fitted` positions, with codes of `size` components."""
    hidden, states = config.hidden_size, config.fused_size
    width, rank = states + hidden, _rank(config)
    flop = 2.0 * fitted * (width * (width + 2 * hidden) + states * hidden + hidden**2)  # `_sums`
    flop += width**3 / 3 + hidden**3 / 3 + float(width) * hidden * (width + hidden)  # `_fit_codes`
    flop += 2.0 * width * hidden * (hidden + size) + hidden**2 * size + 2.0 * config.draft_vocab_size * hidden**2
    flop += 4 * flop_of_eigenvectors(hidden) + 4.0 * width * hidden * 3 * size
    flop += (
        2.0 * width**2 * hidden + 4.0 * hidden**3 + 2.0 * hidden * rank * (hidden + 2 * states)
    )  # `reduced_rank_fit`
    flop += 2.0 * states**2 * hidden  # the same
    flop += 6.0 * states**2 * hidden + 2.0 * states * hidden * (2 * hidden + rank + hidden)  # the parts of `fc`
    return flop
