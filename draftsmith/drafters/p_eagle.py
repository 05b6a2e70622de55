"""P-EAGLE (arXiv 2602.01469): EAGLE-3 with all draft tokens from one forward pass.

Alignment and attention are EAGLE-3's (`decoder.py`), and so is the first draft token. The others cannot read tokens and states
that are not there yet. In their place every slot d = 1, 2, ... reads the same: the embedding of a mask token, and a learned vector
m in place of the target's states,

    f = fc([fc_norm_1(m^1), ..., fc_norm_n(m^n)])

at RoPE position p+d, and predicts x_{p+2+d}. It attends to the real positions <= p and to the slots 1..d of its own draft, in every
layer. What is served as one forward pass over K rows is trained with the context computed once for all drafts, which is the same: a slot reads
no later one.

Training drops draft tokens at random, the later the more ("conditional drop-out of depths"): slot d is trained for the rows that
remain of those that slot d-1 was trained for.

With a sliding window of W, slot d sees the real positions > p+d-W, and always p; that is speculators' mask (models/peagle/attention.py), and
vLLM's for K <= W.

Names and shapes of the tensors are those of vLLM's `llama_eagle3.py`, which takes `mask_hidden` besides EAGLE-3's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from draftsmith.config.drafters import PEagleOptions
from draftsmith.drafters.base import InitCost, LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, IndependentSlots
from draftsmith.drafters.decoder import mask_token_of
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.init.least_squares import ROWS_AT_ONCE, rows_until
from draftsmith.drafters.init.parallel import cost_of_start, draft_from_last_position, units
from draftsmith.drafters.layout import EightBits, Entry, Source
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """See `Eagle3Config`."""

    num_depths: int
    """Draft tokens that are trained: the largest K."""
    mask_token_id: int
    """The target's token whose embedding the slots after the first read."""

    @property
    def max_draft_tokens(self) -> int:
        return self.num_depths


def _depth_unsaid(source: Source, config: dict[str, Any]) -> NoReturn:
    raise UserError(
        "The config does not say how many draft tokens the drafter was trained for (`num_depths`), which vLLM does not need and other "
        "formats do. Add it to config.json as its authors state it."
    )


class PEagleDrafter(Eagle3Drafter):
    """The drafter in training. It shares the target's embedding.

    Args:
        config: shapes.
        embedding: float [vocab, H], the target's.
        draft_token_ids: int64 [V] ascending: target id of each draft token.
    """

    config_class: ClassVar[type[Eagle3Config]] = PEagleConfig
    vllm_layout: ClassVar = replace(
        Eagle3Drafter.vllm_layout,
        fields=(
            *Eagle3Drafter.vllm_layout.fields,
            Entry("num_depths", int, default=_depth_unsaid),
            # vLLM looks at all three, in this order.
            Entry("mask_token_id", int, other_keys=("pard_token", "ptd_token_id"), least=0),
        ),
        # vLLM 0.32 gives `fc` the mask as a vector, which its 8-bit kernels for CPUs refuse.
        eight_bits=EightBits(but=("fc",)),
    )
    drafts_at_once: ClassVar = True
    window_moves: ClassVar = True
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, embedding: torch.Tensor, draft_token_ids: torch.Tensor) -> None:
        super().__init__(config, embedding, draft_token_ids)
        self.max_draft_tokens = config.max_draft_tokens
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.fused_size))

    @classmethod
    def make_config(
        cls, options: PEagleOptions, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
    ) -> PEagleConfig:
        """See `Drafter.make_config`.

        Raises:
            UserError: the target has no such mask token.
        """
        mask = mask_token_of(options.mask_token_id, target)
        chosen = options.model_copy(update={"mask_token_id": mask})
        return super().make_config(chosen, target, layer_ids, draft_vocab_size)  # type: ignore[return-value]

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """EAGLE-3's start for the first draft token, and for the others `init/parallel.py`, or, with one layer, the mean of what the first
        reads as what they read."""
        super().init_from_target(tensors, batches)
        if draft_from_last_position(self, batches, centered=tensors.centered_norm):
            return
        count = 0
        for batch in batches:
            self.mask_hidden.add_(self.normed_states(batch.hidden_states).sum(0))
            count += len(batch.positions)
            if count >= ROWS_AT_ONCE:
                break
        self.mask_hidden.div_(count)

    @staticmethod
    def init_cost(config: Eagle3Config, *, rows: int, answered: int) -> InitCost:
        cost = Eagle3Drafter.init_cost(config, rows=rows, answered=answered)
        assert isinstance(config, PEagleConfig)
        if not units(config):
            return replace(cost, rows_read=cost.rows_read + rows_until(ROWS_AT_ONCE, rows=rows, answered=rows))
        shapes = PEagleDrafter.shapes(config)

        def matmuls(steps: int) -> tuple[float, float]:
            counts = PEagleDrafter.matmul_counts(config, steps)
            each = [(2.0 * math.prod(shapes[name]), *times) for name, times in counts.items()]
            return sum(flop * seldom for flop, seldom, _ in each), sum(flop * often for flop, _, often in each)

        flop, read = cost_of_start(config, rows=rows, answered=answered, matmuls=matmuls)
        return replace(cost, flop=cost.flop + flop, rows_read=cost.rows_read + read)

    def loss_terms(self, options: PEagleOptions) -> LossTerms:
        return LossTerms(targets=options.targets)

    @staticmethod
    def trained_rows(options: PEagleOptions, weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """See `Drafter.trained_rows`: each draft token after the first keeps part of the rows that the one before it has."""
        rows = weights.any(1).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        weights = weights.clone()
        for depth in range(weights.shape[1]):
            weights[rows[int(len(rows) * options.share_of_rows(depth)) :], depth] = 0
        return weights

    def to_raw_states(self, tensors: dict[str, torch.Tensor], scales: Sequence[float]) -> dict[str, torch.Tensor]:
        tensors = super().to_raw_states(tensors, scales)
        mask = tensors["mask_hidden"]  # a state, as `fc` reads them
        size = mask.new_tensor(scales).repeat_interleave(mask.shape[-1] // len(scales))
        return tensors | {"mask_hidden": mask * size}

    def mask_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.mask_hidden.view(1, len(self.config.layer_ids), -1)
        mask = self.config.mask_token_id
        return self.embedding[mask : mask + 1], self.fc(self.normed_states(states))

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        return IndependentSlots(self, batch, rows, steps=steps)

    @staticmethod
    def matmul_counts(config: Eagle3Config, steps: int) -> dict[str, tuple[int, int]]:
        counts = Eagle3Drafter.matmul_counts(config, steps)
        for name in "qkv":  # of the masks' slots: one product for all rows
            matrix = f"layers.0.self_attn.{name}_proj.weight"
            counts[matrix] = (counts[matrix][0], 1)
        return counts


DRAFTER = PEagleDrafter
