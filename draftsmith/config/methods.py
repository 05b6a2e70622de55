"""The recipe's methods of speculation: one section each, with vLLM's own keys.

Imports neither torch nor vLLM. What depends on the target, a drafter's files or the machine is checked in
`draftsmith/engine/speculation.py`, before an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from draftsmith.config.drafters import KINDS, method_of
from draftsmith.config.section import ModelName, Section

if TYPE_CHECKING:
    DrafterMethod = str
else:
    DrafterMethod = Literal[tuple(dict.fromkeys(map(method_of, KINDS)))]


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
    prompt_lookup_min: int = Field(2, ge=1)
    """Fewest last tokens to match."""
    prompt_lookup_max: int = Field(5, ge=1)
    """Most last tokens to match."""

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


class DraftModel(Method):
    """A smaller model with the target's vocabulary drafts."""

    method: Literal["draft_model"]
    model: ModelName
    """Its Hub id or folder."""
    revision: str | None = None
    """The revision of a Hub id."""
    num_speculative_tokens: int = Field(3, ge=1)


class Drafter(Method):
    """A trained drafter: the run's own, or another."""

    method: DrafterMethod
    model: ModelName | None = None
    """Hub id or folder of a drafter that vLLM loads (`draftsmith convert --to vllm`). Default: the run's own."""
    revision: str | None = None
    """The revision of a Hub id."""


class Mtp(Method):
    """The target's own multi-token prediction layers draft."""

    method: Literal["mtp"]
    num_speculative_tokens: int = Field(1, ge=1)


AnyMethod = Annotated[NoSpeculation | NGram | Suffix | DraftModel | Drafter | Mtp, Field(discriminator="method")]
