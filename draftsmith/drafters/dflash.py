"""DFlash (Chen et al., arXiv 2602.06036): a block of draft tokens from one forward pass, by attention to the target's states.

A block is drafted after the text up to its anchor, the last known token x_a, whose state the target has not computed yet. It has
the anchor and B - 1 masks, at the positions a, a + 1, ..., a + B - 1:

    u = [E(x_a), m, ..., m]                                  m: the embedding of the mask, learned or the target's
    c_t = hidden_norm(fc([h_t^1, ..., h_t^n]))               for every earlier position t < a

Each layer has Qwen3's form. Queries come from the block's rows alone; keys and values from the context and from the block:

    x = input_layernorm(u)
    u = u + o(attention(q_norm(q(x)), [k_norm(k(c)), k_norm(k(x))], [v(c), v(x)]))
    u = u + mlp(post_attention_layernorm(u))
    logits = lm_head(norm(u))                                over the draft vocabulary

with RoPE at t for the context and at a + j for row j. The context goes through no layer: every layer reads the same c. Rows of a block
see all of it (`sliding_window`: its last so many rows, the same ones from every row of the block), and each other in both directions
(`causal`: no later row). Row j >= 1 predicts the token at its own position, x_{a+j};
nothing is predicted from row 0.

In the terms of `Batch`, row p has the anchor a = p + 1: the last state of the context is its own, and chain step k is row k + 1.

Training takes a sample of the positions as anchors (`trained_rows`), and the text's own next tokens as the truth.

Names and shapes of the tensors are those of vLLM's `qwen3_dflash.py`, which reads the mask's embedding from a file of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import BlockOptions, DFlashOptions
from draftsmith.drafters.attention import CosSin, attend_in_blocks, context_of
from draftsmith.drafters.base import ChainStep, Drafter, InitCost, LossTerms, divide_columns
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, IndependentSlots
from draftsmith.drafters.decoder import (
    LLAMA_FIXED_BUT_WINDOW,
    LLAMA_IRRELEVANT,
    DecoderConfig,
    DecoderLayer,
    layer_fields,
    mask_token_of,
    rotary_embedding,
    shape_of_target,
)
from draftsmith.drafters.init import block_context, blocks, least_squares
from draftsmith.drafters.layout import EightBits, Entry, Layout, Source, Window, look_up, same_names
from draftsmith.drafters.norm import RMSNorm
from draftsmith.run.errors import UserError
from draftsmith.run.weights import Weight
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors

if TYPE_CHECKING:  # imported where it is used, since that takes seconds
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """See `DecoderConfig`; `layer_ids` are the fused hidden states."""

    block_size: int
    """Rows of a block, B."""
    mask_token_id: int
    """The token whose embedding is the mask's, in every row of a block."""
    causal: bool = False

    @property
    def fused_size(self) -> int:
        return len(self.layer_ids) * self.hidden_size

    @property
    def known_rows(self) -> int:
        """Rows at the beginning of a block that nothing is predicted from."""
        return 1

    @property
    def max_draft_tokens(self) -> int:
        """The largest K."""
        return self.block_size - self.known_rows


def _ids_of_outputs(source: Source, config: dict[str, Any]) -> tuple[int, ...]:
    """`layer_ids` where the config only counts layers' outputs: output i is what enters layer i + 1."""
    found = look_up(source.record, "dflash_config.target_layer_ids")
    if not isinstance(found, list) or not all(isinstance(one, int) for one in found) or not found:
        raise UserError(
            "The config does not say which of the target's states the drafter reads (`dflash_config.target_layer_ids`)."
        )
    return tuple(one + 1 for one in found)


def _mask_file(config: DFlashConfig, weights: Mapping[str, Weight]) -> bytes:
    """What vLLM takes the mask's embedding from; it passes over the tensor of `model.safetensors`."""
    file = io.BytesIO()
    mask = {"embedding": weights["mask_embedding"].tensor(), "mask_token_id": config.mask_token_id}
    torch.save(mask, file)
    return file.getvalue()


