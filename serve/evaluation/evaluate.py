"""The evaluate stage: the baseline against speculative decoding, in one run.

What is compared is up side by side, differs only in what is compared, and alternates, so that disturbances of the machine hit both.
Two engines are up at a time: the baseline and one other, which drafts at every K (`lineup.py`). Three phases:

a. Step cost (`step_cost.py`, `curve.py`): a few prompts of the first suite, one at a time, baseline and every K. The time of an
   engine step hardly depends on the prompt, so a few suffice.
b. Acceptance and fidelity (`acceptance.py`, `fidelity.py`): all prompts in batches. The first suite runs at every K; acceptance
   length over step cost is the estimated speedup, and the K with the highest is chosen. Other suites run at that K and at
   `acceptance_k`. Answers that differ from the baseline's are tested against the effect of rounding alone.
c. Speed (`speed.py`, `throughput.py`, `configurations.py`): wall-clock, on some prompts of every suite with one request in flight, and
   on the first suite with as many as `evaluate.concurrency` says: the baseline in every dtype of the machine, the drafter at
   the chosen K in each, and other methods (`evaluate.methods`).

Identical engines differ by several percent from start to start, so a and c run `evaluate.engine_starts` times with engines started
anew; b and the first of c go on with the last ones of a. After that, if asked for, two servers are measured at request rates
(`evaluate.request_rates`).

Answers are greedy, or sampled as `evaluate.temperature`, `top_p` and `top_k` say. Sampled ones are not compared token for token; on
demand, tests compare their distribution with the baseline's (`sampled_fidelity.py`).

Acceptance varies between prompts far more than step cost does. Choosing K by wall-clock speed alone would take hundreds of prompts,
one at a time, on every engine.

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/eval/{results.json,report.html,stage.json}`, and `partial.json` on the way, from
which a stopped evaluation resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from draftsmith.config.evaluation import RESULTS_VERSION
from draftsmith.config.loading import digest
from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling import Sampling
from draftsmith.data.prompts import Prompt
from draftsmith.data.results_in_words import changed_answers
from draftsmith.data.turns import TurnRenderer
from draftsmith.engine.environment import resolved
from draftsmith.engine.options import check_options
from draftsmith.engine.speculation import model_content
from draftsmith.run import stage
from draftsmith.run.atomic_io import write_bytes, write_json
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.run.stage import StageRun
from draftsmith.serve.evaluation.acceptance import measure_acceptance
from draftsmith.serve.evaluation.configurations import Configuration, baseline_again_drafter, timed_dtypes
from draftsmith.serve.evaluation.curve import predicted_speedup, rivals
from draftsmith.serve.evaluation.engine import say_options
from draftsmith.serve.evaluation.leakage import overlap
from draftsmith.serve.evaluation.load import at_request_rates, check_servers
from draftsmith.serve.evaluation.machine import describe_engines, describe_machine
from draftsmith.serve.evaluation.partial import MeasuredSuite, PartialResults
from draftsmith.serve.evaluation.quality import require_programs_run
from draftsmith.serve.evaluation.report import render
from draftsmith.serve.evaluation.sampled_fidelity import measure_sampled_fidelity
from draftsmith.serve.evaluation.schema import MethodAtSuite, Results, Suite, Throughput, Variant
from draftsmith.serve.evaluation.speed import combined, concurrent_load, measure_speeds, suite_load
from draftsmith.serve.evaluation.step_cost import measure_step_costs
from draftsmith.serve.evaluation.suites import SuiteInput, asks_texts, draw, load_suite, render_suite, turn_renderer
from draftsmith.serve.evaluation.summary import print_table
from draftsmith.serve.evaluation.variants import Variants
from draftsmith.serve.schedule import k_at, schedule_of
from draftsmith.serve.speculator import Speculator, is_trained_since, speculator
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target

_FILES = ("results.json", "report.html")


class WrongAnswersError(DraftsmithError):
    """Speculative answers differ from the target's own by more than rounding explains. The command line exits with status 4."""

    exit_status = 4


