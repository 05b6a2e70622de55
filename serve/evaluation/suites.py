"""Suites of prompts in the target's chat template: first turns, later turns, and what of them a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.data.prompts import Prompt, load_prompts, training_and_held_out
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.engine import Generated
from draftsmith.serve.evaluation.intervals import TURN
from draftsmith.serve.evaluation.quality import MEASURES, NEEDS, can_score


@dataclass(frozen=True)
class SuitePrompt:
    """One question, ready for an engine."""

    id: str
    question: Prompt
    """Its messages, earlier answers included."""
    token_ids: list[int]
    """In the target's chat template, ready for the answer."""
    later: list[list[dict[str, Any]]]
    """Messages to add after each answer, to be answered in turn."""
    turn: int = 1


@dataclass(frozen=True)
class SuiteInput:
    """A suite, ready for an engine."""

    name: str
    prompts: list[SuitePrompt]
    """First turns."""
    max_tokens: int
    score: str | None = None
    """How answers are scored (`MEASURES`)."""


def suite_prompts(recipe: Recipe, name: str) -> list[Prompt]:
    """The prompts of one suite, with their later turns where it asks for all.

    Raises:
        UserError: there are none.
    """
    suite = recipe.evaluate.suites[name]
    if suite.prompts == "held_out":
        found = training_and_held_out(recipe.extract)[1]
    else:
        found = load_prompts(suite.prompts, whole=suite.turns == "all")
    if not found:
        raise UserError(f"The suite `{name}` has no prompts. Give `evaluate.suites.{name}.prompts` another source.")
    return found


class Renderer:
    """Prompts in the target's chat template, ready for the assistant's answer."""

    def __init__(self, target_dir: Path, max_model_len: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
        self._max_model_len = max_model_len
        if self._tokenizer.chat_template is None:
            raise UserError(f"The tokenizer of the target in {target_dir} has no chat template, which prompts need.")

    def suite(
        self, name: str, conversations: Sequence[Prompt], max_tokens: int, score: str | None = None
    ) -> SuiteInput:
        """First turns of the conversations, and what follows them.

        Raises:
            UserError: a prompt does not fit the engine, or has nothing to score its answers with.
        """
        found = []
        for conversation in conversations:
            turns = conversation.user_turns()
            if not turns:
                raise UserError(
                    f"Prompt `{conversation.id}` of the suite `{name}` has no user's turn to answer. Evaluation takes prompts "
                    f"and conversations, and no plain texts or tokens: give evaluate.suites.{name}.prompts another source."
                )
            first, later = turns[0], turns[1:]
            question = replace(conversation, messages=first)
            ids = self._ids(question)
            if len(ids) + max_tokens > self._max_model_len:
                raise UserError(
                    f"Prompt `{conversation.id}` of the suite `{name}` has {len(ids)} tokens; with {max_tokens} response tokens "
                    f"that is more than engine.max_model_len, {self._max_model_len}. Raise it, lower "
                    f"evaluate.suites.{name}.max_tokens, or leave long prompts out with evaluate.suites.{name}.prompts.max_chars."
                )
            if score is not None and not can_score(score, conversation.reference):
                raise UserError(
                    f"Prompt `{conversation.id}` of the suite `{name}` has nothing to score its answers with: "
                    f"evaluate.suites.{name}.score is `{score}`, which needs {NEEDS[score]} in every row. Leave `score` out, or "
                    "give the suite such rows."
                )
            found.append(SuitePrompt(conversation.id, question, ids, later))
        return SuiteInput(name, found, max_tokens, score)

    def next_turn(self, prompt: SuitePrompt, answer: Generated, suite: SuiteInput) -> SuitePrompt | None:
        """The turn after an answered one; None where there is none, or it leaves no room for an answer."""
        if not prompt.later:
            return None
        said = {"role": "assistant", "content": self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)}
        question = replace(prompt.question, messages=[*prompt.question.messages, said, *prompt.later[0]])
        ids = self._ids(question)
        if len(ids) + suite.max_tokens > self._max_model_len:
            return None
        turn = prompt.turn + 1
        name = f"{prompt.id.partition(TURN)[0]}{TURN}{turn}"
        return SuitePrompt(name, question, ids, prompt.later[1:], turn)

    def text(self, prompt: SuitePrompt) -> str:
        """The prompt as the target reads it."""
        return str(
            self._tokenizer.apply_chat_template(prompt.question.messages, add_generation_prompt=True, tokenize=False)
        )

    def quality(
        self,
        suite: SuiteInput,
        prompts: Sequence[SuitePrompt],
        plain: Sequence[Generated],
        speculative: Sequence[Generated],
    ) -> res.Quality | None:
        """Shares of first answers that are right; None where the suite is not scored."""
        if suite.score is None:
            return None
        right = [0, 0]
        first = [index for index, prompt in enumerate(prompts) if prompt.turn == 1]
        with Bar(f"{suite.name}: quality", total=len(first), unit="prompts") as bar:
            for done, index in enumerate(first, start=1):
                texts = [
                    self._tokenizer.decode(answers[index].token_ids, skip_special_tokens=True)
                    for answers in (plain, speculative)
                ]
                scores = {
                    text: MEASURES[suite.score](text, prompts[index].question.reference or {}) for text in set(texts)
                }
                right = [count + scores[text] for count, text in zip(right, texts, strict=True)]
                bar.update(done)
        return {
            "measure": suite.score, "prompts": len(first), "plain": right[0] / len(first), "speculative": right[1] / len(first),
        }  # fmt: skip

    def examples(self, prompts: Sequence[SuitePrompt], answers: Sequence[Generated], count: int) -> list[res.Example]:
        """Some answers token by token, spread over the suite."""
        chosen = range(0, len(prompts), max(1, len(prompts) // count))[:count] if count else ()
        return [
            {
                "prompt": prompts[index].id,
                "question": str(prompts[index].question.messages[-1]["content"]),
                "tokens": [
                    [self._tokenizer.decode([token]), position]
                    for token, position in zip(
                        answers[index].token_ids, res.draft_position(answers[index]), strict=True
                    )
                ],
            }
            for index in chosen
        ]

    def _ids(self, question: Prompt) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            question.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)