def read_mask(directory: Path, config: DFlashConfig) -> torch.Tensor | None:
    """The mask's embedding [H] from the file that vLLM takes it from, which holds a tensor of H numbers or a dictionary with one; None if
    there is no such file. Raises UserError: the file is damaged, or is for another drafter."""
    if not (path := directory / MASK_FILE).is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive can raise anything
        text = str(error).splitlines() or [""]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {text[0][:200]}). Get it again.") from None
    if isinstance(found, dict):
        stated = found.get("mask_token_id", config.mask_token_id)
        if type(stated) is not int or stated != config.mask_token_id:
            raise UserError(
                f"{path} is for the mask token {str(stated)[:20]}, and the config says {config.mask_token_id}. The two are of different "
                "drafters; get both again."
            )
        found = found.get("embedding")
    plain = isinstance(found, torch.Tensor) and found.layout == torch.strided and found.device.type == "cpu"
    if not plain or not found.is_floating_point() or found.numel() != config.hidden_size:
        said = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise UserError(
            f"{path} should hold the mask's embedding, {config.hidden_size} floating-point numbers, and holds {said}. It is damaged, or of "
            "another drafter; get it again."
        )
    return found.reshape(-1)


_VLLM = Layout(
    fields=(
        *layer_fields(),
        Window(),
        Entry("layer_ids", tuple, "eagle_aux_hidden_state_layer_ids", default=_ids_of_outputs),
        Entry("draft_vocab_size", int, default=lambda _, config: config["vocab_size"]),
        Entry("block_size", int),
        Entry("mask_token_id", int, "dflash_config.mask_token_id", least=0),
        # vLLM's own default, by the type of each layer.
        Entry("causal", bool, "dflash_config.causal", default=lambda _, config: config["sliding_window"] is not None),
    ),
    names=same_names,
    fixed={
        **LLAMA_FIXED_BUT_WINDOW,
        "attention_bias": False,
        "dflash_config.use_aux_hidden_state": True,
        "dflash_config.sample_from_anchor": False,
    },
    derived={
        "architectures": lambda _: [DFlashOptions.serving.architecture],
        "model_type": lambda _: "qwen3",
        "tie_word_embeddings": lambda _: False,
        "dflash_config.target_layer_ids": lambda config: [layer - 1 for layer in config.layer_ids],
    },
    irrelevant=LLAMA_IRRELEVANT | {"num_target_layers", "has_own_lm_head"},
    supported={"attention_bias": (False,)},
    maps_vocabulary=True,
    eight_bits=EightBits(keys={"has_own_lm_head": True}),  # vLLM takes the head for one in floating point otherwise
    further_files={MASK_FILE: _mask_file},
)
"""For vLLM's `DFlashQwen3ForCausalLM` (vllm/model_executor/models/qwen3_dflash.py). The module already uses its tensor names."""


