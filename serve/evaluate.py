"""Plain against speculative decoding, measured in one run.

The plain engine and one engine for each K live side by side, alike but for speculation, and take turns at
every prompt, so that whatever else the machine does hits them all. Three phases:

a. step cost: a few prompts of the first suite, one at a time, on every engine. What an engine step costs hardly
   depends on the prompt, so a few tell it well;
b. acceptance and identity: all prompts in batches. The first suite runs at every K; acceptance length over step cost
   is the speed-up to expect, and the K with the highest is chosen. Other suites run at that K and at `acceptance_k`;
c. speed: some prompts of every suite, one at a time, plain and at the chosen K in turn, by the clock.

Other ways of speculating (`evaluate.methods`) have engines of their own and take part in b and c. Then, where wanted, the
first suite's prompts run so many at once (`evaluate.batch_sizes`), and last, with servers instead of engines, at request rates
(`evaluate.request_rates`).

Acceptance varies from prompt to prompt far more than the cost of a step. Choosing K by the clock alone would take
hundreds of prompts, one at a time, on every engine.

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/eval/{results.json,report.html,stage.json}`. Each suite's figures are
in `partial.json` as soon as it is measured; an evaluation that was stopped goes on after the last.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftsmith import stage
from draftsmith.errors import UserError
from draftsmith.methods import Method
from draftsmith.progress import Bar, console
from draftsmith.prompts import Prompt, load_prompts, training_and_held_out
from draftsmith.recipe import Recipe, digest
from draftsmith.serve import results as res
from draftsmith.serve.engine import EngineConfig, EngineHost, Generated, start_engines
from draftsmith.serve.load import at_request_rates
from draftsmith.serve.quality import MEASURES, NEEDS, can_score
from draftsmith.serve.report import render
from draftsmith.serve.results import Results
from draftsmith.serve.speculation import check_graph_sizes, drafter_name, method_config, own_drafter
from draftsmith.target import TargetInfo, describe_target, prepare_target, target_name

_WARM_UP_TOKENS = 8
"""Tokens that every engine generates before any is timed: first calls allocate and choose kernels."""
_COST_TOKENS = 16
"""Response tokens of an answer whose steps are timed."""
_POSITIONS_SHOWN = 4
"""On screen, of methods that guess far ahead."""
_LOAD_ROUNDS = 3
"""Runs of each number of sequences at once; all count."""
_REPORT_VERSION = 7
"""Counted up when results or report change their form, so that old ones are made again."""


_PARTIAL = "partial.json"

Arm = int | str
"""Whose engine: 0 for plain decoding, K for the drafter, the name of another method."""


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


def run_evaluate(recipe: Recipe, run_dir: Path) -> Results:
    """Evaluate a run's drafter, or return what an earlier evaluation of the same inputs found.

    Args:
        recipe: the whole recipe; `target`, `engine`, `evaluate` and the prompts of `extract` are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/`.

    Returns:
        The contents of `results.json`.

    Raises:
        UserError: no drafter is there, or a prompt does not fit the engine.
        DraftsmithError: an engine failed.
    """
    started = time.time()
    target_dir = prepare_target(recipe.target)
    target = describe_target(target_dir, name=target_name(recipe.target))
    drafter_dir = run_dir / "vllm"
    for file in ("config.json", "model.safetensors"):
        if not (drafter_dir / file).is_file():
            raise UserError(
                f"There is no drafter in {drafter_dir} ({file} is missing). Run `draftsmith convert` first."
            )
    prompts = _prompts(recipe)
    # Training predicted for the held-out text: beside another suite's measurement the number would mislead.
    on_held_out = recipe.evaluate.suites[next(iter(prompts))].prompts == "held_out"
    predicted = _predicted(run_dir) if on_held_out else None
    sections = {
        "engine": recipe.engine.model_dump(mode="json"),
        "evaluate": recipe.evaluate.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
    }
    drafter_sha256 = {file: stage.sha256_of(drafter_dir / file) for file in ("config.json", "model.safetensors")}
    inputs = digest(
        {
            "version": _REPORT_VERSION,
            "target": [target.revision, target.config_hash, target.tokenizer_hash, target.chat_template_hash],
            "drafter": drafter_sha256,
            "prompts": {name: [[p.id, p.messages, p.reference] for p in items] for name, items in prompts.items()},
            "served": recipe.serve.options if recipe.evaluate.request_rates else None,
            "max_tokens": recipe.extract.response_tokens(held_out=True),
            "predicted": predicted,
            **sections,
        }
    )
    output = run_dir / recipe.evaluate.output
    if stage.finished(output, inputs):
        record = stage.read(output)
        assert record is not None
        found: Results = record["figures"]
        console.print(f"evaluate: finished before, see {output / 'report.html'}", highlight=False, soft_wrap=True)
        print_table(found)
        return found
    partial = _read_partial(output / _PARTIAL, inputs)
    stage.claim(output, fresh=partial is None)
    renderer = Renderer(target_dir, recipe.engine.max_model_len)
    suites = [
        renderer.suite(
            name, items, recipe.evaluate.suites[name].max_tokens or recipe.extract.response_tokens(held_out=True),
            recipe.evaluate.suites[name].score,
        )
        for name, items in prompts.items()
    ]  # fmt: skip
    found = evaluate(
        recipe, target=target, drafter_dir=drafter_dir, drafter_sha256=drafter_sha256, suites=suites, renderer=renderer,
        predicted=predicted, log_dir=output, partial=partial,
        keep=lambda measured: stage.write_json(output / _PARTIAL, {"inputs": inputs, **measured}),
    )  # fmt: skip
    stage.write_json(output / "results.json", found)
    stage.write_bytes(output / "report.html", render(found).encode())
    stage.finish(
        output, stage="evaluate", inputs=inputs, recipe=sections, figures=dict(found), started=started,
        files=("results.json", "report.html"),
    )  # fmt: skip
    (output / _PARTIAL).unlink(missing_ok=True)
    print_table(found)
    console.print(f"evaluate: report in {output / 'report.html'}", highlight=False, soft_wrap=True)
    return found


def _read_partial(path: Path, inputs: str) -> dict[str, Any] | None:
    """What an evaluation of the same inputs had measured when it was stopped."""
    try:
        partial = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return partial if isinstance(partial, dict) and partial.get("inputs") == inputs else None


def evaluate(
    recipe: Recipe,
    *,
    target: TargetInfo,
    drafter_dir: Path,
    drafter_sha256: dict[str, str],
    suites: Sequence[SuiteInput],
    renderer: Renderer,
    predicted: Mapping[str, float] | None,
    log_dir: Path,
    partial: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda measured: None,
) -> Results:
    """Measure; writes nothing but logs of engines and servers.

    Args:
        drafter_sha256: digests of its files, passed on into the results.
        suites: what to evaluate on; the first gives the K curve.
        renderer: makes the prompts of later turns.
        predicted: acceptance length by K that training predicted, passed on into the results.
        log_dir: folder for logs.
        partial: what `keep` was last given by an evaluation that was stopped: its suites are not measured again.
        keep: called with what is measured so far after every suite.
    """
    options = recipe.evaluate
    ks = sorted({*options.k, options.acceptance_k})
    measured: dict[str, res.Suite] = dict(partial["suites"]) if partial else {}
    curve: dict[str, res.CurvePoint] = partial["k_curve"] if partial else {}
    load: dict[str, res.Load] = partial["load"] if partial else {}
    examples: list[res.Example] = partial["examples"] if partial else []
    rates: dict[str, res.Rate] = partial["rates"] if partial else {}
    best = res.fastest({k: curve[str(k)] for k in options.k}) if partial else 0
    if partial:
        console.print(f"evaluate: {', '.join(measured)} measured before", highlight=False, soft_wrap=True)
    left = [suite for suite in suites if suite.name not in measured]
    engines = (
        _start(recipe, target, drafter_dir, sorted({best, options.acceptance_k}) if partial else ks, log_dir)
        if left
        else {}
    )
    try:
        for host in engines.values():
            host.generate([left[0].prompts[0].token_ids], max_tokens=_WARM_UP_TOKENS)
        for suite in left:
            first = suite is suites[0]
            costs, different = _step_costs(engines, ks, suite, recipe) if first else ({}, [])
            at_k = ks if first else sorted({best, options.acceptance_k})
            found = _acceptance(engines, [*at_k, *options.methods], suite, renderer, options.batch_size)
            if first:
                curve = {str(k): res.curve_point(found.at[k], costs[k]) for k in ks}
                best = res.fastest({k: curve[str(k)] for k in options.k})
                for k in ks:
                    if k not in (best, options.acceptance_k):
                        engines.pop(k).close()
                examples = renderer.examples(found.prompts, found.answers[best], options.examples)
                load = _load(engines, best, found.prompts, recipe)
            speeds, differing = _speed(engines, [best, *options.methods], suite.name, found.prompts, recipe)
            different = [*different, *found.different, *differing]
            identical = not any(one["method"] is None for one in different)
            category_of = {one.id: one.question.category for one in found.prompts if one.question.category}
            measured[suite.name] = {
                "prompts": len(found.prompts),
                "prompts_sha256": digest([prompt.token_ids for prompt in suite.prompts]),
                "max_tokens": suite.max_tokens,
                **res.acceptance_of(found.at[best]),
                **speeds[best],
                "acceptance_length_interval": found.at[best]["acceptance_length_interval"],
                "categories": res.categories(found.at[best]["by_prompt"], category_of),
                "identical_to_plain": identical,
                "near_ties": sum(one["near_tie"] for one in different),
                "faults": sum(not one["near_tie"] for one in different),
                "differences": different[: res.DIFFERENCES_KEPT],
                "at_k": {str(k): found.at[k] for k in at_k},
                "plain_seconds": found.plain_seconds,
                "methods": {
                    name: {
                        **found.at[name],
                        "method": method.method,
                        "num_speculative_tokens": engines[name].config.num_speculative_tokens,
                        "tokens_per_step": res.tokens_per_step(found.answers[name]),
                        "tokens_per_second": speeds[name]["tokens_per_second"]["speculative"],
                        "speedup": speeds[name]["speedup"],
                        "speedup_interval": speeds[name]["speedup_interval"],
                        "seconds_by_prompt": speeds[name]["seconds_by_prompt"],
                    }
                    for name, method in options.methods.items()
                },
                "quality": renderer.quality(suite, found.prompts, found.answers[0], found.answers[best]),
            }
            keep({"suites": measured, "k_curve": curve, "load": load, "examples": examples, "rates": rates})
    finally:
        for host in engines.values():
            host.close()
    if options.request_rates:
        speculative = _speculative(recipe, target, drafter_dir, [best], {})[best]
        assert speculative is not None
        check_graph_sizes(recipe.serve.options, best)
        asked = [renderer.text(prompt) for prompt in suites[0].prompts[-options.request_prompts :]]
        if len(asked) < options.request_prompts:
            console.print(f"evaluate: the first suite has {len(asked)} prompts, fewer than evaluate.request_prompts")
        measured_so_far = {"suites": measured, "k_curve": curve, "load": load, "examples": examples}
        rates = at_request_rates(
            recipe, target, speculative, asked, log_dir, known=rates, keep=lambda found: keep({**measured_so_far, "rates": found}),
        )  # fmt: skip

    return {
        "target": target.name,
        "drafter": drafter_name(drafter_dir),
        "drafter_sha256": drafter_sha256,
        "num_speculative_tokens": best,
        "suites": {suite.name: measured[suite.name] for suite in suites},
        "k_curve": curve,
        "predicted_acceptance_length": dict(predicted) if predicted is not None else None,
        "predicted_speedup": res.predicted_speedup(predicted, curve),
        "load": load,
        "rates": rates,
        "examples": examples,
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": res.machine(),
    }


def _start(
    recipe: Recipe, target: TargetInfo, drafter_dir: Path, ks: Sequence[int], log_dir: Path
) -> dict[Arm, EngineHost]:
    """Engines of plain decoding, of the drafter at each K and of the other methods, ready."""
    options = recipe.evaluate
    speculative = {0: None} | _speculative(recipe, target, drafter_dir, ks, options.methods)
    configs = [
        EngineConfig(
            name="plain" if arm == 0 else f"k{arm}" if isinstance(arm, int) else f"method-{_file_name(arm)}",
            target=str(target.path),
            dtype=recipe.target.dtype,
            engine=recipe.engine,
            speculative=config,
            max_num_seqs=max(options.batch_size, *options.batch_sizes, 1),
            memory_share=1 / len(speculative),
        )
        for arm, config in speculative.items()
    ]
    with Bar("start engines", total=len(configs), unit="engines") as bar:
        hosts = start_engines(configs, log_dir, on_ready=bar.update)
    return dict(zip(speculative, hosts, strict=True))


def _speculative(
    recipe: Recipe, target: TargetInfo, drafter_dir: Path, ks: Sequence[int], others: Mapping[str, Method]
) -> dict[Arm, dict[str, Any] | None]:
    """vLLM's `speculative_config` of the drafter at each K and of other methods."""
    own = own_drafter(drafter_dir)
    methods: dict[Arm, Method] = {k: own.model_copy(update={"num_speculative_tokens": k}) for k in ks}
    for name, method in others.items():
        methods[name] = method
    return {
        arm: method_config(
            method, target, own_drafter=drafter_dir, tensor_parallel_size=recipe.engine.tensor_parallel_size
        )
        for arm, method in methods.items()
    }


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _step_costs(
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
class _Acceptance:
    """Phase b for one suite."""

    prompts: list[SuitePrompt]
    """Every turn, in order of being asked."""
    at: dict[Arm, res.SuiteAtK]
    answers: dict[Arm, list[Generated]]
    plain_seconds: float
    different: list[res.Difference]


def _acceptance(
    engines: Mapping[Arm, EngineHost], arms: Sequence[Arm], suite: SuiteInput, renderer: Renderer, batch_size: int
) -> _Acceptance:
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
    return _Acceptance(asked, at, answers, seconds[0], different)


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


def _speed(
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


def _load(
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


def _prompts(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of each suite to run, in the recipe's order."""
    found: dict[str, list[Prompt]] = {}
    for name in recipe.evaluate.only or recipe.evaluate.suites:
        found[name] = suite_prompts(recipe, name)
    if not found:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    return found


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
        name = f"{prompt.id.partition(res.TURN)[0]}{res.TURN}{turn}"
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
                    for token, position in zip(answers[index].token_ids, res.by_whom(answers[index]), strict=True)
                ],
            }
            for index in chosen
        ]

    def _ids(self, question: Prompt) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            question.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)


def _predicted(run_dir: Path) -> dict[str, float] | None:
    """Acceptance length by K that training predicted, from the checkpoint's `stage.json`."""
    record = stage.read(run_dir / "checkpoint")
    predicted = record["figures"].get("predicted_acceptance_length") if record else None
    return {str(k): float(value) for k, value in predicted.items()} if predicted else None


def print_table(results: Results) -> None:
    """The results on screen."""
    best = results["num_speculative_tokens"]
    table = Table(
        title=f"{results['target']} with {results['drafter']}: K = {best} chosen by measurement",
        caption="length: acceptance length (of other methods: tokens a step); tok/s: plain to speculative, one prompt at a time; same: as plain decoding; "
        "+-: half of a 95% interval over prompts",
        box=SIMPLE_HEAD,
    )
    table.add_column("suite")
    for heading in ("K", "length", "by position", "tok/s", "speed-up", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, suite in results["suites"].items():
        speeds = suite["tokens_per_second"]
        for k, at_k in sorted(suite["at_k"].items(), key=lambda item: item[0] != str(best)):
            chosen = k == str(best)
            table.add_row(
                name if chosen else "",
                k,
                _plus_minus(at_k["acceptance_length"], at_k["acceptance_length_interval"]),
                " ".join(f"{share:.2f}" for share in at_k["acceptance_per_position"]),
                f"{speeds['plain']:.1f} to {speeds['speculative']:.1f}" if chosen else "",
                _plus_minus(suite["speedup"], suite["speedup_interval"]) if chosen else "",
                f"{at_k['prompts_identical']}/{suite['prompts']}",
            )
        for method, other in suite["methods"].items():
            table.add_row(
                f"  {method}",
                str(other["num_speculative_tokens"]),
                f"{other['tokens_per_step']:.2f}",
                " ".join(f"{share:.2f}" for share in other["acceptance_per_position"][:_POSITIONS_SHOWN]),
                f"{speeds['plain']:.1f} to {other['tokens_per_second']:.1f}",
                _plus_minus(other["speedup"], other["speedup_interval"]),
                f"{other['prompts_identical']}/{suite['prompts']}",
            )
    console.print(table)
    for size, load in results["load"].items():
        console.print(
            f"{size} at once: {load['plain']['tokens_per_second']:.1f} to {load['speculative']['tokens_per_second']:.1f} tok/s "
            f"({load['speedup']:.2f}); first token after {load['plain']['first_token_seconds']:.2f} and "
            f"{load['speculative']['first_token_seconds']:.2f} s",
            highlight=False,
        )
    for rate, at in results["rates"].items():
        plain, speculative = at["plain"], at["speculative"]
        console.print(
            f"{rate} requests a second: {1000 * plain['seconds_per_token']:.0f} to {1000 * speculative['seconds_per_token']:.0f} ms a "
            f"token; first token after {plain['first_token_seconds']:.2f} and {speculative['first_token_seconds']:.2f} s",
            highlight=False,
        )
    for name, suite in results["suites"].items():
        if quality := suite["quality"]:
            console.print(
                f"{name}: {quality['plain']:.1%} right of {quality['prompts']} plainly, {quality['speculative']:.1%} with the drafter",
                highlight=False,
            )
    for k, point in results["k_curve"].items():
        predicted = (results["predicted_acceptance_length"] or {}).get(k)
        said = f" (predicted {predicted:.3f})" if predicted is not None else ""
        faster = f" (predicted {predicted / point['step_cost']:.2f})" if predicted is not None else ""
        console.print(
            f"K = {k}: acceptance length {point['acceptance_length']:.3f}{said}; a step costs {point['step_cost']:.2f} plain "
            f"steps; speed-up to expect {point['speedup']:.2f}{faster}",
            highlight=False,
        )


def _plus_minus(value: float, interval: res.Interval) -> str:
    return f"{value:.2f} +-{(interval[1] - interval[0]) / 2:.2f}"
