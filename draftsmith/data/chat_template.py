"""Conversations to tokens and loss masks, with the target's chat template.

A conversation is one sequence: it is rendered once, and the whole text is tokenized once, never in pieces. An assistant turn is
the text that the target itself generates: everything after the generation prompt, up to and including the token that ends
the turn. The template's text after that token, often a line break, is not part of it.

The position of a turn in the text is found by rendering, so that it works for any template:

1. *The words.* The conversation is rendered again with other words in the turn's place. What the texts have in common before and
   after encloses the words, however the template trims or rearranges them, in the context of the turns that follow: Qwen3's
   template removes the thinking of earlier turns, Mistral's moves the system prompt to the last question.
2. *The start.* The target also generates the template's own text between the generation prompt and the words (a space,
   `<think>`). If the text begins with the earlier turns rendered with the generation prompt, the turn starts there. If later
   turns changed the text before it, the turn starts after the text that ends the prompt, which must also follow the words of the
   previous message here.
3. *The end.* The first special token that the template puts after the words.

If the template removed the thinking from a turn, the rest is the assistant's. If a template does not allow this exactly (answers do not
start with its generation prompt, no special token ends a turn, turns or tools are left out), that conversation is an error;
nothing is approximated. A template with `{% generation %}` blocks marks the assistant's text itself, and those marks are used.

A token belongs to the side of its first character. A token that starts in the prompt and extends into the answer is the prompt's:
when serving, the prompt is tokenized before there is an answer, so the target cannot generate that token.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftsmith.data.conversations import Conversation
from draftsmith.data.images import text_of
from draftsmith.run.errors import UserError

_STAND_INS = ("0qzj0", "9Xkv9")
"""Replacement words. They differ in their first and last characters, so that any text differs from one of them there."""
_STAND_IN_CHARS = range(1, 6)


class Unrenderable(Exception):
    """The chat template cannot render the conversation exactly; the text says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation in tokens."""

    token_ids: list[int]
    loss_mask: list[bool]
    """As long as `token_ids`: True at tokens that the target itself would have generated."""


class Renderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: the target's.
        plain: render prompts as plain text if the tokenizer has no chat template, as for base models, instead of raising an error.

    Raises:
        UserError: on use: the tokenizer has no chat template; or a mask is needed and the tokenizer gives no character offsets.
    """

    def __init__(self, tokenizer: Any, *, plain: bool = False) -> None:
        self._tokenizer = tokenizer
        self.plain = plain and not tokenizer.chat_template
        """Whether messages become plain text (`_plain_text`): asked for, and the tokenizer has no chat template."""
        self._special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        template = tokenizer.chat_template or ""
        templates = [template] if isinstance(template, str) else [*template.values()]
        self._marks_answers = all(re.search(r"\{%-?\s*generation\s*-?%\}", text) for text in templates)
        self.dated = any("strftime_now" in text for text in templates)
        """Whether the template may write the date of today: the same conversation is other tokens tomorrow."""
        self._plain_end: str | None = None

    @cached_property
    def _encoder(self) -> Any:
        """The tokenizer without its post-processor, which would trim white space from offsets. Tokens are the same: the template
        writes all special ones."""
        if not self._tokenizer.is_fast:
            raise UserError(
                f"The tokenizer {type(self._tokenizer).__name__} gives no character offsets, which loss masks need. Save the "
                "target with a `tokenizer.json`, or use `extract.mode: generate`."
            )
        encoder = copy.deepcopy(self._tokenizer.backend_tokenizer)
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation for the target to answer, with the generation prompt at the end.

        A text or token ids are used unchanged.

        Raises:
            Unrenderable: the template refuses the conversation, or leaves out its tools.
        """
        if not conversation.messages:
            return self._without_template(conversation)
        # A template writes all special tokens itself.
        return list(self._tokenizer(self.prompt_text(conversation), add_special_tokens=self.plain)["input_ids"])

    def prompt_text(self, conversation: Conversation) -> str:
        """What `prompt` tokenizes; for token ids, and for a text beside a chat template, the text of its tokens, as no special token is
        added to what a template renders.

        Raises:
            Unrenderable: as in `prompt`.
        """
        messages, tools = conversation.messages, conversation.tools
        if self.plain and conversation.document is not None:
            return conversation.document
        if not messages:
            return str(self._tokenizer.decode(self._without_template(conversation), skip_special_tokens=self.plain))
        if self.plain:
            return _plain_text(messages, tools)
        text = self._render(messages, tools, answer_next=True)
        self._require_tools(messages, tools, text, answer_next=True)
        return text

    def text(self, conversation: Conversation) -> Rendered:
        """Token ids of a conversation with its answers, and the loss mask.

        Turns after the last assistant turn are left out, since nothing in them is trained on. In a conversation without an assistant
        turn, a text, or token ids without a mask, all tokens are trained on.

        Raises:
            Unrenderable: the template refuses the conversation or cannot be handled exactly.
        """
        if not conversation.messages:
            ids = self._without_template(conversation)
            return Rendered(ids, conversation.loss_mask or [True] * len(ids))
        if not conversation.has_answers:
            ids = self.prompt(conversation)
            return Rendered(ids, [True] * len(ids))
        messages = conversation.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return self._answers(conversation, messages[: last + 1])

    def answers_in(self, token_ids: list[int]) -> list[bool]:
        """The loss mask of a conversation of which only the tokens are known: answers run from the tokens that the template puts
        between a question and its answer to the next one that ends a turn, or to the end.

        Raises:
            Unrenderable: there is no answer, or the template does not show where answers begin and end.
        """
        begin, end = self._answer_marks
        mask, at = [False] * len(token_ids), len(begin)
        while at < len(token_ids):
            answers = token_ids[at - len(begin) : at] == begin
            while answers and at < len(token_ids):
                mask[at] = True
                answers = token_ids[at] != end
                at += 1
            at += 1
        if True not in mask:
            raise Unrenderable("there is no answer in the chat template's form")
        return mask

    @cached_property
    def _answer_marks(self) -> tuple[list[int], int]:
        """The tokens before an answer, and the one that ends it."""
        word = _STAND_INS[0]
        question = {"role": "user", "content": word}
        before = self._render([question], None, answer_next=True).rpartition(word)[2]
        after = self._end([question, {"role": "assistant", "content": word}], 1, None)
        begin, end = (list(self._encoder.encode(text, add_special_tokens=False).ids) for text in (before, after))
        if not begin:
            raise Unrenderable("the chat template puts nothing before an answer")
        return begin, end[-1]

    def _answers(self, conversation: Conversation, messages: list[dict[str, Any]]) -> Rendered:
        tools = conversation.tools
        text = self._render(messages, tools)
        self._require_tools(messages, tools, text)
        spans: list[tuple[int, int]] = []
        if self._marks_answers:
            text, spans = self._marked(messages, tools)
        else:
            for turn, message in enumerate(messages):
                if message["role"] == "assistant":
                    after = spans[-1][1] if spans else 0
                    spans.append(self._span(messages, turn, tools, text, after))
        encoded = self._encoder.encode(text, add_special_tokens=False)
        return Rendered(list(encoded.ids), _mask([start for start, _ in encoded.offsets], spans))

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans of the template's `{% generation %}` blocks.

        Like `apply_chat_template(return_assistant_tokens_mask=True)`, but with characters: its conversion to tokens loses a turn
        whose first character is a space that the tokenizer's offsets leave out.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self._tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], spans[0]

    def _span(self, messages: list[dict[str, Any]], turn: int, tools: Any, text: str, after: int) -> tuple[int, int]:
        """Characters [start, end) of `text` that the assistant generates in message `turn`; `start` is not before `after`."""
        first, last = self._words(messages, turn, tools, text)
        prompt = self._render(messages[:turn], tools, answer_next=True)
        if text.startswith(prompt) and len(prompt) <= first:
            start = len(prompt)
        else:
            start = self._start_after_rewriting(messages, turn, tools, text, prompt, first)
        end = self._end(messages, turn, tools)
        if start < after or not text.startswith(end, last):
            raise Unrenderable("the chat template ends an earlier answer differently from the last one")
        return start, last + len(end)

    def _words(
        self, messages: list[dict[str, Any]], turn: int, tools: Any, text: str, *, answer_next: bool = False
    ) -> tuple[int, int]:
        """Characters [first, last) of `text`, the rendered messages, that depend on the content of message `turn`."""
        first = after = len(text)
        for word in _STAND_INS:
            said = [*messages[:turn], _saying(messages[turn], word), *messages[turn + 1 :]]
            other = self._render(said, tools, answer_next=answer_next)
            if word not in other or (messages[turn].get("tool_calls") and f"{word}f" not in other):
                raise Unrenderable("the chat template leaves out a turn or its tool calls")
            first = min(first, _common_prefix(text, other))
            after = min(after, _common_prefix(text[::-1], other[::-1]))
            before_words, after_words = text[:first], text[len(text) - after :]
            if not any(before_words.endswith(word[:n]) or after_words.startswith(word[-n:]) for n in _STAND_IN_CHARS):
                break  # the common parts end at the word, so they contain nothing of the message
        return first, max(first, len(text) - after)

    def _start_after_rewriting(
        self, messages: list[dict[str, Any]], turn: int, tools: Any, text: str, prompt: str, first: int
    ) -> int:
        """The start of a turn if the template changed the text before it because of later turns: after the text that the template
        puts between the previous words and the answer, both in the prompt and here."""
        if turn == 0 or messages[turn - 1]["role"] == "assistant":
            raise Unrenderable("the chat template rewrites a conversation whose answers do not each follow a question")
        lead_in = prompt[self._words(messages[:turn], turn - 1, tools, prompt, answer_next=True)[1] :]
        asked = self._words(messages, turn - 1, tools, text)[1]
        start = asked + len(lead_in)
        answered_last = self._render(messages[: turn + 1], tools)
        if not answered_last.startswith(prompt) or not text.startswith(lead_in, asked) or start > first:
            raise Unrenderable("the chat template's generation prompt is not how it begins the answer")
        return start

    def _end(self, messages: list[dict[str, Any]], turn: int, tools: Any) -> str:
        """The template's text after the words of a turn, up to and including the token that ends it."""
        if self._plain_end is None:
            word = _STAND_INS[0]
            probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": word}]
            self._plain_end = self._to_special(self._render(probe, None).rpartition(word)[2])
        if not messages[turn].get("tool_calls"):
            return self._plain_end
        # The rest of the call is the assistant's too, and may contain special tokens before the usual end.
        alone = self._render(messages[: turn + 1], tools)
        rest = alone[self._words(messages[: turn + 1], turn, tools, alone)[1] :]
        call, found, _ = rest.partition(self._plain_end)
        return call + found if found else self._to_special(rest)

    def _to_special(self, text: str) -> str:
        encoded = self._encoder.encode(text, add_special_tokens=False)
        for token, (_, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if token in self._special:
                return text[:end]
        raise Unrenderable("the chat template ends an answer with no special token")

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, answer_next: bool = False) -> str:
        if not self._tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self._tokenizer.name_or_path} has no chat template, which prompts need. Save one beside the "
                "model as `chat_template.jinja`, or give rows with `text`."
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=answer_next, tokenize=False
            )
        except Exception as error:  # a template may raise anything, from its own message to a TypeError
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120].rstrip(".")
            raise Unrenderable(f"the chat template refuses it: {reason}") from None
        return str(text)

    def _require_tools(
        self, messages: list[dict[str, Any]], tools: Any, text: str, *, answer_next: bool = False
    ) -> None:
        """A template without support for tools drops them silently."""
        if tools and text == self._render(messages, None, answer_next=answer_next):
            raise Unrenderable("the chat template has no place for tools")

    def _without_template(self, conversation: Conversation) -> list[int]:
        if conversation.token_ids is not None:
            if not conversation.token_ids:  # `Conversation.opening` of one
                raise Unrenderable("`loss_mask` leaves no prompt before the answer")
            if max(conversation.token_ids) >= len(self._tokenizer):
                raise Unrenderable("a token id is not in the target's vocabulary")
            return conversation.token_ids
        return list(self._tokenizer(conversation.document)["input_ids"])


def _plain_text(messages: list[dict[str, Any]], tools: Any) -> str:
    """The words of all messages, a paragraph each, for a target without a chat template to go on with.

    Raises:
        Unrenderable: there are tools.
    """
    if tools:
        raise Unrenderable("a target without a chat template has no place for tools")
    return "\n\n".join(text_of(message["content"]) for message in messages)


def _saying(message: dict[str, Any], word: str) -> dict[str, Any]:
    """The message with `word` in place of its content, in the same shape."""
    other = message | {"content": word if message["content"] or not message.get("tool_calls") else message["content"]}
    if "reasoning_content" in message:
        other["reasoning_content"] = word
    if message.get("tool_calls"):
        function = {"name": f"{word}f{word}", "arguments": {word: word}}
        other["tool_calls"] = [call | {"function": function} for call in message["tool_calls"]]
    return other


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is much faster than a loop."""
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def _mask(starts: list[int], spans: list[tuple[int, int]]) -> list[bool]:
    """True at tokens whose first character is in one of the spans; `starts` is sorted."""
    mask = [False] * len(starts)
    for start, end in spans:
        for token in range(bisect_left(starts, start), bisect_left(starts, end)):
            mask[token] = True
    return mask
