"""`draftsmith doctor`: what this machine can do, and what is wrong with the install. Imports no vLLM, asks no network."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.config.drafters import KINDS
from draftsmith.config.recipe import EngineConfig
from draftsmith.run import cuda
from draftsmith.run.errors import UserError

_GIB = 1024**3
_KNOWN_VLLM = "0.32.0"
"""What the install asks for and what tests run."""
_OLDEST_TORCH = (2, 10)
_OLDEST_CAPABILITY = (7, 5)
"""Compute capability: what vLLM's kernels are built for at least."""
_ONLY_V1 = ("suffix", *(kind for kind, options in KINDS.items() if not options.serving.runner_v2))
"""Methods that vLLM 0.32's model runner V2 does not have (vllm/config/vllm.py)."""
_METHODS = ("extraction", *KINDS, "ngram", "draft_model", "mtp", "suffix")
_LITTLE_DISK = 20 * _GIB
_NODES = Path("/sys/devices/system/node")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    """What was looked at."""
    found: str
    """What is there, in a line."""
    status: Literal["good", "note", "wrong"] = "good"
    """`note`: worth knowing, and everything runs. `wrong`: the way from prompts to an evaluation does not work."""
    advice: str = ""
    """What to do about it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs."""


def examine(runs: Path) -> list[Finding]:
    """All findings, in the order in which they are shown.

    Args:
        runs: the folder of all runs; it need not exist.
    """
    checks: list[Callable[[], Finding]] = [
        python, torch_build, driver, gpus, vllm, runners, kernels, compiler, extensions, bfloat16, memory,
        lambda: disk(runs), hub,
    ]  # fmt: skip
    return [check() for check in checks]


# ---- programs ----


def python() -> Finding:
    version = sys.version_info
    found = f"{version[0]}.{version[1]}.{version[2]}, {sys.executable}"
    if (version[0], version[1]) < (3, 11):
        return Finding("Python", found, "wrong", "Draftsmith needs Python 3.11 or later.")
    return Finding("Python", found)


def torch_build() -> Finding:
    hip = getattr(torch.version, "hip", None)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    found, figures = (
        f"{torch.__version__}, built for {build}",
        {"version": torch.__version__, "cuda": torch.version.cuda},
    )
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < _OLDEST_TORCH:
        wanted = ".".join(map(str, _OLDEST_TORCH))
        return Finding("torch", found, "wrong", f"Draftsmith needs torch {wanted} or later.", figures)
    if hip:
        return Finding("torch", found, "note", "Draftsmith is not tested on AMD's GPUs.", figures)
    return Finding("torch", found, figures=figures)


def driver() -> Finding:
    """The NVIDIA driver, and whether this torch can use it."""
    loaded, supports, on_bus = cuda.driver_version(), cuda.driver_supports(), cuda.gpus_on_the_bus()
    figures = {"version": loaded, "cuda": supports, "gpus_on_the_bus": on_bus}
    found = f"{loaded or 'of unknown version'}{f', CUDA up to {supports}' if supports else ''}"
    found = found if loaded or supports else "none"
    try:
        cuda.require_usable_gpus()
    except UserError as error:
        return Finding("driver", found, "wrong", str(error), figures)
    if torch.version.cuda is None and (loaded or on_bus):
        advice = "This machine has an NVIDIA GPU, and torch is a CPU build: a new environment with `make venv EXTRA=cuda` uses it."
        return Finding("driver", found, "note", advice, figures)
    return Finding("driver", found, figures=figures)


def gpus() -> Finding:
    """Each GPU with its memory, what of it is free, and its compute capability."""
    if not torch.cuda.is_available():
        hidden = " (CUDA_VISIBLE_DEVICES hides them)" if cuda.hidden() else ""
        return Finding("GPUs", f"none{hidden}: everything runs on the CPU", figures={"gpus": []})
    listed, full, old = [], [], []
    share = EngineConfig().gpu_memory_utilization
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        listed.append(
            {
                "name": about.name, "memory_gib": round(total / _GIB, 1), "free_gib": round(free / _GIB, 1),
                "capability": f"{about.major}.{about.minor}",
            }
        )  # fmt: skip
        if free < share * total:
            full.append(index)
        if (about.major, about.minor) < _OLDEST_CAPABILITY:
            old.append(index)
    found = "; ".join(
        f"{index}: {one['name']}, {one['memory_gib']} GiB, {one['free_gib']} free, compute capability {one['capability']}"
        for index, one in enumerate(listed)
    )
    figures = {"gpus": listed}
    if old:
        wanted = ".".join(map(str, _OLDEST_CAPABILITY))
        advice = f"GPU {_numbers(old)}: vLLM needs compute capability {wanted}. CUDA_VISIBLE_DEVICES chooses others."
        return Finding("GPUs", found, "wrong", advice, figures)
    if full:
        advice = (
            f"GPU {_numbers(full)}: less is free than the {share:.0%} that engines take by default. See nvidia-smi for who has it; "
            "CUDA_VISIBLE_DEVICES chooses other GPUs, engine.gpu_memory_utilization takes less."
        )
        return Finding("GPUs", found, "wrong", advice, figures)
    return Finding("GPUs", found, figures=figures)


