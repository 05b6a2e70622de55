"""Induction heads (Olsson et al. 2022, arXiv 2209.11895) for EAGLE-3's initialization: they find an earlier occurrence of the
current context and copy what followed it.

Models repeat themselves and their prompts, and a drafter of one layer does not learn from a small store to exploit that. On
SmolLM2's answers to ShareGPT prompts, the first draft token of a trained drafter was right for 36% of held-out tokens, the
token that followed the occurrence found here for 34%, and one or the other for 57% (docs/log.md).

At position p such a head looks for the earlier row i whose context resembles the one at p+1, and copies the token that
followed. Its key at row i is a code of the target's state h_i; its query, a code of the expected h_{p+1}, from the states h_p
and the embedding e_{p+1} (see `codes.py`); its value, the embedding e_{i+1}, which row i holds.

Attention reads the fused state f, not the target's states. The codes are put into those directions of f that matter least to
the vocabulary head.

Shape legend: S width of all states that `fc` reads, H hidden size, C components of a code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init.codes import Moments, canonical_codes, directions_by_importance, slow_pairs
from draftsmith.drafters.init.least_squares import ROWS_AT_ONCE, factor, solve, unit_rms

if TYPE_CHECKING:
    from draftsmith.drafters.eagle3 import Eagle3Drafter

ROWS_TO_LOOK_UP = 32_768
"""Rows to fit codes and outputs on."""
_SHARPNESS = 0.05
"""Tokens are not Gaussian: with the full score, attention is nearly all on the best row, which is right in two of five cases. Of
0.1, 0.03, 0.01 and 0.004 on SmolLM2, 0.03 and 0.1 explained most of the target's next state."""
_CODE_SCALE = 0.5  # standard deviation of a code's components in f; about that of the other directions of f


@dataclass(frozen=True)
class Codes:
    """Linear codes; the score of a row is the sum over components of weights * (x @ expected) * (h @ found)."""

    expected: torch.Tensor
    """[S + H, C]: code of the states at p and the embedding at p+1."""
    found: torch.Tensor
    """[S, C]: code of the states at a row."""
    weights: torch.Tensor
    """[C]"""
    directions: torch.Tensor
    """[H, 2 C], orthonormal: the directions of f that hold both codes."""


