"""Kinds of drafter: the options of each in a recipe, and what serving needs to know of it.

The modules themselves are in `draftsmith/drafters/KIND.py`; they need torch, and nothing here does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from draftsmith.config.section import Section


@dataclass(frozen=True)
class ServingSpec:
    """How vLLM serves a kind of drafter."""

    method: str
    """`method` of vLLM's `speculative_config`."""
    architecture: str
    """What `config.json` of the directory that vLLM loads names as its architecture."""
    needs_plugin: bool = False
    """vLLM serves it with Draftsmith installed beside it, and not alone."""
    fixed_k: bool = False
    """vLLM drafts the same number of tokens at every batch size."""
    single_pass: bool = False
    """All draft tokens come from one reading of the drafter's weights; otherwise each takes one."""
    k_field: str | None = None
    """Where `config.json` has the most tokens that it can draft, of kinds with a limit."""
    runner_v2: bool = True
    """vLLM's model runner V2 serves it; otherwise only V1 does."""


class DrafterOptions(Section):
    """What is free in the shape of a kind of drafter, and how it is taught. The rest follows from the target."""

    serving: ClassVar[ServingSpec]

    kind: str
    draft_vocab_size: int | None = None
    """Tokens the drafter can propose: the most frequent in the store. Absent (null): the target's whole vocabulary."""

    @property
    def max_draft_tokens(self) -> int | None:
        """Most tokens that it can draft; None: any number."""
        return None


class EagleOptions(DrafterOptions):
    """EAGLE, the first version (arXiv 2401.15077)."""

    serving: ClassVar = ServingSpec(method="eagle", architecture="EagleLlamaForCausalLM")

    kind: Literal["eagle"] = "eagle"
    num_layers: int = Field(1, ge=1)
    """Decoder layers in the drafter."""
    draft_vocab_size: None = None
    """The target's own head is served: its whole vocabulary."""
    feature_weight: float = Field(1.0, ge=0)
    """Weight of the loss on the foretold state (SmoothL1)."""
    token_weight: float = Field(0.1, gt=0)
    """Weight of the cross-entropy against the target's distribution."""
    noise: float = Field(0.2, ge=0)
    """Uniform noise on the target's normed states in training, in (-1/2, 1/2) * noise * 512 / T for T states of a sequence."""


class Eagle3Options(DrafterOptions):
    """EAGLE-3 (arXiv 2503.01840)."""

    serving: ClassVar = ServingSpec(method="eagle3", architecture="LlamaForCausalLMEagle3")

    kind: Literal["eagle3"] = "eagle3"
    layer_ids: tuple[int, ...] | None = None
    """Hidden states that `fc` fuses, a subset of the store's; absent: all of the store's."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers in the drafter."""
    draft_vocab_size: int | None = Field(8192, ge=16)
    norm_before_residual: bool = False
    """The residual is the normed state instead of the raw one."""
    fc_norm: bool = True
    """One RMSNorm per fused state before `fc`: layers differ in scale by orders of magnitude."""
    norm_output: bool = False
    """The next chain step reads the normed output instead of the raw one."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLP; absent: the target's."""


class MedusaOptions(DrafterOptions):
    """Medusa (arXiv 2401.10774): heads on the target's last state, one for each token ahead."""

    serving: ClassVar = ServingSpec(
        method="medusa",
        architecture="MedusaModel",
        fixed_k=True,
        single_pass=True,
        k_field="num_heads",
        runner_v2=False,
    )

    kind: Literal["medusa"] = "medusa"
    num_heads: int = Field(4, ge=1)
    """Tokens that it can guess ahead; all heads are trained, whatever `ttt_steps` says."""
    num_layers: int = Field(1, ge=1)
    """Residual blocks in a head."""
    bias: bool = False
    """Give the blocks biases, as the original implementation does."""
    shared_head: bool = False
    """All heads share one vocabulary head, the target's at the start; otherwise each has its own."""
    draft_vocab_size: None = None
    """vLLM loads no Medusa heads over a part of the vocabulary."""
    targets: Literal["distribution", "tokens"] = "tokens"
    """Learn what the target wrote, as published, or its distribution over next tokens."""

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_heads


class MlpOptions(DrafterOptions):
    """MLP speculator (arXiv 2404.19124): a small recurrent network on the target's last state. Served by vLLM with Draftsmith
    installed beside it, as a plugin: vLLM alone cannot."""

    serving: ClassVar = ServingSpec(
        method="eagle",  # whose place our plugin takes
        architecture="EagleMLPSpeculatorModel", needs_plugin=True, single_pass=True, k_field="n_predict",
    )  # fmt: skip

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    n_predict: int = Field(3, ge=1)
    """Tokens that it can guess ahead; all are trained, whatever `ttt_steps` says."""
    inner_size: int | None = Field(None, ge=1)
    """Width of its state; absent: the target's hidden size."""
    tie_weights: bool = True
    """All steps share their weights, except the first one's projection."""
    scale_input: bool = True
    """Norm the target's state once more on its way in."""
    draft_vocab_size: None = None
    """The published layout has the target's whole vocabulary."""
    targets: Literal["distribution", "tokens"] = "tokens"
    """Learn what the target wrote, as published, or its distribution over next tokens."""

    @model_validator(mode="after")
    def _tied_steps_are_several(self) -> MlpOptions:
        if self.tie_weights and self.n_predict == 1:
            raise ValueError("`tie_weights` needs an `n_predict` above 1")
        return self

    @property
    def max_draft_tokens(self) -> int | None:
        return self.n_predict


def _with_default_kind(section: Any) -> Any:
    if isinstance(section, dict):
        return {"kind": "eagle3", **section}
    if not isinstance(section, DrafterOptions):
        raise ValueError("must be a section, as in `drafter: { kind: eagle3 }`")
    return section


_Kinds = EagleOptions | Eagle3Options | MedusaOptions | MlpOptions
AnyDrafterOptions = Annotated[_Kinds, Field(discriminator="kind"), BeforeValidator(_with_default_kind)]
KINDS: dict[str, type[DrafterOptions]] = {options.model_fields["kind"].default: options for options in get_args(_Kinds)}
"""Every kind by its name."""


def kind_of_architecture(architecture: str) -> str | None:
    """The kind that a drafter's `config.json` names, ours or another library's; None: none of them."""
    for kind, options in KINDS.items():
        if architecture == options.serving.architecture:
            return kind
    # A method is part of its architectures' names, and the longest that fits is meant: `eagle3`, not `eagle`.
    stock = [kind for kind, options in KINDS.items() if not options.serving.needs_plugin]
    named = [kind for kind in stock if KINDS[kind].serving.method in architecture.lower()]
    return max(named, key=lambda kind: len(KINDS[kind].serving.method), default=None)
