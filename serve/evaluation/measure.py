"""What an evaluation measures with its engines side by side: cost of a step, acceptance and identity."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine.environment import is_cpu
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.serve.evaluation import fidelity
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.engine import Counters, EngineHost, Generated
from draftsmith.serve.evaluation.suites import SuiteInput, draw

Variant = int | str
"""Whose engine: 0 for plain decoding, K for the drafter, the name of another method."""

_COST_TOKENS = 16
"""Response tokens of an answer whose steps are timed."""


def step_costs(
    engines: Mapping[Variant, EngineHost], ks: Sequence[int], suite: SuiteInput, recipe: Recipe
) -> dict[int, list[float]]:
    """Seconds of a decoding step at each K over those of a plain step, for each prompt, one at a time.

    Answers are short and every prompt goes to every engine in turn, so that what disturbs the machine for a second or
    two spoils one ratio of many; a median leaves it out.
    """
    order = [0, *ks]
    ratios: dict[int, list[float]] = {k: [] for k in ks}
    prompts = draw(suite.prompts, recipe.evaluate.step_cost_prompts, seed=recipe.seed)
    with Bar("step cost", total=len(prompts) * len(order), unit="answers") as bar:
        for index, prompt in enumerate(prompts):
            seconds: dict[int, float] = {}
            shift = index % len(order)  # nobody is always first
            for k in order[shift:] + order[:shift]:
                before = engines[k].counters()
                (answer,), _ = engines[k].generate([prompt.token_ids], max_tokens=_COST_TOKENS)
                # Prefill gives the first token; from there every step of a speculative engine checks a draft.
                steps = (engines[k].counters() - before).drafts if k else len(answer.token_ids) - 1
                seconds[k] = answer.decode_seconds / steps if steps else 0.0
                bar.step()
            for k in order[1:]:
                if seconds[0] and seconds[k]:
                    ratios[k].append(seconds[k] / seconds[0])
    if not all(ratios.values()):
        raise UserError(
            f"The answers to {len(prompts)} prompts of the suite `{suite.name}` are a single token long, too short to time a step. "
            "Raise evaluate.step_cost_prompts, or put a suite with longer answers first."
        )
    return ratios


@dataclass
class InBatches:
    """Phase b for one suite."""

    prompts: list[Turn]
    """Every turn, in order of being asked."""
    at: dict[Variant, res.SuiteAtK]
    answers: dict[Variant, list[Generated]]
    plain_seconds: float
    different: list[fidelity.Difference]
    control: fidelity.Control


@dataclass
class _Batch:
    """Prompts that are asked together, and what plain decoding answered."""

    prompts: list[Turn]
    plain: list[Generated]
    seconds: float


def in_batches(
    groups: Iterable[Mapping[Variant, EngineHost]],
    arms: Sequence[Variant],
    suite: SuiteInput,
    renderer: TurnRenderer,
    *,
    piece: int,
    batch_size: int,
    max_model_len: int,
) -> InBatches:
    """Every prompt of a suite on every engine, in batches; later turns follow plain decoding's answers.

    Args:
        groups: engines that are up together, the plain one and others, until each of `arms` was in one. Where there are several
            groups, plain decoding answers beside the first, and its answers stand for all.
        arms: those that speculate.
        piece: of the control (`fidelity.control`): one more than the most tokens that any of `arms` guesses.
    """
    identical = dict.fromkeys(arms, 0)
    seconds: dict[Variant, float] = dict.fromkeys(arms, 0.0)
    answers: dict[Variant, list[Generated]] = {arm: [] for arm in arms}
    counted: dict[Variant, Counters] = {}
    different: list[fidelity.Difference] = []
    batches: list[_Batch] = []
    control: fidelity.Control | None = None
    most = sum(1 + len(prompt.later) for prompt in suite.prompts)
    for engines in groups:
        here = [arm for arm in arms if arm in engines]
        before = {arm: engines[arm].counters() for arm in here}
        first = control is None
        with Bar(f"{suite.name}: acceptance", total=most * (len(here) + first), unit="answers") as bar:
            done = 0
            for batch in _plain_answers(engines[0], suite, renderer, batch_size, batches) if first else batches:
                done += first * len(batch.prompts)
                bar.update(done)
                for arm in here:
                    found, spent = engines[arm].generate(
                        [prompt.token_ids for prompt in batch.prompts], max_tokens=suite.max_tokens
                    )
                    seconds[arm] += spent
                    answers[arm] += found
                    differing = _differences(engines, arm, batch.prompts, batch.plain, found)
                    identical[arm] += len(batch.prompts) - len(differing)
                    different += differing
                    done += len(batch.prompts)
                    bar.update(done)
        counted |= {arm: engines[arm].counters() - before[arm] for arm in here}
        if control is None:
            control = _control(engines[0], suite, batches, piece, batch_size, max_model_len)
    assert control is not None
    asked = [prompt for batch in batches for prompt in batch.prompts]
    plain = [answer for batch in batches for answer in batch.plain]
    at: dict[Variant, res.SuiteAtK] = {}
    for arm in arms:
        counts = {
            prompt.id: [len(answer.drafted), sum(answer.accepted)]
            for prompt, answer in zip(asked, answers[arm], strict=True)
        }
        at[arm] = {
            **res.acceptance(counted[arm]),
            "acceptance_length_interval": res.acceptance_interval(counts),
            "by_prompt": counts,
            "prompts_identical": identical[arm],
            "fidelity": fidelity.judge(
                [one for one in different if _is_of(one, arm)], [prompt.id for prompt in asked], plain, control
            ),
            "seconds": seconds[arm],
        }
    plain_seconds = sum(batch.seconds for batch in batches)
    return InBatches(asked, at, {0: plain, **answers}, plain_seconds, different, control)


def _plain_answers(
    engine: EngineHost, suite: SuiteInput, renderer: TurnRenderer, batch_size: int, batches: list[_Batch]
) -> Iterator[_Batch]:
    """Batches of the suite's prompts as plain decoding answers them; they are added to `batches`, too."""
    waiting = deque(suite.prompts)
    while waiting:
        prompts = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        found, spent = engine.generate([prompt.token_ids for prompt in prompts], max_tokens=suite.max_tokens)
        batches.append(_Batch(prompts, found, spent))
        yield batches[-1]
        following = [
            renderer.next(prompt, answer.token_ids, max_tokens=suite.max_tokens)
            for prompt, answer in zip(prompts, found, strict=True)
        ]
        waiting.extendleft(reversed([prompt for prompt in following if prompt is not None]))


