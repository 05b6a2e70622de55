"""The device that vLLM's engines run on, and the plugins that they load.

vLLM's own wheels run on NVIDIA GPUs or on CPUs, which torch tells apart without vLLM. Any other device comes from a package that adds a
platform to vLLM (`vllm.platform_plugins`, such as vllm-ascend): where one is installed, or torch is built for Intel's GPUs, vLLM itself is
asked for its `current_platform`. Only then is vLLM imported here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any
from unittest import mock

from draftsmith.run import cuda
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console

OWN_PLUGIN = "draftsmith"
"""Name of our entry point in the group `vllm.general_plugins` (pyproject.toml)."""
_PLATFORMS, _GENERAL = "vllm.platform_plugins", "vllm.general_plugins"


@dataclass(frozen=True)
class Device:
    """One of the devices that engines run on."""

    name: str
    """As in the variable `Platform.visible_devices`."""
    memory_bytes: int


@dataclass(frozen=True)
class Platform:
    """What vLLM's engines run on."""

    device: str
    """The type of device as vLLM and torch name it: cpu, cuda, xpu, npu, ..."""
    visible_devices: str
    """The environment variable that selects devices."""

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def devices(self) -> list[Device]:
        """The visible devices, in order; none on a CPU."""
        if self.is_cpu:
            return []
        sizes = _cuda_sizes() if self.device == "cuda" else _sizes_by_vllm()
        visible = os.environ.get(self.visible_devices)
        names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(len(sizes))]
        # The list of visible devices ends at the first unknown name.
        return [Device(name, size) for name, size in zip(names, sizes, strict=False)]

    def device_names(self) -> list[str]:
        """What each visible device is, for people."""
        import torch

        if self.device == "cuda":
            return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return [] if self.is_cpu else [_current().get_device_name(i) for i in range(_current().device_count() or 0)]

    def has_bfloat16(self) -> bool:
        """Whether it has bfloat16 arithmetic instead of emulating it."""
        import torch

        if self.device in ("cpu", "cuda"):
            return cuda.native_bfloat16()
        return torch.bfloat16 in _current().supported_dtypes


def current_platform() -> Platform:
    """The platform of engines that are started from here.

    Raises:
        UserError: vLLM is built for CUDA and torch cannot use a GPU (the driver may be missing or too old), or vLLM finds no platform.
    """
    import torch

    if torch.cuda.is_available() and not platform_plugins():
        return Platform("cuda", "CUDA_VISIBLE_DEVICES")
    if platform_plugins() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return _by_vllm(plugins_to_load())
    cuda.require_gpus_for_vllm()
    return Platform("cpu", "CUDA_VISIBLE_DEVICES")


# ---- plugins ----


def platform_plugins() -> list[str]:
    """Names of the plugins that engines must load to run on other devices: those by which installed packages add a platform to vLLM, and
    the same packages' general ones. Without those that the user's VLLM_PLUGINS leaves out; empty if no package adds a platform."""
    platforms, general = _installed()
    given = os.environ.get("VLLM_PLUGINS")
    if given is None:
        return [*platforms, *general]
    allowed = given.split(",")
    found = [name for name in platforms if name in allowed]
    return [*found, *(name for name in general if name in allowed)] if found else []


@cache
def _installed() -> tuple[list[str], list[str]]:
    """Names of the plugins that add platforms, and of the same packages' general ones."""
    platforms = list(entry_points(group=_PLATFORMS))
    packages = {one.dist.name for one in platforms if one.dist is not None}
    general = [one for one in entry_points(group=_GENERAL) if one.dist is not None and one.dist.name in packages]
    return sorted({one.name for one in platforms}), sorted({one.name for one in general})


def plugins_to_load() -> str:
    """VLLM_PLUGINS for engines: what the user has set, with ours; otherwise ours and those of other platforms. Further packages' plugins may
    need another vLLM."""
    given = os.environ.get("VLLM_PLUGINS")
    if given is None:
        return ",".join(dict.fromkeys([OWN_PLUGIN, *platform_plugins()]))
    names = [name for name in given.split(",") if name]
    if OWN_PLUGIN in names:
        return given
    _say_added(given)
    return ",".join([*names, OWN_PLUGIN])


@cache
def _say_added(given: str) -> None:
    console.print(
        f"VLLM_PLUGINS={given} leaves out Draftsmith's plugin for vLLM, which sampling on CPUs, MLP speculators and extraction need; engines "
        f"started here load {OWN_PLUGIN} as well",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


# ---- what vLLM says ----


@cache
def _by_vllm(plugins: str) -> Platform:
    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": plugins}):
        found = _current()
    if not found.device_type:
        raise UserError(
            "vLLM finds no device that it is built for here, and no installed platform plugin offers one. `draftsmith doctor` lists what is "
            "installed; vLLM's log with VLLM_LOGGING_LEVEL=DEBUG says why each platform was passed over."
        )
    return Platform(found.device_type, found.device_control_env_var)


def _current() -> Any:
    """vLLM's `current_platform`. It is chosen once in a process, with the plugins that VLLM_PLUGINS allows then."""
    from vllm.platforms import current_platform

    return current_platform


def _cuda_sizes() -> list[int]:
    import torch

    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def _sizes_by_vllm() -> list[int]:
    found = _current()
    return [int(found.get_device_total_memory(index)) for index in range(found.device_count() or 0)]
