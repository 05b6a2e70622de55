"""Kinds of drafter: each kind's options in a recipe, and how vLLM serves it.

The modules are in `draftsmith/drafters/KIND.py`; they need torch, which nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from draftsmith.config.section import LayerIds, Section

MOST = 1000
"""Most layers, heads and draft tokens of a drafter, of which none has nearly as many: a number with a digit too many is refused at once."""


@dataclass(frozen=True)
class ServingSpec:
    """How vLLM serves a kind of drafter."""

    method: str
    """`method` of vLLM's `speculative_config`."""
    architecture: str
    """Architecture in the `config.json` that vLLM loads."""
    architecture_of_qwen3: str | None = None
    """The same for layers of Qwen3's form, where vLLM has another class for them."""
    method_on_cpus: str | None = None
    """The same on CPUs, where Draftsmith's plugin serves it under the name of another kind; None where it is no other."""
    needs_plugin: bool = False
    """vLLM serves it only with Draftsmith's plugin installed."""
    fixed_k: bool = False
    """vLLM drafts the same number of tokens at every concurrency."""
    parallel_drafting: bool = False
    """vLLM is told to draft all tokens in one forward pass (`parallel_drafting` of its `speculative_config`)."""
    single_pass: bool = False
    """The drafter's weights are read once for all draft tokens of a step, not once per token."""
    reads_one_position: bool = False
    """It reads the last position's state alone. Others go over all rows of the target's step, or over a block of as many."""
    weights_per_token: bool = False
    """Each draft token up to the largest K has weights of its own in the files, shared or not, and a draft reads those of its K tokens."""
    depends_on_k: bool = False
    """Draft tokens can depend on how many are drafted, as where those of a block attend to each other."""
    rows_read: tuple[str, ...] = ()
    """Tensors of which a draft only reads some rows; `*` as in file names."""
    read_per_token: tuple[str, ...] = ()
    """Tensors that are read once per draft token, with `single_pass` too."""
    k_field: str | None = None
    """Key in `config.json` of the largest K, for kinds with a limit."""
    rows_before_drafts: int = 0
    """Subtracted from `k_field` to get the largest K: rows of a block that are not draft tokens."""
    all_rows_field: str | None = None
    """Key in `config.json`; where it is true, those rows are draft tokens too."""
    mended_on_cpus: bool = False
    """On CPUs, vLLM computes it wrongly without Draftsmith's plugin (`serve/plugin`) if it has several layers."""
    reads_layers: bool = False
    """It reads hidden states from within the target, not the last ones alone."""
    shares_embedding: bool = False
    """vLLM gives it the target's embedding, which it must find, and where its files have no head, the target's head."""
    shares_head: bool = False
    """Its head is the target's, which vLLM must find."""
    needs_vocab_size: bool = False
    """vLLM 0.32 looks for the vocabulary's size at the top of the target's config (config/speculative.py), where one that nests its language
    model's has none."""
    eight_bits: bool = True
    """vLLM can take its linear layers with 8-bit weights."""
    further_files: tuple[str, ...] = ()
    """Files that vLLM reads beside `config.json` and `model.safetensors`, each with a tensor of the file's name."""
    whole_on_each_gpu: bool = False
    """vLLM does not split it over the GPUs of its target, or not all of it: of Medusa the heads alone, and these are counted as whole too."""
    runner_v2: bool = True
    """Whether vLLM's model runner V2 serves it, or only V1."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """All of the kind."""
        return (self.architecture, *([self.architecture_of_qwen3] if self.architecture_of_qwen3 else []))

    @property
    def speculative(self) -> dict[str, Any]:
        """The keys of vLLM's `speculative_config` that depend on the kind."""
        return {"method": self.method} | ({"parallel_drafting": True} if self.parallel_drafting else {})


_EMBEDDING = "*embed_tokens.weight"
"""An embedding of the drafter's own, which files from elsewhere may have."""


