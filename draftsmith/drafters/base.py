"""The interface of a drafter, through which training, prediction and conversion handle every kind."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.branches import Branches, RepeatedChains
from draftsmith.drafters.layout import Layout
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that determines a module's shapes and mathematics; written to `draft.json`."""

    layer_ids: tuple[int, ...]
    """The target's hidden states that the drafter reads, in vLLM's numbering."""
    hidden_size: int
    rms_norm_eps: float
    vocab_size: int
    """Size of the target's vocabulary."""
    draft_vocab_size: int

    @property
    def max_draft_tokens(self) -> int | None:
        """The largest K; None for no limit."""
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Raises TypeError, ValueError, KeyError: a field is missing, unknown, or in part of the wrong type."""
        layer_ids = fields["layer_ids"]
        if not isinstance(layer_ids, list | tuple) or not all(type(layer) is int for layer in layer_ids):
            raise ValueError(f"`layer_ids` is {str(layer_ids)[:80]!r}, where a list of whole numbers should be")
        return cls(**{**fields, "layer_ids": tuple(layer_ids)})


@dataclass(frozen=True)
class LossTerms:
    """What a kind learns, and with which weights."""

    targets: Literal["distribution", "tokens"] = "distribution"
    """Cross-entropy against the target's distribution, or against its tokens."""
    token_weight: float = 1.0
    """Weight of that cross-entropy."""
    feature_weight: float = 0.0
    """Weight of SmoothL1 between the head's input and the target's normed last state."""
    in_blocks: bool = False
    """Few rows are drafted from, and one head reads all draft tokens (`train.loss.BlockLoss`)."""
    variation_weight: float = 0.0
    """Weight of sum |p - q|, for the target's distribution p and the drafter's q; where it is `in_blocks`."""
    confidence_weight: float = 0.0
    """Weight of the binary cross-entropy of `ChainStep.confidence` against 1 - sum |p - q| / 2, the probability that a token drawn from q is
    accepted (Leviathan et al., arXiv 2211.17192); where it is `in_blocks`."""
    supervised_prefix: bool = False
    """Where it is `in_blocks`: leave out the draft tokens of a row after the first that is not trained."""
    acceptance_alpha: float | None = None
    """Where it is `in_blocks`: weigh the draft tokens of a row by the acceptance that each decides on, with this smoothing (see
    `BlockOptions`), instead of by `train.ttt_loss_decay`."""


@dataclass
class ChainStep:
    """Output of one chain step for the Q rows that are predicted from."""

    normed: torch.Tensor
    """[Q, H']: the head's input."""
    head: torch.Tensor
    """[V, H']: the head of this step. Logits over the draft vocabulary are `normed @ head.T`."""
    loss_weights: torch.Tensor
    """[Q]: weight of each row in the loss."""
    frozen_columns: int = 0
    """So many columns of the head, from the first on, are not trained though others are."""
    confidence: torch.Tensor | None = None
    """[Q]: logit of the probability that the draft token is accepted; None where the kind does not tell."""


@dataclass(frozen=True)
class InitCost:
    """Cost of `Drafter.init_from_target` on the drafter's device."""

    flop: float
    """Floating-point operations, all in float32. Other than products, as in Golub and Van Loan: n^3 / 3 for a Cholesky
    factor, n^2 m for a triangular solution with m columns, 9 n^3 for eigenvectors."""
    memory_bytes: int
    """Peak, besides the drafter itself and a batch of one sequence."""
    rows_read: int
    """Rows of the store, counted each time they are read: whole sequences, until enough of their rows predict a token."""


