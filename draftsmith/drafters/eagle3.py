"""EAGLE-3 (Li et al., arXiv 2503.01840): fuse hidden states of several layers, draft a chain with one decoder layer.

Alignment and attention: see `decoder.py`.

Mathematics of a step, for fused state f and token embedding e:

    x = [input_layernorm(e), hidden_norm(f)]          2H wide, read by q, k and v of layer 0
    r = f + o(attention(q(x), k(x), v(x)))            (norm_before_residual: hidden_norm(f) + ...)
    y = r + mlp(post_attention_layernorm(r))          y is the next step's state (norm_output: norm(y))
    logits = lm_head(norm(y))                         over the draft vocabulary

and at step 0  f = fc([fc_norm_1(h^1), ..., fc_norm_n(h^n)]).

Names and shapes of the tensors are those of published checkpoints and of vLLM's `llama_eagle3.py`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import Eagle3Options, FusingOptions
from draftsmith.drafters.base import InitCost, divide_columns
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.decoder import (
    LLAMA_FIXED,
    LLAMA_FIXED_BUT_WINDOW,
    LLAMA_IRRELEVANT,
    DecoderConfig,
    DecoderDrafter,
    DecoderLayer,
    layer_fields,
    rotary_embedding,
)
from draftsmith.drafters.init import least_squares
from draftsmith.drafters.init.induction import ROWS_TO_LOOK_UP, attend_by_codes, fit_codes, fit_outputs, write_codes
from draftsmith.drafters.layout import EXTRA, EightBits, Entry, Layout, Source, Window, look_up, put, same_names
from draftsmith.drafters.norm import RMSNorm
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors

_FAST = 0.03
"""Rotary pairs that turn by more than this many radians per position are used. The fastest separate neighbors; the slower ones
separate positions hundreds apart, where the fast ones happen to align again: with pairs above 0.3 alone, a row 2,000
positions into a text had 0.56 of its attention on itself with SmolLM2's frequencies, with these 0.998."""
_OWN_POSITION_LEAD = 6.0  # how much the score of a head's own position exceeds that of the one before, in logits


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """See `DecoderConfig`; `layer_ids` are the fused hidden states."""

    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool = False
    """One RMSNorm over all fused states together before `fc`, in some drafters trained elsewhere."""
    target_hidden_size: int | None = None
    """Width of the states that `fc` reads, if it is not the drafter's."""
    qk_norm: bool = False
    """Queries and keys are normed, as in Qwen3."""

    @property
    def fused_size(self) -> int:
        return len(self.layer_ids) * (self.target_hidden_size or self.hidden_size)


IDS_IN_SECTION = ("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_config.layer_ids")
"""Where else vLLM looks for the layer ids: its first model runner at the first alone, its second at the second alone."""

_MODELOPT_KEYS = (
    "next_layer_regular", "parallel_draft_heads_num_layers", "parallel_draft_step", "use_input_layernorm_in_first_layer",
    "use_last_layernorm", "use_mtp_layernorm",
)  # fmt: skip
"""What NVIDIA's ModelOpt also writes into that section. vLLM reads none of it: values that change the module come with other tensors."""


def ids_unsaid(source: Source, config: dict[str, Any]) -> NoReturn:
    """`Entry.default` of `layer_ids`, where neither the config nor a target says them. Raises UserError."""
    raise UserError(
        "The config does not say which of the target's states the drafter reads "
        "(`eagle_aux_hidden_state_layer_ids`). Name the target it was made for with --target: its depth decides."
    )


FLAGS = ("norm_before_residual", "fc_norm", "norm_output", "norm_before_fc")
"""Fields for other norms than the paper's."""


@dataclass(frozen=True)
class _LayersOfQwen3(Entry):
    """Whether the layers are Qwen3's, by their `model_type`, and not Llama's."""

    def read(self, source: Source, config: dict[str, Any]) -> bool:
        return look_up(source.record, self.path) == "qwen3"

    def write(self, record: dict[str, Any], value: bool) -> None:
        put(record, self.path, "qwen3" if value else "llama")


