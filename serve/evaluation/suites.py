"""Suites of prompts, rendered with the target's chat template."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Unrenderable
from draftsmith.data.conversations import RejectedRows
from draftsmith.data.images import image_parts
from draftsmith.data.prompts import Prompt, load_prompts, training_and_held_out
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.serve.evaluation.quality import NEEDS, can_score
from draftsmith.target.info import TargetInfo
from draftsmith.target.pretrained import tokenizer_of


@dataclass(frozen=True)
class SuiteInput:
    """A suite, ready for an engine."""

    name: str
    prompts: list[Turn]
    """First turns."""
    max_tokens: int
    """Longest response, in tokens."""
    score: str | None = None
    """How answers are scored: a key of `quality.MEASURES`; None for not at all."""


def turn_renderer(target: TargetInfo, max_model_len: int) -> TurnRenderer:
    """A renderer with the target's tokenizer. Prompts of a target without a chat template, a base model, are plain text: said once."""
    tokenizer = tokenizer_of(target.path, trust_remote_code=target.trust_remote_code)
    renderer = TurnRenderer(tokenizer, max_model_len, plain=True)
    if renderer.renderer.plain:
        console.print(
            f"{target.name} has no chat template: prompts are given as plain text, and turns and answers joined by empty lines",
            highlight=False,
            soft_wrap=True,
        )
    return renderer


def load_suite(recipe: Recipe, name: str) -> list[Prompt]:
    """The conversations of one suite, with later turns if `turns` is `all`.

    Raises:
        UserError: there are none.
    """
    suite = recipe.evaluate.suites[name]
    if suite.prompts == "held_out":
        if recipe.extract.prompts is None:
            raise UserError(
                f"The suite `{name}` takes the prompts that extraction holds out, and the recipe has no `extract.prompts`. Give it prompts of its "
                f"own, as in `evaluate.suites.{name}.prompts: {{ path: my-prompts.jsonl }}`."
            )
        found = training_and_held_out(recipe.extract)[1]
    else:
        found = load_prompts(suite.prompts, whole=suite.turns == "all")
    if not found:
        raise UserError(f"The suite `{name}` has no prompts. Give `evaluate.suites.{name}.prompts` another source.")
    return found


def asks_texts(recipe: Recipe, name: str) -> bool:
    """Whether a suite's texts and tokens are prompts for the target to go on with: its own are; held-out ones, where extraction took them so."""
    return recipe.evaluate.suites[name].prompts != "held_out" or recipe.extract.mode == "generate"


def render_suite(
    renderer: TurnRenderer,
    name: str,
    conversations: Sequence[Prompt],
    max_tokens: int,
    score: str | None = None,
    *,
    held_out: bool = False,
    texts: bool = True,
) -> SuiteInput:
    """Render the first turns of a suite's conversations; those that the chat template cannot render, or with images, are left out.

    Args:
        held_out: the conversations are those that extraction holds out. As there, what does not fit or cannot be asked is left out: they come
            from the training data, which nobody chose row by row.
        texts: as `asks_texts` says of the suite.

    Raises:
        UserError: a prompt does not fit the engine or cannot be scored, or none is left.
    """
    found: list[Turn] = []
    rejected = RejectedRows()
    for conversation in conversations:
        where = f"Prompt `{conversation.id}` of the suite `{name}`"
        if not conversation.can_be_asked(texts=texts):
            if held_out:
                rejected.add("it has no user turn to answer", conversation.where)
                continue
            raise UserError(
                f"{where} has no user turn to answer: give evaluate.suites.{name}.prompts a source of prompts or conversations."
            )
        if score is not None and not can_score(score, conversation.reference):
            raise UserError(
                f"{where} has nothing to score its answers with: evaluate.suites.{name}.score is `{score}`, which needs "
                f"{NEEDS[score]} in every row. Leave `score` out, or give the suite such rows."
            )
        if image_parts(conversation.messages):
            rejected.add("it has images, which evaluation does not measure with", conversation.id)
            continue
        try:
            first = renderer.first(conversation)
        except Unrenderable as reason:
            rejected.add(str(reason), conversation.id)
            continue
        if len(first.token_ids) + max_tokens > renderer.max_model_len:
            if held_out:
                too_long = f"too long: no room for {max_tokens} response tokens in engine.max_model_len tokens"
                rejected.add(too_long, conversation.where)
                continue
            raise UserError(
                f"{where} has {len(first.token_ids)} tokens; with {max_tokens} response tokens that is more than "
                f"engine.max_model_len, {renderer.max_model_len}. Raise it, lower evaluate.suites.{name}.max_tokens, or leave long "
                f"prompts out with evaluate.suites.{name}.prompts.max_chars."
            )
        found.append(first)
    for line in rejected.lines():
        console.print(
            f"evaluate: left out of the suite `{name}`: {line}", highlight=False, markup=False, soft_wrap=True
        )
    if not found:
        raise UserError(
            f"No prompt of the suite `{name}` can be used: {rejected.lines()[0]}. Give `evaluate.suites.{name}.prompts` "
            "another source."
        )
    return SuiteInput(name, found, max_tokens, score)


def draw(prompts: Sequence[Turn], count: int, *, seed: int) -> list[Turn]:
    """Draw `count` prompts of a suite, with each category and turn in proportion."""
    return stratified(prompts, count, lambda turn: (turn.conversation.category or "", turn.number), seed=seed)


def stratified(items: Sequence[Any], count: int, stratum: Callable[[Any], Any], *, seed: int) -> list[Any]:
    """Draw `count` items so that every stratum has its share of them, to within an item or two.

    Which strata get the odd ones, and which items stand for a stratum, depends on the seed and the items alone.

    Args:
        items: to draw from; all of them, shuffled, if `count` is no smaller than their number.
        stratum: of an item; hashable.
    """
    draw = random.Random(seed)
    strata: dict[Any, list[Any]] = {}
    for item in items:
        strata.setdefault(stratum(item), []).append(item)
    places: list[tuple[float, float, Any]] = []
    for members in strata.values():
        draw.shuffle(members)
        # The i-th of a stratum's n members lies at (i + u) / n: any first part of the order has every stratum's share.
        offset = draw.random()
        places += [((i + offset) / len(members), draw.random(), member) for i, member in enumerate(members)]
    return [member for _, _, member in sorted(places, key=lambda place: place[:2])[:count]]
