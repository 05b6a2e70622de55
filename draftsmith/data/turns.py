"""Multi-turn conversations that the target answers itself: each user turn in order, after its own earlier answers.

Extraction and evaluation both render prompts here, so that acceptance is measured on prompts like those trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.data.chat_template import Renderer, Unrenderable
from draftsmith.data.conversations import Conversation

_FINAL = "<|channel|>final<|message|>"
"""What gpt-oss writes between its reasoning and its answer. These are special tokens, without which nothing in the text would divide the two."""
TURN = "/turn-"
"""Separates a conversation's id from the number of a later turn."""


@dataclass(frozen=True)
class Turn:
    """One user turn, ready for the target to answer."""

    conversation: Conversation
    """The messages up to this turn, earlier answers included."""
    token_ids: list[int]
    """`conversation` in the target's chat template, with the generation prompt at the end."""
    later: Sequence[list[dict[str, Any]]] = ()
    """Messages to add after each further answer (`Conversation.user_turns`)."""
    number: int = 0
    """0 for the first."""

    @property
    def id(self) -> str:
        """The conversation's id; later turns add `/turn-2`, `/turn-3` and so on."""
        return f"{self.conversation.id}{TURN}{self.number + 1}" if self.number else self.conversation.id


class TurnRenderer:
    """Renders the user turns of conversations, with tools, as the target is asked them.

    Args:
        tokenizer: the target's.
        max_model_len: tokens of the longest sequence that the engine takes, answer included.
        plain: as in `Renderer`.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, *, plain: bool = False) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.renderer = Renderer(tokenizer, plain=plain)
        has_channels = {"<|channel|>", "<|message|>"} <= {
            str(token) for token in tokenizer.added_tokens_decoder.values()
        }
        self._final = list(tokenizer(_FINAL, add_special_tokens=False)["input_ids"]) if has_channels else []

    def identity(self, turns: Sequence[Turn]) -> list[Any]:
        """What identifies prompts, today and tomorrow: their tokens; where the chat template may write the date, what it renders."""
        if not self.renderer.dated:
            return [turn.token_ids for turn in turns]
        return [[turn.conversation.sample_id, turn.number] for turn in turns]

    def first(self, conversation: Conversation) -> Turn:
        """The first user turn.

        Raises:
            Unrenderable: the chat template refuses the conversation, or leaves out its tools.
        """
        opening, later = conversation.opening()
        return Turn(opening, self.renderer.prompt(opening), later)

    def next(self, turn: Turn, answer: Sequence[int], *, max_tokens: int, text: str | None = None) -> Turn | None:
        """The turn after an answered one; None if there is none, the chat template refuses it, or it leaves no room.

        Args:
            answer: token ids of the target's answer to `turn`.
            max_tokens: room to leave for the next answer.
            text: the answer's text as the engine returned it, without what stopped it; None to decode the token ids.
        """
        if not turn.later:
            return None
        asked = self.with_answer(turn.conversation, answer, text)
        asked = replace(asked, messages=[*asked.messages, *turn.later[0]])
        try:
            ids = self.renderer.prompt(asked)
        except Unrenderable:
            return None
        if len(ids) + max_tokens > self.max_model_len:
            return None
        return Turn(asked, ids, turn.later[1:], turn.number + 1)

    def with_answer(self, conversation: Conversation, answer: Sequence[int], text: str | None = None) -> Conversation:
        """The conversation with the target's answer as its last message; arguments as those of `next`."""
        if text is None or len(self._without_reasoning(answer)) < len(answer):
            text = self.decode(answer)
        return replace(conversation, messages=[*conversation.messages, {"role": "assistant", "content": text}])

    def decode(self, answer: Sequence[int]) -> str:
        """The text of an answer, without special tokens and, where these divide it from the rest, without reasoning."""
        return str(self.tokenizer.decode(self._without_reasoning(answer), skip_special_tokens=True))

    def _without_reasoning(self, answer: Sequence[int]) -> list[int]:
        """What follows the last `_FINAL`; nothing if there is only reasoning, and all of an answer without channels."""
        ids, size = list(answer), len(self._final)
        if not size or self._final[0] not in ids:
            return ids
        starts = [end for end in range(size, len(ids) + 1) if ids[end - size : end] == self._final]
        return ids[starts[-1] :] if starts else []
