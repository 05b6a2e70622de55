"""What an evaluation measures with its engines side by side: cost of a step, acceptance and identity, speed, load."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.errors import UserError
from draftsmith.progress import Bar, console
from draftsmith.recipe import Recipe
from draftsmith.serve import results as res
from draftsmith.serve.engine import EngineHost, Generated
from draftsmith.serve.suites import Renderer, SuiteInput, SuitePrompt

Arm = int | str
"""Whose engine: 0 for plain decoding, K for the drafter, the name of another method."""

_COST_TOKENS = 16
"""Response tokens of an answer whose steps are timed."""
_LOAD_ROUNDS = 3
"""Runs of each number of sequences at once; all count."""


def step_costs(
    engines: Mapping[Arm, EngineHost], ks: Sequence[int], suite: SuiteInput, recipe: Recipe
) -> tuple[dict[int, float], list[res.Difference]]:
    """Phase a: what one decoding step costs at each K, over a plain step's cost.

    Answers are short and every prompt goes to every engine in turn, so that what disturbs the machine for a second or
    two spoils one ratio of many; the median leaves it out.
    """
    order = [0, *ks]
    ratios: dict[int, list[float]] = {k: [] for k in ks}
    different: list[res.Difference] = []
    count = min(recipe.evaluate.curve_prompts, len(suite.prompts))
    with Bar("step cost", total=count * len(order), unit="answers") as bar:
        for index in range(count):
            answers: dict[int, Generated] = {}
            seconds: dict[int, float] = {}
            shift = index % len(order)  # nobody is always first
            for k in order[shift:] + order[:shift]:
                before = engines[k].counters()
                (answers[k],), _ = engines[k].generate([suite.prompts[index].token_ids], max_tokens=_COST_TOKENS)
                # Prefill gives the first token; from there every step of a speculative engine checks a draft.
                steps = (engines[k].counters() - before).drafts if k else len(answers[0].token_ids) - 1
                seconds[k] = answers[k].decode_seconds / steps if steps else 0.0
                bar.update(index * len(order) + len(answers))
            for k in order[1:]:
                different += _differences(engines, k, [suite.prompts[index]], [answers[0]], [answers[k]])
                if seconds[0] and seconds[k]:
                    ratios[k].append(seconds[k] / seconds[0])
    if not all(ratios.values()):
        raise UserError(
            f"The first {count} answers of the suite `{suite.name}` are a single token long, too short to time a step. "
            "Raise evaluate.curve_prompts, or put a suite with longer answers first."
        )
    return {k: statistics.median(found) for k, found in ratios.items()}, different


@dataclass
class InBatches:
    """Phase b for one suite."""

    prompts: list[SuitePrompt]
    """Every turn, in order of being asked."""
    at: dict[Arm, res.SuiteAtK]
    answers: dict[Arm, list[Generated]]
    plain_seconds: float
    different: list[res.Difference]


def in_batches(
    engines: Mapping[Arm, EngineHost], arms: Sequence[Arm], suite: SuiteInput, renderer: Renderer, batch_size: int
) -> InBatches:
    """Every prompt of a suite on every engine, in batches; later turns follow plain decoding's answers."""
    before = {arm: engines[arm].counters() for arm in arms}
    identical = dict.fromkeys(arms, 0)
    seconds: dict[Arm, float] = dict.fromkeys((0, *arms), 0.0)
    answers: dict[Arm, list[Generated]] = {arm: [] for arm in (0, *arms)}
    asked: list[SuitePrompt] = []
    different: list[res.Difference] = []
    waiting = deque(suite.prompts)
    total = sum(1 + len(prompt.later) for prompt in suite.prompts) * (len(arms) + 1)
    with Bar(f"{suite.name}: acceptance", total=total, unit="answers") as bar:
        while waiting:
            batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
            for turn, arm in enumerate((0, *arms), start=1):
                found, spent = engines[arm].generate(
                    [prompt.token_ids for prompt in batch], max_tokens=suite.max_tokens
                )
                seconds[arm] += spent
                answers[arm] += found
                if arm != 0:
                    plain = answers[0][-len(batch) :]
                    differing = _differences(engines, arm, batch, plain, found)
                    identical[arm] += len(batch) - len(differing)
                    different += differing
                bar.update(len(asked) * (len(arms) + 1) + turn * len(batch))
            asked += batch
            answered = zip(batch, answers[0][-len(batch) :], strict=True)
            following = (renderer.next_turn(prompt, answer, suite) for prompt, answer in answered)
            waiting.extendleft(reversed([prompt for prompt in following if prompt is not None]))
    if left_out := sum(1 + len(prompt.later) for prompt in suite.prompts) - len(asked):
        console.print(
            f"evaluate: {left_out} later turns of the suite `{suite.name}` are left out: with the answers before them they leave "
            "no room within engine.max_model_len", highlight=False, soft_wrap=True,
        )  # fmt: skip
    at: dict[Arm, res.SuiteAtK] = {}
    for arm in arms:
        by_prompt = {
            prompt.id: [len(answer.drafted), sum(answer.accepted)]
            for prompt, answer in zip(asked, answers[arm], strict=True)
        }
        at[arm] = {
            **res.acceptance(engines[arm].counters() - before[arm]),
            "acceptance_length_interval": res.acceptance_interval(by_prompt),
            "by_prompt": by_prompt,
            "prompts_identical": identical[arm],
            "seconds": seconds[arm],
        }
    return InBatches(asked, at, answers, seconds[0], different)


