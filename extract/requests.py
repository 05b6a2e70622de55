"""Extraction requests: the recipe's conversations as tokens, kept on disk until an engine has room for them.

A data set may be larger than memory. It is read once, each conversation becomes one line per sample of a temporary file,
and requests are read back from there one at a time.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Rendered, Renderer, Unrenderable
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.image_renderer import ImageRenderer
from draftsmith.data.images import Part, image_parts
from draftsmith.data.overlap import PromptsFile
from draftsmith.data.prompts import read_conversations, split, whole_suite
from draftsmith.data.rows import name_of
from draftsmith.run.errors import UserError
from draftsmith.store.format import nth_sample
from draftsmith.target.pretrained import tokenizer_of


@dataclass(frozen=True)
class ExtractRequest:
    """One prompt to answer, or one whole text to prefill. Driver to worker."""

    sample_id: int
    """Identifies the sequence in the store; unique in a run."""
    held_out: bool
    prompt_token_ids: list[int]
    max_tokens: int
    loss_mask: list[bool] | None = None
    """True at the tokens of `prompt_token_ids` to train on. None where the target answers: the answer is trained on."""
    conversation: Conversation | None = None
    """With `later`: the messages that `prompt_token_ids` render."""
    later: tuple[list[dict[str, Any]], ...] = ()
    """User turns after the first (`Conversation.user_turns`), each added once the turn before it is answered."""
    images: tuple[Part, ...] = ()
    """The prompt's images, in order. `prompt_token_ids` has a placeholder for each, which the engine expands."""
    image_tokens: int | None = None
    """With `images`: tokens that the placeholders become in addition."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, placeholders expanded."""
        return len(self.prompt_token_ids) + (self.image_tokens or 0)

    def sampling_seed(self, run_seed: int) -> int:
        """A seed of its own, so that sampling depends on neither order nor batch."""
        return (self.sample_id ^ run_seed) & 0x7FFFFFFF