# ---- the stage ----


def run_evaluate(recipe: Recipe, run_dir: Path) -> Results:
    """Evaluate a run's drafter, or return the results of an earlier evaluation of the same inputs.

    In a recipe that trains no drafter, the method of its `serve` section or the first of `evaluate.methods` takes its place.

    Args:
        recipe: the whole recipe; `target`, `engine`, `evaluate` and the prompts of `extract` are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/` if it has one.

    Returns:
        The contents of `results.json`.

    Raises:
        UserError: there is no drafter, the run's checkpoint is newer, or a prompt does not fit the engine.
        WrongAnswersError: speculative decoding changes the text.
        DraftsmithError: an engine failed.
    """
    check_options(recipe.engine)
    run = StageRun("evaluate", run_dir / recipe.evaluate.output)
    speculates_with = speculator(recipe, run_dir)
    if speculates_with.own:
        _require_converted(run_dir)
    recipe = speculates_with.measured(recipe)
    target = describe_target(prepare_target(recipe.target), recipe.target)
    output = run.directory
    prompts = _prompts(recipe)
    # Training predicted for held-out text; beside the figures of another suite the prediction would mislead.
    first = next(iter(prompts))
    on_held_out = recipe.evaluate.suites[first].prompts == "held_out"
    predicted = _predicted(run_dir, recipe.evaluate.sampling) if on_held_out else None
    sections = {
        "engine": resolved(recipe.engine).model_dump(mode="json"),
        "evaluate": recipe.evaluate.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
    }
    dtypes = timed_dtypes(recipe, target.config)
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"dtypes": dtypes})})
    models = {name: model_content(method) for name, method in recipe.evaluate.methods.items()}
    inputs = digest(
        {
            "version": RESULTS_VERSION,
            "target": [target.revision, target.config_hash, target.tokenizer_hash, target.chat_template_hash],
            "drafter": dict(speculates_with.sha256),
            "prompts": {name: [_content(one) for one in items] for name, items in prompts.items()},
            "served": recipe.serve.vllm_args if recipe.evaluate.request_rates else None,
            "dtypes": dtypes,
            "max_tokens": recipe.extract.response_tokens(held_out=True),
            "predicted": predicted,
            **({"models": models} if any(models.values()) else {}),
            # Prompts for timing are drawn with it. Digests with the default are those of before it counted.
            **({"seed": recipe.seed} if recipe.seed else {}),
            # It gives K, loads and rates, and JSON's keys are sorted here. Digests with the one that recipes have first by default are those of
            # before it counted.
            **({"first": first} if not on_held_out else {}),
            **sections,
        }
    )  # fmt: skip
    k_by_load = None
    if recipe.evaluate.concurrency:
        k_by_load = schedule_of(run_dir, recipe.tune.output, speculates_with.sha256)
    if (figures := run.finished(inputs)) is not None:
        earlier = cast("Results", figures)
        tuned = _tuned_since(earlier, k_by_load)
        if all(k in (0, _measured_k(earlier, n)) for n, k in tuned.items()):
            if tuned:  # what is to be said changes, but nothing that was measured
                for n, k in tuned.items():
                    earlier["load"][n]["tuned_k"] = k
                _write(earlier, output)
                run.revise(dict(earlier), files=_FILES)
            return _shown(earlier, output)
        console.print("evaluate: but draftsmith tune has chosen another K for a load since; measuring again")

    unfinished = PartialResults.read(output / "partial.json", inputs)
    partial = unfinished or PartialResults(output / "partial.json", inputs)
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    suites = [_rendered(recipe, renderer, name, items) for name, items in prompts.items()]
    load_k = _load_k(recipe, k_by_load, partial)
    # What cannot run is refused while earlier figures are still there, and before hours of measuring.
    variants = Variants(recipe, target, speculates_with, suites, output, load_k.values())
    if recipe.evaluate.request_rates:
        check_servers(recipe, target, [variants.speculative_config(k) for k in (0, *recipe.evaluate.k)])
    if any(suite.score == "unit_tests" for suite in suites):
        require_programs_run()
    run.claim(fresh=unfinished is None)
    say_options("evaluate", recipe.engine)
    found = evaluate(
        recipe,
        target,
        speculates_with,
        variants,
        suites,
        renderer,
        load_k=load_k,
        predicted=predicted,
        log_dir=output,
        partial=partial,
    )
    if speculates_with.own:
        _add_overlap(found, recipe, run_dir, prompts)

    _write(found, output)
    run.finish(inputs, dict(found), recipe=sections, files=_FILES)
    partial.path.unlink(missing_ok=True)
    return _shown(found, output)


