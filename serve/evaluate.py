"""Plain against speculative decoding, measured in one run.

The plain engine and one engine for each K live side by side, alike but for speculation, and take turns at
every prompt, so that whatever else the machine does hits them all. Three phases:

a. step cost: a few prompts of the first suite, one at a time, on every engine. What an engine step costs hardly
   depends on the prompt, so a few tell it well;
b. acceptance and identity: all prompts in batches. The first suite runs at every K; acceptance length over step cost
   is the speed-up to expect, and the K with the highest is chosen. Other suites run at that K and at `acceptance_k`;
c. speed: some prompts of every suite, one at a time, plain and at the chosen K in turn, by the clock.

Acceptance varies from prompt to prompt far more than the cost of a step. Choosing K by the clock alone would take
hundreds of prompts, one at a time, on every engine.

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/eval/{results.json,report.html,stage.json}`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftsmith import stage
from draftsmith.errors import UserError
from draftsmith.progress import Bar, console
from draftsmith.prompts import Prompt, load_prompts, training_and_held_out
from draftsmith.recipe import Recipe, digest
from draftsmith.serve import results as res
from draftsmith.serve.engine import EngineConfig, EngineHost, Generated, start_engines
from draftsmith.serve.report import render
from draftsmith.serve.results import Results
from draftsmith.serve.speculation import drafter_name, speculative_config
from draftsmith.target import describe_target, prepare_target, target_name

_WARM_UP_TOKENS = 8
"""Tokens that every engine generates before any is timed: first calls allocate and choose kernels."""
_COST_TOKENS = 16
"""Response tokens of an answer whose steps are timed."""
_REPORT_VERSION = 5
"""Counted up when results or report change their form, so that old ones are made again."""


@dataclass(frozen=True)
class SuiteInput:
    """A suite, ready for an engine."""

    name: str
    prompt_ids: list[str]
    token_ids: list[list[int]]
    """One sequence a prompt, in the target's chat template, ready for the answer."""
    max_tokens: int


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
            "prompts": {name: [[p.id, p.messages] for p in items] for name, items in prompts.items()},
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
    stage.claim(output, fresh=True)
    suites = [
        _tokenise(name, items, target_dir, recipe.evaluate.suites[name].max_tokens or recipe.extract.response_tokens(held_out=True),
                  recipe.engine.max_model_len)
        for name, items in prompts.items()
    ]  # fmt: skip
    found = evaluate(
        recipe, target_dir=target_dir, target_name=target.name, drafter_dir=drafter_dir, drafter_sha256=drafter_sha256,
        suites=suites, predicted=predicted, log_dir=output,
    )  # fmt: skip
    stage.write_json(output / "results.json", found)
    stage.write_bytes(output / "report.html", render(found).encode())
    stage.finish(
        output, stage="evaluate", inputs=inputs, recipe=sections, figures=dict(found), started=started,
        files=("results.json", "report.html"),
    )  # fmt: skip
    print_table(found)
    console.print(f"evaluate: report in {output / 'report.html'}", highlight=False, soft_wrap=True)
    return found


