"""Conversations: rows in the common data set formats, parsed into one type.

    messages          {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}   OpenAI's, images included
    sharegpt          {"conversations": [{"from": "human", "value": "..."}, ...]}
    prompt            {"prompt": "...", "response": "..."}, or {"instruction", "input", "output"}
    text              {"text": "..."}                  used without a chat template
    tokens            {"input_ids": [...], "loss_mask": [...]}
    mt_bench, humaneval, gsm8k                         their published formats

Other rows are rejected with a reason, and reasons are counted: no row is dropped silently.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from draftsmith.data.images import located, text_of, without_sources

_ROLES = ("system", "user", "assistant", "tool")
_SAME_ROLE = {
    "human": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "developer": "system",
    "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_MAX_REASONS = 50
_ROWS_APART = 16
"""Of 16 pieces of one ShareGPT conversation some adjoin: of all 8,088 later pieces in the published file, each adjoins the one before."""


@dataclass(frozen=True)
class Conversation:
    """One row: messages, a text or token ids, exactly one of the three.

    `messages` may have any number of turns; a conversation that ends with a user turn is a prompt.
    """

    id: str
    """Its name, unique in its source: `ID#2` for the second row of an `ID`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """In the form of chat templates: `role`, `content` (a string; with images, a list of parts as in `images.py`), `tool_calls` with
    arguments as objects, and so on."""
    tools: list[dict[str, Any]] | None = None
    """Schemas of the functions that the model may call."""
    document: str | None = None
    """A text to use without a chat template."""
    token_ids: list[int] | None = None
    """The tokens of a row that is already tokenized."""
    loss_mask: list[bool] | None = None
    """With `token_ids`: True at tokens to train on; None for all."""
    category: str | None = field(default=None, compare=False)
    """Its category in its data set, for figures by category."""
    reference: dict[str, Any] | None = field(default=None, compare=False)
    """Its data set's reference for scoring answers: gsm8k's `answer`, HumanEval's `prompt`, `test` and `entry_point`."""
    where: str = field(default="", compare=False)
    """Its position in its file, for messages."""

    @property
    def text(self) -> str:
        """The opening of the conversation: the first user message (no system message), or the text. Of tokens, and of messages without a
        user's, what is before the first answer; all if nothing is."""
        if self.document is not None:
            return self.document
        if self.token_ids is not None:
            return " ".join(map(str, self._prompt_ids or self.token_ids))
        for message in self.messages:
            if message["role"] == "user":
                return text_of(message["content"])
        before = list(takewhile(lambda message: message["role"] != "assistant", self.messages)) or self.messages
        return "\n".join(text_of(message["content"]) for message in before)

    @property
    def _prompt_ids(self) -> list[int]:
        """`token_ids` before the first that `loss_mask` marks: the masked tokens are the answer."""
        ids, mask = self.token_ids or [], self.loss_mask or []
        return ids[: mask.index(True)] if True in mask else ids

    @property
    def asked(self) -> list[str]:
        """The user's messages, `text` first; or the text."""
        return [text_of(m["content"]) for m in self.messages if m["role"] == "user"] or [self.text]

    @property
    def has_answers(self) -> bool:
        """Whether it has assistant turns, or is a text or tokens."""
        return not self.messages or any(message["role"] == "assistant" for message in self.messages)

    def can_be_asked(self, *, texts: bool) -> bool:
        """Whether the target can answer it: it has a user turn, or is a text or tokens and `texts` says that these are prompts."""
        return bool(self.user_turns()) or (texts and not self.messages)

    @property
    def sample_id(self) -> int:
        """A 63-bit hash of the conversation, the same in every run and every file."""
        messages = without_sources(self.messages)
        content: Any = messages
        if not self.messages:
            content = {"text": self.document, "token_ids": self.token_ids, "loss_mask": self.loss_mask}
        elif self.tools is not None:
            content = {"messages": messages, "tools": self.tools}
        found = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
        return int.from_bytes(found[:8], "big") >> 1

    def opening(self) -> tuple[Conversation, list[list[dict[str, Any]]]]:
        """The conversation up to its first user turn, and what to add after each answer (`user_turns`).

        Tokens are returned up to the answer that `loss_mask` marks. A conversation without a user turn, a text or tokens without a mask is
        returned whole.
        """
        if self.token_ids is not None:
            return replace(self, token_ids=self._prompt_ids, loss_mask=None), []
        first, *later = self.user_turns() or [self.messages]
        return replace(self, messages=first), later

    def user_turns(self) -> list[list[dict[str, Any]]]:
        """The messages to add before each answer when the target answers the conversation turn by turn.

        `[system, user, assistant, user]` gives `[[system, user], [user]]`. The turns end before the first tool call or
        result, since the target may not make the same call.
        """
        turns: list[list[dict[str, Any]]] = []
        waiting: list[dict[str, Any]] = []
        for message in self.messages:
            if message["role"] == "tool" or message.get("tool_calls"):
                break
            if message["role"] != "assistant" or not turns:  # an assistant message at the start is kept
                waiting.append(message)
            if message["role"] == "user":
                turns.append(waiting)
                waiting = []
        return turns