def _differences(
    engines: Mapping[Arm, EngineHost],
    arm: Arm,
    prompts: Sequence[SuitePrompt],
    plain: Sequence[Generated],
    found: Sequence[Generated],
) -> list[res.Difference]:
    """Where answers differ from plain ones, and by how much the target preferred its own token there."""
    config = engines[arm].config
    differing = res.differences(
        [prompt.id for prompt in prompts], plain, found, k=config.num_speculative_tokens,
        method=arm if isinstance(arm, str) else None,
    )  # fmt: skip
    places = {prompt.id: index for index, prompt in enumerate(prompts)}
    for one in differing:
        index, position = places[one["prompt"]], one["position"]
        pair = [answer.token_ids[position : position + 1] for answer in (plain[index], found[index])]
        if all(pair):
            context = prompts[index].token_ids + plain[index].token_ids[:position]
            one["gap"] = engines[0].gap(context, pair[0][0], pair[1][0])
            one["near_tie"] = one["gap"] is not None and abs(one["gap"]) <= res.NEAR_TIE[config.dtype]
    return differing


def one_at_a_time(
    engines: Mapping[Arm, EngineHost], arms: Sequence[Arm], name: str, prompts: Sequence[SuitePrompt], recipe: Recipe
) -> tuple[dict[Arm, res.Timed], list[res.Difference]]:
    """Phase c for one suite: prompts one at a time, by the clock."""
    # The prompts that step costs were measured on come first in the suite; these are its last.
    timed = prompts[-recipe.evaluate.speed_prompts :]
    order = [0, *arms]
    seconds: dict[Arm, dict[str, float]] = {arm: {} for arm in order}
    tokens: dict[Arm, int] = dict.fromkeys(order, 0)
    different: list[res.Difference] = []
    with Bar(f"{name}: speed", total=len(timed), unit="prompts") as bar:
        for done, prompt in enumerate(timed, start=1):
            answers: dict[Arm, Generated] = {}
            shift = done % len(order)  # nobody is always first
            for arm in order[shift:] + order[:shift]:
                (answers[arm],), seconds[arm][prompt.id] = engines[arm].generate(
                    [prompt.token_ids], max_tokens=recipe.evaluate.speed_tokens
                )
                tokens[arm] += len(answers[arm].token_ids)
            for arm in arms:
                different += _differences(engines, arm, [prompt], [answers[0]], [answers[arm]])
            bar.update(done, speedup=sum(seconds[0].values()) / sum(seconds[arms[0]].values()))
    found: dict[Arm, res.Timed] = {}
    for arm in arms:
        both = {prompt.id: [seconds[0][prompt.id], seconds[arm][prompt.id]] for prompt in timed}
        ratios = [plain / own for plain, own in both.values()]
        speeds: res.Speeds = {
            "plain": tokens[0] / sum(seconds[0].values()),
            "speculative": tokens[arm] / sum(seconds[arm].values()),
        }
        found[arm] = {
            "tokens_per_second": speeds,
            "speedup": speeds["speculative"] / speeds["plain"],
            "speedup_interval": res.speedup_interval(both),
            "speedup_per_prompt": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
            "timed_prompts": len(timed),
            "seconds_by_prompt": both,
        }
    return found, different


def at_batch_sizes(
    engines: Mapping[Arm, EngineHost], best: int, prompts: Sequence[SuitePrompt], recipe: Recipe
) -> dict[str, res.Load]:
    """Throughput and latency with several sequences at once: the suite's last prompts, in turns."""
    found: dict[str, res.Load] = {}
    sizes = [size for size in recipe.evaluate.batch_sizes if size <= len(prompts)]
    if len(sizes) < len(recipe.evaluate.batch_sizes):
        console.print(f"evaluate: the first suite has {len(prompts)} prompts, too few for larger evaluate.batch_sizes")
    done = 0
    with Bar("load", total=2 * _LOAD_ROUNDS * len(sizes), unit="batches") as bar:
        for size in sizes:
            batch = [prompt.token_ids for prompt in prompts[-size:]]
            runs: dict[int, list[tuple[list[Generated], float]]] = {0: [], best: []}
            for number in range(_LOAD_ROUNDS):
                for arm in (0, best) if number % 2 else (best, 0):
                    runs[arm].append(engines[arm].generate(batch, max_tokens=recipe.evaluate.speed_tokens))
                    done += 1
                    bar.update(done)
            plain, speculative = (res.at_batch(runs[arm]) for arm in (0, best))
            ratio = speculative["tokens_per_second"] / plain["tokens_per_second"]
            found[str(size)] = {"plain": plain, "speculative": speculative, "speedup": ratio}
    return found
