"""Single answers: how many are right, and a few shown token by token."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import Generated
from draftsmith.serve.evaluation.quality import MEASURES
from draftsmith.serve.evaluation.schema import Example, Quality
from draftsmith.serve.evaluation.statistics import draft_position
from draftsmith.serve.evaluation.suites import SuiteInput


def quality(
    suite: SuiteInput,
    renderer: TurnRenderer,
    prompts: Sequence[Turn],
    baseline: Sequence[Generated],
    speculative: Sequence[Generated],
) -> Quality | None:
    """The share of first answers that are right; None if the suite is not scored."""
    if suite.score is None:
        return None
    right = [0, 0]
    first = [index for index, turn in enumerate(prompts) if turn.number == 0]
    with Bar(f"{suite.name}: quality", total=len(first), unit="prompts") as bar:
        for done, index in enumerate(first, start=1):
            texts = [renderer.decode(answers[index].token_ids) for answers in (baseline, speculative)]
            reference = prompts[index].conversation.reference or {}
            scores = {text: MEASURES[suite.score](text, reference) for text in set(texts)}
            right = [count + scores[text] for count, text in zip(right, texts, strict=True)]
            bar.update(done)
    return {
        "measure": suite.score, "prompts": len(first), "baseline": right[0] / len(first),
        "speculative": right[1] / len(first),
    }  # fmt: skip


def examples(
    renderer: TurnRenderer, prompts: Sequence[Turn], answers: Sequence[Generated], count: int
) -> list[Example]:
    """Some answers token by token, spread over the suite."""
    chosen = range(0, len(prompts), max(1, len(prompts) // count))[:count] if count else ()
    return [
        {
            "prompt": prompts[index].id,
            "question": _question(renderer, prompts[index]),
            "tokens": [
                [renderer.tokenizer.decode([token]), position]
                for token, position in zip(answers[index].token_ids, draft_position(answers[index]), strict=True)
            ],
        }
        for index in chosen
    ]


def _question(renderer: TurnRenderer, turn: Turn) -> str:
    """What the target was asked last, for people."""
    asked = turn.conversation
    return asked.asked[-1] if asked.token_ids is None else renderer.decode(asked.token_ids)