@dataclass(frozen=True)
class _SectionFirst(Entry):
    """A field that is looked up in `eagle_config` before the top level, where it is written."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (f"eagle_config.{self.path}", self.path)


def eagle3_layout(
    *,
    ids: Entry,
    flags: Collection[str],
    flags_in_section: Collection[str] = (),
    any_layers: bool = False,
    several_layers: bool = True,
    false_left_out: bool = False,
    derived: Mapping[str, Callable[[Any], Any]],
    prefix: str = "",
    old_rope: bool = False,
    norm_before_residual: Any = False,
    names: Callable[[Any, tuple[str, ...]], dict[str, str]] = same_names,
    fixed: Mapping[str, Any] = {},
    irrelevant: frozenset[str] = frozenset(),
    supported: Mapping[str, Callable[[Any], bool]] = {},
    eight_bits: EightBits | None = None,
) -> Layout:
    """A layout with what those of EAGLE-3 have in common; other arguments than these add to it, or are `Layout`'s own.

    Args:
        ids: where `layer_ids` are.
        flags: those of `FLAGS` for which the format has keys.
        flags_in_section: those that are looked up in `eagle_config` first.
        any_layers: the format has Qwen3's layers besides Llama's, and sliding windows.
        several_layers: the format has names for several layers.
        false_left_out: keys of flags that are false are not written.
        prefix: of the layer's fields in the config.
        old_rope: see `layer_fields`.
        norm_before_residual: default of that field.
    """
    unsaid: dict[str, Any] = {name: (False,) for name in FLAGS if name not in flags}
    if not several_layers:
        unsaid["num_layers"] = (1,)
    if not any_layers:
        unsaid |= {"sliding_window": (None,), "qk_norm": (False,)}

    def flag(name: str, default: Any = False) -> Entry:
        key = name if name in flags else f"{EXTRA}.{name}"
        entry = _SectionFirst if name in flags_in_section else Entry
        return entry(name, bool, key, default=default, left_out=False if false_left_out else None)

    layers = (Window(prefix), _LayersOfQwen3("qk_norm", bool, f"{prefix}model_type")) if any_layers else ()
    plain = LLAMA_FIXED_BUT_WINDOW if any_layers else LLAMA_FIXED
    fixed_in_layers = {f"{prefix}{name}": value for name, value in {**plain, "attention_bias": False}.items()}
    return Layout(
        fields=(
            *layer_fields(prefix, old_rope=old_rope),
            *layers,
            Entry("attention_bias", bool, f"{EXTRA}.attention_bias", default=False),
            ids,
            Entry("draft_vocab_size", int, default=lambda _, config: config["vocab_size"]),
            flag("norm_before_residual", norm_before_residual),
            *(flag(name) for name in FLAGS[1:]),
            Entry("target_hidden_size", int, default=None),
        ),
        names=names,
        fixed={**fixed_in_layers, **fixed},
        derived=derived,
        irrelevant=frozenset(prefix + name for name in LLAMA_IRRELEVANT) | irrelevant,
        supported={**unsaid, "attention_bias": (False,), **supported},
        maps_vocabulary=True,
        eight_bits=eight_bits,
    )


def _architecture(config: Any) -> str:
    own, of_qwen3 = Eagle3Options.serving.architectures
    return of_qwen3 if config.qk_norm else own


_VLLM = eagle3_layout(
    ids=Entry(
        "layer_ids",
        tuple,
        "eagle_aux_hidden_state_layer_ids",
        default=ids_unsaid,
        other_keys=IDS_IN_SECTION,
    ),
    flags=FLAGS,
    flags_in_section=("norm_before_fc",),
    any_layers=True,
    # vLLM's second model runner compares the head's `weight` with the target's (vllm/v1/worker/gpu/spec_decode/eagle/utils.py): packed
    # integers have none, and 8-bit floats compare with nothing. Integers that are not packed just differ.
    eight_bits=EightBits(but_of_weights=("lm_head",)),
    derived={
        "architectures": lambda config: [_architecture(config)],
        "tie_word_embeddings": lambda _: False,
        "num_aux_hidden_states": lambda config: len(config.layer_ids),
        IDS_IN_SECTION[0]: lambda config: list(config.layer_ids),
    },
    fixed={"eagle_config.use_aux_hidden_state": True},
    irrelevant=frozenset(f"eagle_config.{name}" for name in _MODELOPT_KEYS),
)
"""For vLLM's `Eagle3LlamaForCausalLM` (vllm/model_executor/models/llama_eagle3.py) and, with `qk_norm`, `Eagle3Qwen3ForCausalLM`
(qwen3_eagle3.py). The module already uses their tensor names."""


class Eagle3Drafter(DecoderDrafter):
    """The drafter in training. It shares the target's embedding.

    Args:
        embedding: float [vocab, H], the target's.
        draft_token_ids: int64 [V] ascending: target id of each draft token.
    """

    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config
    vllm_layout: ClassVar = _VLLM
    has_embedding: ClassVar = True
    config: Eagle3Config
    fc: nn.Linear
    lm_head: nn.Linear

    def __init__(self, config: Eagle3Config, embedding: torch.Tensor, draft_token_ids: torch.Tensor) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        reads = config.fused_size // len(config.layer_ids)
        self.fc_norm = nn.ModuleList(RMSNorm(reads, eps) for _ in config.layer_ids) if config.fc_norm else None
        self.input_norm = RMSNorm(config.fused_size, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(config.fused_size, hidden, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, reads=hidden if index else 2 * hidden, hidden_norm=index == 0, qk_norm=config.qk_norm)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self._rotary = rotary_embedding(config)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    @staticmethod
    def layer_ids(options: FusingOptions, saved: tuple[int, ...], last: int) -> tuple[int, ...]:
        return options.layer_ids or saved

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        """The states that the authors and vLLM fuse by default."""
        layers = target.num_hidden_layers
        return {"layer_ids": (2, layers // 2, layers - 3)}

    @classmethod
    def from_target(cls, config: Eagle3Config, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        return cls(config, tensors.shared_embedding(reads_layers=True), draft_token_ids)

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Initialize the drafter in place so that, untrained, it is the best linear drafter of its shape, and copies from context.

        The head and the final norm are the target's own, so at position p the drafter has to produce the target's last
        state at the next position, z_{p+1} (up to scale, which the norm removes). Least squares on the store gives the best
        linear prediction from its inputs, the states h_p and the token's embedding e_{p+1}:

            z_{p+1} ~ W_h h_p + W_e e_{p+1}

        `fc` takes W_h, and one attention head of each key/value group takes its part of W_e, whose rank is reduced to that
        of the value projections (reduced-rank regression: Izenman 1975). Those heads must attend to their own position
        only; see `_attend_to_own_position`. The second head of each group is an induction head; see `init/induction.py`.
        Everything else starts with zero output, so training starts from this prediction.
        """
        config = self.config
        self.lm_head.weight.copy_(tensors.lm_head[self.draft_token_ids.to(tensors.lm_head.device)])
        self.norm.weight.copy_(tensors.final_norm_weight)
        for layer in self.decoder_layers():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

        rank = min(config.num_key_value_heads * config.head_dim, config.hidden_size)
        sums = _regression(self, batches, tensors.centered_norm)
        from_states, to_values, from_values = least_squares.reduced_rank_fit(*sums, rank=rank)
        del sums
        self.fc.weight.copy_(from_states.T)
        attention = self.decoder_layers()[0].self_attn
        attention.v_proj.weight.zero_()
        attention.v_proj.weight[:rank, : config.hidden_size] = to_values.T
        group = config.num_attention_heads // config.num_key_value_heads
        for first in range(0, rank, config.head_dim):
            head = first // config.head_dim * group  # the group's first head
            columns = from_values[first : first + config.head_dim].T
            attention.o_proj.weight[:, head * config.head_dim : head * config.head_dim + columns.shape[1]] = columns
        codes = fit_codes(self, batches, tensors.centered_norm)
        if codes is not None:
            write_codes(self, codes)
        fused = _fused_states(self, batches, to_values, from_values)
        if codes is not None:
            attend_by_codes(self, codes, size=fused.size)
        _attend_to_own_position(self, fused)
        if codes is not None:
            fit_outputs(self, codes, batches, tensors.centered_norm)

    @staticmethod
    def init_cost(config: Eagle3Config, *, rows: int, answered: int) -> InitCost:
        hidden, states, vocabulary = config.hidden_size, config.fused_size, config.draft_vocab_size
        width, rank = states + hidden, min(config.num_key_value_heads * config.head_dim, hidden)
        fitted = min(answered, least_squares.ROWS_TO_FIT)
        sums = width**2 + width * hidden + 4 * min(fitted, least_squares.ROWS_AT_ONCE) * width
        flop = 2.0 * fitted * width * (width + hidden)  # `_regression`
        flop += least_squares.flop_of_solve(width, hidden) + 2.0 * states**2 * hidden  # `reduced_rank_fit`
        flop += least_squares.flop_of_eigenvectors(hidden) + 4.0 * hidden**3
        flop += 2.0 * hidden * rank * (hidden + 2 * states)
        flop += fitted * (2.0 * hidden * (states + 2 * rank) + 4.0 * hidden**2)  # `_fused_states`
        flop += least_squares.flop_of_solve(hidden, 1)  # `_attend_to_own_position`
        held = max(sums, 2 * width**2 + 2 * width * hidden + 5 * hidden**2)
        rows_read = 2 * least_squares.rows_until(least_squares.ROWS_TO_FIT, rows=rows, answered=answered)
        if config.num_attention_heads > config.num_key_value_heads:
            looked_up, answers = min(rows, ROWS_TO_LOOK_UP), min(answered, ROWS_TO_LOOK_UP)
            mixed = 2 * config.num_key_value_heads * config.head_dim
            flop += 2.0 * looked_up * width * (width + hidden) + 2.0 * answers * hidden**2  # `fit_codes`
            flop += width**3 / 3 + hidden**3 / 3 + float(width) * hidden * (width + hidden) + 2.0 * width * hidden**2
            flop += 2.0 * vocabulary * hidden**2 + 2 * least_squares.flop_of_eigenvectors(hidden)
            for name, (_, times) in Eagle3Drafter.matmul_counts(config, 1).items():  # `fit_outputs`
                flop += 2.0 * answers * times * math.prod(Eagle3Drafter.shapes(config)[name])
            flop += 2.0 * answers * mixed * (mixed + hidden) + least_squares.flop_of_solve(mixed, hidden)
            rows_read += looked_up + least_squares.rows_until(ROWS_TO_LOOK_UP, rows=rows, answered=answered)
            kept = states * hidden + 2 * rank * hidden  # of the regression
            held = max(held, kept + sums, kept + 3 * vocabulary * hidden + 2 * hidden**2)
        return InitCost(flop, 4 * held, rows_read)

    def head_parameters(self) -> list[nn.Parameter]:
        return [*self.lm_head.parameters()]

    def normed_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The input of `fc`: [T, n, H] to [T, n * H]."""
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states.flatten(1)).view_as(hidden_states)
        if self.fc_norm is not None:
            hidden_states = torch.stack([norm(hidden_states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        return hidden_states.flatten(1)

    @property
    def scales_states(self) -> bool:
        return self.fc_norm is None and self.input_norm is None

    def to_raw_states(self, tensors: dict[str, torch.Tensor], scales: Sequence[float]) -> dict[str, torch.Tensor]:
        return tensors | {"fc.weight": divide_columns(tensors["fc.weight"], scales)}

    def reads(self, batch: Batch, rows: torch.Tensor | slice) -> torch.Tensor:
        """All that step 0 reads at `rows`, [rows, n*H + H]: `normed_states`, and the normed embedding of the next token."""
        embeds = F.embedding(batch.next_tokens[rows, 0], self.embedding)
        normed = self.decoder_layers()[0].input_layernorm(embeds)
        return torch.cat([self.normed_states(batch.hidden_states[rows]), normed], dim=1)

    def first_state(self, batch: Batch) -> torch.Tensor:
        return self.fc(self.normed_states(batch.hidden_states))

    def inputs(
        self, layer: DecoderLayer, index: int, embeds: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index > 0:
            return layer.input_layernorm(state), state
        normed = layer.hidden_norm(state)
        residual = normed if self.config.norm_before_residual else state
        return torch.cat([layer.input_layernorm(embeds), normed], dim=-1), residual

    def outputs(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(state)
        return normed, normed if self.config.norm_output else state

    def head(self) -> torch.Tensor:
        return self.lm_head.weight

    @staticmethod
    def matmul_counts(config: Eagle3Config, steps: int) -> dict[str, tuple[int, int]]:
        return {"fc.weight": (1, 1), **config.layer_matmul_counts(steps)}


def _regression(drafter: Eagle3Drafter, batches: Iterable[Batch], centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over rows of the outer products of the drafter's inputs, [n*H + H, n*H + H], and of the inputs with the target's
    next last state, [n*H + H, H]. `centered`: see `unit_rms`."""
    width, hidden = drafter.config.fused_size + drafter.config.hidden_size, drafter.config.hidden_size
    gram, cross = drafter.fc.weight.new_zeros(width, width), drafter.fc.weight.new_zeros(width, hidden)
    for batch, rows in least_squares.rows_to_fit(batches):
        assert batch.last_states is not None
        reads = drafter.reads(batch, rows)
        gram.addmm_(reads.T, reads)
        cross.addmm_(reads.T, least_squares.unit_rms(batch.last_states[rows + 1], centered=centered))
    return gram, cross


