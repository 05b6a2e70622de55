"""An evaluation's results on screen."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftsmith.config.sampling import Sampling
from draftsmith.data.results_in_words import faster_methods, not_trained_on, trained_on
from draftsmith.run.progress import console
from draftsmith.serve.evaluation.configurations import executed_otherwise, not_tuned_to_speculate
from draftsmith.serve.evaluation.schema import Interval, Ratio, Results, Throughput


def print_table(results: Results) -> None:
    """Print the results, in a table that fits into 80 columns."""
    best = results["num_speculative_tokens"]
    starts = results["engine_starts"]
    over = f"prompts and {starts} engine starts" if starts > 1 else "prompts, of one engine start"
    table = Table(
        title=f"{results['target']} with {results['drafter']}: fastest at K = {best}",
        caption="length: acceptance length (other methods: tokens per step); tok/s: baseline to speculative, one request at a time; "
        f"fastest: over the fastest baseline configuration; same: answers equal to the baseline's; +-: half of a 95% interval over {over}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("suite", overflow="fold")
    for heading in ("K", "length", "tok/s", "speedup", "fastest", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, suite in results["suites"].items():
        speeds = suite["tokens_per_second"]
        for k, at_k in sorted(suite["at_k"].items(), key=lambda item: item[0] != str(best)):
            chosen = k == str(best)
            table.add_row(
                name if chosen else "",
                k,
                _plus_minus(at_k["acceptance_length"], at_k["acceptance_length_interval"]),
                f"{speeds['baseline']:.1f} to {speeds['speculative']:.1f}" if chosen else "",
                _plus_minus(suite["speedup"], suite["speedup_interval"]) if chosen else "",
                _plus_minus(suite["speedup_over_fastest_baseline"], suite["speedup_over_fastest_baseline_interval"])
                if chosen
                else "",
                _same(at_k["prompts_identical"], suite["prompts"]),
            )
        for method, other in suite["methods"].items():
            table.add_row(
                f"  {method}",
                str(other["num_speculative_tokens"]),
                f"{other['tokens_per_step']:.2f}",
                f"{speeds['baseline']:.1f} to {other['tokens_per_second']:.1f}",
                _plus_minus(other["speedup"], other["speedup_interval"]),
                "",
                _same(other["prompts_identical"], suite["prompts"]),
            )
    console.print(table)
    for name, suite in results["suites"].items():
        _print_throughput(name, suite["throughput"])
    loads = [*(suite["throughput"] for suite in results["suites"].values()), *results["load"].values()]
    otherwise = {what: both for of in loads for what, both in executed_otherwise(of).items()}
    for what, (own, of_baseline) in otherwise.items():
        console.print(
            f"vLLM executes {what} by {own}, and the baseline by {of_baseline}: a part of their ratio is that",
            highlight=False,
            soft_wrap=True,
        )
    for load in results["load"].values():
        _print_throughput(f"{load['in_flight']} at once", load)
        if load.get("tuned_k") == 0:
            console.print(not_tuned_to_speculate(load), highlight=False, soft_wrap=True)
    for line in _sampled(results):
        console.print(line, highlight=False, soft_wrap=True)
    if results["toss_up"]:
        others = ", ".join(map(str, results["toss_up"]))
        console.print(
            f"The choice of K = {best} is a toss-up: within the errors of step costs and prompts, K = {others} may be as fast.",
            highlight=False,
        )
    for rate, at in results["rates"].items():
        baseline, speculative = at["baseline"], at["speculative"]
        console.print(
            f"{rate} requests per second, baseline to speculative: {1000 * baseline['seconds_per_token']:.0f} to "
            f"{1000 * speculative['seconds_per_token']:.0f} ms per token; first token after {baseline['first_token_seconds']:.2f} and "
            f"{speculative['first_token_seconds']:.2f} s",
            highlight=False,
        )
    for name, suite in results["suites"].items():
        if quality := suite["quality"]:
            console.print(
                f"{name}: of {quality['prompts']} answers {quality['baseline']:.1%} are right without the drafter, "
                f"{quality['speculative']:.1%} with it",
                highlight=False,
            )
    for line in faster_methods(results):
        console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    for line in trained_on(results):
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    for line in not_trained_on(results):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for k, point in results["k_curve"].items():
        predicted = (results["predicted_acceptance_length"] or {}).get(k)
        said = f" (predicted {predicted:.3f})" if predicted is not None else ""
        faster = f" (predicted {predicted / point['step_cost']:.2f})" if predicted is not None else ""
        drafting = "" if (draft := point.get("drafting")) is None else f", {draft:.2f} of it drafting"
        console.print(
            f"K = {k}: acceptance length {point['acceptance_length']:.3f}{said}; step cost {point['step_cost']:.2f} "
            f"(+-{_half(point['step_cost_interval']):.2f}) x baseline{drafting}; estimated speedup {point['speedup']:.2f}{faster}",
            highlight=False,
        )


def _sampled(results: Results) -> list[str]:
    """How answers were sampled, if they were, and what the tests of their distribution say."""
    sampling = Sampling.of(results["sampling"])
    if sampling.greedy:
        return []
    if not results["sampled_fidelity"]:
        return [
            f"All answers are sampled ({sampling}), and not compared; `evaluate.fidelity: sampling` tests their distribution."
        ]
    lines = [f"All answers are sampled ({sampling})."]
    for name, one in results["sampled_fidelity"].items():
        bias = one["detectable_bias"]
        finds = "" if bias is None else f"; drafts accepted {bias:.2f} times too readily would have been found"
        said = "follow" if one["verdict"] == "same_distribution" else "do NOT follow"
        lines.append(
            f"{name}: {one['answers']} sampled answers {said} the baseline's distribution (p = {one['continuations_p_value']:.2g} by "
            f"continuations, {one['drafts_p_value']:.2g} by drafted tokens{finds})"
        )
    return lines


def _same(identical: int | None, prompts: int) -> str:
    return "" if identical is None else f"{identical}/{prompts}"


def _print_throughput(name: str, of: Throughput) -> None:
    """One line: every configuration's tokens per second, the speedups, and the machine's noise."""
    rates = ", ".join(f"{what} {one['tokens_per_second']:.1f}" for what, one in of["configurations"].items())
    ratio, fastest, noise = of["speedup"], of["speedup_over_fastest_baseline"], of["noise"]
    console.print(
        f"{name}: tok/s: {rates}. Speedup {ratio['value']:.2f} ({_ends(ratio)}; median of starts {ratio['median']:.2f}); "
        f"{of['fastest_speculative']} over {of['fastest_baseline']}: {fastest['value']:.2f} ({_ends(fastest)}); noise, baseline over baseline: "
        f"{noise['value']:.2f} ({_ends(noise)})",
        highlight=False,
        soft_wrap=True,
    )


def _ends(ratio: Ratio) -> str:
    return f"{ratio['interval'][0]:.2f} to {ratio['interval'][1]:.2f}"


def _plus_minus(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} +-{_half(interval):.2f}"


def _half(interval: Interval) -> float:
    return (interval[1] - interval[0]) / 2
