"""MLP speculator (Wertheimer et al., arXiv 2404.19124): a small recurrent network on the target's last hidden state.

Alignment. At position p it reads the target's last state h_p, after its final norm, and the token x_{p+1}, and predicts
x_{p+2}; step i reads the network's state of step i-1 and the token x_{p+1+i}, and predicts x_{p+2+i}.

Mathematics, for n steps and an inner size D, with norm(x) = x / sqrt(mean(x^2) + 1e-6):

    w_s = 0.5^(0.5 / n),  w_e = sqrt((1 - w_s^2) D / 2)      state and token have equal weight after n steps
    s_{-1} = h_p                                             (scale_input: norm(h_p) / sqrt(2))
    s_i = GELU(ln_i(proj_i s_{i-1} + (w_e / w_s) emb_i[x_{p+1+i}]))      ln_i(x) = a_i norm(x) + b_i
    logits_i = head_i s_i                                    over the target's vocabulary

With `tie_weights` all steps share emb, ln and head, and all but the first share proj.

Names and shapes of the tensors are those of the published accelerators (ibm-fms, ibm-granite) without their prefix.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import MlpOptions
from draftsmith.drafters.base import ChainStep, Drafter, DrafterConfig, InitCost, LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.decoder import LLAMA_IRRELEVANT
from draftsmith.drafters.init import least_squares
from draftsmith.drafters.layout import EXTRA, Entry, Layout, Source, same_names, target_fields
from draftsmith.drafters.norm import FinalNorm
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class MlpConfig(DrafterConfig):
    """See `DrafterConfig`; the only layer is the target's last, the draft vocabulary the target's."""

    inner_size: int
    n_predict: int
    tie_weights: bool
    scale_input: bool

    @property
    def max_draft_tokens(self) -> int:
        return self.n_predict


def _published_names(config: MlpConfig, tensors: tuple[str, ...]) -> dict[str, str]:
    """Shared tensors have a name for each step: with `tie_weights`, vLLM still loads a head for every one."""
    names = {}
    for i in range(config.n_predict):
        shared = 0 if config.tie_weights else i
        sources = {"proj": min(i, 1) if config.tie_weights else i, "emb": shared, "head": shared, "ln": shared}
        for name in tensors:
            part, number, what = name.split(".")
            if int(number) == sources[part]:
                names[f"speculator.{part}.{i}.{what}"] = name
    return names


@dataclass(frozen=True)
class _InnerSize(Entry):
    """The inner size: without the key, or with 0, the hidden size, as in vLLM (vllm/transformers_utils/configs/mlp_speculator.py)."""

    def read(self, source: Source, config: dict[str, Any]) -> Any:
        return super().read(source, config) or config["hidden_size"]


PUBLISHED = Layout(
    fields=(
        Entry("hidden_size", int, "emb_dim"),
        Entry("vocab_size", int),
        Entry("draft_vocab_size", int, f"{EXTRA}.draft_vocab_size", default=lambda _, config: config["vocab_size"]),
        _InnerSize("inner_size", int, "inner_dim", default=0, least=0),
        Entry("n_predict", int),
        Entry("tie_weights", bool, default=False),
        Entry("scale_input", bool, default=False),
        *target_fields(),
    ),
    names=_published_names,
    derived={
        "architectures": lambda _: ["MLPSpeculatorPreTrainedModel"],
        "model_type": lambda _: "mlp_speculator",
        "n_candidates": lambda _: 1,
        "top_k_tokens_per_head": lambda config: [1] * config.n_predict,
    },
    irrelevant=frozenset({"base_model_name_or_path", "dtype", "torch_dtype", "transformers_version"}),
)
"""The published accelerators' layout. vLLM 0.32 knows its config and cannot run it."""

_SERVED = Layout(
    fields=(
        Entry("hidden_size", int),
        Entry("vocab_size", int),
        Entry("draft_vocab_size", int, f"{EXTRA}.draft_vocab_size", default=lambda _, config: config["vocab_size"]),
        Entry("inner_size", int, "inner_dim"),
        Entry("n_predict", int),
        Entry("tie_weights", bool),
        Entry("scale_input", bool),
        *target_fields(),
    ),
    names=same_names,
    derived={
        "architectures": lambda _: [MlpOptions.serving.architecture],
        # vLLM makes a config of it before anybody asks for the model: a Llama's, of which it reads sizes.
        "model_type": lambda _: "llama",
        "num_hidden_layers": lambda _: 1,
        "num_attention_heads": lambda _: 1,
        "max_position_embeddings": lambda _: 1 << 20,  # it knows no positions: the target's limit is the only one
        "tie_word_embeddings": lambda _: False,
    },
    irrelevant=LLAMA_IRRELEVANT,
)
"""For our plugin's model in vLLM (serve/plugin/mlp_speculator.py)."""