class DrafterOptions(Section):
    """Options of a drafter: what its target does not determine."""

    serving: ClassVar[ServingSpec]

    kind: str
    draft_vocab_size: int | None = None
    """Size of the draft vocabulary: the most frequent tokens of the store's responses. null: the target's whole vocabulary."""

    @property
    def max_draft_tokens(self) -> int | None:
        """Largest number of tokens that it can draft; None for any number."""
        return None

    @property
    def share_of_later_steps(self) -> float:
        """Share of the draft steps after a row's first that are trained."""
        return 1.0

    @property
    def share_of_positions(self) -> float:
        """Share of the positions with a token to predict that are drafted from in training."""
        return 1.0


class EagleOptions(DrafterOptions):
    """EAGLE, version 1 (arXiv 2401.15077)."""

    serving: ClassVar = ServingSpec(
        method="eagle",
        architecture="EagleLlamaForCausalLM",
        shares_embedding=True,
        shares_head=True,
        rows_read=(_EMBEDDING,),
    )

    kind: Literal["eagle"] = "eagle"
    num_layers: int = Field(1, ge=1, le=MOST)
    """Decoder layers in the drafter."""
    draft_vocab_size: None = None
    """Only null: EAGLE drafts with the target's own head, over its whole vocabulary."""
    feature_weight: float = Field(1.0, ge=0)
    """Weight of the loss on the predicted hidden state (SmoothL1)."""
    token_weight: float = Field(0.1, gt=0)
    """Weight of the cross-entropy against the target's distribution."""
    noise: float = Field(0.2, ge=0)
    """Uniform noise on the target's normed hidden states in training: (-1/2, 1/2) * noise * 512 / T for a sequence of T tokens."""


class FusingOptions(DrafterOptions):
    """What EAGLE-3 and P-EAGLE have in common."""

    layer_ids: LayerIds | None = None
    """Layer ids of the hidden states that `fc` fuses, a subset of the store's, in any order. Absent: all of the store's."""
    num_layers: int = Field(1, ge=1, le=MOST)
    """Decoder layers in the drafter."""
    draft_vocab_size: int | None = Field(8192, ge=16)
    """Size of the draft vocabulary: the most frequent tokens of the store's responses. null: the target's whole vocabulary."""
    norm_before_residual: bool = False
    """Use the normed hidden state as the residual instead of the raw one."""
    fc_norm: bool = True
    """Apply an RMSNorm to each fused hidden state before `fc`, since layers differ in scale by orders of magnitude."""
    norm_output: bool = False
    """Feed the normed output to the next draft step instead of the raw one."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLP. Absent: the target's; for mixture-of-experts targets, the total width of a token's active experts, within two to
    four times the hidden size."""


class Eagle3Options(FusingOptions):
    """EAGLE-3 (arXiv 2503.01840)."""

    serving: ClassVar = ServingSpec(
        method="eagle3",
        architecture="LlamaForCausalLMEagle3",
        architecture_of_qwen3="Eagle3Qwen3ForCausalLM",
        reads_layers=True,
        shares_embedding=True,
        rows_read=(_EMBEDDING,),
    )

    kind: Literal["eagle3"] = "eagle3"


MASK_OF_P_EAGLE = "mask_hidden"
"""The tensor by which vLLM, and we, tell P-EAGLE from EAGLE-3 of the same architecture."""


