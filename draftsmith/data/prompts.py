"""The conversations of a run: read, drawn, deduplicated, and split into training and held-out."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from draftsmith.config.evaluation import SuiteConfig
from draftsmith.config.recipe import ExtractConfig
from draftsmith.config.sources import Prompts
from draftsmith.data.conversations import EXPECTED, Conversation, Pieces, RejectedRows, Skip, detect, parse
from draftsmith.data.images import text_of
from draftsmith.data.overlap import Known, numbers_of
from draftsmith.data.rows import READABLE, Unreadable, name_of, read_rows
from draftsmith.run.errors import UserError

Prompt = Conversation
"""A conversation that ends with its first user turn."""


def load_prompts(source: Prompts, *, whole: bool = False) -> list[Prompt]:
    """Read the prompts of `source` in the file's order; an invalid row is an error.

    For fixed sets on which figures are compared. `max_chars` is applied before `limit`; the draw depends only on `seed` and the
    file.

    Args:
        whole: return conversations with all their turns instead of prompts.

    Raises:
        UserError: the file is missing, a row is invalid (its line is named), or nothing is left.
    """
    return list(read_conversations(source, whole=whole, rejected=None))


def training_and_held_out(extract: ExtractConfig) -> tuple[list[Prompt], list[Prompt]]:
    """The training and the held-out prompts of a run, without overlap or duplicates: the openings of the conversations that extraction takes.

    Raises:
        UserError: either set cannot be read, or is empty although the recipe asks for it.
    """
    parts: dict[bool, list[Prompt]] = {False: [], True: []}
    seen: set[tuple[bool, int]] = set()
    for conversation, held_out in split(extract, whole=extract.reads_whole, rejected=RejectedRows()):
        prompt = conversation.opening()[0]
        if extract.reads_whole:  # conversations may differ after the same opening
            key = (held_out, _as_prompt(prompt))
            if key in seen:
                continue
            seen.add(key)
        parts[held_out].append(prompt)
    return parts[False], parts[True]


def split(
    extract: ExtractConfig, *, whole: bool, rejected: RejectedRows, apart_from: Mapping[str, SuiteConfig] | None = None
) -> Iterator[tuple[Conversation, bool]]:
    """Yield the conversations of a run one at a time, each with whether it is held out.

    No training conversation is or nearly is a held-out one (`overlap.py`), and none occurs twice. Without a held-out file,
    a hash of its opening decides whether a conversation is held out: adding rows moves no others, and conversations with the
    same first question stay together. Rows are read more than once, so that they need not be kept in memory.

    Args:
        whole: conversations with all their turns; otherwise up to the first user turn.
        rejected: collects rejected rows; complete when the iterator is exhausted.
        apart_from: evaluation suites. No row of their sources is trained on, drawn or not.

    Raises:
        UserError: either part cannot be read, or is empty although the recipe asks for it.
    """
    fraction = extract.held_out_fraction if extract.held_out is None else 0.0
    known: list[Known] = []  # one for each source, since each has its own boilerplate
    for name, suite in (apart_from or {}).items():
        known.append(known_of(whole_suite(suite), label=f"the suite `{name}`"))
    # Two passes before the actual one: over the held-out part, and for the boilerplate that it shares with the rest.
    if extract.held_out is not None:
        held_out = _distinct(extract.held_out, whole, RejectedRows())
    else:
        held_out = (
            one for one in _distinct(extract.training_prompts, whole, RejectedRows()) if _uniform(one) < fraction
        )
    if extract.held_out is not None or fraction > 0:
        mine = known_of(held_out, label="the held-out prompts", of_a_kind=True)
        known.append(mine)
        if not len(mine):
            raise UserError(
                f"`extract.held_out_fraction: {fraction}` holds out no prompt of {name_of(extract.training_prompts)}. "
                "Raise it, or name a held-out file in `extract.held_out`."
            )
        for other in _distinct(extract.training_prompts, whole, RejectedRows()):
            if _uniform(other) >= fraction:
                mine.count([numbers_of(text) for text in other.asked])
    some = False
    for conversation in _distinct(extract.training_prompts, whole, rejected):
        if _uniform(conversation) < fraction:
            yield conversation, True
            continue
        texts = [numbers_of(text) for text in conversation.asked]
        found = next((found for one in known if (found := one.find(texts))), None)
        if found is not None:
            label, kind = next(iter(found.items()))
            rejected.add(f"{'as' if kind == 'verbatim' else 'nearly as'} in {label}", conversation.where)
        else:
            some = True
            yield conversation, False
    if not some:
        raise UserError(
            "No training prompts are left: all of them match, at least nearly, prompts that are held out or evaluated on. Use "
            "different files."
        )
    if extract.held_out is not None:
        for conversation in _distinct(extract.held_out, whole, rejected):
            yield conversation, True


def whole_suite(suite: SuiteConfig) -> Iterator[Conversation]:
    """Every row of a suite's source, regardless of `limit` and `max_chars`.

    Nothing for held-out prompts, which have no source of their own.

    Raises:
        UserError: as `load_prompts`.
    """
    if suite.prompts != "held_out":
        source = suite.prompts.model_copy(update={"limit": None, "max_chars": None})
        yield from read_conversations(source, whole=suite.turns == "all", rejected=None)


def known_of(conversations: Iterable[Conversation], *, label: str | None = None, of_a_kind: bool = False) -> Known:
    """Conversations to compare others with, each user turn by itself.

    Args:
        label: what `Known.find` returns; None for the conversation's id.
        of_a_kind: as in `Known.add`.
    """
    known = Known()
    for conversation in conversations:
        for turn, text in enumerate(conversation.asked):
            name = conversation.id if label is None else label
            known.add(text, name, of_a_kind=of_a_kind, opening=turn == 0)
    return known


def read_conversations(source: Prompts, *, whole: bool, rejected: RejectedRows | None) -> Iterator[Conversation]:
    """Yield the conversations of `source` in order, one at a time; `limit` draws as in `load_prompts`.

    Args:
        whole: all turns; otherwise up to the first user turn.
        rejected: collects unusable rows. Without it they are errors, except those that a published format is known to contain, and ids
            must be unique.

    Raises:
        UserError: the source is missing or is not a data set, or nothing in it can be used.
    """
    if source.limit is None:
        yield from _usable(source, whole, rejected)
    elif source.dataset is not None:  # already shuffled; the rest is not downloaded
        yield from islice(_usable(source, whole, rejected), source.limit)
    else:
        total = sum(1 for _ in _usable(source, whole, None if rejected is None else RejectedRows()))
        drawn = set(range(total))
        if source.limit < total:
            drawn = set(random.Random(source.seed).sample(range(total), source.limit))
        yield from (found for i, found in enumerate(_usable(source, whole, rejected)) if i in drawn)


def _usable(source: Prompts, whole: bool, rejected: RejectedRows | None) -> Iterator[Conversation]:
    """Yield every row that is a conversation; others are counted in `rejected`, or errors without it."""
    strict, rejected = rejected is None, RejectedRows() if rejected is None else rejected
    format: str | None = None if source.format == "auto" else source.format
    folder = _folder(source)
    ids: set[int] = set()
    uses: Counter[int] = Counter()
    pieces = Pieces(in_order=source.dataset is None or source.limit is None)  # otherwise the Hub's rows are shuffled
    rows = readable = parsed = usable = 0
    for where, row in read_rows(source):
        rows += 1
        try:
            if isinstance(row, Unreadable):
                raise ValueError(row.reason)
            readable += 1
            format = format or detect(row)
            if format is None and isinstance(row, dict):
                raise ValueError("its keys match no known format")
            conversation = parse(
                row,
                format or "jsonl",
                where=where,
                fallback_id=f"{parsed + 1:05d}",
                whole=whole,
                folder=folder,
                pieces=pieces,
            )
        except Skip as reason:
            rejected.add(str(reason), where)
            continue
        except ValueError as error:
            cut_off = format == "sharegpt" and isinstance(row, Unreadable)  # as in one published copy of ShareGPT
            if strict and not cut_off:
                raise UserError(_bad_row(source, where, row, format or "jsonl", error)) from None
            rejected.add(str(error), where)
            continue
        parsed += 1  # also where the id is refused: it may be that of a row without one, and the next one needs another
        # Figures name prompts by their ids. Here an id may be another row's too, as in a folder of files that each count from 0.
        id = hash(conversation.id if strict else (conversation.id, conversation.sample_id))
        if id in ids:
            if strict and format != "sharegpt":  # ShareGPT itself has some conversations twice
                raise UserError(
                    f"{name_of(source)}, {where}: the id {conversation.id!a} occurs twice. Ids must be unique; or leave them out."
                )
            rejected.add("the same row occurs twice", where)
            continue
        ids.add(id)
        if not strict:
            conversation = _named_apart(conversation, uses)
        said = [text_of(message["content"]) for message in conversation.messages]
        chars = len(conversation.document or "") + sum(map(len, said))
        if source.max_chars is not None and chars > source.max_chars:
            rejected.add("longer than `max_chars`", where)
            continue
        usable += 1
        yield conversation
    if not rows:
        raise UserError(f"{name_of(source)} is empty. {EXPECTED['jsonl']}")
    if not usable:
        why = "; ".join(rejected.lines()[:3])
        raise UserError(
            f"{name_of(source)} has no prompts that match `format` and `max_chars`. Rejected: {why}. "
            f"{EXPECTED[format or 'jsonl'] if readable else READABLE}"
        )


def _named_apart(conversation: Conversation, uses: Counter[int]) -> Conversation:
    """The conversation under an id that no earlier one has: `ID`, `ID#2`, `ID#3`. `uses` counts each id's, by hash."""
    given = id = conversation.id
    while uses[hash(id)]:
        uses[hash(given)] += 1
        id = f"{given}#{uses[hash(given)]}"
    uses[hash(id)] += 1
    return conversation if id == given else replace(conversation, id=id)


