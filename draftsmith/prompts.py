"""Prompts: read from the layouts they are published in, drawn, deduplicated, and split from the held-out ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.files import fetch
from draftsmith.recipe import Extract, Prompts

_OVERLAP_CHARS = 80
"""Two prompts that begin alike for this many normalised characters count as the same one, reworded at its end."""

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, once: a conversation that ends with its first user turn."""

    id: str
    """Unique in its file."""
    messages: list[dict[str, str]]
    """`role` and `content`, as chat templates take them."""

    @property
    def text(self) -> str:
        """The user's words, without a system message."""
        return self.messages[-1]["content"]

    @property
    def sample_id(self) -> int:
        """A hash of the conversation, 63 bits: the same in every run, whatever else its file holds."""
        found = hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).digest()
        return int.from_bytes(found[:8], "big") >> 1


def load_prompts(source: Prompts) -> list[Prompt]:
    """Read the prompts that `source` names, in the file's order.

    `max_chars` is applied before `limit`; the draw depends on `seed` and the file alone.

    Raises:
        UserError: the file is missing, a row is wrong (its line is named), or nothing is left.
    """
    path = fetch(source)
    rows = list(_rows(path))
    if not rows:
        raise UserError(f"{path} holds no prompts.")
    format = _detect(rows[0][1]) if source.format == "auto" else source.format
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for position, row in rows:
        try:
            prompt = _parse(row, format, fallback_id=f"{len(prompts) + 1:05d}")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path}, {position}: not a row of the format `{format}`: {what}. {_EXPECTED[format]}"
            ) from None
        if prompt is None:
            continue
        if prompt.id in seen:
            if format != "sharegpt":
                raise UserError(
                    f"{path}, {position}: the id {prompt.id!r} is there twice. Ids must differ; or leave them out."
                )
            continue  # ShareGPT itself holds some conversations twice
        seen.add(prompt.id)
        prompts.append(prompt)
    if source.max_chars is not None:
        prompts = [prompt for prompt in prompts if sum(len(m["content"]) for m in prompt.messages) <= source.max_chars]
    if not prompts:
        raise UserError(f"{path} holds no prompts that `format` and `max_chars` let through.")
    if source.limit is not None and source.limit < len(prompts):
        drawn = random.Random(source.seed).sample(range(len(prompts)), source.limit)
        prompts = [prompts[i] for i in sorted(drawn)]
    return prompts


def training_and_held_out(extract: Extract) -> tuple[list[Prompt], list[Prompt]]:
    """The training and the held-out prompts of a run; no text is in both, and none is in training twice.

    Without a held-out file, a conversation is held out by a hash of its text: adding prompts moves none of the
    others.

    Raises:
        UserError: either set cannot be read or comes out empty although the recipe asks for it.
    """
    prompts = _without_duplicates(load_prompts(extract.prompts))
    if extract.held_out is not None:
        held_out = _without_duplicates(load_prompts(extract.held_out))
    else:
        held_out = [prompt for prompt in prompts if _uniform(prompt) < extract.held_out_fraction]
        if not held_out and extract.held_out_fraction > 0:
            raise UserError(
                f"`extract.held_out_fraction: {extract.held_out_fraction}` of {len(prompts)} prompts holds none out. "
                "Raise it, or name a held-out file in `extract.held_out`."
            )
    training = without_overlap(prompts, held_out)
    if not training:
        raise UserError(
            "No training prompts are left: all of them are among the held-out ones. Use two different files."
        )
    return training, held_out


def without_overlap(prompts: Iterable[Prompt], others: Iterable[Prompt]) -> list[Prompt]:
    """The prompts that are in no way in `others`: neither the same text nor the same first 80 characters.

    Letter case and white space do not count.
    """
    known = {_normalised(other)[:_OVERLAP_CHARS] for other in others}
    return [prompt for prompt in prompts if _normalised(prompt)[:_OVERLAP_CHARS] not in known]