def fit_codes(drafter: Eagle3Drafter, batches: Iterable[Batch], centered: bool) -> Codes | None:
    """Codes with as many components as slow rotary pairs hold; None where no head is free or no pair is slow. `centered`: see `unit_rms`."""
    config = drafter.config
    size = min(2 * len(slow_pairs(drafter.inverse_frequencies())), config.hidden_size // 8)
    if size == 0 or config.num_attention_heads == config.num_key_value_heads:
        return None
    width = (len(config.layer_ids) + 1) * config.hidden_size
    new_zeros = drafter.fc.weight.new_zeros
    gram, cross, rows = new_zeros(width, width), new_zeros(width, config.hidden_size), 0
    seen = new_zeros(config.vocab_size) + 1  # count of each response token, plus one
    moments = Moments(gram, config.hidden_size)
    # The middle state identifies the context best: with 30 components, the token after the found row was right for 31% of
    # tokens with SmolLM2's state 15, 26% with state 2 and 13% with the last.
    middle = (len(config.layer_ids) - 1) // 2 * config.hidden_size
    key = slice(middle, middle + config.hidden_size)
    for batch in batches:
        pairs = len(batch.positions) - 1  # none in a text of two tokens
        for start in range(0, pairs, ROWS_AT_ONCE):
            x = drafter.reads(batch, slice(start, min(start + ROWS_AT_ONCE, pairs) + 1))  # and the row after
            gram.addmm_(x[:-1].T, x[:-1])
            cross.addmm_(x[:-1].T, x[1:, key])
        assert batch.last_states is not None
        for here in (batch.loss_weights[:-1, 0] > 0).nonzero()[:, 0].split(ROWS_AT_ONCE):
            moments.add(unit_rms(batch.last_states[here + 1], centered=centered))
        rows += pairs
        seen += torch.bincount(batch.next_tokens[batch.loss_weights[:, 0] > 0, 1], minlength=config.vocab_size)
        if rows >= ROWS_TO_LOOK_UP:
            break
    # What is not finite in any row is not finite on the diagonal; looking at all of the matrix would take a copy of it.
    if not (gram.diagonal().isfinite().all() and cross.isfinite().all()):
        return None  # the first training step reports which samples are broken
    of_expected = factor(gram)
    of_found = torch.linalg.cholesky(gram[key, key])  # a principal submatrix of a positive definite matrix has one
    del gram
    whitened, right, correlations = canonical_codes(of_expected, of_found, cross, size=size)
    # Whitening used sums over rows: their square root makes the components of size one.
    expected = torch.linalg.solve_triangular(of_expected.T, whitened, upper=True) * rows**0.5
    del of_expected, cross, whitened
    found = new_zeros(width - config.hidden_size, size)
    found[key] = torch.linalg.solve_triangular(of_found.T, right, upper=True) * rows**0.5
    head = drafter.lm_head.weight * drafter.norm.weight
    return Codes(
        expected=expected,
        found=found,
        weights=_SHARPNESS * correlations / (1 - correlations**2),
        directions=directions_by_importance(head, seen[drafter.draft_token_ids], moments.covariance())[:, : 2 * size],
    )


def write_codes(drafter: Eagle3Drafter, codes: Codes) -> None:
    """Make `fc`, which is fitted as the own-position heads are, write both codes into f, in directions that nothing else writes to."""
    attention = drafter.decoder_layers()[0].self_attn
    aside = codes.directions @ codes.directions.T
    attention.o_proj.weight.sub_(aside @ attention.o_proj.weight)
    drafter.fc.weight.sub_(aside @ drafter.fc.weight)
    in_states = torch.cat([codes.found, codes.expected[: len(codes.found)]], dim=1)
    drafter.fc.weight.add_(_CODE_SCALE * codes.directions @ in_states.T)


def attend_by_codes(drafter: Eagle3Drafter, codes: Codes, *, size: torch.Tensor) -> None:
    """Make the second head of every key/value group attend by the codes in f, which `write_codes` wrote. `size` is f's mean RMS,
    which `hidden_norm` divides by, approximately."""
    config, attention = drafter.config, drafter.decoder_layers()[0].self_attn
    hidden, head_dim, components = config.hidden_size, config.head_dim, len(codes.weights)
    read_found, read_expected = (size / _CODE_SCALE * codes.directions.T).split(components)
    scale = (codes.weights * head_dim**0.5).sqrt()[:, None]
    pairs = slow_pairs(drafter.inverse_frequencies())[: components // 2]
    dimensions = [dimension for pair in pairs for dimension in (pair, pair + len(drafter.inverse_frequencies()))]
    q = attention.q_proj.weight.unflatten(0, (config.num_key_value_heads, -1, head_dim))  # [M, G, C, 2H]
    k = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, head_dim))  # [M, C, 2H]
    q[:, 1] = 0
    q[:, 1, dimensions, :hidden] = scale * codes.expected[len(codes.found) :].T
    q[:, 1, dimensions, hidden:] = scale * read_expected
    k[:, dimensions, :hidden] = 0
    k[:, dimensions, hidden:] = scale * read_found


def fit_outputs(drafter: Eagle3Drafter, codes: Codes, batches: Iterable[Batch], centered: bool) -> None:
    """Fit the output projection of the first two heads of every group, by least squares, to what is left of the next state, and add
    it to `o_proj`.

    Nothing is written to the directions that hold codes: later chain steps read them.
    `centered`: see `unit_rms`.
    """
    config, layer = drafter.config, drafter.decoder_layers()[0]
    width = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    firsts = [(index * group + head) * width for index in range(config.num_key_value_heads) for head in (0, 1)]
    columns = torch.cat([torch.arange(first, first + width) for first in firsts]).to(codes.directions.device)
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: caught.update(mixed=inputs[0])),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: caught.update(residual=inputs[0])),
    ]
    gram = codes.directions.new_zeros(len(columns), len(columns))
    cross = codes.directions.new_zeros(len(columns), config.hidden_size)
    rows = 0
    for batch in batches:
        assert batch.last_states is not None
        for _ in drafter.chain(batch, steps=1):
            pass
        counted = (batch.loss_weights[:, 0] > 0).nonzero()[:, 0]
        mixed, residual = caught["mixed"], caught["residual"]
        if len(mixed) != len(counted):  # in a drafter of several layers the first one runs on every row
            mixed, residual = mixed[counted], residual[counted]
        mixed = mixed[:, columns]
        gram.addmm_(mixed.T, mixed)
        cross.addmm_(mixed.T, unit_rms(batch.last_states[counted + 1], centered=centered) - residual)
        rows += len(counted)
        if rows >= ROWS_TO_LOOK_UP:
            break
    for hook in hooks:
        hook.remove()
    added = solve(factor(gram), cross)
    added -= added @ codes.directions @ codes.directions.T
    layer.self_attn.o_proj.weight[:, columns] += added.T
