"""`report.html`: the results as one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape

from draftsmith.config.sampling import Sampling
from draftsmith.data.results_in_words import changed_answers, faster_methods, not_trained_on, trained_on
from draftsmith.serve.evaluation.charts import bar_chart, line_chart
from draftsmith.serve.evaluation.configurations import (
    Configuration,
    baseline_again_drafter,
    execution_in_words,
    not_tuned_to_speculate,
)
from draftsmith.serve.evaluation.schema import AtRate, Measured, Ratio, Results, SuiteAtK, Throughput
from draftsmith.serve.evaluation.statistics import FEWEST

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6878; --line: #d7dce3; --page: #ffffff; --panel: #f5f7fa;
  --one: #1f6feb; --two: #d9730d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa6b5; --line: #343c48; --page: #12161c;
  --panel: #1a2029; --one: #6cb0ff; --two: #ffa657; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); }
.headline { font-size: 2.6rem; font-weight: 650; line-height: 1.2; margin-top: 1.25rem; color: var(--one); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; padding: 1rem; background: var(--panel); border-radius: .5rem; }
figcaption { font-weight: 600; margin-bottom: .5rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .value { fill: var(--ink); }
svg .axis { stroke: var(--line); } .one { fill: var(--one); stroke: var(--one); } .two { fill: var(--two); stroke: var(--two); }
svg polyline { fill: none; stroke-width: 2; } svg .one text, svg text.one, svg text.two { stroke: none; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.answer { white-space: pre-wrap; font: 14px/1.7 ui-monospace, monospace; background: var(--panel); padding: 1rem;
  border-radius: .5rem; overflow-wrap: anywhere; }
.answer b { font-weight: inherit; background: color-mix(in srgb, var(--one) var(--much), transparent); border-radius: 2px; }
.answer b[data-draft="1"] { --much: 22%; } .answer b[data-draft="2"] { --much: 38%; } .answer b { --much: 54%; }
"""

_POSITIONS_SHOWN = 8
"""In tables, of methods with long drafts."""
_RATIO_HEADINGS = ("95% interval", "median of starts")
"""Of the columns after a ratio."""


