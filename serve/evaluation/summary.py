"""An evaluation's results on screen."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from draftsmith.run.progress import console
from draftsmith.serve.evaluation import results as res
from draftsmith.serve.evaluation.leakage import trained_on
from draftsmith.serve.evaluation.results import Results

_POSITIONS_SHOWN = 4
"""Of methods that guess far ahead."""


def print_table(results: Results) -> None:
    """The results on screen."""
    best = results["num_speculative_tokens"]
    starts = results["engine_starts"]
    over = f"prompts and {starts} engine starts" if starts > 1 else "prompts, of one engine start"
    table = Table(
        title=f"{results['target']} with {results['drafter']}: K = {best} chosen by measurement",
        caption="length: acceptance length (of other methods: tokens a step); tok/s: plain to speculative, one request at a time; "
        f"fastest: over the fastest plain configuration; same: as plain decoding; +-: half of a 95% interval over {over}",
        box=SIMPLE_HEAD,
    )
    table.add_column("suite")
    for heading in ("K", "length", "by position", "tok/s", "speed-up", "fastest", "same"):
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
                _plus_minus(suite["speedup_over_fastest_plain"], suite["speedup_over_fastest_plain_interval"])
                if chosen
                else "",
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
                "",
                f"{other['prompts_identical']}/{suite['prompts']}",
            )
    console.print(table)
    for name, suite in results["suites"].items():
        _print_throughput(name, suite["throughput"])
    for load in results["load"].values():
        _print_throughput(f"{load['in_flight']} at once", load)
    for name, suite in results["suites"].items():
        wrong = [k for k, at_k in suite["at_k"].items() if at_k["fidelity"]["verdict"] == "wrong"]
        if wrong:
            console.print(f"{name}: answers are not the target's own at K = {', '.join(wrong)}", style="bold red")
    if results["toss_up"]:
        others = ", ".join(map(str, results["toss_up"]))
        console.print(
            f"The choice of K = {best} is a toss-up: within the error of step costs and prompts, K = {others} may be as fast.",
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
    for line in trained_on(results):
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    for k, point in results["k_curve"].items():
        predicted = (results["predicted_acceptance_length"] or {}).get(k)
        said = f" (predicted {predicted:.3f})" if predicted is not None else ""
        faster = f" (predicted {predicted / point['step_cost']:.2f})" if predicted is not None else ""
        console.print(
            f"K = {k}: acceptance length {point['acceptance_length']:.3f}{said}; a step costs {point['step_cost']:.2f} "
            f"(+-{1.96 * point['step_cost_error']:.2f}) plain steps; speed-up to expect {point['speedup']:.2f}{faster}",
            highlight=False,
        )


def _print_throughput(name: str, of: res.Throughput) -> None:
    """One line of every configuration's tokens per second, and the ratios that matter, with the machine's noise."""
    rates = ", ".join(f"{what} {one['tokens_per_second']:.1f}" for what, one in of["configurations"].items())
    ratio, fastest, noise = of["speedup"], of["speedup_over_fastest_plain"], of["noise"]
    console.print(
        f"{name}: tok/s: {rates}. Speed-up {ratio['value']:.2f} ({_ends(ratio)}; median of starts {ratio['median']:.2f}); "
        f"{of['fastest_speculative']} over {of['fastest_plain']}: {fastest['value']:.2f} ({_ends(fastest)}); noise, plain over plain: "
        f"{noise['value']:.2f} ({_ends(noise)})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _ends(ratio: res.Ratio) -> str:
    return f"{ratio['interval'][0]:.2f} to {ratio['interval'][1]:.2f}"


def _plus_minus(value: float, interval: res.Interval) -> str:
    return f"{value:.2f} +-{(interval[1] - interval[0]) / 2:.2f}"