def evaluate(
    recipe: Recipe,
    target: TargetInfo,
    speculates_with: Speculator,
    variants: Variants,
    suites: Sequence[SuiteInput],
    renderer: TurnRenderer,
    *,
    load_k: Mapping[str, int],
    predicted: Mapping[str, float] | None,
    log_dir: Path,
    partial: PartialResults,
) -> Results:
    """Measure what `partial` does not have yet; writes only `partial.json` and logs.

    Args:
        recipe: with `evaluate.dtypes` as `timed_dtypes` has them.
        speculates_with: what is measured at every K, with its recipe (`Speculator.measured`).
        variants: with everything that is measured.
        suites: the first gives the K curve.
        renderer: for later turns.
        load_k: K by requests in flight; 0 for the one that is found best with one.
        predicted: acceptance length by K that training predicted.
        log_dir: folder for the logs of engines and servers.
    """
    options = recipe.evaluate
    with closing(variants.lineup()) as lineup:
        measure_step_costs(lineup, variants, suites[0], recipe, partial)
        measure_acceptance(lineup, variants, suites, renderer, recipe, partial)
        measure_sampled_fidelity(lineup, variants, suites[0], recipe, partial)
        best = partial.best_k(options.k)
        partial.load_k = {n: k or best for n, k in load_k.items()}
        by_suite = {suite.name: suite_load(suite.name, partial, best) for suite in suites}
        by_load = {n: concurrent_load(int(n), partial, k) for n, k in partial.load_k.items()}
        measure_speeds(lineup, variants, [*by_suite.values(), *by_load.values()], recipe, partial)
        partial.peak_engines = max(partial.peak_engines, lineup.peak)
        partial.save()
    if options.request_rates:
        _measure_rates(variants, best, suites[0], renderer, recipe, target, log_dir, partial)
    return {
        "schema_version": RESULTS_VERSION,
        "target": target.name,
        "drafter": speculates_with.name,
        "drafter_sha256": dict(speculates_with.sha256),
        "num_speculative_tokens": best,
        "suites": {
            name: _suite(partial.suites[name], combined(load, recipe, partial), recipe, best, len(load.prompts))
            for name, load in by_suite.items()
        },
        "k_curve": partial.k_curve,
        "toss_up": rivals({k: partial.k_curve[str(k)] for k in options.k if str(k) in partial.k_curve}, best),
        "engine_starts": options.engine_starts,
        "predicted_acceptance_length": dict(predicted) if predicted is not None else None,
        "predicted_speedup": predicted_speedup(predicted, partial.k_curve),
        "load": {n: _load(n, combined(load, recipe, partial), partial) for n, load in by_load.items()},
        "rates": partial.rates,
        "examples": partial.examples,
        "sampling": {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k},
        "sampled_fidelity": partial.sampled_fidelity,
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": describe_machine(),
        "engine": describe_engines(recipe.engine, partial.peak_engines),
    }


# ---- its inputs ----