def render(results: Results) -> str:
    """The page as HTML.

    Args:
        results: the contents of `results.json`.
    """
    best = results["num_speculative_tokens"]
    curve = results["k_curve"]
    first_name, first = next(iter(results["suites"].items()))
    identity = _identity(results)
    changed = [f"With speculation the text changes: {line}." for line in changed_answers(results, methods=True)]
    speedup, fastest = first["throughput"]["speedup"], first["throughput"]["speedup_over_fastest_baseline"]
    starts = results["engine_starts"]
    over = f"prompts and {starts} engine starts" if starts > 1 else "prompts (one engine start)"
    charts = [
        _figure(
            f"Acceptance length and estimated speedup, by K ({first_name})",
            line_chart(
                list(curve),
                {
                    "estimated speedup": [point["speedup"] for point in curve.values()],
                    "acceptance length": [point["acceptance_length"] for point in curve.values()],
                },
            ),
        ),
        _figure(
            "Draft tokens accepted, by position",
            line_chart(
                [str(position + 1) for position in range(len(_longest(first["at_k"])))],
                {
                    name: list(_longest(suite["at_k"])) for name, suite in list(results["suites"].items())[:2]
                },
                percent=True,
            ),
        ),
        _figure(
            "Tokens per second, one request at a time",
            bar_chart(
                list(results["suites"]),
                {
                    "baseline": [suite["tokens_per_second"]["baseline"] for suite in results["suites"].values()],
                    "speculative": [suite["tokens_per_second"]["speculative"] for suite in results["suites"].values()],
                },
            ),
        ),
    ]  # fmt: skip
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(results["target"])} with {escape(results["drafter"])}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(results["target"])}</h1>
<p class="soft">drafted by {escape(results["drafter"])}, {best} speculative tokens, {escape(results["dtype"])}</p>
<p class="headline">{speedup["value"]:.2f}&times; the speed</p>
<p>of the baseline (decoding without speculation) on {escape(first_name)}, one request at a time, both in
{escape(results["dtype"])}: {first["tokens_per_second"]["speculative"]:.1f} instead of
{first["tokens_per_second"]["baseline"]:.1f} tokens per second (95% interval over {over}: {_interval(speedup["interval"])}; median of
starts {speedup["median"]:.3f}).
Its fastest configuration here by tokens per second, measured one after the other ({escape(first["throughput"]["fastest_speculative"])}), is
<strong>{fastest["value"]:.2f}&times;</strong> as fast as the fastest baseline ({escape(first["throughput"]["fastest_baseline"])};
{_interval(fastest["interval"])}; median of starts {fastest["median"]:.3f}). {identity}</p>
{"".join(f"<p><strong>{escape(line)}</strong></p>" for line in [*changed, *faster_methods(results), *trained_on(results)])}
{"".join(f'<p class="soft">{escape(line)}</p>' for line in not_trained_on(results))}
<h2>Charts</h2>
<div class="charts">
{"".join(charts)}
</div>
<h2>Suites</h2>
{_suite_table(results)}
<p class="soft">Acceptance length: tokens per step of the target, 1 + accepted / drafts; for other methods, steps without a draft
count too. Accepted by position: share of all drafts whose first, second, ... token was accepted. Tokens per second include prompt
processing. Intervals: how far a figure would move with other prompts of the same kind (Student's t over conversations; acceptance has
none where fewer than {FEWEST} have drafts) and, for speeds, with other engine starts ({starts} here); they do not cover other machines. Median of starts: of the ratios of single
engine starts. Noise: a second baseline engine over the first.</p>
<h2>Configurations</h2>
{_configurations(results)}
<h2>Numbers of speculative tokens</h2>
<p class="soft">Step cost: the time of a decoding step over that of a baseline step, one prompt at a time. Estimated speedup:
acceptance length over step cost. Of the recipe's <code>evaluate.k</code>, the one with the highest is chosen; the speedup above is measured at that K.{_toss_up(results)}</p>
{_curve_table(results)}
{_categories(results)}{_quality(results)}{_load(results)}{_rates(results)}{_examples(results)}<h2>Measured with</h2>
{_facts(results)}
</body>
</html>
"""


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>\n"


def _longest(at_k: Mapping[str, SuiteAtK]) -> list[float]:
    """Acceptance by position at the largest K measured."""
    return at_k[max(at_k, key=int)]["acceptance_per_position"]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n'


def _suite_table(results: Results) -> str:
    rows = []
    for name, suite in results["suites"].items():
        for k, at_k in sorted(suite["at_k"].items(), key=lambda item: int(item[0])):
            chosen = k == str(results["num_speculative_tokens"])
            speeds, timed = suite["tokens_per_second"], suite["throughput"]
            rows.append(
                [
                    name, k, f"{at_k['acceptance_length']:.3f}", _interval(at_k["acceptance_length_interval"]),
                    ", ".join(f"{100 * share:.1f}%" for share in at_k["acceptance_per_position"]),
                    str(at_k["drafts"]), _of(at_k["prompts_identical"], suite["prompts"]),
                    f"{speeds['baseline']:.2f}" if chosen else "",
                    f"{speeds['speculative']:.2f}" if chosen else "",
                    *_ratio(timed["speedup"] if chosen else None),
                    *_ratio(timed["speedup_over_fastest_baseline"] if chosen else None),
                    _interval(timed["noise"]["interval"]) if chosen else "",
                ]
            )  # fmt: skip
        for method, other in suite["methods"].items():
            rows.append(
                [
                    f"{name}, {method}", str(other["num_speculative_tokens"]), f"{other['tokens_per_step']:.3f}", "",
                    ", ".join(f"{100 * share:.1f}%" for share in other["acceptance_per_position"][:_POSITIONS_SHOWN]),
                    str(other["drafts"]), _of(other["prompts_identical"], suite["prompts"]),
                    f"{suite['tokens_per_second']['baseline']:.2f}", f"{other['tokens_per_second']:.2f}",
                    *_ratio(suite["throughput"]["speedups"][Configuration(method, results["dtype"]).name]), *_ratio(None), "",
                ]
            )  # fmt: skip
    headings = (
        "suite", "K", "acceptance length", "95% interval", "accepted by position", "drafts", "identical",
        "baseline tok/s", "spec. tok/s", "speedup", *_RATIO_HEADINGS, "over fastest baseline", *_RATIO_HEADINGS, "noise",
    )  # fmt: skip
    return _table(headings, rows)


def _categories(results: Results) -> str:
    rows = [
        [
            name,
            category,
            str(found["prompts"]),
            str(found["conversations"]),
            f"{found['acceptance_length']:.3f}",
            _interval(found["acceptance_length_interval"]),
        ]
        for name, suite in results["suites"].items()
        for category, found in suite["categories"].items()
    ]
    if not rows:
        return ""
    headings = ("suite", "category", "prompts", "conversations", "acceptance length", "95% interval")
    return f"<h2>By category</h2>\n{_table(headings, rows)}"


def _quality(results: Results) -> str:
    rows = [
        [
            name,
            said["measure"].replace("_", " "),
            str(said["prompts"]),
            f"{said['baseline']:.1%}",
            f"{said['speculative']:.1%}",
        ]
        for name, suite in results["suites"].items()
        if (said := suite["quality"])
    ]
    if not rows:
        return ""
    headings = ("suite", "by", "prompts", "right, baseline", "right, speculative")
    return f"<h2>Correct answers</h2>\n{_table(headings, rows)}"


def _of(identical: int | None, prompts: int) -> str:
    return "" if identical is None else f"{identical} of {prompts}"


def _identity(results: Results) -> str:
    """Whether the answers are the target's own: compared token for token, or, where they were sampled, by their distribution."""
    sampling = Sampling.of(results["sampling"])
    if sampling.greedy:
        if all(suite["identical_to_baseline"] for suite in results["suites"].values()):
            return "In batches every answer is identical to the baseline's, token for token."
        return _differing(results)
    lines = [f"Answers are sampled ({escape(str(sampling))})."]
    for name, one in results["sampled_fidelity"].items():
        p = f"p = {one['continuations_p_value']:.2g} by continuations, {one['drafts_p_value']:.2g} by drafted tokens"
        if one["verdict"] == "wrong":
            lines.append(
                f"<strong>Those of {escape(name)} do not follow the baseline's distribution ({p}): this engine with this drafter changes "
                "the text.</strong>"
            )
        else:
            lines.append(
                f"Those of {escape(name)} follow the baseline's distribution ({p}, of {one['answers']} answers)."
            )
    return " ".join(lines)