def _control(
    engine: EngineHost, suite: SuiteInput, batches: Sequence[_Batch], piece: int, batch_size: int, max_model_len: int
) -> fidelity.Control:
    """What rounding alone makes of plain decoding's answers, read again in pieces of so many tokens."""
    asked = [prompt for batch in batches for prompt in batch.prompts]
    if left_out := sum(1 + len(prompt.later) for prompt in suite.prompts) - len(asked):
        console.print(
            f"evaluate: {left_out} later turns of the suite `{suite.name}` are left out: with the answers before them they leave "
            "no room within engine.max_model_len, or the chat template refuses them", highlight=False, soft_wrap=True,
        )  # fmt: skip
    with Bar(f"{suite.name}: control", total=len(asked), unit="answers") as bar:
        return fidelity.control(
            engine, [prompt.token_ids for prompt in asked], [answer for batch in batches for answer in batch.plain],
            piece=piece, batch_size=batch_size, max_model_len=max_model_len, on_batch=bar.update,
        )  # fmt: skip


def _is_of(difference: fidelity.Difference, arm: Variant) -> bool:
    if isinstance(arm, str):
        return difference["method"] == arm
    return difference["method"] is None and difference["num_speculative_tokens"] == arm


def _differences(
    engines: Mapping[Variant, EngineHost],
    arm: Variant,
    prompts: Sequence[Turn],
    plain: Sequence[Generated],
    found: Sequence[Generated],
) -> list[fidelity.Difference]:
    """Where answers differ from plain ones, and by how much the target preferred its own token there."""
    config, names = engines[arm].config, [prompt.id for prompt in prompts]
    differing = fidelity.differences(
        names, plain, found, k=config.num_speculative_tokens, method=arm if isinstance(arm, str) else None
    )
    fidelity.look_at_margins(
        differing, {prompt.id: prompt.token_ids for prompt in prompts}, dict(zip(names, plain, strict=True)),
        dict(zip(names, found, strict=True)), engines[0].logit_margin,
        fidelity.near_tie(config.dtype, on_gpu=not is_cpu()),
    )  # fmt: skip
    return differing
