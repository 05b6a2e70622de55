"""Medusa (Cai et al., arXiv 2401.10774): independent heads on the target's last hidden state, one for each draft token.

Alignment. At position p head i reads the target's last state h_p, after its final norm, and predicts x_{p+2+i}; x_{p+1} is
the target's own token. No head reads the draft tokens of the others, nor x_{p+1}.

Mathematics of head i with L residual blocks (the paper's first formula; W starts at zero, so a block starts as the identity):

    y_0 = h_p;  y_{l+1} = y_l + SiLU(W_{i,l} y_l + b_{i,l});  logits = lm_head_i(y_L)

Names and shapes of the tensors are those of vLLM's `medusa.py`, with one vocabulary head per head or a shared one
(`original_lm_head`). Heads are over the target's whole vocabulary: vLLM 0.32 refuses a checkpoint with a `token_map`,
since its loader then misses a weight of that name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import MedusaOptions
from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig, InitCost, LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, IndependentSlots
from draftsmith.drafters.init.least_squares import ROWS_TO_FIT, cost_of_fit_next_states, fit_next_states, rows_until
from draftsmith.drafters.layout import Entry, Layout, same_names, target_fields
from draftsmith.drafters.norm import FinalNorm
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """See `DrafterConfig`; the only layer is the target's last, the draft vocabulary the target's."""

    num_heads: int
    num_layers: int
    bias: bool
    shared_head: bool

    @property
    def max_draft_tokens(self) -> int:
        return self.num_heads


_VLLM = Layout(
    fields=(
        Entry("hidden_size", int),
        Entry("vocab_size", int),
        Entry("draft_vocab_size", int, "truncated_vocab_size", default=lambda _, config: config["vocab_size"]),
        Entry("num_heads", int),
        Entry("num_layers", int, "num_hidden_layers", default=1),
        Entry("bias", bool, "medusa_fc_bias", default=False),
        Entry("shared_head", bool, "original_lm_head", default=False),
        *target_fields(),
    ),
    names=same_names,
    fixed={"logit_scale": None},
    derived={"architectures": lambda _: [MedusaOptions.serving.architecture], "model_type": lambda _: "medusa"},
    irrelevant=frozenset({"dtype", "max_paths", "max_seq_len", "topk", "torch_dtype", "transformers_version"}),
)
"""For vLLM's `MedusaModel` (vllm/model_executor/models/medusa.py); names are those of the module."""


class _Block(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.bias) for _ in range(config.num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaDrafter(Drafter):
    """The heads in training. They share the target's final norm."""

    config_class: ClassVar = MedusaConfig
    vllm_layout: ClassVar = _VLLM
    drafts_at_once: ClassVar = True
    config: MedusaConfig
    final_norm: FinalNorm

    def __init__(self, config: MedusaConfig, final_norm: FinalNorm) -> None:
        super().__init__()
        self.config, self.max_draft_tokens = config, config.max_draft_tokens
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_heads))
        heads = 1 if config.shared_head else config.num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(heads)
        )
        self.final_norm = final_norm
        self.register_buffer("draft_token_ids", torch.arange(config.vocab_size), persistent=False)

    @classmethod
    def from_target(cls, config: MedusaConfig, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        return cls(config, FinalNorm.of(tensors, config.rms_norm_eps))

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Start the blocks as identities, as in the paper, and the vocabulary heads as the target's head.

        Without a shared head, each includes the best linear prediction of its state: if z_{p+1+i} ~ A_i z_p for the normed
        states, by least squares, then head i starts as lm_head A_i.
        """
        for parameter in self.blocks.parameters():
            parameter.zero_()
        target_head = tensors.lm_head.to(self._head(0))
        if self.config.shared_head:
            self._head(0).copy_(target_head)
            return
        for i, ahead in enumerate(fit_next_states(self.final_norm, batches, steps=self.config.num_heads)):
            self._head(i).copy_(target_head @ ahead)

    @staticmethod
    def init_cost(config: MedusaConfig, *, rows: int, answered: int) -> InitCost:
        hidden, head = config.hidden_size, config.vocab_size * config.hidden_size
        if config.shared_head:
            return InitCost(0.0, 4 * head, 0)
        flop, held = cost_of_fit_next_states(hidden, answered=answered, steps=config.num_heads)
        # Heads are made after the fit, from the target's and one A_i at a time.
        return InitCost(
            flop + 2.0 * config.num_heads * head * hidden,
            4 * (head + max(held, config.num_heads * hidden**2 + head)),
            rows_until(ROWS_TO_FIT, rows=rows, answered=answered),
        )

    def loss_terms(self, options: MedusaOptions) -> LossTerms:
        return LossTerms(targets=options.targets)

    def head_parameters(self) -> list[nn.Parameter]:
        return [*self.lm_heads.parameters()]

    def recompute_modules(self) -> list[nn.Module]:
        return [*self.blocks]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        """See `Drafter.chain`; `autoregressive` changes nothing, as no head reads draft tokens."""
        rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        state = self.final_norm(batch.hidden_states[rows, 0])
        for k in range(steps):
            yield ChainStep(self.blocks[k](state), self._head(k), batch.loss_weights[rows, k])

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        return IndependentSlots(self, batch, rows, steps=steps)

    def _head(self, i: int) -> torch.Tensor:
        """[V, H]"""
        head = self.lm_heads[0 if self.config.shared_head else i]
        assert isinstance(head, nn.Linear)
        return head.weight

    @staticmethod
    def matmul_counts(config: MedusaConfig, steps: int) -> dict[str, tuple[int, int]]:
        heads, layers = range(min(steps, config.num_heads)), range(config.num_layers)
        return {f"blocks.{i}.layers.{j}.weight": (0, 1) for i in heads for j in layers}


DRAFTER = MedusaDrafter
