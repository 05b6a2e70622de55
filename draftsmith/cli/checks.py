"""The checks of `draftsmith doctor`, one function each. None imports vLLM, uses the network or changes anything."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith import __version__
from draftsmith.config.drafters import KINDS
from draftsmith.config.target import EngineConfig
from draftsmith.engine.platform import platform_plugins
from draftsmith.run import cuda
from draftsmith.run.errors import UserError
from draftsmith.run.machine_memory import available_memory, cgroup, memory_nodes
from draftsmith.run.stage import installed_version

_GIB = 1024**3
_TESTED_VLLM = "0.32.0"  # the version that the extras `cpu` and `cuda` install and that the tests run
_OLDEST_TORCH = (2, 10)
_OLDEST_CAPABILITY = (7, 5)  # lowest compute capability that vLLM's kernels are built for
_ONLY_V1 = ("suffix", *(kind for kind, options in KINDS.items() if not options.serving.runner_v2))
"""Methods that vLLM 0.32's model runner V2 lacks (vllm/config/vllm.py)."""
_METHODS = ("extraction", *KINDS, "ngram", "draft_model", "mtp", "suffix")
_PLUGIN = "draftsmith"  # name of our entry point in the group `vllm.general_plugins` (pyproject.toml)
_LITTLE_DISK = 20 * _GIB
_FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """What was checked."""
    found: str
    """What is there, in one line."""
    status: Literal["good", "note", "wrong"] = "good"
    """`note`: worth knowing, everything works. `wrong`: some stage of a run would fail or give wrong results."""
    advice: str = ""
    """What to do about it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """`found` in machine-readable form."""


def _finding(name: str, found: str, figures: dict[str, Any], *, wrong: str = "", note: str = "") -> Finding:
    """A finding with advice, if any: about what is wrong, or else what is worth knowing."""
    return Finding(name, found, "wrong" if wrong else "note" if note else "good", wrong or note, figures)


def run_checks(runs: Path) -> list[Finding]:
    """All findings, in the order in which they are printed. `runs`, the folder that holds all runs, need not exist."""
    checks: list[Callable[[], Finding]] = [
        python, packages, torch_build, driver, gpus, vllm, plugin, runners, kernels, compiler, extensions, cores, bfloat16,
        memory, lambda: disk(runs), hub,
    ]  # fmt: skip
    return [check() for check in checks]


# ---- software ----


def python() -> Finding:
    """Its version, and whether every process would compile the packages that it imports."""
    version = sys.version_info
    found = f"{version[0]}.{version[1]}.{version[2]}, {sys.executable}"
    wrong = "Draftsmith needs Python 3.11 or later." if version[:2] < (3, 11) else ""
    spec = torch.__spec__
    compiled = spec is None or spec.cached is None or Path(spec.cached).exists()
    note = ""
    if sys.dont_write_bytecode and not compiled:
        note = (
            "PYTHONDONTWRITEBYTECODE is set and the installed packages have no bytecode, so every engine and command compiles for several "
            f"seconds what it imports. Once and for all: {sys.executable} -m compileall -q -j 0 {sysconfig.get_path('purelib')}"
        )
    return _finding("Python", found, {"bytecode": compiled}, wrong=wrong, note=note)


def packages() -> Finding:
    """Draftsmith and the packages that it depends on, against the versions that it requires."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in importlib.metadata.requires("draftsmith") or ()]
    except importlib.metadata.PackageNotFoundError:
        wrong = "Install it, so that its dependencies and its plugin for vLLM are found: pip install -e '.[cpu]' or '.[cuda]'."
        found = f"draftsmith {__version__}, not installed"
        return _finding("packages", found, {"draftsmith": __version__}, wrong=wrong)
    figures: dict[str, Any] = {"draftsmith": __version__}
    problems = []
    for one in required:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        figures[one.name] = version = installed_version(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name}{one.specifier} (here: {version or 'not installed'})")
    shown = ("draftsmith", "transformers", "accelerate", "safetensors")
    found = ", ".join(f"{name} {figures.get(name)}" for name in shown)
    wrong = f"Draftsmith needs {', '.join(problems)}: install it again." if problems else ""
    return _finding("packages", found, figures, wrong=wrong)