def evaluate(
    recipe: Recipe,
    *,
    target_dir: Path,
    target_name: str,
    drafter_dir: Path,
    drafter_sha256: dict[str, str],
    suites: Sequence[SuiteInput],
    predicted: Mapping[str, float] | None,
    log_dir: Path,
) -> Results:
    """Measure; writes nothing but the engines' logs.

    Args:
        drafter_sha256: digests of its files, passed on into the results.
        suites: what to evaluate on; the first gives the K curve.
        predicted: acceptance length by K that training predicted, passed on into the results.
        log_dir: folder for the engines' logs.
    """
    options = recipe.evaluate
    ks = sorted({*options.k, options.acceptance_k})
    configs = [
        EngineConfig(
            name="plain" if k == 0 else f"k{k}",
            target=str(target_dir),
            dtype=recipe.target.dtype,
            engine=recipe.engine,
            speculative=speculative_config(drafter_dir, k) if k else None,
            max_num_seqs=options.batch_size,
            memory_share=1 / (len(ks) + 1),
        )
        for k in (0, *ks)
    ]
    with Bar("start engines", total=len(configs), unit="engines") as bar:
        hosts = start_engines(configs, log_dir, on_ready=bar.update)
    engines = dict(zip((0, *ks), hosts, strict=True))
    try:
        for host in hosts:
            host.generate([suites[0].token_ids[0]], max_tokens=_WARM_UP_TOKENS)
        costs, different = _step_costs(engines, suites[0], recipe)
        measured: dict[str, res.Suite] = {}
        curve: dict[int, res.CurvePoint] = {}
        best = 0
        for suite in suites:
            first = suite is suites[0]
            at_k, plain_seconds, more = _acceptance(
                engines, ks if first else sorted({best, options.acceptance_k}), suite, options.batch_size
            )
            if first:
                curve = {k: res.curve_point(at_k[str(k)], costs[k]) for k in ks}
                best = res.fastest({k: curve[k] for k in options.k})
                for k in ks:
                    if k not in (best, options.acceptance_k):
                        engines.pop(k).close()
            speed, differing = _speed(engines, best, suite, recipe)
            different = [*(different if first else []), *more, *differing]
            measured[suite.name] = {
                "prompts": len(suite.token_ids),
                "max_tokens": suite.max_tokens,
                **res.acceptance_of(at_k[str(best)]),
                **speed,
                "identical_to_plain": not different,
                "differences": different[: res.DIFFERENCES_KEPT],
                "at_k": at_k,
                "plain_seconds": plain_seconds,
            }
    finally:
        for host in hosts:
            host.close()

    by_k = {str(k): point for k, point in curve.items()}
    return {
        "target": target_name,
        "drafter": drafter_name(drafter_dir),
        "drafter_sha256": drafter_sha256,
        "num_speculative_tokens": best,
        "suites": measured,
        "k_curve": by_k,
        "predicted_acceptance_length": dict(predicted) if predicted is not None else None,
        "predicted_speedup": res.predicted_speedup(predicted, by_k),
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": res.machine(),
    }


def _step_costs(
    engines: Mapping[int, EngineHost], suite: SuiteInput, recipe: Recipe
) -> tuple[dict[int, float], list[res.Difference]]:
    """Phase a: what one decoding step costs at each K, over a plain step's cost.

    Answers are short and every prompt goes to every engine in turn, so that what disturbs the machine for a second or
    two spoils one ratio of many; the median leaves it out.
    """
    order = list(engines)
    ratios: dict[int, list[float]] = {k: [] for k in order[1:]}
    different: list[res.Difference] = []
    count = min(recipe.evaluate.curve_prompts, len(suite.token_ids))
    with Bar("step cost", total=count * len(order), unit="answers") as bar:
        for index in range(count):
            answers: dict[int, Generated] = {}
            seconds: dict[int, float] = {}
            shift = index % len(order)  # nobody is always first
            for k in order[shift:] + order[:shift]:
                before = engines[k].counters()
                (answers[k],), _ = engines[k].generate([suite.token_ids[index]], max_tokens=_COST_TOKENS)
                # Prefill gives the first token; from there every step of a speculative engine checks a draft.
                steps = (engines[k].counters() - before).drafts if k else len(answers[0].token_ids) - 1
                seconds[k] = answers[k].decode_seconds / steps if steps else 0.0
                bar.update(index * len(order) + len(answers))
            for k in order[1:]:
                different += res.differences([suite.prompt_ids[index]], [answers[0]], [answers[k]], k=k)
                if seconds[0] and seconds[k]:
                    ratios[k].append(seconds[k] / seconds[0])
    if not all(ratios.values()):
        raise UserError(
            f"The first {count} answers of the suite `{suite.name}` are a single token long, too short to time a step. "
            "Raise evaluate.curve_prompts, or put a suite with longer answers first."
        )
    return {k: statistics.median(found) for k, found in ratios.items()}, different


def _acceptance(
    engines: Mapping[int, EngineHost], ks: Sequence[int], suite: SuiteInput, batch_size: int
) -> tuple[dict[str, res.SuiteAtK], float, list[res.Difference]]:
    """Phase b for one suite: figures by K, seconds of plain decoding, and where answers differ from it."""
    total = len(suite.token_ids)
    before = {k: engines[k].counters() for k in ks}
    identical = dict.fromkeys(ks, 0)
    seconds = dict.fromkeys((0, *ks), 0.0)
    different: list[res.Difference] = []
    with Bar(f"{suite.name}: acceptance", total=total * (len(ks) + 1), unit="answers") as bar:
        for start in range(0, total, batch_size):
            part = slice(start, min(start + batch_size, total))
            size = part.stop - start
            plain: list[Generated] = []
            for turn, k in enumerate((0, *ks), start=1):
                answers, spent = engines[k].generate(suite.token_ids[part], max_tokens=suite.max_tokens)
                seconds[k] += spent
                if k == 0:
                    plain = answers
                else:
                    found = res.differences(suite.prompt_ids[part], plain, answers, k=k)
                    identical[k] += size - len(found)
                    different += found
                bar.update(start * (len(ks) + 1) + turn * size)
    at_k: dict[str, res.SuiteAtK] = {
        str(k): {
            **res.acceptance(engines[k].counters() - before[k]),
            "prompts_identical": identical[k],
            "seconds": seconds[k],
        }
        for k in ks
    }
    return at_k, seconds[0], different