class DFlashDrafter(Drafter):
    """The drafter in training. It shares the target's embedding.

    Args:
        config: shapes.
        embedding: float [vocab, H], the target's.
        draft_token_ids: int64 [V] ascending: target id of each draft token.
    """

    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    vllm_layout: ClassVar = _VLLM
    has_embedding: ClassVar = True
    drafts_at_once: ClassVar = True
    learns_mask: ClassVar[bool] = True
    """The mask has an embedding of its own; otherwise it is the row of its token."""
    config: DFlashConfig
    embedding: torch.Tensor
    _rotary: LlamaRotaryEmbedding

    def __init__(self, config: DFlashConfig, embedding: torch.Tensor, draft_token_ids: torch.Tensor) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.max_draft_tokens, self.depends_on_k = config.max_draft_tokens, not config.causal
        self.fc = nn.Linear(config.fused_size, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, reads=hidden, qk_norm=True) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if self.learns_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        self._rotary = rotary_embedding(config)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_token_ids", draft_token_ids, persistent=False)

    @staticmethod
    def layer_ids(options: BlockOptions, saved: tuple[int, ...], last: int) -> tuple[int, ...]:
        return options.layer_ids or saved

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        return {}  # a config says which states are read, in one way or another

    @classmethod
    def sizes(cls, target: TargetInfo) -> dict[str, Any]:
        return shape_of_target(target)

    @classmethod
    def make_config(
        cls, options: BlockOptions, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
    ) -> DFlashConfig:
        """See `Drafter.make_config`.

        Raises:
            UserError: the target has no such mask token.
        """
        chosen = options.model_copy(update={"mask_token_id": mask_token_of(options.mask_token_id, target)})
        return super().make_config(chosen, target, layer_ids, draft_vocab_size)  # type: ignore[return-value]

    @classmethod
    def from_target(cls, config: DFlashConfig, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        return cls(config, tensors.shared_embedding(reads_layers=True), draft_token_ids)

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Initialize the drafter in place so that, untrained, its first draft token is about that of a linear drafter, or what followed where
        the text was alike before; see `init/blocks.py`. The MLPs start without output."""
        self._start(tensors, batches)

    def _start(self, tensors: TargetTensors, batches: Iterable[Batch]) -> blocks.ContextCodes:
        self.lm_head.weight.copy_(tensors.lm_head[self.draft_token_ids.to(tensors.lm_head.device)])
        self.norm.weight.copy_(tensors.final_norm_weight)
        for layer in self.decoder_layers():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        if self.learns_mask and not self.mask_embedding.requires_grad:
            self.mask_embedding.copy_(self.embedding[self.config.mask_token_id])
        elif self.learns_mask:
            tokens = self.embedding[self.draft_token_ids]
            mean = tokens.mean(0)
            self.mask_embedding.copy_(mean * (tokens.norm(dim=1).mean() / mean.norm()))
            del tokens
        return blocks.start(self, tensors, batches)

    @staticmethod
    def init_cost(config: DFlashConfig, *, rows: int, answered: int) -> InitCost:
        hidden, states, width = config.hidden_size, config.fused_size, config.fused_size + config.hidden_size
        fitted = min(answered, least_squares.ROWS_TO_FIT)
        cost_of_pass = partial(DFlashDrafter.cost_of_pass, config, rows=rows, answered=answered)
        fitting, comparing = cost_of_pass(most=blocks.ANCHORS_TO_FIT), cost_of_pass(most=blocks.ANCHORS_TO_COMPARE)
        size = block_context.components(config, rotary_embedding(config).inv_freq)
        flop = block_context.cost_of_context(config, fitted=fitted, size=size)
        flop += blocks.flop_of_start(config, fitting, comparing, size=size)
        sums = width**2 + 2 * width * hidden + states * hidden + hidden**2
        batch = 4 * min(fitted, least_squares.ROWS_AT_ONCE) * width
        head = 3 * config.draft_vocab_size * hidden + 2 * hidden**2
        mixed = config.num_layers * config.num_attention_heads * config.head_dim
        held = max(sums + batch, sums + width**2 + max(2 * width * hidden, head), 2 * mixed**2 + 3 * mixed * hidden)
        read = least_squares.rows_until(least_squares.ROWS_TO_FIT, rows=rows, answered=answered)
        read += (config.num_layers + bool(size)) * comparing.rows_read
        read += (config.num_layers + min(config.num_layers, 2)) * fitting.rows_read
        return InitCost(flop, 4 * held, read)

    @staticmethod
    def cost_of_pass(config: DFlashConfig, *, rows: int, answered: int, most: int) -> blocks.CostOfPass:
        """Of a pass of the start over `most` blocks."""
        drafted = min(most, answered)
        read = least_squares.rows_until(drafted, rows=rows, answered=answered)
        flop = sum(
            2.0 * math.prod(DFlashDrafter.shapes(config)[name]) * (seldom * (read - drafted) + often * drafted)
            for name, (seldom, often) in DFlashDrafter.matmul_counts(config, config.max_draft_tokens).items()
            if ".mlp." not in name
        )
        return blocks.CostOfPass(flop, drafted, read)

    @property
    def scales_states(self) -> bool:
        return True

    def to_raw_states(self, tensors: dict[str, torch.Tensor], scales: Sequence[float]) -> dict[str, torch.Tensor]:
        return tensors | {"fc.weight": divide_columns(tensors["fc.weight"], scales)}

    def loss_terms(self, options: BlockOptions) -> LossTerms:
        return LossTerms(targets=options.targets, in_blocks=True, acceptance_alpha=options.acceptance_alpha)

    @staticmethod
    def trained_rows(options: BlockOptions, weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """See `Drafter.trained_rows`: as many anchors as it takes for `options.passes`, among the positions where a server drafts: both
        the anchor and the token after it are trained on."""
        first = weights[:, 0] > 0
        rows = (first[1:] & first[:-1]).nonzero()[:, 0] + 1
        count = math.ceil(len(rows) * options.share_of_positions)
        chosen = rows[torch.randperm(len(rows), generator=generator)[:count]]
        return torch.zeros_like(weights).index_copy(0, chosen, weights[chosen])

    def head_parameters(self) -> list[nn.Parameter]:
        return [*self.lm_head.parameters()]

    def frozen_parameters(self, options: BlockOptions) -> list[nn.Parameter]:
        return [self.mask_embedding] if isinstance(options, DFlashOptions) and not options.train_mask_embedding else []

    def recompute_modules(self) -> list[nn.Module]:
        return [layer.mlp for layer in self.decoder_layers()]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        """See `Drafter.chain`. Draft tokens do not depend on each other, so `autoregressive` makes no difference."""
        queries = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        normed, head = self.block(batch, queries, steps), self.lm_head.weight
        for k in range(steps):
            yield ChainStep(normed[:, k], head, batch.loss_weights[queries, k])

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        return IndependentSlots(self, batch, rows, steps=steps)

    def block(self, batch: Batch, queries: torch.Tensor, steps: int) -> torch.Tensor:
        """The head's inputs [Q, steps, H] of the blocks that are drafted from some rows of the batch.

        Args:
            batch: see `Drafter.chain`.
            queries: int64 [Q] ascending, rows of the batch.
            steps: draft tokens of each block.
        """
        known_rows = self.config.known_rows
        rows = known_rows + steps
        heads, head_dim = self.config.num_attention_heads, self.config.head_dim
        window = self.config.sliding_window
        visible = context_of(batch, queries, heads=heads, head_dim=head_dim, block=rows, window=window)
        context = self.hidden_norm(self.fc(batch.hidden_states.flatten(1)))
        anchors, mask_token = batch.next_tokens[queries, 0], self.config.mask_token_id
        mask = self.mask_embedding if self.learns_mask else self.embedding[mask_token]
        known = torch.where((anchors == mask_token)[:, None], mask, F.embedding(anchors, self.embedding))
        state = torch.cat([known[:, None], mask.expand(len(queries), rows - 1, -1)], dim=1).flatten(
            0, 1
        )  # [Q * rows, H]
        positions = batch.positions[queries, None] + 1 + torch.arange(rows, device=queries.device)
        of_context, of_blocks = self._rope(batch.positions, context), self._rope(positions.flatten(), context)
        for index, layer in enumerate(self.decoder_layers()):
            attention, last = layer.self_attn, index == len(self.layers) - 1
            keys, values = attention.keys_values(context, of_context)
            x = layer.input_layernorm(state)
            own_keys, own_values = attention.keys_values(x, of_blocks)
            if last and known_rows:  # nothing reads their output
                x, state = (each.unflatten(0, (-1, rows))[:, known_rows:].flatten(0, 1) for each in (x, state))
                cos, sin = (each.unflatten(0, (-1, rows))[:, known_rows:].flatten(0, 1) for each in of_blocks)
                of_blocks = cos, sin
            asked = attention.queries(x, of_blocks)
            mixed = attend_in_blocks(
                asked.unflatten(0, (-1, steps if last else rows)),
                (keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()),
                (own_keys.unflatten(0, (-1, rows)), own_values.unflatten(0, (-1, rows))),
                visible,
                causal=self.config.causal,
            )
            state = state + attention.o_proj(mixed.flatten(0, 1))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        return self.norm(state).unflatten(0, (-1, steps))

    def said_by_tokens(self, embeds: torch.Tensor) -> torch.Tensor | None:
        """What is added to a block's states at draft tokens, by the normed embeddings of the tokens before them, [rows, H]; only used by the
        start."""
        return None

    def decoder_layers(self) -> list[DecoderLayer]:
        """The modules of `layers`."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def inverse_frequencies(self) -> torch.Tensor:
        """[C / 2], or fewer where RoPE turns part of each head: radians that each rotary pair turns per position."""
        return torch.as_tensor(self._rotary.inv_freq)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> CosSin:
        cos, sin = self._rotary(like, positions[None])
        return cos[0], sin[0]

    @staticmethod
    def matmul_counts(config: DFlashConfig, steps: int) -> dict[str, tuple[int, int]]:
        counts = {"fc.weight": (1, 1)}
        for index in range(config.num_layers):
            all_rows = steps + config.known_rows
            rows = all_rows if index < config.num_layers - 1 else steps
            for name in "qkvo":
                seldom, often = (1, all_rows + 1) if name in "kv" else (0, rows)
                counts[f"layers.{index}.self_attn.{name}_proj.weight"] = (seldom, often)
            counts |= {f"layers.{index}.mlp.{name}_proj.weight": (0, rows) for name in ("gate", "up", "down")}
        return counts


DRAFTER = DFlashDrafter
