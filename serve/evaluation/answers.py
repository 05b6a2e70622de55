"""What results say of single answers: how many are right, and a few shown token by token."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.engine import Generated
from draftsmith.serve.evaluation.quality import MEASURES
from draftsmith.serve.evaluation.suites import SuiteInput


def quality(
    suite: SuiteInput,
    renderer: TurnRenderer,
    prompts: Sequence[Turn],
    plain: Sequence[Generated],
    speculative: Sequence[Generated],
) -> res.Quality | None:
    """Shares of first answers that are right; None where the suite is not scored."""
    if suite.score is None:
        return None
    right = [0, 0]
    first = [index for index, turn in enumerate(prompts) if turn.number == 0]
    with Bar(f"{suite.name}: quality", total=len(first), unit="prompts") as bar:
        for done, index in enumerate(first, start=1):
            texts = [renderer.decode(answers[index].token_ids) for answers in (plain, speculative)]
            reference = prompts[index].conversation.reference or {}
            scores = {text: MEASURES[suite.score](text, reference) for text in set(texts)}
            right = [count + scores[text] for count, text in zip(right, texts, strict=True)]
            bar.update(done)
    return {
        "measure": suite.score, "prompts": len(first), "plain": right[0] / len(first), "speculative": right[1] / len(first),
    }  # fmt: skip


def examples(
    renderer: TurnRenderer, prompts: Sequence[Turn], answers: Sequence[Generated], count: int
) -> list[res.Example]:
    """Some answers token by token, spread over the suite."""
    chosen = range(0, len(prompts), max(1, len(prompts) // count))[:count] if count else ()
    return [
        {
            "prompt": prompts[index].id,
            "question": str(prompts[index].conversation.messages[-1]["content"]),
            "tokens": [
                [renderer.tokenizer.decode([token]), position]
                for token, position in zip(answers[index].token_ids, res.draft_position(answers[index]), strict=True)
            ],
        }
        for index in chosen
    ]
