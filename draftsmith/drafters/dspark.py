"""DSpark (arXiv 2607.05147): DFlash with a Markov head, through which a draft token depends on the one before it.

The block is DFlash's (`dflash.py`), except that the mask is a row of the target's embedding and not learned. To the logits of row
j >= 1, which predicts x_{a+j}, comes a term of low rank of the token before it:

    logits_j = lm_head(norm(u_j)) + w2(w1(x_{a+j-1}))

That token is the true one in training, and the block's own draft in serving: K short steps over logits, after one forward pass.

With `sample_from_anchor`, as published, the anchor's row predicts too, and each row the token after its own: row k = 0, 1, ... predicts
x_{a+1+k}, from the logits above with x_{a+k} as the token before. A block of B rows then has B draft tokens instead of B - 1. In the
terms of `Batch`, chain step k is row k.

A confidence head (`enable_confidence_head`) tells how likely a draft token is to be accepted, where the target samples from p and the
drafter from q, both over the draft vocabulary:

    c_k = sigmoid(proj([norm(u_k), w1(x_{a+k})]))            trained to be 1 - sum |p - q| / 2

The published loss (DeepSpec, `modeling/dspark/loss.py`) is 0.1 times the cross-entropy against the target's tokens, plus 0.9 sum |p - q|,
plus the binary cross-entropy of c_k, each weighed by exp(-k / 4). Here the first alone is the default, which needs no distribution.

Names and shapes of the tensors are those of vLLM's `qwen3_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import BlockOptions, DSparkOptions
from draftsmith.drafters.base import ChainStep, InitCost, LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, OfRows, Proposals
from draftsmith.drafters.dflash import DFlashConfig, DFlashDrafter
from draftsmith.drafters.init import blocks, least_squares
from draftsmith.drafters.layout import EightBits, Entry
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """See `DFlashConfig`."""

    markov_rank: int
    sample_from_anchor: bool = False
    """The anchor's row predicts the first draft token."""
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    """It also reads the embedding of the token before in the Markov head; only with `enable_confidence_head`."""

    @property
    def known_rows(self) -> int:
        return 0 if self.sample_from_anchor else 1