def torch_build() -> Finding:
    hip = getattr(torch.version, "hip", None)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    found = f"{torch.__version__}, built for {build}"
    figures = {"version": torch.__version__, "cuda": torch.version.cuda}
    wrong, note = "", "Draftsmith is not tested on AMD GPUs." if hip else ""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        wrong = f"Draftsmith needs torch {'.'.join(map(str, _OLDEST_TORCH))} or later."
    return _finding("torch", found, figures, wrong=wrong, note=note)


def driver() -> Finding:
    """The NVIDIA driver, and whether this torch can use it."""
    loaded, supports, on_bus = cuda.driver_version(), cuda.driver_supports(), cuda.gpus_on_the_bus()
    figures = {"version": loaded, "cuda": supports, "gpus_on_the_bus": on_bus}
    found = f"{loaded or 'unknown version'}{f', CUDA up to {supports}' if supports else ''}"
    found = found if loaded or supports else "none"
    try:
        cuda.require_usable_gpus()
    except UserError as error:
        return _finding("driver", found, figures, wrong=str(error))
    note = ""
    if torch.version.cuda is None and (loaded or on_bus):
        note = "This machine has an NVIDIA GPU, but torch is a CPU build. To use it, create an environment with `make install EXTRA=cuda`."
    return _finding("driver", found, figures, note=note)


def gpus() -> Finding:
    """Each GPU with its memory, free memory and compute capability."""
    if not torch.cuda.is_available():
        hidden = " (hidden by CUDA_VISIBLE_DEVICES)" if cuda.hidden() else ""
        return Finding("GPUs", f"none{hidden}: everything runs on the CPU", figures={"gpus": []})
    listed, full, old = [], [], []
    share = EngineConfig().gpu_memory_utilization
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        listed.append({
            "name": about.name, "memory_gib": round(total / _GIB, 1), "free_gib": round(free / _GIB, 1),
            "capability": f"{about.major}.{about.minor}",
        })  # fmt: skip
        if free < share * total:
            full.append(str(index))
        if (about.major, about.minor) < _OLDEST_CAPABILITY:
            old.append(str(index))
    found = "; ".join(
        f"{index}: {one['name']}, {one['memory_gib']} GiB, {one['free_gib']} free, compute capability {one['capability']}"
        for index, one in enumerate(listed)
    )
    wrong = ""
    if old:
        wanted = ".".join(map(str, _OLDEST_CAPABILITY))
        wrong = f"GPU {', '.join(old)}: vLLM needs compute capability {wanted}. Select other GPUs with CUDA_VISIBLE_DEVICES."
    elif full:
        wrong = (
            f"GPU {', '.join(full)}: less memory is free than the {share:.0%} that engines take by default. nvidia-smi shows which "
            "processes use it. Select other GPUs with CUDA_VISIBLE_DEVICES, or lower engine.gpu_memory_utilization."
        )
    return _finding("GPUs", found, {"gpus": listed}, wrong=wrong)


def vllm() -> Finding:
    """vLLM's version, its build, and the platform that its engines run on."""
    installed = cuda.vllm_build()
    if installed is None:
        wrong = "Extraction and evaluation need it: `make install EXTRA=cuda` in Draftsmith's folder, or without a GPU `make install`."
        return _finding("vLLM", "not installed", {"version": None, "build": None, "platform": None}, wrong=wrong)
    version, build = installed
    added = platform_plugins()
    platform = "cpu" if build == "cpu" else "cuda" if torch.cuda.is_available() else None
    if added:  # only vLLM itself can say which device they find, and nothing here imports it
        found = f"{version}, platform of the plugins {', '.join(added)}"
        known: dict[str, Any] = {"version": version, "build": build, "platform": "plugin", "plugins": added}
        return _finding("vLLM", found, known, note=_tested_with(version))
    found = f"{version}, {'CUDA' if build == 'cuda' else 'CPU'} build, platform {platform or 'unspecified'}"
    figures = {"version": version, "build": build, "platform": platform}
    try:
        cuda.require_gpus_for_vllm()
    except UserError as error:
        return _finding("vLLM", found, figures, wrong=str(error))
    if note := _tested_with(version):
        return _finding("vLLM", found, figures, note=note)
    unused = build == "cpu" and torch.cuda.is_available()
    wrong = "This vLLM does not use the GPUs. Create an environment with `make install EXTRA=cuda`." if unused else ""
    return _finding("vLLM", found, figures, wrong=wrong)


def _tested_with(version: str) -> str:
    """A note on another version than the tested one; empty for that."""
    if version.split("+")[0] == _TESTED_VLLM:
        return ""
    return f"Draftsmith is tested with vLLM {_TESTED_VLLM}; its plugin serves MLP speculators with no other version."