def _load_k(recipe: Recipe, k_by_load: Sequence[Sequence[int]] | None, partial: PartialResults) -> dict[str, int]:
    """K by requests in flight: what an unfinished evaluation has, else what tuning chose; 0 for neither.

    Args:
        k_by_load: the schedule of `draftsmith tune`: from, to, K; None if it did not run.
        partial: receives what tuning chose.
    """
    if partial.load_k:
        return partial.load_k
    tuned = {str(n): k_at(k_by_load, n) for n in recipe.evaluate.concurrency}
    partial.tuned_k = {n: k for n, k in tuned.items() if k is not None}
    return {n: partial.tuned_k.get(n, 0) for n in tuned}


def _tuned_since(found: Results, k_by_load: Sequence[Sequence[int]] | None) -> dict[str, int]:
    """What tuning has chosen since for loads, where it is another K than results say that it chose, or than was measured."""
    tuned = {n: k_at(k_by_load, int(n)) for n in found["load"]}
    return {
        n: k for n, k in tuned.items() if k is not None and k != found["load"][n].get("tuned_k", _measured_k(found, n))
    }


def _measured_k(found: Results, in_flight: str) -> Variant:
    return baseline_again_drafter(found["load"][in_flight])[2]["speculation"]


def _prompts(recipe: Recipe) -> dict[str, list[Prompt]]:
    """The prompts of each suite to run, in the recipe's order."""
    found = {name: load_suite(recipe, name) for name in recipe.evaluate.only or recipe.evaluate.suites}
    if not found:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    return found


def _content(prompt: Prompt) -> list[Any]:
    """What identifies a prompt. Texts and tokens count only where they are: digests of before they were asked had messages alone."""
    return [prompt.id, prompt.messages, prompt.tools, prompt.reference] + (
        [] if prompt.messages else [prompt.document, prompt.token_ids]
    )


def _rendered(recipe: Recipe, renderer: TurnRenderer, name: str, prompts: Sequence[Prompt]) -> SuiteInput:
    options = recipe.evaluate.suites[name]
    max_tokens = options.max_tokens or recipe.extract.response_tokens(held_out=True)
    return render_suite(
        renderer,
        name,
        prompts,
        max_tokens,
        options.score,
        held_out=options.prompts == "held_out",
        texts=asks_texts(recipe, name),
    )


def _require_converted(run_dir: Path) -> None:
    """Raises UserError: the run was trained again after its drafter was made. What training predicted and trained on is then another drafter's."""
    if is_trained_since(run_dir):
        raise UserError(
            f"The drafter in {run_dir / 'vllm'} was not made from the checkpoint in {run_dir / 'checkpoint'}, which is newer. Run "
            "`draftsmith convert` with this recipe, and then `draftsmith evaluate`."
        )


def _predicted(run_dir: Path, sampling: Sampling) -> dict[str, float] | None:
    """Acceptance length by K that training predicted for this sampling, from the checkpoint's `stage.json`: from text that was sampled so,
    or because the recipe asked for it (`train.predict_temperature`)."""
    record = stage.read(run_dir / "checkpoint")
    figures = record["figures"] if record else {}
    text, at = figures.get("text_sampling"), figures.get("predicted_at_temperature")
    predicted = None
    if sampling.greedy if text is None else Sampling.of(text) == sampling:
        predicted = figures.get("predicted_acceptance_length")
    elif at is not None and Sampling.of(at) == sampling:
        predicted = at["greedy_drafts"]
    elif figures:
        console.print(
            f"evaluate: training predicted no acceptance length for answers like these ({sampling}); `draftsmith predict` does, from held-out "
            "responses that are sampled so",
            highlight=False,
            soft_wrap=True,
        )
    return {str(k): float(value) for k, value in predicted.items()} if predicted else None


# ---- its results ----


