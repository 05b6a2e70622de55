"""Section `extract`: prompts to store."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from draftsmith.config.sampling_options import WITHOUT_SPECULATION, Penalty, Temperature, TokenId, Word, require_room
from draftsmith.config.section import LayerIds, Section
from draftsmith.config.sources import Prompts
from draftsmith.run.errors import UserError

_FURTHER = {"stop_token_ids", "min_tokens", "bad_words", "presence_penalty", "frequency_penalty", "repetition_penalty"}


class ExtractConfig(Section):
    """Prompts to store: the target's responses, and its hidden states, saved as it generates them."""

    prompts: Prompts | None = None
    """Training prompts. Only a recipe that trains no drafter, and measures or serves methods that need none, can leave them out."""
    held_out: Prompts | None = None
    """Held-out prompts, never trained on. Absent: `held_out_fraction` of `prompts` is held out."""
    held_out_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of conversations that is held out if `held_out` is absent, selected by a hash of their text."""
    layer_ids: LayerIds | None = None
    """Hidden states to save, in vLLM's numbering: id i is the input of decoder layer i, and id `num_hidden_layers` is the output
    of the last layer before the final norm. Their order does not matter. Absent: 2, n//2, n-3
    and n."""
    mode: Literal["generate", "prefill"] = "generate"
    """`generate`: the target responds, and the hidden states of prompt and response are saved in one pass. `prefill`: the
    hidden states of the given conversations are saved, with the loss on the assistant's turns; prompts without a response are
    saved as they are."""
    max_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    held_out_max_tokens: int | None = Field(None, ge=1)
    """Longest response to a held-out prompt, in tokens. Absent: `max_tokens`. The evaluation of `held_out` uses it too, so that
    predicted and measured acceptance length refer to the same text."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy. Sampled responses are reproducible: every prompt has its own seed."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many most likely tokens. Absent: from all."""
    stop: tuple[Word, ...] = ()
    """Strings that end a response, in addition to the target's end tokens."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end a response, in addition to the target's end tokens."""
    min_tokens: int = Field(0, ge=0)
    """Tokens of a response before it may end."""
    bad_words: tuple[Word, ...] = ()
    """Strings that are not generated."""
    presence_penalty: Penalty = 0.0
    """Lower the logits of tokens that the response has already by this."""
    frequency_penalty: Penalty = 0.0
    """The same times how often the response has them."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divide positive logits, and multiply negative ones, of tokens that the prompt or the response has by this."""
    samples: int = Field(1, ge=1)
    """Responses per training prompt, each with its own seed. More than one needs a temperature; held-out prompts get one."""
    turns: Literal["first", "all"] = "first"
    """With `generate`: respond to the first user turn of a conversation, or to each in order, with the target's own responses as
    context. All turns form one sequence."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """`transformers` is slow, needs no vLLM, and is the reference that vLLM's hidden states are tested against."""
    workers: int = Field(1, ge=1)
    """Engines per machine, which share its cores or GPUs. If one dies, the others take over its prompts."""
    machines: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """Machines of the Ray cluster that this machine belongs to, each with `workers` engines. All must see the run's folder under
    the same path; if one dies, the others take over its prompts. Absent: this machine only, without Ray."""
    max_num_seqs: int = Field(128, ge=1)
    """Sequences that an engine runs at once."""
    max_num_batched_tokens: int = Field(4096, ge=16)
    """Tokens per engine step; longer prompts are prefilled in chunks."""
    shard_tokens: int = Field(8192, ge=1)
    """Tokens per shard. A crash loses at most the open shard."""
    compression: Literal["none", "lossless", "int8"] = "lossless"
    """How hidden states are stored. `lossless`: bit for bit, at 0.68 of the size in bfloat16, 0.84 in float32 and 0.86 in
    float16. `none`: memory-mapped, for disks that are faster than a core decompresses. `int8`: rounded to 8 bits, at 0.44 of
    the size in bfloat16; drafters trained on such a store were as good (docs/log.md)."""
    check_free_space: bool = True
    """Refuse to start if the disk could not hold the store with every response at its longest. If false, a full disk stops
    the extraction cleanly, and it resumes once there is space."""

    @model_validator(mode="before")
    @classmethod
    def _none_without_speculation(cls, section: Any) -> Any:
        named = [name for name in WITHOUT_SPECULATION if isinstance(section, dict) and name in section]
        if named:
            raise ValueError(
                f"vLLM 0.32 takes no `{named[0]}` where it speculates, and to it extraction of hidden states is a method of speculation; leave "
                "it out, or let `draftsmith generate` sample the answers and extract them with `mode: prefill`"
            )
        return section

    @model_validator(mode="after")
    def _samples_differ(self) -> ExtractConfig:
        if self.samples > 1 and (self.temperature == 0 or self.mode == "prefill"):
            raise ValueError(
                "`samples` above 1 needs `mode: generate` and a `temperature` above 0: greedy samples are identical"
            )
        needs_vllm = self.stop or self.turns == "all" or self.workers > 1 or self.machines is not None
        if self.backend == "transformers" and needs_vllm:
            raise ValueError("`stop`, `turns: all`, `workers` and `machines` need `backend: vllm`")
        if self.backend == "transformers" and (given := self.further_sampling()):
            raise ValueError(f"`{next(iter(given))}` needs `backend: vllm`")
        require_room(self.min_tokens, min(self.max_tokens, self.held_out_max_tokens or self.max_tokens))
        return self

    @property
    def reads_whole(self) -> bool:
        """Whether conversations are read with all their turns, and not up to the first question."""
        return self.mode == "prefill" or self.turns == "all"

    def further_sampling(self) -> dict[str, Any]:
        """vLLM's sampling parameters beside temperature, top-p, top-k and `stop` that are not its defaults; none if nothing is generated."""
        if self.mode == "prefill":
            return {}
        found = self.model_dump(mode="json", include=_FURTHER)
        return {
            name: value for name, value in found.items() if getattr(self, name) != type(self).model_fields[name].default
        }

    @property
    def training_prompts(self) -> Prompts:
        """`prompts`. Raises UserError: the recipe has none."""
        if self.prompts is None:
            raise UserError(
                "The recipe has no `extract.prompts`, so there is nothing to extract or to train a drafter from. Name a file of prompts; methods "
                "that need no drafter of the run's own are measured with `draftsmith evaluate` and served with `draftsmith serve` alone."
            )
        return self.prompts

    def response_tokens(self, *, held_out: bool) -> int:
        """Longest response to a training or a held-out prompt, in tokens."""
        return (self.held_out_max_tokens or self.max_tokens) if held_out else self.max_tokens