class Pieces:
    """Tells the later pieces of conversations that were cut up (`ID_0`, `ID_9`, ...) from whole conversations that are numbered
    (`identity_0`, `identity_1`, ...), in the rows of one ShareGPT source.

    The number of a piece is that of its first turn. So a row is a later piece if an earlier row is `ID_0`, no row of that id begins before
    the one before it ends, and the second does not follow a question with another. Rows of an id that breaks this once are numbered
    ones from then on. In rows that are shuffled, all but `ID_0` are pieces until two of an id overlap: kept, pieces of one conversation
    could be trained on and held out. In any order, an id of which many rows have been seen, and none that begins where another ends, is
    that of numbered rows, such as a sample of them.

    Args:
        in_order: the rows are in the order of the source.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._last: dict[int, tuple[int, bool] | None] = {}
        """By id: the turn with which its last piece ends, and whether a question may follow; None where rows are numbered."""
        self._spans: dict[int, list[tuple[int, int]]] = {}
        """By id, in shuffled rows that are not known to be numbered: first turn and end of each."""
        self._later: Counter[int] = Counter()
        """By id: rows after `ID_0`, or all of them in shuffled rows."""
        self._adjoining: set[int] = set()
        """Ids of which a row begins where another ends."""

    def is_later(self, id: str, turns: list[Any]) -> bool:
        """Whether the row is a later piece. To be called for every row, in order.

        Args:
            id: of the row.
            turns: all of the row's.
        """
        found = re.fullmatch(r"(.*)_(\d{1,9})", id, re.DOTALL)
        if found is None or not turns:
            return False
        base, start, first = hash(found[1]), int(found[2]), _role(turns[0])
        if not self._in_order:
            return self._is_piece_of_any_order(base, start + (first == "assistant"), start + len(turns)) and start > 0
        last = self._last.get(base, (0, True) if start == 0 else None)
        if last is None or start == 0:
            fits = last is not None
        elif first == "assistant":
            # In one published copy such a piece begins with the last turn of the one before.
            fits = start >= last[0] - 1
        else:
            fits = first == "user" and start >= last[0] and last[1]
        if last is not None and start > 0:
            fits = fits and not self._are_apart(base, adjoins=start in (last[0], last[0] - 1))
        answered = (len(turns) - (first == "system")) % 2 == (first == "assistant")
        self._last[base] = (start + len(turns), answered or start > 0) if fits else None
        return fits and start > 0

    def _is_piece_of_any_order(self, base: int, start: int, end: int) -> bool:
        if base in self._last:  # numbered
            return False
        spans = self._spans.setdefault(base, [])
        adjoins = any(start == other_end or end == other_start for other_start, other_end in spans)
        overlaps = any(start < other_end and other_start < end for other_start, other_end in spans)
        if overlaps or self._are_apart(base, adjoins=adjoins):
            self._last[base] = None
            del self._spans[base]
            return False
        spans.append((start, end))
        return True

    def _are_apart(self, base: int, *, adjoins: bool) -> bool:
        """Count a row of an id; whether too many were seen without one that adjoins another."""
        self._later[base] += 1
        if adjoins:
            self._adjoining.add(base)
        return self._later[base] >= _ROWS_APART and base not in self._adjoining


class Skip(Exception):
    """A valid row that cannot be used by itself, such as the middle of a conversation that was cut into pieces."""


@dataclass
class RejectedRows:
    """Rows that were not used: the number for each reason, and the position of the first."""

    _rows: dict[str, int] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one row."""
        if reason not in self._rows and len(self._rows) >= _MAX_REASONS:
            reason = "another reason"
        self._rows[reason] = self._rows.get(reason, 0) + 1
        self._first.setdefault(reason, where)

    def __len__(self) -> int:
        return sum(self._rows.values())

    def figures(self) -> dict[str, dict[str, Any]]:
        """`{reason: {"rows": count, "first": position}}`, the most frequent reason first."""
        ordered = sorted(self._rows.items(), key=lambda item: -item[1])
        return {reason: {"rows": rows, "first": self._first[reason]} for reason, rows in ordered}

    def lines(self) -> list[str]:
        """The same as text."""
        return [f"{entry['rows']} x {reason} (first: {entry['first']})" for reason, entry in self.figures().items()]