def _folder(source: Prompts) -> Path | None:
    """Where relative paths of images start: the folder of a local file, or the local folder of files."""
    if source.path is None:
        return None
    path = Path(source.path).absolute()
    return path if path.is_dir() else path.parent


def _bad_row(source: Prompts, where: str, row: object, format: str, error: ValueError) -> str:
    if isinstance(row, dict):
        return f"{name_of(source)}, {where}: not a row of the format `{format}`: {error}. {EXPECTED[format]}"
    wanted = f" {READABLE}" if isinstance(row, Unreadable) else ""
    return f"{name_of(source)}, {where}: {error}.{wanted}"


def _distinct(source: Prompts, whole: bool, rejected: RejectedRows) -> Iterator[Conversation]:
    """Drop duplicates: prompts with the same words up to case and white space, or equal whole conversations. The same question under
    another system prompt, after other messages or with other tools is another prompt."""
    seen: set[int] = set()
    for conversation in read_conversations(source, whole=whole, rejected=rejected):
        key = conversation.sample_id if whole else _as_prompt(conversation)
        if key in seen:
            rejected.add("the same conversation occurs twice", conversation.where)
            continue
        seen.add(key)
        yield conversation


def _as_prompt(conversation: Conversation) -> int:
    """A hash that prompts share whose words are the same, up to case and white space, in the same surroundings."""
    return hash((_normalized(conversation), _around(conversation)))


def _normalized(conversation: Conversation) -> str:
    return " ".join(conversation.text.casefold().split())


def _around(conversation: Conversation) -> str:
    """What a prompt asks with beside the user's words: other messages and tools."""
    others = [message for message in conversation.messages if message["role"] != "user"]
    return json.dumps([others, conversation.tools], sort_keys=True)


def _uniform(conversation: Conversation) -> float:
    """A number in [0, 1) that depends only on the conversation's opening."""
    found = hashlib.sha256(_normalized(conversation).encode()).digest()
    return int.from_bytes(found[:8], "big") / 2**64
