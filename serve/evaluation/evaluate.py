"""Plain against speculative decoding, measured in one run.

Engines that are compared live side by side, alike but for what is compared, and take turns, so that whatever else the machine does
hits them all; on GPUs that do not hold them all, in groups with the plain one (serve/evaluation/lineup.py). Three phases:

a. step cost (serve/evaluation/measure.py, serve/evaluation/curve.py): a few prompts of the first suite, one at a time, plain and at every K. What an
   engine step costs hardly depends on the prompt, so a few tell it well;
b. acceptance and fidelity (serve/evaluation/measure.py, serve/evaluation/fidelity.py): all prompts in batches. The first suite runs at every K;
   acceptance length over step cost is the estimated speedup, and the K with the highest is chosen. Other suites run at that K and
   at `acceptance_k`. Whether answers are plain decoding's own is tested against what rounding alone does;
c. speed (serve/evaluation/throughput.py, serve/evaluation/configurations.py): some prompts of every suite, drawn by category, with one request in flight,
   and on the first suite with as many as `evaluate.concurrency` says: plain decoding in every dtype that the machine has, the
   drafter at the chosen K in each, other methods (`evaluate.methods`), wall-clock.

Two engines that do the same differ by several percent from start to start, so a and c are done `evaluate.engine_starts` times with
engines started anew. Last, where wanted, two servers are asked at request rates (`evaluate.request_rates`).

Acceptance varies from prompt to prompt far more than the cost of a step. Choosing K by wall-clock speed alone would take
hundreds of prompts, one at a time, on every engine.

Reads the target and `runs/NAME/vllm`; writes `runs/NAME/eval/{results.json,report.html,stage.json}`. What is measured is in
`partial.json` as soon as it is; an evaluation that was stopped resumes there.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.config.loading import digest
from draftsmith.config.methods import Method
from draftsmith.config.recipe import Recipe
from draftsmith.data.prompts import Prompt
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine.environment import is_cpu, resolved
from draftsmith.engine.speculation import check_graph_sizes, drafter_name, method_config, own_drafter
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import Bar, console
from draftsmith.serve.evaluation import fidelity
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.answers import examples, quality
from draftsmith.serve.evaluation.configurations import (
    Configuration,
    Speculation,
    beside_plain,
    configurations,
    machine_dtypes,
    throughput,
)
from draftsmith.serve.evaluation.curve import fastest, rivals, speedup_curve, step_cost_curve
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, Generated, start_engines
from draftsmith.serve.evaluation.in_flight import Request, Timing
from draftsmith.serve.evaluation.leakage import overlap
from draftsmith.serve.evaluation.lineup import Lineup, find_placement
from draftsmith.serve.evaluation.load import at_request_rates
from draftsmith.serve.evaluation.measure import in_batches, step_costs
from draftsmith.serve.evaluation.report import render
from draftsmith.serve.evaluation.results import Results
from draftsmith.serve.evaluation.suites import SuiteInput, draw, load_suite, render_suite, turn_renderer
from draftsmith.serve.evaluation.summary import print_table
from draftsmith.serve.evaluation.throughput import REQUESTS_PER_SLOT, AtStart, at_start, run_load, schedule
from draftsmith.serve.tune import schedule_of
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target, target_name

_WARM_UP_TOKENS = 8
"""Tokens that every engine generates before any is timed: first calls allocate and choose kernels."""
_REPORT_VERSION = 9
"""Counted up when results or report change their form, so that old ones are made again."""
_PARTIAL = "partial.json"


class WrongAnswersError(DraftsmithError):
    """Speculative answers are not the target's own, by more than rounding explains. The command line exits with status 4."""

    exit_status = 4


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
        "engine": resolved(recipe.engine).model_dump(mode="json"),
        "evaluate": recipe.evaluate.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
    }
    drafter_sha256 = {file: stage.sha256_of(drafter_dir / file) for file in ("config.json", "model.safetensors")}
    k_by_load = schedule_of(run_dir, recipe.tune.output) if recipe.evaluate.concurrency else None
    inputs = digest(
        {
            "version": _REPORT_VERSION,
            "target": [target.revision, target.config_hash, target.tokenizer_hash, target.chat_template_hash],
            "drafter": drafter_sha256,
            "prompts": {
                name: [[p.id, p.messages, p.tools, p.reference] for p in items] for name, items in prompts.items()
            },
            "served": recipe.serve.vllm_args if recipe.evaluate.request_rates else None,
            "dtypes": recipe.evaluate.dtypes or machine_dtypes(),
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
        _require_own_answers(found)
        return found
    partial = _read_partial(output / _PARTIAL, inputs)
    stage.claim(output, fresh=partial is None)
    renderer = turn_renderer(target, recipe.engine.max_model_len)
    suites = [
        render_suite(
            renderer, name, items,
            recipe.evaluate.suites[name].max_tokens or recipe.extract.response_tokens(held_out=True),
            recipe.evaluate.suites[name].score,
        )
        for name, items in prompts.items()
    ]  # fmt: skip
    found = evaluate(
        recipe, target=target, drafter_dir=drafter_dir, drafter_sha256=drafter_sha256, suites=suites, renderer=renderer,
        predicted=predicted, k_by_load=k_by_load, log_dir=output, partial=partial,
        keep=lambda measured: stage.write_json(output / _PARTIAL, {"inputs": inputs, **measured}),
    )  # fmt: skip
    stores = [run_dir / "store", *(Path(folder.path) for folder in recipe.train.extra_stores)]
    overlaps = overlap(stores, recipe.evaluate.suites, prompts)
    if overlaps is None:
        console.print(
            "evaluate: not checked whether the suites were trained on: a store is missing, or was made by an earlier version",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for name, suite in found["suites"].items():
        suite["overlap_with_training"] = None if overlaps is None else overlaps[name]
    stage.write_json(output / "results.json", found)
    stage.write_bytes(output / "report.html", render(found).encode())
    stage.finish(
        output, stage="evaluate", inputs=inputs, recipe=sections, figures=dict(found), started=started,
        files=("results.json", "report.html"),
    )  # fmt: skip
    (output / _PARTIAL).unlink(missing_ok=True)
    print_table(found)
    console.print(f"evaluate: report in {output / 'report.html'}", highlight=False, soft_wrap=True)
    _require_own_answers(found)
    return found


def _require_own_answers(found: Results) -> None:
    """
    Raises:
        WrongAnswersError: a verdict is `wrong`.
    """
    wrong = []
    for name, suite in found["suites"].items():
        verdicts = {
            **{f"K = {k}": at_k["fidelity"] for k, at_k in suite["at_k"].items()},
            **{method: other["fidelity"] for method, other in suite["methods"].items()},
            **suite["throughput"]["fidelity"],
        }
        for what, one in verdicts.items():
            if one["verdict"] == "wrong":
                wrong.append(
                    f"{name}, {what}: {one['differing']} of {one['answers']} answers differ, {one['mismatches']} of them where the "
                    f"target was not undecided (p = {one['rate_p_value']:.2g} for so many)"
                )
    if wrong:
        raise WrongAnswersError(
            f"Speculative decoding did not give the target's own answers, by more than rounding explains: {'; '.join(wrong)}. The "
            "results are written and list the first differences. Do not serve this drafter with this engine; a wrong engine, "
            "plugin or drafter configuration changes text, not only speed."
        )


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
    renderer: TurnRenderer,
    predicted: Mapping[str, float] | None,
    k_by_load: Sequence[Sequence[int]] | None,
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
        k_by_load: what `draftsmith tune` chose: from, to, K; None where it was not run.
        log_dir: folder for logs.
        partial: what `keep` was last given by an evaluation that was stopped; it is not measured again.
        keep: called with what is measured so far, whenever there is more.
    """
    options = recipe.evaluate
    known: dict[str, Any] = {
        "costs": [], "suites": {}, "k_curve": {}, "timed": {}, "examples": [], "speeds": [], "fidelity": {}, "rates": {},
        **(partial or {}),
    }  # fmt: skip
    known.pop("inputs", None)
    run = _Evaluation(recipe, target, drafter_dir, log_dir, known, keep, suites)
    try:
        run.step_costs(suites[0])
        run.acceptance(suites, renderer)
    finally:
        run.close()
    best = fastest({k: run.curve[str(k)] for k in options.k})
    # Kept, so that tuning between a stop and the rest changes nothing.
    known.setdefault("k_by_load", {str(n): _k_at(k_by_load, n) or best for n in options.concurrency})
    loads = {int(n): k for n, k in known["k_by_load"].items()}
    run.speeds([suite.name for suite in suites], best, loads)
    if options.request_rates:
        speculative = _speculative(recipe, target, drafter_dir, [best], {})[best]
        assert speculative is not None
        check_graph_sizes(recipe.serve.vllm_args, best)
        asked = [
            renderer.renderer.prompt_text(turn.conversation) for turn in suites[0].prompts[-options.request_prompts :]
        ]
        if len(asked) < options.request_prompts:
            console.print(f"evaluate: the first suite has {len(asked)} prompts, fewer than evaluate.request_prompts")
        known["rates"] = at_request_rates(
            recipe, target, speculative, asked, log_dir, placement=run.placement, known=known["rates"],
            keep=lambda found: keep({**known, "rates": found}),
        )  # fmt: skip
    load = {str(n): run.throughput(_load_key(n), "", n, k) for n, k in loads.items()}
    return {
        "target": target.name,
        "drafter": drafter_name(drafter_dir),
        "drafter_sha256": drafter_sha256,
        "num_speculative_tokens": best,
        "suites": {suite.name: run.suite(suite.name, best) for suite in suites},
        "k_curve": run.curve,
        "toss_up": rivals({k: run.curve[str(k)] for k in options.k}, best),
        "engine_starts": options.engine_starts,
        "predicted_acceptance_length": dict(predicted) if predicted is not None else None,
        "predicted_speedup": res.predicted_speedup(predicted, run.curve),
        "load": load,
        "rates": known["rates"],
        "examples": known["examples"],
        "dtype": recipe.target.dtype,
        "versions": stage.versions(),
        "machine": res.machine(),
        "engine": res.engines(recipe.engine, run.placement.at_once),
    }


def _load_key(in_flight: int) -> str:
    """Where `partial.json` has a load, among suites' names."""
    return f"{in_flight} at once"


def _under_load(recipe: Recipe, in_flight: int, k: int) -> list[Configuration]:
    """What is measured with so many requests in flight: methods beside the drafter are compared with one alone."""
    every = configurations(recipe, k)
    return every if in_flight == 1 else [one for one in every if isinstance(one.speculation, int)]


def _k_at(k_by_load: Sequence[Sequence[int]] | None, in_flight: int) -> int:
    """The K that tuning chose for so many requests; 0 where it chose none."""
    return next((k for first, last, k in k_by_load or () if first <= in_flight <= last), 0)


class _Evaluation:
    """An evaluation under way: what is known, and the phases that add to it.

    `known` is what `partial.json` holds. `costs`: by engine start, ratios by K. `k_by_load`: the drafter's K by requests in flight.
    `suites`: phase b's figures by suite. `timed`: by suite, the drawn prompts as id and token ids; under the empty name those of
    the loads. `speeds`: by engine start, then by load or suite, then by configuration.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        drafter_dir: Path,
        log_dir: Path,
        known: dict[str, Any],
        keep: Callable[[dict[str, Any]], None],
        suites: Sequence[SuiteInput],
    ) -> None:
        self._recipe, self._target, self._drafter_dir, self._log_dir = recipe, target, drafter_dir, log_dir
        self._known, self._keep = known, keep
        options = recipe.evaluate
        self._ks = sorted({*options.k, options.acceptance_k})
        self._speculative = self._speculative_configs([0, *self._ks, *options.methods])
        in_flight, longest = max((1, *options.concurrency)), max(map(_longest, suites))
        self.placement = find_placement(
            recipe.engine, target, list(self._speculative.values()),
            dtypes=sorted({one.dtype for one in configurations(recipe, self._ks[-1])}),
            tokens=max(options.acceptance_batch_size, in_flight) * longest, at_least=in_flight * (longest + options.timing_tokens),
            smaller="evaluate.concurrency",
        )  # fmt: skip
        self._lineup: Lineup[Speculation] = Lineup(self.placement, self._started)
        self._warm_up = suites[0].prompts[0].token_ids

    @property
    def curve(self) -> dict[str, res.CurvePoint]:
        curve: dict[str, res.CurvePoint] = self._known["k_curve"]
        return curve

    # ---- a: step costs ----

    def step_costs(self, suite: SuiteInput) -> None:
        """What a step costs at each K, with engines started anew each time; the last ones stay for phase b."""
        costs = self._known["costs"]
        while len(costs) < self._recipe.evaluate.engine_starts:
            self.close()
            self._lineup = Lineup(self.placement, self._started, number=len(costs))
            last = len(costs) + 1 == self._recipe.evaluate.engine_starts
            found: dict[str, list[float]] = {}
            for engines in self._turns(self._ks, methods=last and self._holds_all):
                ks = [k for k in self._ks if k in engines]
                found |= {str(k): ratios for k, ratios in step_costs(engines, ks, suite, self._recipe).items()}
            costs.append(found)
            self._keep(self._known)

    # ---- b: acceptance and fidelity ----

    def acceptance(self, suites: Sequence[SuiteInput], renderer: TurnRenderer) -> None:
        """All prompts of the suites that are left, in batches."""
        options, known = self._recipe.evaluate, self._known
        if known["suites"]:
            console.print(f"evaluate: {', '.join(known['suites'])} measured before", highlight=False, soft_wrap=True)
        for suite in [suite for suite in suites if suite.name not in known["suites"]]:
            first = suite is suites[0]
            at_k = self._ks if first else sorted({self._best(), options.acceptance_k})
            self._acceptance_of(suite, at_k, renderer, first=first)
            self._keep(known)

    def _acceptance_of(self, suite: SuiteInput, at_k: Sequence[int], renderer: TurnRenderer, *, first: bool) -> None:
        options, known = self._recipe.evaluate, self._known
        arms: list[Speculation] = [*at_k, *options.methods]
        found = in_batches(
            self._turns(at_k, methods=True), arms, suite, renderer,
            piece=1 + max((self._speculative[arm] or {})["num_speculative_tokens"] for arm in arms),
            batch_size=options.acceptance_batch_size, max_model_len=self._recipe.engine.max_model_len,
        )  # fmt: skip
        if first:
            costs = step_cost_curve([{int(k): ratios for k, ratios in one.items()} for one in known["costs"]])
            by_prompt = {k: found.at[k]["by_prompt"] for k in self._ks}
            known["k_curve"] = {str(k): one for k, one in speedup_curve(costs, by_prompt, options.k).items()}
            most = REQUESTS_PER_SLOT * max(options.concurrency, default=0)
            known["timed"][""] = _ids(draw(found.prompts, most, seed=self._recipe.seed))
            known["examples"] = examples(renderer, found.prompts, found.answers[self._best()], options.examples)
        known["timed"][suite.name] = _ids(draw(found.prompts, options.timing_prompts, seed=self._recipe.seed))
        best = self._best()
        category_of = {one.id: one.conversation.category for one in found.prompts if one.conversation.category}
        known["suites"][suite.name] = {
            "prompts": len(found.prompts),
            "prompts_sha256": digest([prompt.token_ids for prompt in suite.prompts]),
            "max_tokens": suite.max_tokens,
            **res.acceptance_of(found.at[best]),
            "acceptance_length_interval": found.at[best]["acceptance_length_interval"],
            "categories": res.categories(found.at[best]["by_prompt"], category_of),
            "identical_to_plain": not any(one["method"] is None for one in found.different),
            "control": {**found.control, "margins": found.control["margins"][: fidelity.DIFFERENCES_KEPT]},
            "differences": found.different[: fidelity.DIFFERENCES_KEPT],
            "at_k": {str(k): found.at[k] for k in at_k},
            "plain_seconds": found.plain_seconds,
            "methods": {
                name: {
                    **found.at[name],
                    "method": method.method,
                    "num_speculative_tokens": (self._speculative[name] or {})["num_speculative_tokens"],
                    "tokens_per_step": res.tokens_per_step(found.answers[name]),
                }
                for name, method in options.methods.items()
            },
            "quality": quality(suite, renderer, found.prompts, found.answers[0], found.answers[best]),
        }

    def _best(self) -> int:
        return fastest({k: self.curve[str(k)] for k in self._recipe.evaluate.k})

    # ---- c: speed ----

    def speeds(self, names: Sequence[str], best: int, loads: Mapping[int, int]) -> None:
        """Throughput on every suite with one request in flight, and on the first under every load.

        Args:
            names: of the suites.
            best: K with one request in flight.
            loads: requests in flight to K.
        """
        speeds: list[dict[str, Any]] = self._known["speeds"]
        for number in range(self._recipe.evaluate.engine_starts):
            if number == len(speeds):
                speeds.append({})
            wanted = [(name, name, 1, best) for name in names]
            wanted += [(_load_key(n), "", n, k) for n, k in loads.items()]
            left = [one for one in wanted if one[0] not in speeds[number]]
            if left:
                self._speeds_of_start(left, number)

    def _speeds_of_start(self, left: Sequence[tuple[str, str, int, int]], number: int) -> None:
        recipe, options, timed = self._recipe, self._recipe.evaluate, self._known["timed"]
        of = list(dict.fromkeys(one for *_, k in left for one in configurations(recipe, k)))
        speculative = self._speculative_configs({one.speculation for one in of})
        configs = {
            one: EngineSpec(
                name=one.file_name, target=str(self._target.path), dtype=one.dtype, engine=recipe.engine,
                speculative=speculative[one.speculation], max_num_seqs=max((1, *options.concurrency)),
            )
            for one in of
        }  # fmt: skip
        lineup: Lineup[Configuration] = Lineup(self.placement, self._started, number)
        found: dict[str, dict[str, Any]] = self._known["speeds"][number]
        measured: dict[str, dict[str, AtStart]] = {key: {} for key, *_ in left}
        try:
            for engines in lineup.turns(configs, lambda one: Configuration(0, one.dtype)):
                for key, name, in_flight, k in left:
                    taking_part = {one: engines[one] for one in _under_load(recipe, in_flight, k) if one in engines}
                    if len(taking_part) < 2:  # the others come in another group
                        continue
                    requests = self._requests(name, in_flight)
                    timings = run_load(taking_part, requests, in_flight, name or "load")
                    if number == 0 and in_flight == 1:
                        of_suite = self._fidelity(taking_part, timings, dict(timed[name]), requests)
                        self._known["fidelity"][key] = self._known["fidelity"].get(key, {}) | of_suite
                    at = {one: at_start(timing, requests) for one, timing in timings.items()}
                    measured[key] = beside_plain(at) | measured[key]  # plain decoding as in its first group
                    if len(engines) == len(configs):  # all are up: nothing of it is still to come
                        found[key] = measured[key]
                        self._keep(self._known)
            found |= measured
            self._keep(self._known)
        finally:
            lineup.close()

    def _fidelity(
        self,
        engines: Mapping[Configuration, EngineHost],
        timings: Mapping[Configuration, Sequence[Timing]],
        contexts: Mapping[str, list[int]],
        requests: Sequence[tuple[str, Request]],
    ) -> dict[str, fidelity.Fidelity]:
        """Answers of every speculative configuration against those of plain decoding in the same dtype."""
        answers = {
            one: {requests[timing.request][0]: Generated(timing.token_ids, None, 0.0) for timing in found}
            for one, found in timings.items()
        }
        found: dict[str, fidelity.Fidelity] = {}
        for plain in [one for one in engines if one.speculation == 0 and not one.again]:
            names = list(answers[plain])
            own = list(answers[plain].values())
            speculative = [one for one in engines if one.speculation != 0 and one.dtype == plain.dtype]
            if not speculative:
                continue
            control = fidelity.control(
                engines[plain], [contexts[name] for name in names], own,
                piece=1 + max(engines[one].config.num_speculative_tokens for one in speculative),
                batch_size=self._recipe.evaluate.acceptance_batch_size, max_model_len=self._recipe.engine.max_model_len,
            )  # fmt: skip
            for one in speculative:
                method = one.speculation if isinstance(one.speculation, str) else None
                differing = fidelity.differences(
                    names, own, [answers[one][name] for name in names], k=engines[one].config.num_speculative_tokens,
                    method=method,
                )  # fmt: skip
                fidelity.look_at_margins(
                    differing,
                    contexts,
                    answers[plain],
                    answers[one],
                    engines[plain].logit_margin,
                    fidelity.near_tie(one.dtype, on_gpu=not is_cpu()),
                )
                found[one.name] = fidelity.judge(differing, names, own, control)
        return found

    # ---- what came out ----

    def throughput(self, key: str, timed: str, in_flight: int, k: int) -> res.Throughput:
        """Of all engine starts.

        Args:
            key: in `speeds`.
            timed: whose prompts were asked.
            in_flight: requests in flight.
            k: the drafter's.
        """
        starts: list[dict[str, dict[str, AtStart]]] = self._known["speeds"]
        return throughput(
            [start[key] for start in starts], _under_load(self._recipe, in_flight, k), in_flight=in_flight,
            requests=len(self._requests(timed, in_flight)) - in_flight, fidelity=self._known["fidelity"].get(key, {}),
        )  # fmt: skip

    def _requests(self, timed: str, in_flight: int) -> list[tuple[str, Request]]:
        options = self._recipe.evaluate
        prompts = self._known["timed"][timed][: max(REQUESTS_PER_SLOT * in_flight, options.timing_prompts)]
        return schedule(prompts, in_flight, options.timing_tokens, seed=self._recipe.seed)

    def suite(self, name: str, best: int) -> res.Suite:
        """One suite's part of the results."""
        known: Any = self._known["suites"][name]  # what `_acceptance_of` put there
        speed = self.throughput(name, name, 1, best)
        plain, _, drafter, *_ = configurations(self._recipe, best)
        own = self._recipe.target.dtype
        found: Any = {
            **known,
            "methods": {
                method: {
                    **figures,
                    "tokens_per_second": speed["configurations"][Configuration(method, own).name]["tokens_per_second"],
                    "speedup": speed["speedups"][Configuration(method, own).name]["value"],
                    "speedup_interval": speed["speedups"][Configuration(method, own).name]["interval"],
                }
                for method, figures in known["methods"].items()
            },
            "tokens_per_second": {
                "plain": speed["configurations"][plain.name]["tokens_per_second"],
                "speculative": speed["configurations"][drafter.name]["tokens_per_second"],
            },
            "speedup": speed["speedup"]["value"],
            "speedup_interval": speed["speedup"]["interval"],
            "speedup_over_fastest_plain": speed["speedup_over_fastest_plain"]["value"],
            "speedup_over_fastest_plain_interval": speed["speedup_over_fastest_plain"]["interval"],
            "timed_prompts": len(self._known["timed"][name]),
            "throughput": speed,
        }
        suite: res.Suite = found
        return suite

    # ---- engines ----

    @property
    def _holds_all(self) -> bool:
        """Whether the engines of phases a and b can all be up at once."""
        at_once = self.placement.at_once
        return at_once is None or at_once >= 1 + len(self._ks) + len(self._recipe.evaluate.methods)

    def _turns(self, ks: Sequence[int], *, methods: bool) -> Iterator[dict[Speculation, EngineHost]]:
        """Engines of plain decoding, of the drafter at each K and of the other methods; all in the recipe's dtype."""
        options = self._recipe.evaluate
        wanted: list[Speculation] = [0, *ks, *(options.methods if methods else ())]
        configs = {
            one: EngineSpec(
                name="plain" if one == 0 else f"k{one}" if isinstance(one, int) else f"method-{_file_name(one)}",
                target=str(self._target.path),
                dtype=self._recipe.target.dtype,
                engine=self._recipe.engine,
                speculative=self._speculative[one],
                max_num_seqs=options.acceptance_batch_size,
            )
            for one in wanted
        }
        return self._lineup.turns(configs, lambda one: 0)

    def _started(self, configs: Sequence[EngineSpec]) -> list[EngineHost]:
        with Bar("start engines", total=len(configs), unit="engines") as bar:
            hosts = start_engines(configs, self._log_dir, on_ready=bar.update)
        try:
            for host in hosts:
                host.generate([self._warm_up], max_tokens=_WARM_UP_TOKENS)
        except BaseException:
            for host in hosts:
                host.close()
            raise
        return hosts

    def _speculative_configs(self, wanted: Iterable[Speculation]) -> dict[Speculation, dict[str, Any] | None]:
        """vLLM's `speculative_config` of each; None for plain decoding."""
        methods = self._recipe.evaluate.methods
        ks = [one for one in wanted if isinstance(one, int) and one]
        named = {one: methods[one] for one in wanted if isinstance(one, str)}
        return {0: None} | _speculative(self._recipe, self._target, self._drafter_dir, ks, named)

    def close(self) -> None:
        """End the engines of the first two phases."""
        self._lineup.close()


def _longest(suite: SuiteInput) -> int:
    """Tokens that a suite's longest sequence can come to, about: each turn has a question as long as the longest, and an answer."""
    prompt = max(len(prompt.token_ids) for prompt in suite.prompts)
    return max(1 + len(prompt.later) for prompt in suite.prompts) * (prompt + suite.max_tokens)


def _ids(prompts: Sequence[Turn]) -> list[list[Any]]:
    return [[prompt.id, prompt.token_ids] for prompt in prompts]


def _speculative(
    recipe: Recipe, target: TargetInfo, drafter_dir: Path, ks: Sequence[int], others: Mapping[str, Method]
) -> dict[Speculation, dict[str, Any] | None]:
    """vLLM's `speculative_config` of the drafter at each K and of other methods."""
    own = own_drafter(drafter_dir)
    methods: dict[Speculation, Method] = {k: own.model_copy(update={"num_speculative_tokens": k}) for k in ks}
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
        found[name] = load_suite(recipe, name)
    if not found:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    return found


def _predicted(run_dir: Path) -> dict[str, float] | None:
    """Acceptance length by K that training predicted, from the checkpoint's `stage.json`."""
    record = stage.read(run_dir / "checkpoint")
    predicted = record["figures"].get("predicted_acceptance_length") if record else None
    return {str(k): float(value) for k, value in predicted.items()} if predicted else None
