"""Phase b: acceptance and fidelity on all prompts, in batches beside the baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.run.progress import Bar, console
from draftsmith.serve.evaluation import fidelity
from draftsmith.serve.evaluation.answers import examples, quality
from draftsmith.serve.evaluation.curve import StepCost, is_beaten, speedup_curve, step_cost_curve
from draftsmith.serve.evaluation.engine import Counters, EngineHost, Generated
from draftsmith.serve.evaluation.lineup import Lineup
from draftsmith.serve.evaluation.partial import MeasuredSuite, PartialResults, timed_prompts
from draftsmith.serve.evaluation.schema import (
    Acceptance,
    AcceptanceByPrompt,
    Control,
    CurvePoint,
    Difference,
    SuiteAtK,
    Variant,
)
from draftsmith.serve.evaluation.statistics import (
    acceptance,
    acceptance_interval,
    categories,
    decoding_steps,
    tokens_per_step,
)
from draftsmith.serve.evaluation.suites import SuiteInput, draw
from draftsmith.serve.evaluation.throughput import least_requests
from draftsmith.serve.evaluation.variants import Variants


def measure_acceptance(
    lineup: Lineup[Variant],
    variants: Variants,
    suites: Sequence[SuiteInput],
    renderer: TurnRenderer,
    recipe: Recipe,
    partial: PartialResults,
) -> None:
    """Measure the suites that are left. The first gives the K curve; others run at the best K and at `acceptance_k`."""
    options = recipe.evaluate
    costs = step_cost_curve(_by_k(partial.step_costs), _by_k(partial.drafting))

    def beaten(variant: Variant, found: Mapping[Variant, AcceptanceByPrompt]) -> bool:
        measured = {k: at_k for k, at_k in found.items() if isinstance(k, int)}
        if (
            isinstance(variant, str)
            or variant == options.acceptance_k
            or not is_beaten(variant, costs, measured, options.k)
        ):
            return False
        console.print(
            f"evaluate: K = {variant} is left out: by its step cost it cannot be the fastest", highlight=False
        )
        return True

    if partial.suites:
        console.print(f"evaluate: {', '.join(partial.suites)} measured before", highlight=False, soft_wrap=True)
    for suite in suites:
        if suite.name in partial.suites:
            continue
        first = suite is suites[0]
        ks = variants.ks if first else sorted({partial.best_k(options.k), options.acceptance_k})
        compared: list[Variant] = [*ks, *options.methods]
        found = in_batches(
            lineup.turns(variants.engines([0, *compared]), lambda variant: 0),
            compared,
            suite,
            renderer,
            batch_size=options.acceptance_batch_size,
            max_model_len=recipe.engine.max_model_len,
            leave_out=beaten
            if first and options.engine_starts == 1 and variants.extends_shorter_drafts
            else lambda variant, found: False,
            token_for_token=options.sampling.greedy,
        )
        if first:
            partial.k_curve = _k_curve(found, options.k, costs)
            most = max(map(least_requests, options.concurrency), default=0)
            partial.load_prompts = timed_prompts(draw(found.turns, most, seed=recipe.seed))
            answers = found.answers[partial.best_k(options.k)]
            partial.examples = examples(renderer, found.turns, answers, options.examples)
        partial.timed[suite.name] = timed_prompts(draw(found.turns, options.timing_prompts, seed=recipe.seed))
        partial.suites[suite.name] = _measured(found, suite, ks, partial.best_k(options.k), variants, renderer, recipe)
        partial.save()


@dataclass
class InBatches:
    """One suite, all variants."""

    turns: list[Turn]
    """Every turn, in the order of asking."""
    at: dict[Variant, SuiteAtK]
    answers: dict[Variant, list[Generated]]
    """The baseline's included."""
    baseline_seconds: float
    different: list[Difference]
    controls: dict[int, Control]
    """By `Control.piece`."""


@dataclass
class _Batch:
    """Turns that are asked together, and the baseline's answers."""

    turns: list[Turn]
    baseline: list[Generated]
    seconds: float