def divide_columns(weight: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """A matrix [H, n * S] that reads n states, with the columns of each divided by its scale."""
    return (weight.unflatten(1, (len(scales), -1)) / weight.new_tensor(scales)[:, None]).flatten(1)


@functools.lru_cache(maxsize=64)
def _shapes(kind: type[Drafter], config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """See `Drafter.shapes`."""
    return {name: tuple(value.shape) for name, value in kind.on_meta(config).state_dict().items()}


class Drafter(nn.Module, ABC):
    """A drafter in training. What it shares with the target is frozen and not part of the state dict."""

    config_class: ClassVar[type[DrafterConfig]]
    vllm_layout: ClassVar[Layout]
    """How the directory that vLLM loads holds it."""
    has_embedding: ClassVar[bool] = False
    """A checkpoint may have its own embedding, `embed_tokens.weight`, instead of sharing the target's."""
    rows_by_draft_token: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    """Tensors with a row for each draft token, in the order of the draft vocabulary; for kinds whose vocabulary may be a subset."""

    config: DrafterConfig
    draft_token_ids: torch.Tensor
    """int64 [V] ascending: target id of each draft token."""
    max_draft_tokens: int | None = None
    """Largest K, where the drafter's shape limits it; all steps are trained."""
    drafts_at_once: ClassVar[bool] = False
    """All draft tokens come from one forward pass, so a further branch of a tree of them costs none."""
    depends_on_k: bool = False
    """A draft token depends on how many are drafted with it, so a chain of K steps is not the beginning of a longer one."""

    @staticmethod
    def layer_ids(options: Any, saved: tuple[int, ...], last: int) -> tuple[int, ...]:
        """The hidden states to read, by the kind's own options, the store's layer ids and that of the target's last state."""
        return (last,)

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        """Config fields to take from the target where a published checkpoint does not have them."""
        return {"layer_ids": (target.num_hidden_layers,), "rms_norm_eps": target.facts.norm_eps}

    @classmethod
    def sizes(cls, target: TargetInfo) -> dict[str, Any]:
        """Fields of a new drafter's config that its target determines, unless the recipe sets them."""
        return {
            "hidden_size": target.hidden_size, "rms_norm_eps": target.facts.norm_eps, "vocab_size": target.vocab_size,
        }  # fmt: skip

    @classmethod
    def make_config(
        cls, options: Any, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
    ) -> DrafterConfig:
        """The config of a new drafter: `sizes`, and the kind's own `options` by the names of its fields, None being unset."""
        names = {each.name for each in fields(cls.config_class)}
        chosen = {name: value for name, value in options if name in names and value is not None}
        chosen |= {"layer_ids": layer_ids, "draft_vocab_size": draft_vocab_size}
        return cls.config_class(**cls.sizes(target) | chosen)

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        """Build the module in float32 on the CPU, with the tensors that it shares with the target."""

    @classmethod
    def on_meta(cls, config: DrafterConfig) -> Self:
        """Build the module on torch's meta device, without memory for its tensors."""
        with torch.device("meta"):
            table = torch.empty(config.vocab_size, config.hidden_size)
            tensors = TargetTensors(table, table, torch.empty(config.hidden_size))
            return cls.from_target(config, tensors, torch.arange(config.draft_vocab_size))

    @abstractmethod
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Initialize the parameters in place, on their device.

        Args:
            tensors: the target's weights, on the CPU.
            batches: one sequence of the store each, on the parameters' device, with `last_states`. They may be iterated several
                times, and not to the end.
        """

    @property
    def scales_states(self) -> bool:
        """The drafter multiplies the target's states by a matrix without norming them first. States of different layers differ in size by
        orders of magnitude, and an optimizer's step is of one size for the whole matrix: it would change what the drafter makes of the
        large ones by much more than it is. So training divides the states by a scale each, and `to_raw_states` takes the scales into the
        weights that are saved."""
        return False

    def to_raw_states(self, tensors: dict[str, torch.Tensor], scales: Sequence[float]) -> dict[str, torch.Tensor]:
        """For a kind that `scales_states`: the state dict that computes from the states what `tensors` computes from the states divided by
        `scales`, one a layer id; powers of two, so that nothing is rounded."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def init_cost(config: Any, *, rows: int, answered: int) -> InitCost:
        """The cost of `init_from_target` with so many `rows` in the store, a token being predicted from those `answered`."""

    def loss_terms(self, options: Any) -> LossTerms:
        """What the kind learns."""
        return LossTerms()

    @staticmethod
    def trained_rows(options: Any, weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Choose what one sequence is trained on in one step, for kinds that take a sample of it.

        Args:
            options: the kind's own.
            weights: [rows, K], as `Batch.loss_weights`.
            generator: on the CPU, to draw from.

        Returns:
            The same, with 0 where nothing is trained.
        """
        return weights

    @abstractmethod
    def head_parameters(self) -> list[nn.Parameter]:
        """The drafter's own vocabulary heads, which `train.train_lm_head` trains or freezes."""

    def frozen_parameters(self, options: Any) -> list[nn.Parameter]:
        """Parameters, other than those of heads, that the kind's own `options` keep as they start. They do not require a gradient when
        `init_from_target` is called."""
        return []

    def embedding_parameters(self) -> list[nn.Parameter]:
        """Other parameters that AdamW trains instead of Muon: those with one row per token, and heads of a single row."""
        return []

    def recompute_modules(self) -> list[nn.Module]:
        """Modules that `train.activation_checkpointing` recomputes: those that keep much more for the backward pass than they read."""
        return []

    @abstractmethod
    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        """Run the chain from every row with a loss weight at some step, and yield the output of each step.

        Args:
            batch: packed rows, with the hidden states of the config's layer ids.
            steps: chain steps, at most the batch's K.
            autoregressive: steps after the first read the drafter's own greedy tokens, as in serving, instead of the
                true ones, as in training.
        """

    def branches(self, batch: Batch, rows: torch.Tensor, *, steps: int) -> Branches:
        """Draft several continuations from the same rows, for trees of draft tokens. The default runs the chain of each from its start
        again; a kind that can go on from where it was overrides it.

        Args:
            batch: as for `chain`, with `steps` columns or more.
            rows: int64 [Q] ascending, rows of the batch.
            steps: tokens of a branch, at most.
        """
        return RepeatedChains(self, batch, rows, steps=steps)

    @classmethod
    def shapes(cls, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the state dict. Raises UserError: no module can be built from the config."""
        try:
            return dict(_shapes(cls, config))
        except Exception as error:  # configs come from files; what a wrong value breaks depends on the kind
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"No {cls.__name__} can be built from its config ({why}).") from None

    @staticmethod
    @abstractmethod
    def matmul_counts(config: Any, steps: int) -> dict[str, tuple[int, int]]:
        """How often a chain of `steps` steps multiplies each matrix of `shapes` (except heads and embeddings): by a row that
        nothing is predicted from, and by one that a token is predicted from. The cost of training follows from it."""