class PEagleOptions(FusingOptions):
    """P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, with all draft tokens from one forward pass."""

    serving: ClassVar = ServingSpec(
        method="eagle3",
        architecture="LlamaForCausalLMEagle3",
        architecture_of_qwen3="Eagle3Qwen3ForCausalLM",
        reads_layers=True,
        shares_embedding=True,
        fixed_k=True,
        parallel_drafting=True,
        single_pass=True,
        rows_read=(_EMBEDDING,),
        k_field="num_depths",
        runner_v2=False,
    )

    kind: Literal["p_eagle"] = "p_eagle"
    num_layers: int = Field(4, ge=1, le=MOST)
    """Decoder layers in the drafter."""
    num_depths: int = Field(8, ge=2, le=MOST)
    """Draft tokens that are trained, which is the largest K, regardless of `ttt_steps`."""
    down_sample_ratio: float = Field(0.7, gt=0, le=1)
    """Train the d-th draft token after the first on this share, to the power of d, of the positions, drawn anew in every step. Each draft
    token's loss is a mean over its positions, weighted by `ttt_loss_decay`. The published code takes one mean over all positions of all draft
    tokens, so that the d-th weighs as its share: a `ttt_loss_decay` of the same value gives the same weights up to the d where
    `down_sample_ratio_min` holds, and smaller ones beyond it."""
    down_sample_ratio_min: float = Field(0.2, gt=0, le=1)
    """Smallest such share."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding stands for the draft tokens that are not known yet; it may occur in texts. Absent: the vocabulary's last."""
    norm_output: Literal[False] = False
    """Only false: no draft step reads the output of another."""
    targets: Literal["distribution", "tokens"] = "distribution"
    """Train on the target's distribution over next tokens, as published, or on the tokens that it generated."""

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_depths

    def share_of_rows(self, depth: int) -> float:
        """Share of the positions that the draft token number `depth`, from 0, is trained on."""
        return max(self.down_sample_ratio**depth, self.down_sample_ratio_min)

    @property
    def share_of_later_steps(self) -> float:
        return sum(map(self.share_of_rows, range(1, self.num_depths))) / (self.num_depths - 1)


class BlockOptions(DrafterOptions):
    """What DFlash and DSpark have in common: a block of tokens from one forward pass, whose layers attend to the target's states."""

    layer_ids: LayerIds | None = None
    """Layer ids of the hidden states that `fc` fuses, a subset of the store's, in any order. Absent: all of the store's."""
    num_layers: int = Field(2, ge=1, le=MOST)
    """Decoder layers in the drafter."""
    draft_vocab_size: int | None = Field(8192, ge=16)
    """Size of the draft vocabulary: the most frequent tokens of the store's responses. null: the target's whole vocabulary."""
    block_size: int = Field(8, ge=2, le=MOST)
    """Rows of a block: the last known token and the draft tokens. The largest K is one less, regardless of `ttt_steps`. Published drafters
    have 16, and little data takes fewer: each position is then trained more often."""
    causal: bool = False
    """A draft token attends to no later one of its block. Otherwise all attend to each other, as published, and each depends on how many
    are drafted."""
    passes: float = Field(1.0, gt=0)
    """How often each response token is trained on in an epoch, on average. It sets the number of blocks per text; their positions are redrawn in
    every step. A higher value improves the first draft token most."""
    acceptance_alpha: float | None = Field(0.5, ge=0, le=1)
    """Weigh draft tokens by the acceptance that each decides on (D-PACE, arXiv 2605.18810), with this smoothing of their probabilities.
    null: by `ttt_loss_decay`; published as exp(-1 / 4) for blocks of 8 and exp(-1 / 7) for blocks of 16. Each draft token's loss is a mean over
    the blocks that train it, where the published code (DeepSpec) divides the weighted sum of all by the sum of the weights: a difference in
    scale alone where every block trains all of its draft tokens."""
    targets: Literal["distribution", "tokens"] = "tokens"
    """Train on the tokens that the target generated, as published, or on its distribution over next tokens, which takes a little longer and
    was better after three epochs of a small store, in one run (docs/log.md)."""
    intermediate_size: int | None = Field(None, ge=1)
    """Width of the MLP. Absent: the target's; for mixture-of-experts targets, the total width of a token's active experts, within two to
    four times the hidden size."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token that stands for the draft tokens that are not known yet, best one that texts do not have: to the drafter it is always that.
    Absent: the vocabulary's last."""

    @property
    def max_draft_tokens(self) -> int | None:
        return self.draft_rows

    @property
    def draft_rows(self) -> int:
        """Rows of a block that a draft token is predicted from."""
        return self.block_size - 1

    @property
    def share_of_positions(self) -> float:
        return min(1.0, self.passes / self.draft_rows)