class MarkovHead(nn.Module):
    """Logits of the next token by the last one: a table of the target's tokens [vocab, rank], and of the draft vocabulary [V, rank]."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a draft token's probability of being accepted, [rows, 1], by the head's input at it."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        markov = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + markov, 1)


_DFLASH = DFlashDrafter.vllm_layout


class DSparkDrafter(DFlashDrafter):
    """The drafter in training. It shares the target's embedding.

    Args:
        config: shapes.
        embedding: float [vocab, H], the target's.
        draft_token_ids: int64 [V] ascending: target id of each draft token.
    """

    config_class: ClassVar[type[DFlashConfig]] = DSparkConfig
    vllm_layout: ClassVar = replace(
        _DFLASH,
        fields=(
            *_DFLASH.fields,
            Entry("markov_rank", int),
            # An absent key is what vLLM's class takes it for.
            Entry("sample_from_anchor", bool, default=True),
            Entry("enable_confidence_head", bool, default=False),
            Entry("confidence_head_with_markov", bool, default=False),
        ),
        # `dflash_config.sample_from_anchor` stays false: vLLM looks at the key above, and refuses another value of this one.
        fixed={**_DFLASH.fixed, "markov_head_type": "vanilla"},
        derived={**_DFLASH.derived, "architectures": lambda _: [DSparkOptions.serving.architecture]},
        further_files={},
        # vLLM's class gives neither its vocabulary head nor the Markov head a quantization; the confidence head has one output.
        eight_bits=EightBits(but=("lm_head", "markov_w1", "markov_w2", "proj")),
    )
    learns_mask: ClassVar = False
    rows_by_draft_token: ClassVar = (*DFlashDrafter.rows_by_draft_token, "markov_head.markov_w2.weight")
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, embedding: torch.Tensor, draft_token_ids: torch.Tensor) -> None:
        super().__init__(config, embedding, draft_token_ids)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)
        self._said: torch.Tensor | None = None  # [H, H], while the start is fitted

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """See `DFlashDrafter.init_from_target`. The Markov head starts with what the last token says of the next beyond the block, and the
        block's output projections are then fitted again, to the rest."""
        codes, centered = self._start(tensors, batches), tensors.centered_norm
        rank = min(self.config.markov_rank, self.config.hidden_size)
        to_values, from_values, size = blocks.fit_tokens(self, batches, rank=rank, centered=centered)
        self._said = to_values @ from_values
        blocks.fit_outputs(self, batches, codes, centered=centered)
        self._said = None
        # The final norm makes the block's states larger, so the head does the same.
        for part in torch.arange(len(self.embedding), device=self.embedding.device).split(least_squares.ROWS_AT_ONCE):
            self.markov_head.markov_w1.weight[part, :rank] = least_squares.unit_rms(self.embedding[part]) @ to_values
        head = self.lm_head.weight * self.norm.weight
        self.markov_head.markov_w2.weight.zero_()
        self.markov_head.markov_w2.weight[:, :rank] = head @ from_values.T / size
        if self.config.enable_confidence_head:  # nothing is known yet: one half
            for parameter in self.confidence_head.parameters():
                parameter.zero_()

    @staticmethod
    def init_cost(config: DFlashConfig, *, rows: int, answered: int) -> InitCost:
        assert isinstance(config, DSparkConfig)
        cost = DFlashDrafter.init_cost(config, rows=rows, answered=answered)
        fitting = DFlashDrafter.cost_of_pass(config, rows=rows, answered=answered, most=blocks.ANCHORS_TO_FIT)
        hidden, rank, fits = config.hidden_size, min(config.markov_rank, config.hidden_size), min(config.num_layers, 2)
        flop = blocks.flop_of_fit_tokens(config, fitting, rank=rank) + blocks.flop_of_fit_outputs(config, fitting)
        flop += 2.0 * fits * fitting.blocks * config.max_draft_tokens * hidden**2  # what the token before says
        flop += 2.0 * (config.vocab_size + config.draft_vocab_size) * hidden * rank
        return replace(cost, flop=cost.flop + flop, rows_read=cost.rows_read + (1 + fits) * fitting.rows_read)

    def said_by_tokens(self, embeds: torch.Tensor) -> torch.Tensor | None:
        return None if self._said is None else embeds @ self._said

    def loss_terms(self, options: BlockOptions) -> LossTerms:
        assert isinstance(options, DSparkOptions)
        return replace(
            super().loss_terms(options),
            token_weight=options.token_weight,
            variation_weight=options.variation_weight,
            confidence_weight=options.confidence_weight if options.enable_confidence_head else 0.0,
            supervised_prefix=options.supervised_prefix,
        )

    def embedding_parameters(self) -> list[nn.Parameter]:
        confidence = self.confidence_head.parameters() if self.config.enable_confidence_head else ()
        return [*self.markov_head.parameters(), *confidence]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        queries = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        normed, tokens = self.block(batch, queries, steps), batch.next_tokens[queries, 0]
        # One product does both: the sum of two is the product of what is side by side.
        head = torch.cat([self.lm_head.weight, self.markov_head.markov_w2.weight], dim=1)
        frozen = 0 if self.lm_head.weight.requires_grad else self.config.hidden_size
        for k in range(steps):
            read = torch.cat([normed[:, k], self.markov_head.markov_w1(tokens)], dim=1)
            yield ChainStep(read, head, batch.loss_weights[queries, k], frozen, self._confidence(read))
            if autoregressive:
                tokens = self.draft_token_ids[F.linear(read, head).argmax(-1)]
            else:
                tokens = batch.next_tokens[queries, k + 1]

    def _confidence(self, read: torch.Tensor) -> torch.Tensor | None:
        """The logits [Q] of a step's draft tokens being accepted, by the head's input [Q, H + rank]; None without that head."""
        if not self.config.enable_confidence_head:
            return None
        proj = self.confidence_head.proj
        logits: torch.Tensor = proj(read[:, : proj.in_features])
        return logits[:, 0]

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        return _Branches(self, batch, rows, steps)


class _Branches(Branches):
    """One block, and its logits, for all branches of a row, and the Markov head along each."""

    def __init__(self, drafter: DSparkDrafter, batch: Batch, rows: torch.Tensor, steps: int) -> None:
        self._block, self._head, self._markov = drafter.block(batch, rows, steps), drafter.lm_head, drafter.markov_head
        self._roots, self._depth = torch.arange(len(rows), device=rows.device), 0

    def step(self, parents: torch.Tensor, tokens: torch.Tensor) -> Proposals:
        self._roots, of_block = self._roots[parents], self._block[:, self._depth]
        self._depth += 1
        return Proposals(
            self._markov.markov_w1(tokens),
            self._markov.markov_w2.weight,
            torch.arange(len(tokens), device=tokens.device),
            OfRows(of_block, self._head.weight, self._roots),
        )


DRAFTER = DSparkDrafter