def _speed(
    engines: Mapping[int, EngineHost], best: int, suite: SuiteInput, recipe: Recipe
) -> tuple[res.Timed, list[res.Difference]]:
    """Phase c for one suite: prompts one at a time, by the clock."""
    # The prompts that step costs were measured on come first in the suite; these are its last.
    timed = range(max(0, len(suite.token_ids) - recipe.evaluate.speed_prompts), len(suite.token_ids))
    seconds: dict[int, list[float]] = {0: [], best: []}
    tokens = {0: 0, best: 0}
    different: list[res.Difference] = []
    with Bar(f"{suite.name}: speed", total=len(timed), unit="prompts") as bar:
        for done, index in enumerate(timed, start=1):
            answers: dict[int, Generated] = {}
            for k in (0, best) if done % 2 else (best, 0):
                (answers[k],), spent = engines[k].generate(
                    [suite.token_ids[index]], max_tokens=recipe.evaluate.speed_tokens
                )
                seconds[k].append(spent)
                tokens[k] += len(answers[k].token_ids)
            different += res.differences([suite.prompt_ids[index]], [answers[0]], [answers[best]], k=best)
            bar.update(done, speedup=sum(seconds[0]) / sum(seconds[best]))
    ratios = [a / b for a, b in zip(seconds[0], seconds[best], strict=True)]
    speeds: res.Speeds = {
        "plain": tokens[0] / sum(seconds[0]),
        "speculative": tokens[best] / sum(seconds[best]),
    }
    return {
        "tokens_per_second": speeds,
        "speedup": speeds["speculative"] / speeds["plain"],
        "speedup_per_prompt": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
        "timed_prompts": len(timed),
    }, different


def _prompts(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of each suite to run, in the recipe's order."""
    found: dict[str, list[Prompt]] = {}
    for name in recipe.evaluate.only or recipe.evaluate.suites:
        source = recipe.evaluate.suites[name].prompts
        found[name] = training_and_held_out(recipe.extract)[1] if source == "held_out" else load_prompts(source)
        if not found[name]:
            raise UserError(f"The suite `{name}` has no prompts. Give `evaluate.suites.{name}.prompts` another source.")
    if not found:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    return found


def _tokenise(
    name: str, prompts: Sequence[Prompt], target_dir: Path, max_tokens: int, max_model_len: int
) -> SuiteInput:
    """Prompts in the target's chat template, ready for the assistant's answer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
    if tokenizer.chat_template is None:
        raise UserError(f"The tokenizer of the target in {target_dir} has no chat template, which prompts need.")
    token_ids = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) + max_tokens > max_model_len:
            raise UserError(
                f"Prompt `{prompt.id}` of the suite `{name}` has {len(ids)} tokens; with {max_tokens} response tokens that "
                f"is more than engine.max_model_len, {max_model_len}. Raise it, lower evaluate.suites.{name}.max_tokens, "
                f"or leave long prompts out with evaluate.suites.{name}.prompts.max_chars."
            )
        token_ids.append(list(ids))
    return SuiteInput(name, [prompt.id for prompt in prompts], token_ids, max_tokens)


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
        caption="length: acceptance length; tok/s: plain to speculative, one prompt at a time; same: as plain decoding",
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
                f"{at_k['acceptance_length']:.3f}",
                " ".join(f"{share:.2f}" for share in at_k["acceptance_per_position"]),
                f"{speeds['plain']:.1f} to {speeds['speculative']:.1f}" if chosen else "",
                f"{suite['speedup']:.2f}" if chosen else "",
                f"{at_k['prompts_identical']}/{suite['prompts']}",
            )
    console.print(table)
    for k, point in results["k_curve"].items():
        predicted = (results["predicted_acceptance_length"] or {}).get(k)
        said = f" (predicted {predicted:.3f})" if predicted is not None else ""
        faster = f" (predicted {predicted / point['step_cost']:.2f})" if predicted is not None else ""
        console.print(
            f"K = {k}: acceptance length {point['acceptance_length']:.3f}{said}; a step costs {point['step_cost']:.2f} plain "
            f"steps; speed-up to expect {point['speedup']:.2f}{faster}",
            highlight=False,
        )