class DFlashOptions(BlockOptions):
    """DFlash (arXiv 2602.06036): a block of tokens from one forward pass, whose layers attend to the target's hidden states."""

    serving: ClassVar = ServingSpec(
        method="dflash",
        architecture="DFlashDraftModel",
        reads_layers=True,
        shares_embedding=True,
        fixed_k=True,
        single_pass=True,
        depends_on_k=True,
        k_field="block_size",
        rows_before_drafts=1,
        mended_on_cpus=True,
        rows_read=(_EMBEDDING,),
        further_files=("mask_embedding.pt",),
    )

    kind: Literal["dflash"] = "dflash"
    train_mask_embedding: bool = True
    """Train an embedding for the mask, which starts as the mean of the draft vocabulary's. Otherwise the mask keeps the target's embedding of
    `mask_token_id`, as published: the format `zlab` holds no other."""


class DSparkOptions(BlockOptions):
    """DSpark (arXiv 2607.05147): DFlash with a Markov head, through which a draft token depends on the one before it."""

    serving: ClassVar = ServingSpec(
        method="dspark",
        method_on_cpus="dflash",  # our plugin replaces its proposer
        architecture="Qwen3DSparkModel",
        reads_layers=True,
        shares_embedding=True,
        fixed_k=True,
        single_pass=True,
        depends_on_k=True,
        k_field="block_size",
        rows_before_drafts=1,
        all_rows_field="sample_from_anchor",
        mended_on_cpus=True,
        rows_read=(_EMBEDDING, "markov_head.markov_w1.weight"),
        read_per_token=("markov_head.markov_w2.weight",),
    )

    kind: Literal["dspark"] = "dspark"
    markov_rank: int = Field(64, ge=1)
    """Rank of the Markov head; published as 256. Each draft step reads so many numbers for each token of the draft vocabulary."""
    sample_from_anchor: bool = False
    """Predict the first draft token from the row of the last known token, as published: every row predicts the token after its own, and the
    largest K is `block_size`. Otherwise a row predicts the token at its own position, as in DFlash."""
    enable_confidence_head: bool = False
    """Also learn how likely each draft token is to be accepted, as published; needs a `confidence_weight` above 0. vLLM reads it on GPUs
    alone, with `enable_adaptive_verification`."""
    confidence_head_with_markov: bool = True
    """The confidence head also reads what the Markov head knows of the token before, as published."""
    token_weight: float = Field(1.0, ge=0)
    """Weight of the cross-entropy against the target's tokens; published as 0.1."""
    variation_weight: float = Field(0.0, ge=0)
    """Weight of the sum of |p - q| over the draft vocabulary, between the target's and the drafter's distribution; published as 0.9."""
    confidence_weight: float = Field(1.0, ge=0)
    """Weight of the confidence head's binary cross-entropy against the probability that a sampled draft token is accepted; 1, as
    published."""
    supervised_prefix: bool = False
    """Train a block only up to its first draft token that is not learned, of a prompt or outside the draft vocabulary, as published. Otherwise
    also on those after it, which a server never reaches."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token whose embedding stands for the draft tokens that are not known yet; it may occur in texts. Absent: the vocabulary's last."""

    @property
    def draft_rows(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def weighs_terms(self) -> bool:
        """Its loss has terms beside the one that `train.loss` chooses."""
        return self.variation_weight > 0 or self.enable_confidence_head

    @model_validator(mode="after")
    def _learns_all_that_it_has(self) -> DSparkOptions:
        if not self.token_weight and not self.variation_weight:
            raise ValueError("`token_weight` and `variation_weight` are both 0: the drafter would learn nothing")
        if self.enable_confidence_head and not self.confidence_weight:
            raise ValueError(
                "`confidence_weight` is 0: the confidence head would stay untrained, and say 0.5 of every draft token. Leave "
                "`enable_confidence_head` out, or give it a weight"
            )
        return self


class MedusaOptions(DrafterOptions):
    """Medusa (arXiv 2401.10774): heads on the target's last hidden state, one for each draft token."""

    serving: ClassVar = ServingSpec(
        method="medusa",
        whole_on_each_gpu=True,
        architecture="MedusaModel",
        fixed_k=True,
        needs_vocab_size=True,
        single_pass=True,
        reads_one_position=True,
        eight_bits=False,
        k_field="num_heads",
        runner_v2=False,
    )

    kind: Literal["medusa"] = "medusa"
    num_heads: int = Field(4, ge=1, le=MOST)
    """Number of heads, which is the largest K. All are trained, regardless of `ttt_steps`."""
    num_layers: int = Field(1, ge=1, le=MOST)
    """Residual blocks per head."""
    bias: bool = False
    """Whether the blocks have biases, as in the original implementation."""
    shared_head: bool = False
    """Share one vocabulary head, initialized from the target's, among all heads instead of one each."""
    draft_vocab_size: None = None
    """Only null: vLLM loads Medusa heads over the whole vocabulary only."""
    targets: Literal["distribution", "tokens"] = "tokens"
    """Train on the tokens that the target generated, as published, or on its distribution over next tokens."""

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_heads


class MlpOptions(DrafterOptions):
    """MLP speculator (arXiv 2404.19124): a small recurrent network on the target's last hidden state. vLLM serves it only with
    Draftsmith's plugin installed."""

    serving: ClassVar = ServingSpec(
        method="eagle",  # our plugin replaces its proposer
        whole_on_each_gpu=True,
        architecture="EagleMLPSpeculatorModel",
        needs_plugin=True,
        reads_one_position=True,
        weights_per_token=True,
        eight_bits=False,
        k_field="n_predict",
        rows_read=("*.emb.*.weight",),
    )

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    n_predict: int = Field(3, ge=1, le=MOST)
    """Largest K. All steps are trained, regardless of `ttt_steps`."""
    inner_size: int | None = Field(None, ge=1)
    """Width of its state. Absent: the target's hidden size."""
    tie_weights: bool = True
    """Share the weights among all steps, except the first step's projection."""
    scale_input: bool = True
    """Normalize the target's hidden state once more at the input."""
    draft_vocab_size: None = None
    """Only null: the published format has the target's whole vocabulary."""
    targets: Literal["distribution", "tokens"] = "tokens"
    """Train on the tokens that the target generated, as published, or on its distribution over next tokens."""

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


_Kinds = EagleOptions | Eagle3Options | PEagleOptions | DFlashOptions | DSparkOptions | MedusaOptions | MlpOptions
AnyDrafterOptions = Annotated[_Kinds, Field(discriminator="kind"), BeforeValidator(_with_default_kind)]
KINDS: dict[str, type[DrafterOptions]] = {options.model_fields["kind"].default: options for options in get_args(_Kinds)}
"""The options of every kind, by its name."""


def method_of(kind: str) -> str:
    """The method that serves a kind, as recipes name it: vLLM's, or the kind itself where vLLM's name is that of another kind too."""
    serving = KINDS[kind].serving
    return kind if serving.needs_plugin or serving.parallel_drafting else serving.method


def methods_of(trait: Callable[[ServingSpec], bool]) -> set[str]:
    """vLLM's names of the methods that serve kinds with a trait, without those that need the plugin: it serves them under others' names."""
    return {
        options.serving.method
        for options in KINDS.values()
        if trait(options.serving) and not options.serving.needs_plugin
    }


def kinds_of(trait: Callable[[ServingSpec], bool]) -> str:
    """Names of the kinds with a trait, for messages."""
    return " or ".join(kind for kind, options in KINDS.items() if trait(options.serving))


def kind_of_architecture(architecture: str) -> str | None:
    """The kind of an architecture in a drafter's `config.json`, of Draftsmith or another library; None if unknown."""
    for kind, options in KINDS.items():
        if architecture in options.serving.architectures:
            return kind
    # Architectures contain their method's name; the longest match counts: `eagle3`, not `eagle`.
    stock = [kind for kind, options in KINDS.items() if not options.serving.needs_plugin]
    named = [kind for kind in stock if KINDS[kind].serving.method in architecture.lower()]
    return max(named, key=lambda kind: len(KINDS[kind].serving.method), default=None)