def vllm() -> Finding:
    installed = cuda.vllm_build()
    if installed is None:
        advice = (
            "Extraction and evaluation need it: pip install 'draftsmith[cuda]', or 'draftsmith[cpu]' without a GPU."
        )
        return Finding("vLLM", "not installed", "wrong", advice, {"version": None, "build": None})
    version, build = installed
    found, figures = f"{version}, {'CUDA' if build == 'cuda' else 'CPU'} build", {"version": version, "build": build}
    try:
        cuda.require_gpus_for_vllm()
    except UserError as error:
        return Finding("vLLM", found, "wrong", str(error), figures)
    if version.split("+")[0] != _KNOWN_VLLM:
        advice = f"Draftsmith is tested with vLLM {_KNOWN_VLLM}; its plugin for MLP speculators refuses another one."
        return Finding("vLLM", found, "note", advice, figures)
    if build == "cpu" and torch.cuda.is_available():
        advice = "There are GPUs, and this vLLM does not use them: a new environment with `make venv EXTRA=cuda` does."
        return Finding("vLLM", found, "wrong", advice, figures)
    return Finding("vLLM", found, figures=figures)


def runners() -> Finding:
    """Which of its two model runners vLLM takes for which method, by the rules of the version that is known."""
    installed = cuda.vllm_build()
    if installed is None or installed[0].split("+")[0] != _KNOWN_VLLM:
        return Finding("model runner", f"known for vLLM {_KNOWN_VLLM} alone", figures={"runners": None})
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    can = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if asked is not None:
        taken = dict.fromkeys(_METHODS, "V2" if asked not in ("", "0") else "V1")
    else:
        taken = {method: "V2" if can and method not in _ONLY_V1 else "V1" for method in _METHODS}
    by_runner = {name: [method for method in _METHODS if taken[method] == name] for name in ("V1", "V2")}
    found = "; ".join(f"{name} for {', '.join(methods)}" for name, methods in by_runner.items() if methods)
    figures = {"runners": taken}
    if asked is not None:
        advice = f"VLLM_USE_V2_MODEL_RUNNER={asked} decides it; without, vLLM chooses by method."
        return Finding("model runner", found, "note", advice, figures)
    return Finding("model runner", found, figures=figures)


def kernels() -> Finding:
    """Whether FlashInfer's kernels are there: vLLM's CUDA build compiles them at its start where they are not."""
    if not torch.cuda.is_available():
        return Finding("FlashInfer", "not used on a CPU", figures={"missing": []})
    flashinfer = _version("flashinfer-python")
    if flashinfer is None:
        advice = "vLLM's CUDA build asks for it, and takes slower kernels without: install `draftsmith[cuda]` again."
        return Finding("FlashInfer", "not installed", "note", advice, {"version": None, "missing": []})
    wanted = ["flashinfer-cubin"]
    if torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9):
        wanted.append("flashinfer-jit-cache")
    missing = [name for name in wanted if (_version(name) or "").split("+")[0] != flashinfer.split("+")[0]]
    figures = {"version": flashinfer, "missing": missing}
    if missing:
        advice = (
            "vLLM compiles kernels for minutes when an engine starts, or does without them. `vllm download-kernels` in this "
            "environment gets them once."
        )
        return Finding("FlashInfer", f"{flashinfer}, without {' and '.join(missing)}", "note", advice, figures)
    return Finding("FlashInfer", f"{flashinfer}, kernels downloaded", figures=figures)


def compiler() -> Finding:
    """What Triton and torch's compiler call: a C compiler."""
    named = os.environ.get("CC")
    path = next((found for name in (named, "gcc", "cc", "clang") if name and (found := shutil.which(name))), None)
    figures = {"path": path}
    if path is None:
        advice = (
            "Triton and torch.compile build code with one (with `engine.enforce_eager: false` on a CPU; on a GPU always): "
            "install gcc."
        )
        return Finding("C compiler", "none", "wrong" if torch.cuda.is_available() else "note", advice, figures)
    return Finding("C compiler", path, figures=figures)


