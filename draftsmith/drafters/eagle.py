"""EAGLE, version 1 (Li et al., arXiv 2401.15077): predict the target's next final hidden state, and let the target's head read it.

Alignment and attention: see `decoder.py`. Mathematics of a step, for state f and token embedding e:

    x = fc([e, f])                                    H wide, read by q, k and v of layer 0, which has no norm before
    r = x + o(attention(q(x), k(x), v(x)))
    y = r + mlp(post_attention_layernorm(r))          the next step's state
    logits = lm_head(y)                               the target's own head

and at step 0 f is the target's last state after its final norm, h_p. Further layers are plain Llama layers. y learns the
target's next normed state (SmoothL1), and its logits the target's distribution. In training, h_p carries uniform noise in
(-1/2, 1/2) * noise * 512 / T, for a sequence of T states.

Names and shapes of the tensors are those of the published checkpoints and of vLLM's `llama_eagle.py`, whose `fc` has no bias.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.config.drafters import EagleOptions
from draftsmith.drafters.base import InitCost, LossTerms
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.decoder import (
    LLAMA_FIXED,
    LLAMA_IRRELEVANT,
    DecoderConfig,
    DecoderDrafter,
    DecoderLayer,
    layer_fields,
    rotary_embedding,
)
from draftsmith.drafters.init.least_squares import RIDGE, ROWS_AT_ONCE, ROWS_TO_FIT, rows_to_fit, rows_until
from draftsmith.drafters.layout import EXTRA, EightBits, Entry, Layout, same_names
from draftsmith.drafters.norm import FinalNorm
from draftsmith.target.tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """See `DecoderConfig`; the only layer id is the target's last, the draft vocabulary the target's."""

    noise: float
    fc_bias: bool = False
    """`fc` has a bias, as in checkpoints of the original implementation; vLLM's has none (`convert/fc_bias.py`)."""
    output_bias: bool = False
    """The output of each layer's attention has a bias."""


_VLLM = Layout(
    fields=(
        *layer_fields(),
        Entry("attention_bias", bool, "qkv_bias", default=lambda source, _: bool(source.record.get("attention_bias"))),
        Entry("output_bias", bool, "attention_bias", default=False),  # vLLM's key for both, unless there is the other
        Entry("layer_ids", tuple, f"{EXTRA}.layer_ids"),
        Entry("draft_vocab_size", int, f"{EXTRA}.draft_vocab_size", default=lambda _, config: config["vocab_size"]),
        Entry("noise", float, f"{EXTRA}.noise", default=0.0),
        Entry("fc_bias", bool, f"{EXTRA}.fc_bias", default=False),
    ),
    names=same_names,
    fixed={**LLAMA_FIXED, "bias": None},  # vLLM takes `bias` for one of the attention
    derived={
        "architectures": lambda _: [EagleOptions.serving.architecture],
        "model_type": lambda _: "llama",
        "tie_word_embeddings": lambda _: False,
    },
    irrelevant=LLAMA_IRRELEVANT,
    supported={"fc_bias": (False,)},
    eight_bits=EightBits(),
)
"""For vLLM's `EagleLlamaForCausalLM` (vllm/model_executor/models/llama_eagle.py), which shares the target's embedding and head
where the checkpoint has none."""


class EagleDrafter(DecoderDrafter):
    """The drafter in training. It shares the target's embedding and head, float [vocab, H] each, and its final norm."""

    config_class: ClassVar = EagleConfig
    vllm_layout: ClassVar = _VLLM
    has_embedding: ClassVar = True
    config: EagleConfig
    final_norm: FinalNorm
    lm_head: torch.Tensor

    def __init__(
        self, config: EagleConfig, embedding: torch.Tensor, final_norm: FinalNorm, lm_head: torch.Tensor
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, reads=hidden, input_norm=index > 0, output_bias=config.output_bias)
            for index in range(config.num_layers)
        )
        self._rotary = rotary_embedding(config)
        self.register_buffer("embedding", embedding, persistent=False)
        self.final_norm = final_norm
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("draft_token_ids", torch.arange(config.vocab_size), persistent=False)

    @classmethod
    def from_target(cls, config: EagleConfig, tensors: TargetTensors, draft_token_ids: torch.Tensor) -> Self:
        final_norm = FinalNorm.of(tensors, config.rms_norm_eps)
        return cls(config, tensors.shared_embedding(reads_layers=False), final_norm, tensors.lm_head.float())

    @torch.no_grad()
    def init_from_target(self, tensors: TargetTensors, batches: Iterable[Batch]) -> None:
        """Fit `fc` by least squares to predict the next normed state from its input; the layers add nothing yet."""
        for layer in self.decoder_layers():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        size = 2 * self.config.hidden_size
        gram = self.embedding.new_zeros(size, size)
        cross = self.embedding.new_zeros(size, self.config.hidden_size)
        for batch, rows in rows_to_fit(batches):
            assert batch.last_states is not None
            state, following = (self.final_norm(batch.last_states[at]) for at in (rows, rows + 1))
            reads = torch.cat([F.embedding(batch.next_tokens[rows, 0], self.embedding), state], dim=1)
            gram.addmm_(reads.T, reads)
            cross.addmm_(reads.T, following)
        # Embeddings are small compared with states: each half gets a ridge of its own size.
        for half in gram.diagonal().chunk(2):
            half.add_(RIDGE * half.mean())
        self.fc.weight.copy_(torch.linalg.solve(gram, cross).T)

    @staticmethod
    def init_cost(config: EagleConfig, *, rows: int, answered: int) -> InitCost:
        hidden, read = config.hidden_size, 2 * config.hidden_size
        used = min(answered, ROWS_TO_FIT)
        by_lu = 2 / 3 * read**3 + 2.0 * read**2 * hidden
        held = 2 * read**2 + 2 * read * hidden + 2 * min(used, ROWS_AT_ONCE) * read
        rows_read = rows_until(ROWS_TO_FIT, rows=rows, answered=answered)
        return InitCost(2.0 * used * read * (read + hidden) + by_lu, 4 * held, rows_read)

    def loss_terms(self, options: EagleOptions) -> LossTerms:
        return LossTerms(token_weight=options.token_weight, feature_weight=options.feature_weight)

    def head_parameters(self) -> list[nn.Parameter]:
        return []

    def first_state(self, batch: Batch) -> torch.Tensor:
        state = self.final_norm(batch.hidden_states[:, 0])
        if self.training and self.config.noise:
            lengths = torch.bincount(batch.documents)[batch.documents, None]
            state = state + (torch.rand_like(state) - 0.5) * self.config.noise * 512 / lengths
        return state

    def inputs(
        self, layer: DecoderLayer, index: int, embeds: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index > 0:
            return layer.input_layernorm(state), state
        x = self.fc(torch.cat([embeds, state], dim=-1))
        return x, x

    def outputs(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return state, state

    def head(self) -> torch.Tensor:
        return self.lm_head

    @staticmethod
    def matmul_counts(config: EagleConfig, steps: int) -> dict[str, tuple[int, int]]:
        return {"fc.weight": (1, steps), **config.layer_matmul_counts(steps)}


DRAFTER = EagleDrafter