def detect(row: Any) -> str | None:
    """The format of a row by its keys; None if unknown."""
    if not isinstance(row, dict):
        return None
    if "messages" in row:
        return "jsonl"
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if isinstance(row.get("turns"), list):  # elsewhere often their number
        return "mt_bench"
    if "task_id" in row and "entry_point" in row:
        return "humaneval"
    if row.get("source") == "gsm8k" or ("question" in row and "answer" in row):
        return "gsm8k"
    if "prompt" in row or "instruction" in row:
        return "jsonl"
    if "input_ids" in row or "token_ids" in row:
        return "tokens"
    return "text" if "text" in row else None


EXPECTED = {
    "jsonl": 'Write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, and optionally an `id`.',
    "sharegpt": 'Rows are {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}.',
    "text": 'Rows are {"text": "..."}.',
    "tokens": 'Rows are {"input_ids": [1, 2, ...]}, and optionally a `loss_mask` of as many 0s and 1s.',
    "mt_bench": 'Rows are {"question_id": 1, "turns": ["...", "..."]}.',
    "humaneval": 'Rows are {"task_id": "...", "prompt": "def ..."}.',
    "gsm8k": 'Rows are {"prompt": "..."} or {"question": "..."}.',
}


def parse(
    row: Any,
    format: str,
    *,
    where: str,
    fallback_id: str,
    whole: bool,
    folder: Path | None = None,
    pieces: Pieces | None = None,
) -> Conversation:
    """Parse one row.

    Args:
        format: a key of `EXPECTED`.
        where: the row's position in its file.
        fallback_id: the id for a row without one.
        whole: all turns; otherwise up to the first user turn.
        folder: where relative paths of images start; None for nowhere.
        pieces: of the row's source, given every row in order; None where the row stands alone.

    Raises:
        ValueError: the row does not have that format, or an image cannot be read; the text says why.
        Skip: the row has that format and cannot be used.
    """
    if not isinstance(row, dict):
        raise ValueError('a row must be a JSON object, as in {"prompt": "Why is the sky blue?"}')
    try:
        if format == "sharegpt" and pieces is not None and pieces.is_later(_id(row, fallback_id), _turns(row)):
            raise Skip("a later piece of a conversation that was cut into pieces")
        if format == "jsonl" and "messages" not in row and row.get("history"):
            raise Skip("its `history` is not read: write the turns as `messages`")
        found = _PARSERS[format](row, fallback_id, whole)
        if row.get("system") and format in ("jsonl", "sharegpt") and found["messages"][0]["role"] != "system":
            found["messages"].insert(0, *_say("system", _text(row["system"])))
        if found["messages"]:
            found.setdefault("tools", _tools(row))
        # Tokenizers reject unpaired surrogates.
        json.dumps([found["messages"], found.get("tools"), found.get("document")], ensure_ascii=False).encode()
        for message in found["messages"]:
            if isinstance(message["content"], list):
                message["content"] = [
                    located(part, folder) if part["type"] == "image" else part for part in message["content"]
                ]
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    except UnicodeEncodeError:
        raise ValueError("it contains unpaired surrogate characters") from None
    except (TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise ValueError("a value has another type than in the format") from None
    return Conversation(**found, where=where)


Parsed = dict[str, Any]


def _jsonl(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    id = _id(row, fallback_id)
    if "messages" in row:
        return {
            "id": id,
            "messages": _messages(row["messages"], whole),
            "tools": _tools(row),
            "category": _category(row),
        }
    if "instruction" in row and "prompt" not in row:
        prompt, answers = row["instruction"], ("output", "response")
        if row.get("input"):
            prompt = f"{_text(prompt)}\n\n{_text(row['input'])}"
    else:
        prompt, answers = row["prompt"], ("response", "completion")
    answer = next((row[key] for key in answers if row.get(key) is not None), None)
    if isinstance(prompt, list):  # messages under another name
        answers_too = answer if isinstance(answer, list) else [] if answer is None else _say("assistant", answer)
        messages = _messages(prompt + answers_too, whole)
        return {"id": id, "messages": messages, "tools": _tools(row), "category": _category(row)}
    return {"id": id, "messages": _ask(prompt, answer, whole), "category": _category(row)}


def _sharegpt(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    turns = _turns(row)
    if not turns:
        raise Skip("a conversation without turns")
    start = [_role(turn) for turn in turns[:2]]
    if start[0] != "user" and start != ["system", "user"]:
        raise Skip("a conversation that does not start with a user turn")
    return {"id": _id(row, fallback_id), "messages": _messages(turns, whole), "tools": _tools(row)}


def _turns(row: dict[str, Any]) -> list[Any]:
    """The turns of a ShareGPT row."""
    turns = row["conversations"] if "conversations" in row else row["conversation"]
    if not isinstance(turns, list):
        raise TypeError
    return turns


def _plain_text(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    return {"id": _id(row, fallback_id), "messages": [], "document": _not_empty(row["text"], "`text`")}


def _tokens(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    ids = row["input_ids"] if "input_ids" in row else row["token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError("the token ids must be a non-empty list of non-negative integers")
    mask = row.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
            raise ValueError("`loss_mask` must be a list of 0s and 1s, as long as the token ids")
        mask = [bool(value) for value in mask]
    if not whole and mask is not None and True in mask:  # the masked tokens are the answer
        ids, mask = ids[: mask.index(True)], None
        if not ids:
            raise ValueError("`loss_mask` leaves no prompt before the answer")
    return {"id": _id(row, fallback_id), "messages": [], "token_ids": list(ids), "loss_mask": mask}


def _mt_bench(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    turns = row["turns"] if whole else row["turns"][:1]
    messages = [message for turn in [row["turns"][0], *turns[1:]] for message in _ask(turn, None, whole)]
    return {"id": str(row["question_id"]), "messages": messages, "category": _category(row)}


def _humaneval(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    code = row["prompt"].strip("\n")
    question = f"Write the body of this Python function:\n\n```python\n{code}\n```"
    reference = {key: row[key] for key in ("prompt", "test", "entry_point") if key in row}
    return {"id": str(row["task_id"]), "messages": _ask(question, None, whole), "reference": reference}


def _gsm8k(row: dict[str, Any], fallback_id: str, whole: bool) -> Parsed:
    question = row["prompt"] if "prompt" in row else row["question"]
    reference = {"answer": row.get("answer", row.get("expected"))}  # the key in one published copy
    return {"id": _id(row, fallback_id), "messages": _ask(question, row.get("answer"), whole), "reference": reference}


_PARSERS: dict[str, Callable[[dict[str, Any], str, bool], Parsed]] = {
    "jsonl": _jsonl,
    "sharegpt": _sharegpt,
    "text": _plain_text,
    "tokens": _tokens,
    "mt_bench": _mt_bench,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
}


def _category(row: dict[str, Any]) -> str | None:
    """AlpacaEval has it under `dataset`: the source of an instruction."""
    category = row.get("category", row.get("dataset") if "instruction" in row else None)
    return category if isinstance(category, str) else None


def _id(row: dict[str, Any], fallback_id: str) -> str:
    return fallback_id if row.get("id") is None else str(row["id"])


# ---- messages ----


def _ask(question: Any, answer: Any, whole: bool) -> list[dict[str, Any]]:
    asked = _say("user", _not_empty(question, "the prompt"))
    return asked + _say("assistant", _not_empty(answer, "the response")) if whole and answer is not None else asked


def _say(role: str, text: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def _messages(messages: Any, whole: bool) -> list[dict[str, Any]]:
    """All messages, or those up to the first user turn."""
    if not isinstance(messages, list):
        raise TypeError
    kept: list[dict[str, Any]] = []
    for message in messages:
        kept.append(_message(message))
        if kept[-1]["role"] == "user" and not whole:
            return kept
    if not whole or not any(message["role"] in ("user", "assistant") for message in kept):
        raise ValueError("no message has the role `user`")
    return kept


def _message(message: Any) -> dict[str, Any]:
    role = _role(message)
    content = message.get("content") if "role" in message else message["value"]
    kept: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if content is None and not calls:
        raise KeyError("content")
    kept["content"] = "" if content is None else _content(content) if role == "user" else _text(content)
    if role == "tool":  # a function may return an empty result
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                kept[key] = _text(message[key])
        return kept
    if not calls and not isinstance(kept["content"], list):
        _not_empty(kept["content"], "`content`")
    if role == "assistant":
        reasoning = next(
            (message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), None
        )
        if reasoning:
            kept["reasoning_content"] = _text(reasoning)
        if calls:
            kept["tool_calls"] = [_tool_call(call) for call in calls]
    return kept


def _role(message: Any) -> str:
    role = message["role"] if "role" in message else message["from"] if "from" in message else message["role"]
    if not isinstance(role, str) or (role := _SAME_ROLE.get(role, role)) not in _ROLES:
        raise ValueError(f"unknown role {str(role)[:40]!a}; roles: {', '.join(_ROLES)}")
    return role


def _content(content: Any) -> str | list[dict[str, str]]:
    """As `_text`; with images, a list of parts."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content)
    return [
        {"type": "image", "image": _reference(part)} if _is_image(part) else {"type": "text", "text": _text([part])}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def _reference(part: dict[str, Any]) -> str:
    """The path or data URL of an image."""
    found = part[part["type"]]
    return str(_not_empty(found["url"] if isinstance(found, dict) else found, "the path or data URL of an image"))


def _text(content: Any) -> str:
    """A string, or a list of text parts joined as in vLLM's server."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        if not all(
            isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content
        ):
            raise ValueError("`content` has parts that are not text, nor images in a `user` message")
        return "\n".join(_text(part if isinstance(part, str) else part["text"]) for part in content)
    raise ValueError("`content` must be a string that is not empty")


def _tool_call(call: Any) -> dict[str, Any]:
    """A call in the form of chat templates: its arguments are an object, where OpenAI's rows have JSON text."""
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ValueError("the `arguments` of a tool call are not JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError("the `arguments` of a tool call must be a JSON object")
    kept: dict[str, Any] = {"type": "function", "function": {"name": _text(function["name"]), "arguments": arguments}}
    return kept | ({"id": _text(call["id"])} if call.get("id") is not None else {})


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # some data sets store JSON text, so that every row has the same columns
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise ValueError("`tools` is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("`tools` must be a list of function schemas")
    return tools


def _not_empty(text: Any, name: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a string that is not empty")
    return text
