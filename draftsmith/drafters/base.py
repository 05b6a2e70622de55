"""What every kind of drafter has, so that training, prediction and conversion need to know none of them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.layout import Layout
from draftsmith.run.errors import UserError
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that decides a module's shape and mathematics; written to `draft.json`."""

    layer_ids: tuple[int, ...]
    """The target's states that the drafter reads, vLLM's numbering."""
    hidden_size: int
    rms_norm_eps: float
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{**fields, "layer_ids": tuple(fields["layer_ids"])})


@dataclass(frozen=True)
class LossTerms:
    """What a kind is taught, and with which weights."""

    targets: Literal["distribution", "tokens"] = "distribution"
    """Cross-entropy against the target's distribution, or against what it wrote."""
    token_weight: float = 1.0
    """Weight of that cross-entropy."""
    feature_weight: float = 0.0
    """Weight of SmoothL1 between what the head reads and the target's normed last state there."""


@dataclass
class ChainStep:
    """Output of one chain step for the Q rows that are predicted from."""

    normed: torch.Tensor
    """[Q, H']: what the head reads."""
    head: torch.Tensor
    """[V, H']: the head of this step; logits over the draft vocabulary are their product."""
    loss_weights: torch.Tensor
    """[Q]: weight of each row in the loss."""


@dataclass(frozen=True)
class InitCost:
    """What `Drafter.init_from_target` takes, on the drafter's device."""

    flop: float
    """Floating-point operations, all in float32; of what is no product, as Golub and Van Loan count: n^3 / 3 for a Cholesky
    factor, n^2 m for a triangular solution with m columns, 9 n^3 for eigenvectors."""
    memory_bytes: int
    """At once, beside the drafter itself and its batch of one sequence."""
    rows_read: int
    """Of the store, all times together: of whole sequences, until enough of their rows are answered."""


@functools.lru_cache(maxsize=64)
def _shapes(kind: type[Drafter], config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """See `Drafter.shapes`; from a module without memory for its tensors (torch's meta device)."""
    with torch.device("meta"):
        table = torch.empty(config.vocab_size, config.hidden_size)
        tensors = TargetTensors(table, table, torch.empty(config.hidden_size), {}, "")
        drafter = kind.from_target(config, tensors, torch.arange(config.draft_vocab_size))
    return {name: tuple(value.shape) for name, value in drafter.state_dict().items()}


class Drafter(nn.Module, ABC):
    """A drafter as it is trained. What it shares with the target is frozen and not part of the state dict."""

    config_class: ClassVar[type[DrafterConfig]]
    vllm_layout: ClassVar[Layout]
    """The directory that vLLM loads."""
    has_embedding: ClassVar[bool] = False
    """A checkpoint may hold an embedding of its own, `embed_tokens.weight`, where it does not share the target's."""

    config: DrafterConfig
    draft_token_ids: torch.Tensor
    """int64 [V] ascending: target id of each draft token."""
    max_draft_tokens: int | None = None
    """Tokens that it can guess ahead, where its shape decides that; all of them are trained."""

    @staticmethod
    def layer_ids(options: Any, saved: tuple[int, ...], last: int) -> tuple[int, ...]:
        """The states to read, of a store that holds `saved`; `last` is the id of the target's last."""
        return (last,)

    @classmethod
    def config_defaults(cls, target: TargetInfo) -> dict[str, Any]:
        """Fields of the config that the target decides where a published checkpoint does not say them."""
        return {"layer_ids": (target.num_hidden_layers,), "rms_norm_eps": target.config.rms_norm_eps}

    @classmethod
    @abstractmethod
    def make_config(
        cls, options: Any, target: TargetInfo, layer_ids: tuple[int, ...], draft_vocab_size: int
    ) -> DrafterConfig:
        """The drafter's shape: the target's sizes with what the recipe (`options`, the kind's own) sets."""

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        """The module in float32, on the CPU, with what it shares with the target."""

    @abstractmethod
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Initialize the parameters in place, on their device.

        Args:
            tensors: the target's weights, on the CPU.
            batches: one sequence of the store each, on the parameters' device, with `last_states`. They may be iterated several
                times, and not to the end.
        """

    @staticmethod
    @abstractmethod
    def init_cost(config: Any, *, rows: int, answered: int) -> InitCost:
        """What `init_from_target` takes where the store has so many rows, `answered` of which a token is predicted from."""

    def loss_terms(self, options: Any) -> LossTerms:
        """What the kind is taught."""
        return LossTerms()

    @abstractmethod
    def head_parameters(self) -> list[nn.Parameter]:
        """The drafter's own vocabulary heads, which `train.train_lm_head` trains or freezes."""

    def embedding_parameters(self) -> list[nn.Parameter]:
        """Other parameters that have a row a token: matrices by shape only, so AdamW trains them."""
        return []

    def recompute_modules(self) -> list[nn.Module]:
        """Modules that keep much more for the backward pass than they read: `train.activation_checkpointing`'s."""
        return []

    @abstractmethod
    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        """Run the chain from every row that counts at some step, and yield each step's output.

        Args:
            batch: packed rows; its `hidden_states` are those of the config's layer ids.
            steps: chain steps, at most the batch's K.
            autoregressive: steps after the first read the drafter's own greedy tokens, as in serving, and not the
                true ones, as in training.
        """

    @classmethod
    def shapes(cls, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the state dict.

        Raises:
            UserError: no module can be built from the config.
        """
        try:
            return dict(_shapes(cls, config))
        except Exception as error:  # configs come from files; what a wrong value breaks depends on the kind
            raise UserError(f"No {cls.__name__} can be built from its config: {str(error)[:200]}.") from None

    @staticmethod
    @abstractmethod
    def matmul_counts(config: Any, steps: int) -> dict[str, tuple[int, int]]:
        """How often a chain of so many steps multiplies each matrix of `shapes` (heads and tables left out): with a row
        that nothing is predicted from, and with one that something is. What training costs follows from it."""