def _without_duplicates(prompts: list[Prompt]) -> list[Prompt]:
    """The first of each text, in order."""
    return list({_normalised(prompt): prompt for prompt in reversed(prompts)}.values())[::-1]


def _normalised(prompt: Prompt) -> str:
    return " ".join(prompt.text.casefold().split())


def _uniform(prompt: Prompt) -> float:
    """A number in [0, 1) that depends on the conversation's text alone."""
    found = hashlib.sha256(_normalised(prompt).encode()).digest()
    return int.from_bytes(found[:8], "big") / 2**64


# ---- layouts ----


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row and where it is, from JSON lines or one JSON array; either may be gzipped."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {path}: {error}. Prompts are UTF-8 JSON lines, or one JSON array.") from None
    if text.lstrip()[:1] == "[":
        yield from _array_rows(text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise UserError(
                f'{path}, line {number}: a row must be a JSON object, as in {{"prompt": "Why is the sky blue?"}}.'
            )
        yield f"line {number}", row


def _array_rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array up to its end, or to where it was cut off: one published copy of ShareGPT is."""
    decoder, separator = json.JSONDecoder(), re.compile(r"[\s,]*")
    place = text.index("[") + 1
    number = 0
    while True:
        place = separator.match(text, place).end()  # type: ignore[union-attr]  # the pattern matches everywhere
        try:
            row, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        number += 1
        yield f"row {number}", row


def _detect(row: dict[str, Any]) -> str:
    """The format of a file by its first row."""
    if "conversations" in row:
        return "sharegpt"
    if "turns" in row:
        return "mt_bench"
    if "task_id" in row and "entry_point" in row:
        return "humaneval"
    if row.get("source") == "gsm8k" or ("question" in row and "answer" in row):
        return "gsm8k"
    return "jsonl"


_EXPECTED = {
    "jsonl": 'Write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, and an `id` if you like.',
    "sharegpt": 'Rows are {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}.',
    "mt_bench": 'Rows are {"question_id": 1, "turns": ["...", "..."]}.',
    "humaneval": 'Rows are {"task_id": "...", "prompt": "def ..."}.',
    "gsm8k": 'Rows are {"prompt": "..."} or {"question": "..."}.',
}


def _parse(row: dict[str, Any], format: str, *, fallback_id: str) -> Prompt | None:
    """One row as a prompt; None where the format has rows that are not the start of a conversation."""
    if format == "jsonl":
        id = str(row.get("id", fallback_id))
        if "messages" in row:
            return Prompt(id, _first_turn(row["messages"]))
        return _ask(id, row["prompt"])
    if format == "sharegpt":
        # Long conversations were cut into pieces `ID_0`, `ID_9`, ...; a later piece starts in the middle.
        piece = re.search(r"_(\d+)$", str(row["id"]))
        turns = row["conversations"]
        starts = bool(turns) and turns[0]["from"] in ("human", "user") and bool(turns[0]["value"].strip())
        return _ask(str(row["id"]), turns[0]["value"]) if starts and (piece is None or int(piece[1]) == 0) else None
    if format == "mt_bench":
        return _ask(str(row["question_id"]), row["turns"][0])
    if format == "humaneval":
        code = row["prompt"].strip("\n")
        return _ask(str(row["task_id"]), f"Write the body of this Python function:\n\n```python\n{code}\n```")
    assert format == "gsm8k"
    return _ask(str(row.get("id", fallback_id)), row["prompt"] if "prompt" in row else row["question"])


def _ask(id: str, text: Any) -> Prompt:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt must be a text that is not empty")
    return Prompt(id, [{"role": "user", "content": text}])


def _first_turn(messages: Any) -> list[dict[str, str]]:
    """A conversation up to its first user turn; the target answers from there itself."""
    kept: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in _ROLES:
            raise ValueError(f"unknown role {role!r}; roles: {', '.join(_ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError("`content` must be a text that is not empty")
        kept.append({"role": role, "content": content})
        if role == "user":
            return kept
    raise ValueError("no message has the role `user`")
