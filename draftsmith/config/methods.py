"""The recipe's methods of speculation: one section each, with vLLM's own keys.

Imports neither torch nor vLLM. What depends on the target, a drafter's files or the machine is checked in
`draftsmith/engine/speculation.py`, before an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from draftsmith.config.drafters import KINDS, method_of
from draftsmith.config.section import ModelName, Section

_MTP_NAMES = (
    "bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5", "exaone_moe", "gemma4", "glm4_moe",
    "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3", "hy_v4", "inkling", "kimi_k3", "longcat_flash", "mimo", "mimo_v2",
    "minimax_m3", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5",
)  # fmt: skip
"""vLLM's older names of `mtp`, one for each family of targets, without the `_mtp` at their end."""

if TYPE_CHECKING:
    DrafterMethod = str
    MtpMethod = str
else:
    DrafterMethod = Literal[tuple(dict.fromkeys(map(method_of, KINDS)))]
    MtpMethod = Literal[("mtp", *(f"{name}_mtp" for name in _MTP_NAMES))]


class Method(Section):
    """What all methods share."""

    method: str
    num_speculative_tokens: int | None = Field(None, ge=1)
    """Draft tokens per step (K)."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """K by the number of running sequences, as in `[[1, 4, 3], [5, 32, 1]]`: K is 3 with 1 to 4 sequences, and 1 with 5 to 32 and
    more. K = 0 does not speculate. `num_speculative_tokens` is then the highest."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of vLLM's `speculative_config`, passed on unchanged."""

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> Method:
        expected = 1
        for entry in self.num_speculative_tokens_per_batch_size or ():
            first, last, k = entry
            if first != expected or last < first or k < 0:
                raise ValueError(
                    f"`num_speculative_tokens_per_batch_size`: {list(entry)} should start at {expected}, end no earlier than it "
                    "starts, and have no negative number of tokens; ranges are contiguous, from 1"
                )
            expected = last + 1
        return self

    @model_validator(mode="after")
    def _options_are_further_ones(self) -> Method:
        taken = sorted(set(self.options) & {*type(self).model_fields, "model"})
        if taken:
            raise ValueError(f"`options` holds {', '.join(taken)}, which has a key of its own beside `options`")
        return self

    def keys(self) -> dict[str, Any]:
        """The keys of vLLM's `speculative_config` that are set here, without the model's."""
        own = self.model_dump(mode="json", exclude={"options", "model", "revision"}, exclude_none=True)
        return own | self.options


class NoSpeculation(Method):
    """No speculation: the baseline."""

    method: Literal["none"]


class NGram(Method):
    """Draft what followed the last tokens where they appeared earlier in the same text."""

    method: Literal["ngram"]
    num_speculative_tokens: int = Field(3, ge=1)
    prompt_lookup_min: int = Field(5, ge=1)
    """Fewest last tokens to match. Absent: `prompt_lookup_max`, as in vLLM."""
    prompt_lookup_max: int = Field(5, ge=1)
    """Most last tokens to match. Absent: `prompt_lookup_min`, as in vLLM."""

    @model_validator(mode="before")
    @classmethod
    def _one_limit_is_both(cls, section: Any) -> Any:
        if isinstance(section, dict):
            limits = [section.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max")]
            given = next((limit for limit in limits if limit is not None), None)
            if given is not None:
                least, most = (given if limit is None else limit for limit in limits)
                section = section | {"prompt_lookup_min": least, "prompt_lookup_max": most}
        return section

    @model_validator(mode="after")
    def _least_is_least(self) -> NGram:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("`prompt_lookup_min` is more than `prompt_lookup_max`")
        return self


class Suffix(Method):
    """Draft what frequently followed the last tokens in this text and in earlier answers.

    Needs the package `arctic-inference`.
    """

    method: Literal["suffix"]
    suffix_decoding_max_tree_depth: int = Field(24, ge=1)
    """Longest match and draft together, in tokens; also the longest draft, unless `num_speculative_tokens` is lower."""
    suffix_decoding_max_cached_requests: int = Field(10000, ge=0)
    """Earlier answers to keep; 0 for none."""
    suffix_decoding_max_spec_factor: float = Field(1.0, ge=0)
    """Draft tokens per matched token."""
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)
    """Draft only tokens that followed at least this often."""


class ModelMethod(Method):
    """What methods share whose draft tokens come from a model."""

    draft_tensor_parallel_size: int | None = Field(None, ge=1)
    """GPUs that the drafter is split over: as many as the target; 1 for Medusa and MLP speculators, for which it is the default."""
    disable_padded_drafter_batch: bool | None = None
    """Draft for sequences of different lengths without padding them to one length, which not every attention kernel can. Absent: vLLM's
    default, which is to pad."""

    @model_serializer(mode="wrap")
    def _recorded(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        own = {*ModelMethod.model_fields, "parallel_drafting"} - Method.model_fields.keys()
        # Digests of runs without these keys are those of before there were any.
        return {name: value for name, value in fields.items() if name not in own or value is not None}


_ALWAYS_PADDED = {"draft_model", "p_eagle", "dflash", "dspark"}
"""vLLM's proposer refuses unpadded batches for them after the target has loaded (vllm/v1/spec_decode/llm_base_proposer.py)."""


class ParallelMethod(ModelMethod):
    """The same, of models that can also draft all tokens at once."""

    parallel_drafting: bool | None = None
    """Draft all tokens in one forward pass, with a model that was trained for it. Absent: as the run's drafter was trained."""

    @model_validator(mode="after")
    def _padded_where_vllm_needs_it(self) -> ParallelMethod:
        if self.disable_padded_drafter_batch and (self.parallel_drafting or self.method in _ALWAYS_PADDED):
            raise ValueError(
                f"`disable_padded_drafter_batch` does not go with `parallel_drafting` or `method: {self.method}`: vLLM pads their batches always"
            )
        return self


class DraftModel(ParallelMethod):
    """A smaller model with the target's vocabulary drafts."""

    method: Literal["draft_model"]
    model: ModelName
    """Its Hub id or folder."""
    revision: str | None = None
    """The revision of a Hub id."""
    num_speculative_tokens: int = Field(3, ge=1)


class TrainedDrafter(ParallelMethod):
    """A trained drafter: the run's own, or another."""

    method: DrafterMethod
    model: ModelName | None = None
    """Hub id or folder of a drafter, in any format of `draftsmith convert --list`; where it is not vLLM's, it is converted into the cache,
    once. Default: the run's own."""
    revision: str | None = None
    """The revision of a Hub id."""


class Mtp(ModelMethod):
    """The target's own multi-token prediction layers draft. vLLM's older names, such as `deepseek_mtp`, mean the same."""

    method: MtpMethod
    num_speculative_tokens: int = Field(1, ge=1)


AnyMethod = Annotated[NoSpeculation | NGram | Suffix | DraftModel | TrainedDrafter | Mtp, Field(discriminator="method")]
