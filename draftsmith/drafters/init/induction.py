"""Attention heads that look up what followed when the same was said before: part of EAGLE-3's start.

Models repeat themselves and their prompts, and a drafter of one layer does not learn from a small store to make use of
it. On SmolLM2's answers to ShareGPT prompts, a trained drafter's first guess was right for 36% of held-out tokens, what
followed the place that is found here for 34%, and one or the other for 57% (docs/log.md).

At position p such a head wants the earlier row i where the text stood as it will stand at p+1, and the token that followed.
Its key at row i is what the target's state h_i says; its query, what h_{p+1} can be expected to say, from the states h_p and
the embedding e_{p+1}; its value is of the embedding e_{i+1}, which row i holds. Which linear codes a of (h_p, e_{p+1}) and b
of h_{p+1} foretell each other best, canonical correlation analysis tells (Hotelling 1936); with correlations r, the score
is the sum of r / (1 - r^2) a b, the bilinear part of the pointwise mutual information of Gaussians, times `_SHARPNESS`.
Nothing is centred: layers have no bias to do it with. The first pair of codes is then what is nearly constant, and is
left out; the others are orthogonal to it, so their means are near zero.

Attention reads the fused state f, not the states. The codes travel in those directions of f that matter least to the
head, which f gives up for them. RoPE turns queries and keys: only pairs that turn slowly are used.

Shape legend: S the width of all states that `fc` reads, H hidden size, C components of a code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.init.least_squares import ROWS_AT_ONCE, factor, solve, unit_rms

if TYPE_CHECKING:
    from draftsmith.drafters.eagle3 import Eagle3Drafter

ROWS_TO_LOOK_UP = 32_768
"""Rows that codes and outputs are fitted on."""
_SLOW = 0.003
"""Radians a position; rotary pairs that turn less hold codes: at a distance of 300, by 0.9 of a radian at most."""
_SHARPNESS = 0.05
"""Tokens are not Gaussian: the whole score is nearly certain of whatever is best, and right in two of five cases. Of 0.1,
0.03, 0.01 and 0.004 on SmolLM2, 0.03 and 0.1 explained most of what the target says next."""
_LARGEST_CORRELATION = 0.98
_CODE_SCALE = 0.5
"""Standard deviation of a code's components in f, about that of its other directions."""


@dataclass(frozen=True)
class Codes:
    """The score of a row is the sum over components of weights * (x @ expected) * (h @ found)."""

    expected: torch.Tensor
    """[S + H, C]: of the states at p and the embedding at p+1."""
    found: torch.Tensor
    """[S, C]: of the states at a row."""
    weights: torch.Tensor
    """[C]"""
    directions: torch.Tensor
    """[H, 2 C], orthonormal: where f gives way to them."""


