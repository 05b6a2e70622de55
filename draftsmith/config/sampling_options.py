"""vLLM's sampling parameters: types that sections share, and the section `sampling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from draftsmith.config.section import Section

_LEAST_TEMPERATURE = 0.01  # vLLM takes this for any smaller one above 0 (`_MAX_TEMP` in vllm/sampling_params.py)


def _as_vllm_takes_it(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"vLLM would sample at {_LEAST_TEMPERATURE:g} instead, its least temperature; 0 is greedy")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_as_vllm_takes_it)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0)]
Word = Annotated[str, Field(min_length=1)]
WITHOUT_SPECULATION = ("min_p", "logit_bias")
"""Parameters that vLLM 0.32 takes only where it does not speculate."""
_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_ABOUT_FORMS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_SIZES = ("max_pattern_size", "min_pattern_size", "min_count")


def require_room(min_tokens: int, max_tokens: int) -> None:
    """Raises ValueError: an answer would have to be longer than it may be."""
    if min_tokens > max_tokens:
        raise ValueError(f"`min_tokens`, {min_tokens}, is more than the longest answer, {max_tokens} tokens")


class SamplingOptions(Section):
    """How `draftsmith generate` samples: vLLM's sampling parameters, with vLLM's names and, but for `max_tokens` and `seed`, its defaults."""

    n: int = Field(1, ge=1, le=16384)
    """Answers per prompt, each with a seed of its own."""
    max_tokens: int = Field(256, ge=1)
    """Longest answer, in tokens; shorter where `engine.max_model_len` ends it."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before an end token or one of `stop_token_ids` may be generated."""
    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: int = Field(0, ge=-1)
    """Sample from this many most likely tokens; 0 and -1: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this likely, relative to the most likely one. Not with speculation."""
    seed: int | None = None
    """Seed of sampling, from which every answer gets its own. Absent: the recipe's."""
    presence_penalty: Penalty = 0.0
    """Lower the logits of tokens that the answer has already by this."""
    frequency_penalty: Penalty = 0.0
    """The same times how often the answer has them."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divide positive logits, and multiply negative ones, of tokens that the prompt or the answer has by this."""
    stop: tuple[Word, ...] = ()
    """Strings that end an answer."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end an answer, beside the target's end tokens."""
    ignore_eos: bool = False
    """Go on after end tokens."""
    bad_words: tuple[Word, ...] = ()
    """Strings that are not generated: their last token is ruled out where it would complete one."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """Numbers that are added to the logits of tokens, by token id. Not with speculation."""
    allowed_token_ids: tuple[TokenId, ...] | None = Field(None, min_length=1)
    """Generate these tokens only."""
    logprobs: int | None = Field(None, ge=0)
    """Write the log probabilities of each token and of this many most likely ones."""
    skip_special_tokens: bool = True
    """Leave special tokens out of an answer's text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between them if they are in it."""
    include_stop_str_in_output: bool = False
    """Keep the string of `stop` that ended an answer in its text."""
    structured_outputs: dict[str, Any] | None = None
    """Answers in a given form, as vLLM's `StructuredOutputsParams` describes it: `{ json: SCHEMA }`, `{ regex: ... }`, `{ choice: [...] }`,
    `{ grammar: ... }`."""
    thinking_token_budget: int | None = Field(None, ge=-1)
    """Most tokens of a reasoning part; -1 for any number."""
    repetition_detection: dict[str, int] | None = None
    """End answers that repeat themselves: `max_pattern_size`, `min_pattern_size` and `min_count`."""

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("structured_outputs")
    @classmethod
    def _one_form(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        forms = [name for name in _FORMS if value.get(name) is not None]
        if len(forms) != 1:
            raise ValueError(f"`structured_outputs` needs exactly one of {', '.join(_FORMS)}")
        if unknown := sorted(value.keys() - {*forms, *_ABOUT_FORMS}):
            raise ValueError(
                f"`structured_outputs` has no `{unknown[0]}`; beside the form it takes {', '.join(_ABOUT_FORMS)}"
            )
        return value

    @field_validator("repetition_detection")
    @classmethod
    def _known_sizes(cls, value: dict[str, int] | None) -> dict[str, int] | None:
        if value is not None and (unknown := sorted(value.keys() - {*_SIZES})):
            raise ValueError(f"`repetition_detection` has no `{unknown[0]}`; it takes {', '.join(_SIZES)}")
        return value

    @model_validator(mode="after")
    def _room_for_the_least(self) -> SamplingOptions:
        require_room(self.min_tokens, self.max_tokens)
        return self

    def parameters(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.SamplingParams` that differ from its defaults, without `n` and `seed`, and with `temperature`,
        `max_tokens` always."""
        usual = SamplingOptions()
        found = self.model_dump(mode="json", exclude={"n", "seed"})
        found["logit_bias"] = dict(self.logit_bias)  # JSON has no numbers as keys
        always = ("temperature", "max_tokens")
        return {
            name: value
            for name, value in found.items()
            if name in always or getattr(self, name) != getattr(usual, name)
        }

    def token_ids(self) -> dict[str, Sequence[int]]:
        """The token ids that each parameter names."""
        return {
            "stop_token_ids": self.stop_token_ids, "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
        }  # fmt: skip


def unknown_token(named: Mapping[str, Sequence[int]], vocab_size: int) -> str | None:
    """The first parameter with a token that the target does not have, and the token, in words; None if there is none."""
    for name, ids in named.items():
        if (beyond := max(ids, default=0)) >= vocab_size:
            return f"`{name}` has the token {beyond}, and the target's vocabulary has {vocab_size} tokens, from 0 on"
    return None