class Requests:
    """All requests of a run, training first. Iterating reads them from disk, one at a time.

    Args:
        folder: where the temporary file lies. It has no name, so nothing is left of it however the run ends.
        requests: read once.
        dated: their tokens may differ from day to day (`Renderer.dated`). Then they are identified without these: the same recipe has the
            same requests tomorrow.
    """

    def __init__(self, folder: Path, requests: Iterable[ExtractRequest], *, dated: bool = False) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (`close` does)
        self._count = 0
        self.with_images = False
        """Whether any has images."""
        hashed = hashlib.sha256()
        for request in requests:
            line = _to_line(request)
            self._file.write(line)
            if request.images:  # in `sample_id` by their digests; their files may move
                line = _to_line(replace(request, images=()))
            if dated:  # what is rendered is in `sample_id` too
                line = _to_line(replace(request, images=(), prompt_token_ids=[], loss_mask=None))
            hashed.update(line)
            self._count += 1
            self.with_images |= bool(request.images)
        self.digest = hashed.hexdigest()
        """SHA-256 of all requests."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ExtractRequest]:
        position = 0
        while True:  # every iterator has its own position in the file
            self._file.seek(position)
            line = self._file.readline()
            if not line:
                return
            position = self._file.tell()
            yield _from_line(line)

    def close(self) -> None:
        self._file.close()


def _to_line(request: ExtractRequest) -> bytes:
    fields = {name: value for name, value in vars(request).items() if value not in (None, ())}
    if request.conversation is not None:
        fields["conversation"] = {"messages": request.conversation.messages, "tools": request.conversation.tools}
    # ASCII, so that a line break in a message cannot end the line.
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def _from_line(line: bytes) -> ExtractRequest:
    fields = json.loads(line)
    if "conversation" in fields:
        fields["conversation"] = Conversation(id=str(fields["sample_id"]), **fields["conversation"])
    return ExtractRequest(**fields | {name: tuple(fields.get(name, ())) for name in ("later", "images")})


def require_prompts(recipe: Recipe) -> None:
    """Read the first usable row of each local file or folder of prompts that extraction takes: before a target is downloaded.

    Raises:
        UserError: the recipe has no prompts; a file or folder is missing, unreadable, or has no usable row.
    """
    options = recipe.extract
    for source in (options.training_prompts, options.held_out):
        if source is not None and source.path is not None:
            source = source.model_copy(update={"limit": None})  # all rows are counted first to draw some
            next(read_conversations(source, whole=options.reads_whole, rejected=RejectedRows()))
    for suite in recipe.evaluate.suites.values():
        if suite.prompts != "held_out" and suite.prompts.path is not None:
            next(whole_suite(suite))


def requests_of(
    recipe: Recipe,
    target_dir: Path,
    rejected: RejectedRows,
    prompts: PromptsFile | None = None,
    *,
    evaluation_follows: bool = False,
) -> Iterator[ExtractRequest]:
    """The recipe's conversations as requests, one at a time. Unusable rows are counted in `rejected`.

    Args:
        prompts: receives the training prompts.
        evaluation_follows: refuse what the recipe's evaluation could not ask.

    Raises:
        UserError: no training conversation can be used; or one has images, and the target or the recipe's settings cannot read them;
            or no held-out one can be asked.
    """
    options = recipe.extract
    renderer = Renderer(tokenizer_of(target_dir, trust_remote_code=recipe.target.trust_remote_code))
    images = ImageRenderer(
        target_dir,
        processor_options=recipe.engine.options.get("mm_processor_kwargs") or {},
        trust_remote_code=recipe.target.trust_remote_code,
    )
    any_training = any_asked = False
    for conversation, held_out in split(
        options, whole=options.reads_whole, rejected=rejected, apart_from=recipe.evaluate.suites
    ):
        made = tokenized(recipe, renderer, images, conversation, rejected, held_out=held_out)
        if made and not held_out:
            any_training = True
            if prompts is not None:
                prompts.add(conversation.asked)
        any_asked |= bool(made) and held_out and conversation.can_be_asked(texts=options.mode == "generate")
        yield from made
    if not any_training:
        raise UserError(
            f"No training conversation can be used: {'; '.join(rejected.lines()[:3])}. If they are too long, raise "
            "engine.max_model_len or lower extract.max_tokens."
        )
    evaluated = recipe.evaluate.only or recipe.evaluate.suites
    asked = [name for name in evaluated if recipe.evaluate.suites[name].prompts == "held_out"]
    if evaluation_follows and asked and not any_asked:
        raise UserError(
            f"Evaluation would have no prompt for the suite `{asked[0]}`: of {name_of(options.held_out or options.training_prompts)} nothing is held "
            "out that has a user turn to answer. Give evaluate.suites a suite with prompts of its own in its place, as in "
            "`evaluate: { suites: { mine: { prompts: { path: my-prompts.jsonl } } } }`."
        )


def tokenized(
    recipe: Recipe,
    renderer: Renderer,
    images: ImageRenderer,
    conversation: Conversation,
    rejected: RejectedRows,
    *,
    held_out: bool,
) -> list[ExtractRequest]:
    """One request for each sample of a conversation, rendered with the target's chat template; none if it is rejected.

    Args:
        renderer: for conversations without images.
        images: for those with images.

    Raises:
        UserError: it has images, and the target or the recipe's settings cannot read them.
    """
    options, generate = recipe.extract, recipe.extract.mode == "generate"
    answer_tokens = options.response_tokens(held_out=held_out) if generate else 1
    opening, later = conversation.opening() if generate else (conversation, [])
    image_tokens: int | None = None
    try:
        if image_parts([*opening.messages, *chain.from_iterable(later)]):
            (ids, image_tokens), mask = _with_images(recipe, images, opening, later, held_out=held_out), None
        elif generate:
            ids, mask = renderer.prompt(opening), None
        else:
            rendered: Rendered = renderer.text(conversation)
            ids, mask = rendered.token_ids, rendered.loss_mask
    except Unrenderable as reason:
        rejected.add(str(reason), conversation.where)
        return []
    if len(ids) + (image_tokens or 0) + answer_tokens > recipe.engine.max_model_len:
        rejected.add("too long: no room for an answer in engine.max_model_len tokens", conversation.where)
    elif mask is not None and not any(mask):
        rejected.add("no token to train on", conversation.where)
    elif not ids:
        rejected.add("no tokens", conversation.where)
    else:
        return [
            ExtractRequest(
                sample_id=nth_sample(conversation.sample_id, sample),
                held_out=held_out,
                prompt_token_ids=ids,
                max_tokens=answer_tokens,
                loss_mask=mask,
                conversation=opening if later else None,
                later=tuple(later),
                images=tuple(image_parts(opening.messages)),
                image_tokens=image_tokens,
            )
            for sample in range(1 if held_out else options.samples)
        ]
    return []


def _with_images(
    recipe: Recipe, images: ImageRenderer, opening: Conversation, later: list[list[dict[str, Any]]], *, held_out: bool
) -> tuple[list[int], int]:
    """As `ImageRenderer.prompt`; errors name the row."""
    options = recipe.extract
    source = options.held_out if held_out and options.held_out is not None else options.training_prompts
    row = f"The row at {opening.where} of {name_of(source)} has images"
    if options.mode == "prefill" or options.backend == "transformers" or later:
        raise UserError(
            f"{row}, which extraction reads only with `extract.mode: generate`, `extract.turns: first` and `extract.backend: vllm`. Set "
            "these, or leave rows with images out."
        )
    try:
        return images.prompt(opening)
    except UserError as error:
        raise UserError(f"{row}. {error}") from None