def fit_codes(drafter: Eagle3Drafter, batches: Iterable[Batch]) -> Codes | None:
    """Codes for as many components as slow rotary pairs hold; None where no head is free or no pair is slow."""
    config = drafter.config
    size = min(2 * len(_slow_pairs(drafter)), config.hidden_size // 8)
    if size == 0 or config.num_attention_heads == config.num_key_value_heads:
        return None
    width = (len(config.layer_ids) + 1) * config.hidden_size
    new_zeros = drafter.fc.weight.new_zeros
    gram, cross, rows = new_zeros(width, width), new_zeros(width, config.hidden_size), 0
    seen = new_zeros(config.vocab_size) + 1  # how often each token is answered, one more
    # The middle state says best what stands here: with 30 components, what followed the place that is found was right for
    # 31% of tokens with SmolLM2's state 15, 26% with state 2 and 13% with the last.
    middle = (len(config.layer_ids) - 1) // 2 * config.hidden_size
    key = slice(middle, middle + config.hidden_size)
    for batch in batches:
        for here in torch.arange(len(batch.positions) - 1).split(ROWS_AT_ONCE):
            x = drafter.reads(batch, slice(int(here[0]), int(here[-1]) + 2))  # and the row after
            gram.addmm_(x[:-1].T, x[:-1])
            cross.addmm_(x[:-1].T, x[1:, key])
        rows += len(batch.positions) - 1
        seen += torch.bincount(batch.next_tokens[batch.loss_weights[:, 0] > 0, 1], minlength=config.vocab_size)
        if rows >= ROWS_TO_LOOK_UP:
            break
    if not (gram.isfinite().all() and cross.isfinite().all()):
        return None  # the first step of training says which samples are broken
    of_expected = factor(gram)
    of_found = torch.linalg.cholesky(gram[key, key])  # a part of what has a factor has one
    whitened = torch.linalg.solve_triangular(of_expected, cross, upper=False)
    whitened = torch.linalg.solve_triangular(of_found, whitened.T, upper=False).T  # singular values: the correlations
    squares, right = torch.linalg.eigh(whitened.T @ whitened)
    best = slice(-size - 1, -1)
    correlations, right = squares[best].clamp(min=1e-6).sqrt(), right[:, best]
    # Whitened by sums over rows: the square root of their number makes components of size one.
    expected = torch.linalg.solve_triangular(of_expected.T, whitened @ right / correlations, upper=True) * rows**0.5
    found = new_zeros(width - config.hidden_size, size)
    found[key] = torch.linalg.solve_triangular(of_found.T, right, upper=True) * rows**0.5
    correlations = correlations.clamp(max=_LARGEST_CORRELATION)

    often = seen[drafter.draft_token_ids, None] / seen[drafter.draft_token_ids].sum()
    head = drafter.lm_head.weight * drafter.norm.weight
    head = (head - (often * head).sum(0)) * often.sqrt()
    return Codes(
        expected=expected,
        found=found,
        weights=_SHARPNESS * correlations / (1 - correlations**2),
        directions=torch.linalg.eigh(head.T @ head).eigenvectors[:, : 2 * size],
    )


def make_room(drafter: Eagle3Drafter, codes: Codes) -> None:
    """Have `fc` put both codes into f, in directions that nothing else is written to.

    Args:
        drafter: its `fc` foretells the next state, and its own-position heads write to it.
        codes: of `fit_codes`.
    """
    attention = drafter.decoder_layers()[0].self_attn
    aside = codes.directions @ codes.directions.T
    attention.o_proj.weight.sub_(aside @ attention.o_proj.weight)
    drafter.fc.weight.sub_(aside @ drafter.fc.weight)
    in_states = torch.cat([codes.found, codes.expected[: len(codes.found)]], dim=1)
    drafter.fc.weight.add_(_CODE_SCALE * codes.directions @ in_states.T)


def attend_by_codes(drafter: Eagle3Drafter, codes: Codes, *, size: torch.Tensor) -> None:
    """Have the second head of every key/value group attend by the codes in f.

    Args:
        drafter: with `make_room`'s `fc`.
        codes: of `fit_codes`.
        size: mean RMS of f, by which `hidden_norm` divides, about.
    """
    config, attention = drafter.config, drafter.decoder_layers()[0].self_attn
    hidden, head_dim, components = config.hidden_size, config.head_dim, len(codes.weights)
    read_found, read_expected = (size / _CODE_SCALE * codes.directions.T).split(components)
    scale = (codes.weights * head_dim**0.5).sqrt()[:, None]
    pairs = _slow_pairs(drafter)[: components // 2]
    dimensions = [dimension for pair in pairs for dimension in (pair, pair + head_dim // 2)]
    q = attention.q_proj.weight.unflatten(0, (config.num_key_value_heads, -1, head_dim))  # [M, G, C, 2H]
    k = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, head_dim))  # [M, C, 2H]
    q[:, 1] = 0
    q[:, 1, dimensions, :hidden] = scale * codes.expected[len(codes.found) :].T
    q[:, 1, dimensions, hidden:] = scale * read_expected
    k[:, dimensions, :hidden] = 0
    k[:, dimensions, hidden:] = scale * read_found


def fit_outputs(drafter: Eagle3Drafter, codes: Codes, batches: Iterable[Batch]) -> None:
    """Add to `o_proj` what the first two heads of every group say of the next state beyond what is said, by least squares.

    Where f carries codes nothing is written: later chain steps read them.
    """
    config, layer = drafter.config, drafter.decoder_layers()[0]
    width = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    firsts = [(index * group + head) * width for index in range(config.num_key_value_heads) for head in (0, 1)]
    columns = torch.cat([torch.arange(first, first + width) for first in firsts]).to(codes.directions.device)
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: caught.update(mixed=inputs[0])),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: caught.update(said=inputs[0])),
    ]
    gram = codes.directions.new_zeros(len(columns), len(columns))
    cross = codes.directions.new_zeros(len(columns), config.hidden_size)
    rows = 0
    for batch in batches:
        assert batch.last_states is not None
        for _ in drafter.chain(batch, steps=1):
            pass
        counted = (batch.loss_weights[:, 0] > 0).nonzero()[:, 0]
        mixed, said = caught["mixed"], caught["said"]
        if len(mixed) != len(counted):  # with another layer above, the first one works on every row
            mixed, said = mixed[counted], said[counted]
        mixed = mixed[:, columns]
        gram.addmm_(mixed.T, mixed)
        cross.addmm_(mixed.T, unit_rms(batch.last_states[counted + 1]) - said)
        rows += len(counted)
        if rows >= ROWS_TO_LOOK_UP:
            break
    for hook in hooks:
        hook.remove()
    added = solve(factor(gram), cross)
    added -= added @ codes.directions @ codes.directions.T
    layer.self_attn.o_proj.weight[:, columns] += added.T


def _slow_pairs(drafter: Eagle3Drafter) -> list[int]:
    """Rotary pairs that hold codes, slowest first."""
    return (drafter.inverse_frequencies() < _SLOW).nonzero()[:, 0].flip(0).tolist()