def _differing(results: Results) -> str:
    """How answers differ from the baseline's, and whether rounding explains it."""
    found = [at_k["fidelity"] for suite in results["suites"].values() for at_k in suite["at_k"].values()]
    differing, wrong = sum(one["differing"] for one in found), any(one["verdict"] == "wrong" for one in found)
    suites = ", ".join(name for name, suite in results["suites"].items() if not suite["identical_to_baseline"])
    if wrong:
        return (
            f"<strong>{differing} answers differ from the baseline's ({escape(suites)}), more often or by larger margins than rounding "
            "explains: this engine with this drafter changes the text.</strong> results.json lists the first differences."
        )
    return (
        f"{differing} answers differ from the baseline's ({escape(suites)}), each where the target itself was undecided, and no more often "
        "than the baseline differs from itself in another batch shape; results.json lists the first differences."
    )


def _toss_up(results: Results) -> str:
    if not results["toss_up"]:
        return ""
    others = ", ".join(map(str, results["toss_up"]))
    return f" Here the choice is a toss-up: within the errors, K = {others} may be as fast."


def _configurations(results: Results) -> str:
    """Throughput and latency of every configuration with one request in flight."""
    rows = [
        [suite_name, *_configuration(name, one, suite["throughput"])]
        for suite_name, suite in results["suites"].items()
        for name, one in suite["throughput"]["configurations"].items()
    ]
    return _table(("suite", *_CONFIGURATION_HEADINGS), rows)


_CONFIGURATION_HEADINGS = (
    "configuration", "tok/s", "over baseline, same dtype", *_RATIO_HEADINGS, "first token, s", "s per output token", "answers", "vLLM's steps",
)  # fmt: skip


def _configuration(name: str, one: Measured, of: Throughput) -> list[str]:
    ratio, fidelity = of["speedups"].get(name), of["fidelity"].get(name)
    return [
        name, f"{one['tokens_per_second']:.2f}", *_ratio(ratio), f"{one['first_token_seconds']:.3f}", f"{one['seconds_per_token']:.4f}",
        fidelity["verdict"].replace("_", " ") if fidelity else "", execution_in_words(one),
    ]  # fmt: skip


def _load(results: Results) -> str:
    load = results["load"]
    if not load:
        return ""
    baseline, _, drafter = zip(*(baseline_again_drafter(at) for at in load.values()), strict=True)
    chart = _figure(
        f"Tokens per second of all requests together, by how many are in flight ({results['dtype']})",
        line_chart(
            list(load),
            {
                "baseline": [one["tokens_per_second"] for one in baseline],
                "speculative": [one["tokens_per_second"] for one in drafter],
            },
        ),
    )
    rows = [
        [size, *_configuration(name, one, at)]
        for size, at in load.items()
        for name, one in at["configurations"].items()
    ]
    ratios = [
        [
            size,
            *_ratio(at["speedup"]),
            at["fastest_speculative"],
            at["fastest_baseline"],
            *_ratio(at["speedup_over_fastest_baseline"]),
            _interval(at["noise"]["interval"]),
        ]
        for size, at in load.items()
    ]
    headings = (
        "in flight", "speedup", *_RATIO_HEADINGS, "fastest speculative", "fastest baseline", "their ratio", *_RATIO_HEADINGS,
        "noise",
    )  # fmt: skip
    return (
        f'<h2>By concurrency</h2>\n<div class="charts">{chart}</div>\n{_table(headings, ratios)}'
        f"{_table(('in flight', *_CONFIGURATION_HEADINGS), rows)}"
        + "".join(f"<p>{escape(not_tuned_to_speculate(at))}</p>\n" for at in load.values() if at.get("tuned_k") == 0)
    )