def plugin() -> Finding:
    """Whether vLLM finds Draftsmith's plugin. Draftsmith's own engines load it regardless of VLLM_PLUGINS."""
    there = any(entry.name == _PLUGIN for entry in importlib.metadata.entry_points(group="vllm.general_plugins"))
    allowed = os.environ.get("VLLM_PLUGINS")
    loaded = there and (allowed is None or _PLUGIN in allowed.split(","))
    figures = {"found": there, "loaded": loaded}
    without = "Without the plugin vLLM cannot serve MLP speculators, and on CPUs vLLM 0.32 samples from the wrong distribution when speculating."
    if not there:
        advice = f"{without} Install Draftsmith again in this environment."
        return Finding("vLLM plugin", "not found among the installed packages' entry points", "wrong", advice, figures)
    if not loaded:
        advice = f"A vLLM server that you start yourself does not load it. {without} Add {_PLUGIN} to VLLM_PLUGINS, or unset it."
        return Finding("vLLM plugin", f"found, but VLLM_PLUGINS={allowed} excludes it", "note", advice, figures)
    return Finding("vLLM plugin", "found", figures=figures)


def runners() -> Finding:
    """Which of vLLM's two model runners serves which method, by the rules of the tested version."""
    installed = cuda.vllm_build()
    if installed is None or installed[0].split("+")[0] != _TESTED_VLLM:
        return Finding("model runner", f"known only for vLLM {_TESTED_VLLM}", figures={"runners": None})
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    can = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if asked is not None:
        taken = dict.fromkeys(_METHODS, "V2" if asked not in ("", "0") else "V1")
    else:
        taken = {method: "V2" if can and method not in _ONLY_V1 else "V1" for method in _METHODS}
    by_runner = {name: [method for method in _METHODS if taken[method] == name] for name in ("V1", "V2")}
    found = "; ".join(f"{name} for {', '.join(methods)}" for name, methods in by_runner.items() if methods)
    forced = f"VLLM_USE_V2_MODEL_RUNNER={asked} forces this; unset it to let vLLM choose by method."
    return _finding("model runner", found, {"runners": taken}, note="" if asked is None else forced)


def kernels() -> Finding:
    """Whether FlashInfer's compiled kernels are installed; if not, vLLM's CUDA build compiles them at startup."""
    if not torch.cuda.is_available():
        return Finding("FlashInfer", "not used on a CPU", figures={"missing": []})
    flashinfer = installed_version("flashinfer-python")
    if flashinfer is None:
        advice = "vLLM 0.32's CUDA build starts no engine without it (`No module named 'flashinfer'`): run `make install EXTRA=cuda` again, without .venv"
        spared = os.environ.get(_FLASHINFER_SAMPLER) == "0"
        if spared:
            advice = f"Engines start because {_FLASHINFER_SAMPLER}=0 lets vLLM sample without it. For its faster kernels run `make install EXTRA=cuda` again, without .venv"
        else:
            advice += f", or set {_FLASHINFER_SAMPLER}=0"
        return Finding(
            "FlashInfer", "not installed", "note" if spared else "wrong", f"{advice}.", {"version": None, "missing": []}
        )
    wanted = ["flashinfer-cubin"]
    if torch.version.cuda and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9):
        wanted.append("flashinfer-jit-cache")
    missing = [name for name in wanted if (installed_version(name) or "").split("+")[0] != flashinfer.split("+")[0]]
    figures = {"version": flashinfer, "missing": missing}
    if missing:
        advice = (
            "vLLM compiles kernels for minutes whenever an engine starts, or does without them. Run `vllm download-kernels` once in "
            "this environment."
        )
        return Finding("FlashInfer", f"{flashinfer}, without {' and '.join(missing)}", "note", advice, figures)
    return Finding("FlashInfer", f"{flashinfer}, kernels downloaded", figures=figures)


def compiler() -> Finding:
    """The C compiler that Triton and torch.compile need."""
    named = os.environ.get("CC")
    path = next((found for name in (named, "gcc", "cc", "clang") if name and (found := shutil.which(name))), None)
    if path is None:
        advice = "Triton and torch.compile need one (on a GPU always, on a CPU with `engine.enforce_eager: false`): install gcc."
        return Finding("C compiler", "none", "wrong" if torch.cuda.is_available() else "note", advice, {"path": None})
    return Finding("C compiler", path, figures={"path": path})