@dataclass
class _FusedStates:
    """Sums over sample inputs of `hidden_norm`: fused states, with and without the output of the first heads."""

    size: torch.Tensor  # scalar: mean RMS without that output
    gram: torch.Tensor  # [H, H]: sum of the outer products of the normed states
    total: torch.Tensor  # [H]: sum of the normed states


def _fused_states(
    drafter: Eagle3Drafter, batches: Iterable[Batch], to_values: torch.Tensor, from_values: torch.Tensor
) -> _FusedStates:
    """See `_FusedStates`; the first heads map the normed embedding by `to_values` [H, rank] and `from_values` [rank, H]."""
    hidden = drafter.config.hidden_size
    new_zeros = drafter.fc.weight.new_zeros
    sums, count = _FusedStates(new_zeros(()), new_zeros(hidden, hidden), new_zeros(hidden)), 0
    for batch, rows in least_squares.rows_to_fit(batches):
        states, embeds = drafter.reads(batch, rows).split([drafter.config.fused_size, hidden], dim=1)
        fused = drafter.fc(states)
        sums.size += fused.pow(2).mean(-1).sqrt().sum()
        for unit in (least_squares.unit_rms(fused), least_squares.unit_rms(fused + embeds @ to_values @ from_values)):
            sums.gram.addmm_(unit.T, unit)
            sums.total += unit.sum(0)
        count += len(rows)
    sums.size /= count
    return sums