class _Norm(nn.Module):
    """RMS norm with a weight and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * least_squares.unit_rms(x) + self.bias


class MlpDrafter(Drafter):
    """The speculator in training. It shares the target's final norm."""

    config_class: ClassVar = MlpConfig
    vllm_layout: ClassVar = _SERVED
    config: MlpConfig
    final_norm: FinalNorm

    def __init__(self, config: MlpConfig, final_norm: FinalNorm) -> None:
        super().__init__()
        size, steps = config.inner_size, config.n_predict
        self.config, self.max_draft_tokens = config, config.max_draft_tokens
        own = 1 if config.tie_weights else steps
        inputs = [config.hidden_size] + [size] * (min(steps, 2) - 1 if config.tie_weights else steps - 1)
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, size) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(read, size, bias=False) for read in inputs)
        self.ln = nn.ModuleList(_Norm(size) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(size, config.vocab_size, bias=False) for _ in range(own))
        for table in (*self.emb, *self.proj, *self.head):
            assert isinstance(table, nn.Linear | nn.Embedding)
            nn.init.normal_(table.weight, std=size**-0.5)
        self._token_weight = math.sqrt((1 - 0.5 ** (1 / steps)) * size / 2) / 0.5 ** (0.5 / steps)  # w_e / w_s
        self.final_norm = final_norm
        self.register_buffer("draft_token_ids", torch.arange(config.vocab_size), persistent=False)

    @classmethod
    def sizes(cls, target: TargetInfo) -> dict[str, Any]:
        return super().sizes(target) | {"inner_size": target.hidden_size}

    @classmethod
    def from_target(cls, config: MlpConfig, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        return cls(config, FinalNorm.of(tensors, config.rms_norm_eps))

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Take the heads from the target's head and fit the first projection to predict its next state.

        The heads are the target's, in the D directions in which it varies most; `proj_0` gives the coordinates in these
        directions of the next state, predicted from h_p by least squares. With an inner size above H the further columns
        stay random, as do the embeddings and the other projections (as in the paper: N(0, 1/D)).
        """
        head = tensors.lm_head.to(self.final_norm.weight)
        kept = min(self.config.inner_size, self.config.hidden_size)
        directions = torch.linalg.eigh(head.T @ head).eigenvectors[:, -kept:]  # [H, D], ascending
        (ahead,) = least_squares.fit_next_states(self.final_norm, batches, steps=1)
        for step in range(len(self.head)):
            self._head(step)[:, :kept] = head @ directions
        first = self.proj[0]
        assert isinstance(first, nn.Linear)
        first.weight[:kept] = directions.T @ ahead

    @staticmethod
    def init_cost(config: MlpConfig, *, rows: int, answered: int) -> InitCost:
        hidden, head = config.hidden_size, config.vocab_size * config.hidden_size
        kept, heads = min(config.inner_size, hidden), 1 if config.tie_weights else config.n_predict
        flop, held = least_squares.cost_of_fit_next_states(hidden, answered=answered, steps=1)
        flop += least_squares.flop_of_eigenvectors(hidden)
        flop += 2.0 * head * hidden + 2.0 * heads * head * kept + 2.0 * hidden**2 * kept
        held = head + max(held, hidden**2 + config.vocab_size * kept) + hidden * kept
        rows_read = least_squares.rows_until(least_squares.ROWS_TO_FIT, rows=rows, answered=answered)
        return InitCost(flop, 4 * held, rows_read)

    def loss_terms(self, options: MlpOptions) -> LossTerms:
        return LossTerms(targets=options.targets)

    def head_parameters(self) -> list[nn.Parameter]:
        return [*self.head.parameters()]

    def embedding_parameters(self) -> list[nn.Parameter]:
        return [*self.emb.parameters()]

    def chain(self, batch: Batch, *, steps: int, autoregressive: bool = False) -> Iterator[ChainStep]:
        rows = batch.loss_weights[:, :steps].sum(1).nonzero()[:, 0]
        state, tokens = self.first_state(self.final_norm(batch.hidden_states[rows, 0])), batch.next_tokens[rows, 0]
        for k in range(steps):
            state, head = self.step(k, state, tokens)
            yield ChainStep(state, head, batch.loss_weights[rows, k])
            tokens = F.linear(state, head).argmax(-1) if autoregressive else batch.next_tokens[rows, k + 1]

    def first_state(self, normed: torch.Tensor) -> torch.Tensor:
        """s_{-1} [rows, H], from the target's last state after its final norm [rows, H]."""
        return least_squares.unit_rms(normed) / math.sqrt(2) if self.config.scale_input else normed

    def step(self, k: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s_k [rows, D], from s_{k-1} and the tokens x_{p+1+k} (int [rows]), and head_k [V, D]."""
        shared = 0 if self.config.tie_weights else k
        projected = self.proj[min(k, len(self.proj) - 1)](state)
        state = F.gelu(self.ln[shared](projected + self._token_weight * self.emb[shared](tokens)))
        return state, self._head(shared)

    def _head(self, i: int) -> torch.Tensor:
        """[V, D]"""
        head = self.head[i]
        assert isinstance(head, nn.Linear)
        return head.weight

    @staticmethod
    def matmul_counts(config: MlpConfig, steps: int) -> dict[str, tuple[int, int]]:
        if config.tie_weights:
            return {"proj.0.weight": (0, 1), "proj.1.weight": (0, steps - 1)}
        return {f"proj.{i}.weight": (0, 1) for i in range(steps)}


DRAFTER = MlpDrafter