def extensions() -> Finding:
    """torchvision and similar packages, which nothing here needs but which break transformers if built for another torch."""
    broken = {}
    present = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
    for name in present:
        try:
            importlib.import_module(name)
        except Exception as error:  # a mismatched binary can raise anything
            broken[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if broken:
        wrong = (
            "They are built for another torch, and transformers fails to import its models while they are installed. Nothing here "
            f"needs them: pip uninstall {' '.join(broken)}."
        )
        found = f"{', '.join(broken)} cannot be imported"
        return _finding("torch's extensions", found, {"broken": broken}, wrong=wrong)
    return Finding("torch's extensions", ", ".join(present) or "none, and none is needed", figures={"broken": {}})


# ---- hardware ----


def cores() -> Finding:
    """The CPU cores that this process may use, and a container's quota of CPU time."""
    everywhere = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everywhere
    granted, _, period = cgroup("cpu.max").partition(" ")  # times, or `max`
    quota = int(granted) / int(period) if granted.isdigit() and period.isdigit() else None
    found, note = f"{usable} usable of {everywhere}", ""
    if quota is not None and quota < usable:
        found += f", a quota of {quota:g}"
        note = (
            f"The container gets the time of {quota:g} cores, but engines start a thread on each of the {usable} that they see, and "
            "the threads then wait for one another. Restrict the cores instead, as in `docker run --cpuset-cpus` or `taskset`."
        )
    return _finding("cores", found, {"usable": usable, "cores": everywhere, "quota": quota}, note=note)


def bfloat16() -> Finding:
    """Whether the hardware computes in bfloat16 or emulates it."""
    advice = cuda.instead_of_emulated_bfloat16()
    if advice is None:
        return Finding("bfloat16", "in hardware", figures={"native": True})
    return Finding("bfloat16", "emulated", "note", advice, {"native": False})


def memory() -> Finding:
    """Memory within the container's limit: of the system beside GPUs, and otherwise of one NUMA node, as vLLM's CPU build counts it."""
    available = available_memory()
    if torch.cuda.is_available() and available is not None:
        gib = round(available / _GIB, 1)
        return Finding("memory", f"{gib} GiB available, beside the GPUs'", figures={"nodes": [], "available_gib": gib})
    nodes = [*memory_nodes()]
    if not nodes:
        return Finding("memory", "unknown: this system does not report it by NUMA node", figures={"nodes": []})
    figures = {"nodes": [{"total_gib": round(t / _GIB, 1), "available_gib": round(a / _GIB, 1)} for t, a in nodes]}
    found = "; ".join(
        f"NUMA node {index}: {total / _GIB:.1f} GiB, {available / _GIB:.1f} available"
        for index, (total, available) in enumerate(nodes)
    )
    wanted, wrong = EngineConfig().kv_cache_gib, ""
    if nodes[0][1] < wanted * _GIB:
        wrong = (
            "On a CPU vLLM refuses to start if the first NUMA node has less memory available than the KV cache takes "
            f"(engine.kv_cache_gib, {wanted:g} by default). Free memory, or raise the container's limit."
        )
    return _finding("memory", found, figures, wrong=wrong)


def disk(runs: Path) -> Finding:
    """Free space where runs are written."""
    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    found, figures = f"{free / _GIB:.1f} GiB free at {there}", {"path": str(there), "free_gib": round(free / _GIB, 1)}
    wrong = "" if os.access(there, os.W_OK) else "This folder is not writable: choose another one with --runs."
    little = "A store takes gigabytes; `draftsmith run RECIPE --plan` estimates how many. --runs selects another disk."
    return _finding("disk", found, figures, wrong=wrong, note=little if free < _LITTLE_DISK else "")


def hub() -> Finding:
    """The settings used to reach the Hugging Face Hub, which is not contacted."""
    from huggingface_hub import constants, get_token

    token = get_token() is not None
    figures = {"offline": constants.HF_HUB_OFFLINE, "token": token, "endpoint": constants.ENDPOINT}
    known = "a token" if token else "no token"
    if constants.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set: models and data sets must be in the cache or in local folders."
        return Finding("Hub", f"offline, {known}", "note", advice, figures)
    note = "" if token else "Gated models such as Llama, and publishing, need one: `hf auth login`, or HF_TOKEN."
    return _finding("Hub", f"{known}, {constants.ENDPOINT}", figures, note=note)