def extensions() -> Finding:
    """torchvision and its like, which nothing here needs: built for another torch, they break transformers' import."""
    broken = {}
    present = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
    for name in present:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a library that does not fit raises
            broken[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if broken:
        advice = (
            "They are built for another torch, transformers cannot import its models beside them, and nothing here needs them: "
            f"pip uninstall {' '.join(broken)}."
        )
        return Finding(
            "torch's extensions", f"{', '.join(broken)} cannot be imported", "wrong", advice, {"broken": broken}
        )
    return Finding("torch's extensions", ", ".join(present) or "none, and none is needed", figures={"broken": {}})


# ---- the machine ----


def bfloat16() -> Finding:
    """Whether there is arithmetic for bfloat16, or it is emulated."""
    if cuda.native_bfloat16():
        return Finding("bfloat16", "in hardware", figures={"native": True})
    if torch.cuda.is_available():
        advice = "These GPUs emulate it: set `target.dtype: float16` and `train.precision: float32`."
    else:
        advice = "This processor emulates it, at half the speed of float32: set `target.dtype: float32`."
    return Finding("bfloat16", "emulated", "note", advice, {"native": False})


def memory() -> Finding:
    """The machine's, as vLLM's CPU build will count it: of one NUMA node, within the container's limit."""
    nodes = [*_memory_nodes()]
    if not nodes:
        return Finding("memory", "unknown: the system does not say it by NUMA node", figures={"nodes": []})
    figures = {"nodes": [{"total_gib": round(t / _GIB, 1), "available_gib": round(a / _GIB, 1)} for t, a in nodes]}
    found = "; ".join(
        f"NUMA node {index}: {total / _GIB:.1f} GiB, {available / _GIB:.1f} available"
        for index, (total, available) in enumerate(nodes)
    )
    wanted = EngineConfig().kv_cache_gib
    if not torch.cuda.is_available() and nodes[0][1] < wanted * _GIB:
        advice = (
            f"vLLM on a CPU refuses to start where the node has less available than the KV cache takes (engine.kv_cache_gib, "
            f"{wanted:g} by default): end other programs, or give the container more."
        )
        return Finding("memory", found, "wrong", advice, figures)
    return Finding("memory", found, figures=figures)


def disk(runs: Path) -> Finding:
    """Room where runs are written; a store takes gigabytes."""
    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    found, figures = f"{free / _GIB:.1f} GiB free at {there}", {"path": str(there), "free_gib": round(free / _GIB, 1)}
    if not os.access(there, os.W_OK):
        return Finding(
            "disk", found, "wrong", "This folder may not be written to: choose another with --runs.", figures
        )
    if free < _LITTLE_DISK:
        advice = "A store takes gigabytes; `draftsmith run RECIPE --plan` says how many. --runs puts runs elsewhere."
        return Finding("disk", found, "note", advice, figures)
    return Finding("disk", found, figures=figures)


def hub() -> Finding:
    """What would be used to reach the Hugging Face Hub. The Hub itself is not asked."""
    from huggingface_hub import constants, get_token

    token = get_token() is not None
    figures = {"offline": constants.HF_HUB_OFFLINE, "token": token, "endpoint": constants.ENDPOINT}
    known = "a token" if token else "no token"
    if constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set: models and data sets must be in the cache or in folders."
        return Finding("Hub", f"offline, {known}", "note", advice, figures)
    found = f"{known}, {constants.ENDPOINT}"
    if not token:
        advice = "Gated models, as Llama, and publishing need one: `hf auth login`, or HF_TOKEN."
        return Finding("Hub", found, "note", advice, figures)
    return Finding("Hub", found, figures=figures)


# ---- helpers ----


def _memory_nodes() -> Iterator[tuple[int, int]]:
    """Total and available bytes of each NUMA node, as vllm/utils/cpu_resource_utils.py counts them."""
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current") or 0
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))):
        values = {}
        for line in (folder / "meminfo").read_text().splitlines():
            _, _, name, value, *_ = line.split()
            values[name.rstrip(":")] = int(value) * 1024
        total = values["MemTotal"]
        available = sum(values[name] for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        if limit is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
        yield total, available


def _cgroup_bytes(name: str) -> int | None:
    """A figure of the container's memory; None where it has no limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(indices: list[int]) -> str:
    return ", ".join(map(str, indices))