def in_batches(
    groups: Iterable[Mapping[Variant, EngineHost]],
    compared: Sequence[Variant],
    suite: SuiteInput,
    renderer: TurnRenderer,
    *,
    batch_size: int,
    max_model_len: int,
    leave_out: Callable[[Variant, Mapping[Variant, AcceptanceByPrompt]], bool],
    token_for_token: bool,
) -> InBatches:
    """Every prompt of a suite at every variant, in batches; later turns follow the baseline's answers.

    Args:
        groups: what is asked together, the baseline and others, until each of `compared` was in one. With several groups the
            baseline answers in the first, and its answers stand for all.
        compared: the variants that speculate.
        leave_out: whether not to ask a variant, after what was found of those before it.
        token_for_token: whether to compare answers with the baseline's, which only greedy ones can be.
    """
    seconds: dict[Variant, float] = {}
    answers: dict[Variant, list[Generated]] = {}
    accepted: dict[Variant, AcceptanceByPrompt] = {}
    different: list[Difference] = []
    batches: list[_Batch] = []
    pieces: dict[Variant, int] = {}
    controls: dict[int, Control] = {}
    most = sum(1 + len(turn.later) for turn in suite.prompts)
    for engines in groups:
        here = [variant for variant in compared if variant in engines]
        first, done = not batches, 0
        with Bar(f"{suite.name}: acceptance", total=most * (len(here) + first), unit="answers") as bar:
            for batch in _baseline_answers(engines[0], suite, renderer, batch_size, batches) if first else ():
                done += len(batch.turns)
                bar.update(done)
            for variant in here:
                if leave_out(variant, accepted):
                    done += most
                    continue
                before = engines[variant].counters()
                seconds[variant], answers[variant] = 0.0, []
                for batch in batches:
                    found, spent = engines[variant].generate(
                        [turn.token_ids for turn in batch.turns], max_tokens=suite.max_tokens
                    )
                    seconds[variant] += spent
                    answers[variant] += found
                    if token_for_token:
                        different += fidelity.differences_with_margins(
                            engines[0],
                            {turn.id: turn.token_ids for turn in batch.turns},
                            batch.baseline,
                            found,
                            engines[variant].config,
                            variant if isinstance(variant, str) else None,
                        )
                    done += len(batch.turns)
                    bar.update(done)
                accepted[variant] = _by_prompt(engines[variant].counters() - before, batches, answers[variant])
        if first:
            _say_left_out(suite, batches)
        for variant in here:
            # Longer pieces may round in more places, and would excuse faults of short drafts.
            piece = pieces[variant] = 1 + engines[variant].config.num_speculative_tokens
            if piece not in controls and any(_is_of(one, variant) for one in different):
                controls[piece] = _control(engines[0], suite, batches, piece, batch_size, max_model_len)
    asked = [turn for batch in batches for turn in batch.turns]
    baseline = [answer for batch in batches for answer in batch.baseline]
    at: dict[Variant, SuiteAtK] = {}
    for variant, found_of in accepted.items():
        own = [one for one in different if _is_of(one, variant)]
        at[variant] = {
            **found_of,
            "acceptance_length_interval": acceptance_interval(found_of["by_prompt"]),
            "prompts_identical": len(asked) - len(own) if token_for_token else None,
            "fidelity": fidelity.judge(own, [turn.id for turn in asked], baseline, controls.get(pieces[variant]))
            if token_for_token
            else fidelity.not_compared(len(asked)),
            "seconds": seconds[variant],
        }
    baseline_seconds = sum(batch.seconds for batch in batches)
    return InBatches(asked, at, {0: baseline, **answers}, baseline_seconds, different, controls)


def _baseline_answers(
    engine: EngineHost, suite: SuiteInput, renderer: TurnRenderer, batch_size: int, batches: list[_Batch]
) -> Iterator[_Batch]:
    """Batches of the suite's turns with the baseline's answers; also appended to `batches`."""
    waiting = deque(suite.prompts)
    while waiting:
        turns = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        found, spent = engine.generate([turn.token_ids for turn in turns], max_tokens=suite.max_tokens)
        batches.append(_Batch(turns, found, spent))
        yield batches[-1]
        following = [
            renderer.next(turn, answer.token_ids, max_tokens=suite.max_tokens)
            for turn, answer in zip(turns, found, strict=True)
        ]
        waiting.extendleft(reversed([turn for turn in following if turn is not None]))


def _by_prompt(counters: Counters, batches: Sequence[_Batch], answers: Sequence[Generated]) -> AcceptanceByPrompt:
    asked = [turn.id for batch in batches for turn in batch.turns]
    counts = {name: [len(one.drafted), sum(one.accepted)] for name, one in zip(asked, answers, strict=True)}
    return {**acceptance(counters), "by_prompt": counts}