def _measure_rates(
    variants: Variants,
    k: int,
    suite: SuiteInput,
    renderer: TurnRenderer,
    recipe: Recipe,
    target: TargetInfo,
    log_dir: Path,
    partial: PartialResults,
) -> None:
    """Two servers at every request rate, with prompts of the suite, drawn by category."""
    speculative = variants.speculative_config(k)
    assert speculative is not None
    wanted = recipe.evaluate.request_prompts
    asked = [renderer.renderer.prompt_text(turn.conversation) for turn in draw(suite.prompts, wanted, seed=recipe.seed)]
    if len(asked) < wanted:
        console.print(f"evaluate: the first suite has {len(asked)} prompts, fewer than evaluate.request_prompts")
    at_request_rates(
        recipe,
        target,
        speculative,
        asked,
        log_dir,
        suite=suite.name,
        placement=variants.placement,
        partial=partial,
        add_special_tokens=renderer.renderer.plain,
    )


def _write(found: Results, output: Path) -> None:
    results, report = _FILES
    write_json(output / results, found)
    write_bytes(output / report, render(found).encode())


def _load(in_flight: str, measured: Throughput, partial: PartialResults) -> Throughput:
    return {**measured, "tuned_k": partial.tuned_k[in_flight]} if in_flight in partial.tuned_k else measured


def _suite(measured: MeasuredSuite, speed: Any, recipe: Recipe, k: int, timed_prompts: int) -> Suite:
    """A suite's figures of all phases.

    Args:
        speed: its `Throughput` with one request in flight.
        timed_prompts: prompts that it was measured on.
    """
    own = recipe.target.dtype
    rates = {name: one["tokens_per_second"] for name, one in speed["configurations"].items()}
    methods: dict[str, MethodAtSuite] = {}
    for name, figures in measured["methods"].items():
        key = Configuration(name, own).name
        methods[name] = {
            **figures,
            "tokens_per_second": rates[key],
            "speedup": speed["speedups"][key]["value"],
            "speedup_interval": speed["speedups"][key]["interval"],
        }
    over_fastest = speed["speedup_over_fastest_baseline"]
    found: Any = {
        **measured,
        "methods": methods,
        "tokens_per_second": {
            "baseline": rates[Configuration(0, own).name],
            "speculative": rates[Configuration(k, own).name],
        },
        "speedup": speed["speedup"]["value"],
        "speedup_interval": speed["speedup"]["interval"],
        "speedup_over_fastest_baseline": over_fastest["value"],
        "speedup_over_fastest_baseline_interval": over_fastest["interval"],
        "timed_prompts": timed_prompts,
        "throughput": speed,
    }
    suite: Suite = found
    return suite


def _add_overlap(found: Results, recipe: Recipe, run_dir: Path, prompts: Mapping[str, list[Prompt]]) -> None:
    """How much of each suite the drafter was trained on, from the stores that training recorded."""
    trained = stage.read(run_dir / "checkpoint")
    more = (trained or {}).get("recipe", {}).get("train", {}).get("extra_stores")
    if more is None:  # no checkpoint here, or of an earlier version
        more = [{"path": folder.path} for folder in recipe.train.extra_stores]
    stores = [run_dir / "store", *(Path(folder["path"]) for folder in more)]
    overlaps = overlap(stores, recipe.evaluate.suites, prompts)
    for name, suite in found["suites"].items():
        suite["overlap_with_training"] = None if overlaps is None else overlaps[name]


def _shown(found: Results, output: Path) -> Results:
    """Print the results and return them.

    Raises:
        WrongAnswersError: a verdict is `wrong`.
    """
    print_table(found)
    console.print(f"evaluate: report in {output / 'report.html'}", highlight=False, soft_wrap=True)
    wrong = changed_answers(found, methods=True)
    if wrong:
        what = (
            "this drafter" if changed_answers(found, methods=False) else "that method (this drafter is not among them)"
        )
        raise WrongAnswersError(
            f"Speculative decoding changed the target's answers by more than rounding explains: {'; '.join(wrong)}. The results are "
            f"written and list the first differences. Do not serve {what} with this engine: a faulty engine, plugin or drafter "
            "configuration changes text, not only speed."
        )
    return found
