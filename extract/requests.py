"""What the engine is asked: the recipe's conversations as tokens, kept on disk until they are handed out.

A data set may be larger than memory. It is read once, each conversation becomes a line of a temporary file, and the
engine's requests are read back from there as it has room for them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Rendered, Renderer, Unrenderable
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.overlap import PromptsFile
from draftsmith.data.prompts import split
from draftsmith.extract.worker import EngineRequest
from draftsmith.run.errors import UserError
from draftsmith.store.codec import Form


@dataclass(frozen=True)
class ExtractRequest:
    """One prompt, or one whole text, as the engine gets it."""

    sample_id: int
    held_out: bool
    prompt_token_ids: list[int]
    max_tokens: int
    loss_mask: list[bool] | None = None
    """Which of `prompt_token_ids` are to be learnt; None where the target answers, and the answer is."""
    conversation: Conversation | None = None
    """With `later`: the messages that `prompt_token_ids` render."""
    later: tuple[list[dict[str, Any]], ...] = ()
    """Turns that the target answers after the first."""

    @property
    def name(self) -> str:
        return str(self.sample_id)

    def ask(self, seed: int, compression: Form) -> EngineRequest:
        """The request for an engine of a run with this seed, whose store has this form."""
        return EngineRequest(
            name=self.name,
            prompt_token_ids=self.prompt_token_ids,
            max_tokens=self.max_tokens,
            compression=compression,
            seed=(self.sample_id ^ seed) & 0x7FFFFFFF,
            conversation=self.conversation,
            later=self.later,
        )


class Requests:
    """All requests of a run, training first; iterating reads them from disk, one at a time.

    Args:
        folder: where the temporary file lies. It has no name, so that nothing is left of it however the run ends.
        requests: read once.
    """

    def __init__(self, folder: Path, requests: Iterable[ExtractRequest]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (`close` does)
        self._count = 0
        hashed = hashlib.sha256()
        for request in requests:
            line = _line(request)
            hashed.update(line)
            self._file.write(line)
            self._count += 1
        self.digest = hashed.hexdigest()
        """SHA-256 of all that the sequences depend on."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ExtractRequest]:
        at = 0
        while True:  # each iterator has a place of its own in the file
            self._file.seek(at)
            line = self._file.readline()
            if not line:
                return
            at = self._file.tell()
            yield _request(line)

    def close(self) -> None:
        self._file.close()


def _line(request: ExtractRequest) -> bytes:
    fields = {name: value for name, value in vars(request).items() if value not in (None, ())}
    if request.conversation is not None:
        fields["conversation"] = {"messages": request.conversation.messages, "tools": request.conversation.tools}
    # As ASCII, so that a line break in a message cannot end the line.
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def _request(line: bytes) -> ExtractRequest:
    fields = json.loads(line)
    if "conversation" in fields:
        fields["conversation"] = Conversation(id=str(fields["sample_id"]), **fields["conversation"])
    return ExtractRequest(**fields | {"later": tuple(fields.get("later", ()))})


def requests_of(
    recipe: Recipe, target_dir: Path, skips: RejectedRows, prompts: PromptsFile | None = None
) -> Iterator[ExtractRequest]:
    """The recipe's conversations as requests, one at a time; those left out are counted in `skips`.

    Args:
        prompts: receives those that are trained on.

    Raises:
        UserError: no training conversation can be used.
    """
    from transformers import AutoTokenizer

    options = recipe.extract
    whole = options.mode == "prefill" or options.turns == "all"
    renderer = Renderer(AutoTokenizer.from_pretrained(target_dir))
    some = False
    for conversation, held_out in split(options, whole=whole, skips=skips, apart_from=recipe.evaluate.suites):
        made = tokenized(recipe, renderer, conversation, skips, held_out=held_out)
        if made and not held_out:
            some = True
            if prompts is not None:
                prompts.add(conversation.asked)
        yield from made
    if not some:
        raise UserError(
            f"No training conversation can be used: {'; '.join(skips.lines()[:3])}. Where they are too long, raise "
            "engine.max_model_len or lower extract.max_tokens."
        )


def tokenized(
    recipe: Recipe, renderer: Renderer, conversation: Conversation, skips: RejectedRows, *, held_out: bool
) -> list[ExtractRequest]:
    """A conversation through the target's chat template: one request for each of its samples, none if it is no use."""
    options, generate = recipe.extract, recipe.extract.mode == "generate"
    answer = options.response_tokens(held_out=held_out) if generate else 1
    opening, later = conversation.opening() if generate else (conversation, [])
    try:
        if generate:
            ids, mask = renderer.prompt(opening), None
        else:
            rendered: Rendered = renderer.text(conversation)
            ids, mask = rendered.token_ids, rendered.loss_mask
    except Unrenderable as reason:
        skips.add(str(reason), conversation.where)
        return []
    if len(ids) + answer > recipe.engine.max_model_len:
        skips.add("too long: no room for an answer in engine.max_model_len tokens", conversation.where)
    elif mask is not None and not any(mask):
        skips.add("no token of it is to be learnt", conversation.where)
    elif not ids:
        skips.add("no tokens", conversation.where)
    else:
        return [
            ExtractRequest(
                sample_id=_nth_sample(conversation.sample_id, sample),
                held_out=held_out,
                prompt_token_ids=ids,
                max_tokens=answer,
                loss_mask=mask,
                conversation=opening if later else None,
                later=tuple(later),
            )
            for sample in range(1 if held_out else options.samples)
        ]
    return []


def _nth_sample(sample_id: int, number: int) -> int:
    """The id of a conversation's answer `number`: 63 bits, the conversation's own for the first."""
    if number == 0:
        return sample_id
    return int.from_bytes(hashlib.sha256(f"{sample_id}/{number}".encode()).digest()[:8], "big") >> 1