def _say_left_out(suite: SuiteInput, batches: Sequence[_Batch]) -> None:
    """Report later turns that were not asked."""
    asked = sum(len(batch.turns) for batch in batches)
    if left_out := sum(1 + len(turn.later) for turn in suite.prompts) - asked:
        console.print(
            f"evaluate: {left_out} later turns of the suite `{suite.name}` are left out: after the answers before them they do not "
            "fit into engine.max_model_len, or the chat template refuses them",
            highlight=False,
            soft_wrap=True,
        )


def _control(
    engine: EngineHost, suite: SuiteInput, batches: Sequence[_Batch], piece: int, batch_size: int, max_model_len: int
) -> Control:
    """The effect of rounding alone on the baseline's answers, read again in pieces."""
    asked = [turn for batch in batches for turn in batch.turns]
    with Bar(f"{suite.name}: control, {piece} tokens at once", total=len(asked), unit="answers") as bar:
        return fidelity.control(
            engine,
            [turn.token_ids for turn in asked],
            [answer for batch in batches for answer in batch.baseline],
            piece=piece,
            batch_size=batch_size,
            max_model_len=max_model_len,
            on_batch=bar.update,
        )


def _is_of(difference: Difference, variant: Variant) -> bool:
    if isinstance(variant, str):
        return difference["method"] == variant
    return difference["method"] is None and difference["num_speculative_tokens"] == variant


def _by_k(starts: Sequence[Mapping[str, list[float]]]) -> list[dict[int, list[float]]]:
    return [{int(k): ratios for k, ratios in one.items()} for one in starts]


def _k_curve(found: InBatches, choices: Sequence[int], costs: Mapping[int, StepCost]) -> dict[str, CurvePoint]:
    # Over all steps: a lookup method drafts in some only.
    by_prompt = {k: _by_step(found.turns, found.answers[k]) for k in costs if k in found.at}
    curve = speedup_curve({k: costs[k] for k in by_prompt}, by_prompt, [k for k in choices if k in by_prompt])
    return {str(k): one for k, one in curve.items()}


def _by_step(turns: Sequence[Turn], answers: Sequence[Generated]) -> dict[str, list[int]]:
    """Decoding steps and accepted tokens of each prompt."""
    return {
        turn.id: [decoding_steps(answer), sum(answer.accepted)] for turn, answer in zip(turns, answers, strict=True)
    }


def _measured(
    found: InBatches,
    suite: SuiteInput,
    ks: Sequence[int],
    best: int,
    variants: Variants,
    renderer: TurnRenderer,
    recipe: Recipe,
) -> MeasuredSuite:
    """One suite's part of the results."""
    at_best = found.at[best]
    at_best_acceptance: Acceptance = {
        "acceptance_length": at_best["acceptance_length"],
        "acceptance_per_position": at_best["acceptance_per_position"],
        "acceptance_per_position_conditional": at_best["acceptance_per_position_conditional"],
        "drafts": at_best["drafts"],
        "draft_tokens": at_best["draft_tokens"],
        "accepted": at_best["accepted"],
    }
    controls: list[Control] = [
        {**one, "margins": one["margins"][: fidelity.DIFFERENCES_KEPT]} for _, one in sorted(found.controls.items())
    ]
    category_of = {turn.id: turn.conversation.category for turn in found.turns if turn.conversation.category}
    return {
        **at_best_acceptance,
        "prompts": len(found.turns),
        "prompts_sha256": digest(renderer.identity(suite.prompts)),
        "max_tokens": suite.max_tokens,
        "acceptance_length_interval": at_best["acceptance_length_interval"],
        "categories": categories(at_best["by_prompt"], category_of),
        "identical_to_baseline": not any(one["method"] is None for one in found.different)
        if recipe.evaluate.sampling.greedy
        else None,
        "control": controls[-1] if controls else None,
        "controls": controls,
        "differences": found.different[: fidelity.DIFFERENCES_KEPT],
        "at_k": {str(k): found.at[k] for k in ks if k in found.at},
        "baseline_seconds": found.baseline_seconds,
        "methods": {
            name: {
                **found.at[name],
                "method": method.method,
                "num_speculative_tokens": variants.num_speculative_tokens(name),
                "tokens_per_step": tokens_per_step(found.answers[name]),
            }
            for name, method in recipe.evaluate.methods.items()
        },
        "quality": quality(suite, renderer, found.turns, found.answers[0], found.answers[best]),
    }