def _rates(results: Results) -> str:
    rates = results["rates"]
    if not rates:
        return ""
    chart = _figure(
        "Milliseconds per token, by requests per second",
        line_chart(
            list(rates),
            {
                "baseline": [1000 * at["baseline"]["seconds_per_token"] for at in rates.values()],
                "speculative": [1000 * at["speculative"]["seconds_per_token"] for at in rates.values()],
            },
        ),
    )
    every: dict[str, Callable[[AtRate], float | None]] = {
        "tok/s": lambda at: at["tokens_per_second"],
        "first token, s": lambda at: at["first_token_seconds"],
        "first token p99, s": lambda at: at["first_token_seconds_p99"],
        "s/token": lambda at: at["seconds_per_token"],
        "s/token p99": lambda at: at["seconds_per_token_p99"],
    }
    one = next(iter(rates.values()))
    figures = {name: figure for name, figure in every.items() if figure(one["baseline"]) is not None}
    rows = [
        [
            rate,
            *(f"{figure(server):.3f}" for figure in figures.values() for server in (at["baseline"], at["speculative"])),
        ]
        for rate, at in rates.items()
    ]
    headings = ("requests/s", *(f"{variant} {name}" for name in figures for variant in ("baseline", "spec.")))
    return (
        f'<h2>By request rate</h2>\n<p class="soft">One run for each rate and server: {one["requests"]} requests of {escape(one["suite"])} at '
        f"random times, the same for both servers; K = {one['num_speculative_tokens']}. Times are medians over requests"
        f"{'; p99: the 99th percentile' if len(figures) == len(every) else ''}.</p>\n"
        f'<div class="charts">{chart}</div>\n{_table(headings, rows)}'
    )


def _examples(results: Results) -> str:
    if not results["examples"]:
        return ""
    parts = [
        "<h2>Answers, token by token</h2>\n"
        '<p class="soft">Shaded: draft tokens that were accepted, darker for later positions in the draft (hover for the position). '
        "The other tokens are the target's own.</p>\n"
    ]
    for example in results["examples"]:
        text = "".join(
            f'<b data-draft="{position}" title="draft token {position}">{escape(str(token))}</b>'
            if position
            else escape(str(token))
            for token, position in example["tokens"]
        )
        parts.append(f'<p>{escape(example["question"])}</p>\n<div class="answer">{text}</div>\n')
    return "".join(parts)


def _ratio(of: Ratio | None) -> list[str]:
    """Its cells: the ratio and what `_RATIO_HEADINGS` says. Empty ones for none."""
    return [f"{of['value']:.3f}", _interval(of["interval"]), f"{of['median']:.3f}"] if of else [""] * 3


def _interval(ends: Sequence[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def _curve_table(results: Results) -> str:
    predicted, faster = results["predicted_acceptance_length"] or {}, results["predicted_speedup"] or {}
    rows = [
        [
            k,
            f"{point['acceptance_length']:.3f}",
            f"{predicted[k]:.3f}" if k in predicted else "",
            f"{point['step_cost']:.3f}",
            "" if (drafting := point.get("drafting")) is None else f"{drafting:.3f}",
            f"{point['speedup']:.3f}",
            f"{faster[k]:.3f}" if k in faster else "",
        ]
        for k, point in results["k_curve"].items()
    ]
    headings = (
        "K", "acceptance length", "predicted acceptance length", "step cost", "of it drafting", "estimated speedup",
        "predicted speedup",
    )  # fmt: skip
    return _table(headings, rows)


def _facts(results: Results) -> str:
    machine = results["machine"]
    rows = [
        ["processor", f"{machine['processor']}, {machine['cores']} cores"],
        ["memory", f"{machine['memory_gib']:.1f} GiB"],
        ["GPU", ", ".join(machine["gpus"]) or "none"],
        ["system", machine["system"]],
        ["sampling", str(Sampling.of(results["sampling"]))],
        ["vLLM", "without CUDA graphs (eager)" if results["engine"]["enforce_eager"] else "compiled, with CUDA graphs"],
        *([["tensor_parallel_size", str(split)]] if (split := results["engine"]["tensor_parallel_size"]) > 1 else []),
        *([key, json.dumps(value)] for key, value in results["engine"].get("options", {}).items()),
        *([name, version] for name, version in results["versions"].items()),
    ]
    return _table(("", ""), rows)
