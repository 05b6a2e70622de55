"""Plain against speculative decoding, measured in one run.

The plain engine and one engine for each K live side by side, alike but for speculation, and take turns at
every prompt, so that whatever else the machine does hits them all. Three phases (serve/measure.py):

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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith import stage
from draftsmith.errors import UserError
from draftsmith.methods import Method
from draftsmith.progress import Bar, console
from draftsmith.prompts import Prompt
from draftsmith.recipe import Recipe, digest
from draftsmith.serve import results as res
from draftsmith.serve.engine import EngineConfig, EngineHost, start_engines
from draftsmith.serve.load import at_request_rates
from draftsmith.serve.measure import Arm, at_batch_sizes, in_batches, one_at_a_time, step_costs
from draftsmith.serve.report import render
from draftsmith.serve.results import Results
from draftsmith.serve.speculation import check_graph_sizes, drafter_name, method_config, own_drafter
from draftsmith.serve.suites import Renderer, SuiteInput, suite_prompts
from draftsmith.serve.summary import print_table
from draftsmith.target import TargetInfo, describe_target, prepare_target, target_name

_WARM_UP_TOKENS = 8
"""Tokens that every engine generates before any is timed: first calls allocate and choose kernels."""
_REPORT_VERSION = 7
"""Counted up when results or report change their form, so that old ones are made again."""
_PARTIAL = "partial.json"


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
            costs, different = step_costs(engines, ks, suite, recipe) if first else ({}, [])
            at_k = ks if first else sorted({best, options.acceptance_k})
            found = in_batches(engines, [*at_k, *options.methods], suite, renderer, options.batch_size)
            if first:
                curve = {str(k): res.curve_point(found.at[k], costs[k]) for k in ks}
                best = res.fastest({k: curve[str(k)] for k in options.k})
                for k in ks:
                    if k not in (best, options.acceptance_k):
                        engines.pop(k).close()
                examples = renderer.examples(found.prompts, found.answers[best], options.examples)
                load = at_batch_sizes(engines, best, found.prompts, recipe)
            speeds, differing = one_at_a_time(engines, [best, *options.methods], suite.name, found.prompts, recipe)
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


def _prompts(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of each suite to run, in the recipe's order."""
    found: dict[str, list[Prompt]] = {}
    for name in recipe.evaluate.only or recipe.evaluate.suites:
        found[name] = suite_prompts(recipe, name)
    if not found:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    return found


def _predicted(run_dir: Path) -> dict[str, float] | None:
    """Acceptance length by K that training predicted, from the checkpoint's `stage.json`."""
    record = stage.read(run_dir / "checkpoint")
    predicted = record["figures"].get("predicted_acceptance_length") if record else None
    return {str(k): float(value) for k, value in predicted.items()} if predicted else None
