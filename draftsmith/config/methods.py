"""Ways of speculating as a recipe names them: one typed section each, its keys vLLM's own.

Imports neither torch nor vLLM. What depends on the target, on a drafter's files or on the machine is checked in
`draftsmith/engine/speculation.py`, before an engine starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from draftsmith.config.section import ModelName, Section


class Method(Section):
    """What all ways have."""

    method: str
    num_speculative_tokens: int | None = Field(None, ge=1)
    """Tokens guessed in one step (K)."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """K by the number of sequences that run, as in `[[1, 4, 3], [5, 32, 1]]`: from 1 to 4 sequences K is 3, from 5 to 32 it
    is 1, and beyond as in the last. 0 guesses nothing. `num_speculative_tokens` is then the highest."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of vLLM's `speculative_config`, passed on as they are."""

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> Method:
        expected = 1
        for entry in self.num_speculative_tokens_per_batch_size or ():
            first, last, k = entry
            if first != expected or last < first or k < 0:
                raise ValueError(
                    f"`num_speculative_tokens_per_batch_size`: {list(entry)} should begin at {expected}, end no earlier than it "
                    "begins, and have no negative number of tokens; ranges follow one another from 1"
                )
            expected = last + 1
        return self

    @model_validator(mode="after")
    def _options_are_further_ones(self) -> Method:
        taken = sorted(set(self.options) & {*type(self).model_fields, "model"})
        if taken:
            raise ValueError(f"`options` holds {', '.join(taken)}, which is set beside it")
        return self

    def keys(self) -> dict[str, Any]:
        """Those of vLLM's `speculative_config` that are set here; the model's is not."""
        own = self.model_dump(mode="json", exclude={"options", "model", "revision"}, exclude_none=True)
        return own | self.options


class NoSpeculation(Method):
    """Plain decoding."""

    method: Literal["none"]


class NGram(Method):
    """Guess what followed the last tokens where they appeared before in the same text."""

    method: Literal["ngram"]
    num_speculative_tokens: int = Field(3, ge=1)
    prompt_lookup_min: int = Field(2, ge=1)
    """Fewest last tokens to look for."""
    prompt_lookup_max: int = Field(5, ge=1)
    """Most last tokens to look for."""

    @model_validator(mode="after")
    def _least_is_least(self) -> NGram:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("`prompt_lookup_min` is more than `prompt_lookup_max`")
        return self


class Suffix(Method):
    """Guess what followed the last tokens in this text and in earlier answers, as far as it was frequent.

    Needs the package `arctic-inference`.
    """

    method: Literal["suffix"]
    suffix_decoding_max_tree_depth: int = Field(24, ge=1)
    """Longest match and guess together; also the most tokens guessed unless `num_speculative_tokens` says fewer."""
    suffix_decoding_max_cached_requests: int = Field(10000, ge=0)
    """Earlier answers to remember; 0 for none."""
    suffix_decoding_max_spec_factor: float = Field(1.0, ge=0)
    """Tokens to guess for each token that matched."""
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)
    """Guess only tokens that followed at least this often."""


class DraftModel(Method):
    """A smaller model with the target's vocabulary guesses."""

    method: Literal["draft_model"]
    model: ModelName
    """Its Hub id or folder."""
    revision: str | None = None
    """With a Hub id: its revision."""
    num_speculative_tokens: int = Field(3, ge=1)


class Drafter(Method):
    """A trained drafter: the run's own, or another."""

    method: Literal["eagle", "eagle3", "medusa", "mlp_speculator"]
    model: ModelName | None = None
    """A folder that vLLM loads (`draftsmith convert --to vllm`) or its Hub id; absent: the run's own."""
    revision: str | None = None
    """With a Hub id: its revision."""


class Mtp(Method):
    """Layers that came with the target guess (multi-token prediction)."""

    method: Literal["mtp"]
    num_speculative_tokens: int = Field(1, ge=1)


AnyMethod = Annotated[NoSpeculation | NGram | Suffix | DraftModel | Drafter | Mtp, Field(discriminator="method")]