def _attend_to_own_position(drafter: Eagle3Drafter, fused: _FusedStates) -> None:
    """Make the first head of every key/value group of layer 0 attend to its own position; `fused.gram` is overwritten.

    With constant queries and keys only RoPE remains: the score at distance d is the sum over rotary pairs of
    cos(d * frequency), largest at d = 0. The constant comes from the states: least squares finds a direction in which the
    normed state is nearly the same everywhere. Only fast pairs are used; slow ones do not separate neighbors.
    """
    config = drafter.config
    attention, hidden = drafter.decoder_layers()[0].self_attn, config.hidden_size
    constant = least_squares.solve(least_squares.factor(fused.gram), fused.total[:, None])[:, 0]  # unit @ constant ~ 1
    frequencies = drafter.inverse_frequencies()
    fast = (frequencies > _FAST).nonzero()[:, 0]
    one_away = (1 - frequencies[fast].cos()).sum()
    scale = (_OWN_POSITION_LEAD / one_away * config.head_dim**0.5).sqrt()
    q = attention.q_proj.weight.unflatten(0, (config.num_key_value_heads, -1, config.head_dim))  # [M, G, C, 2H]
    k = attention.k_proj.weight.unflatten(0, (config.num_key_value_heads, config.head_dim))  # [M, C, 2H]
    q[:, 0] = 0  # the first head of the group reads only the constant
    for pair in fast.tolist():
        for dimension in (pair, pair + len(frequencies)):  # no other head uses the pair
            q[:, :, dimension] = 0
            k[:, dimension] = 0
        q[:, 0, pair, hidden:] = scale * constant
        k[:, pair, hidden:] = scale * constant


DRAFTER = Eagle3Drafter
