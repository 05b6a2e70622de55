"""Part A's checks but for the training step: what torch alone shows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from draftsmith.run.cuda import driver_supports, native_bfloat16
from tests.gpu.checks import Missing

_REPEATS = 10


def device_of(cpu: bool) -> torch.device:
    """
    Raises:
        Missing: a GPU is asked for, and torch sees none.
    """
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise Missing(f"torch {torch.__version__} ({built}) sees no CUDA device")
    return torch.device("cuda")


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Mean of some calls, after two that do not count."""
    for _ in range(2):
        work()
    wait_for(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return (time.perf_counter() - begun) / repeats


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large product in bfloat16: the limit that a training step is set against. A CPU that emulates it takes a minute for the
    size that fills a core otherwise."""
    size = 8192 if device.type == "cuda" else 1024 if native_bfloat16() else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, device)


def machine(cpu: bool) -> dict[str, str]:
    """What is here, and how fast."""
    device = device_of(cpu)
    found = {"torch": f"{torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} CPU threads"}
    size = 2**28 if device.type == "cuda" else 2**22
    on_host = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        found |= {
            "GPU": f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}",
            "driver": f"{driver[0] if driver else 'nvidia-smi does not say'}, CUDA up to {driver_supports()}",
        }
        pinned = on_host.pin_memory()
        on_gpu = torch.empty(size, dtype=torch.uint8, device=device)
        for name, host in (("pageable", on_host), ("pinned", pinned)):
            back = seconds_of(lambda host=host: host.copy_(on_gpu, non_blocking=True), device)  # type: ignore[misc]
            there = seconds_of(lambda host=host: on_gpu.copy_(host, non_blocking=True), device)  # type: ignore[misc]
            found[f"copies, {name}"] = f"{size / back / 1e9:.1f} GB/s from the GPU, {size / there / 1e9:.1f} GB/s to it"
        a = torch.randn(4096, 4096, device=device)
        found["float32 products"] = f"{2 * 4096**3 / seconds_of(lambda: a @ a, device) / 1e12:.0f} TFLOP/s"
    found["bfloat16 products"] = f"{matmul_rate(device) / 1e12:.3g} TFLOP/s"
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def device_tests(cpu: bool) -> dict[str, str]:
    """`tests/unit/test_on_device.py` on the device.

    Raises:
        AssertionError: a test failed.
    """
    return run_tests("tests/unit/test_on_device.py", DRAFTSMITH_TEST_DEVICE=device_of(cpu).type)


def run_tests(*arguments: str, **variables: str) -> dict[str, str]:
    """Some of the repository's tests, with pytest alone.

    Raises:
        Missing: pytest is not installed.
        AssertionError: a test failed, or none ran.
    """
    if importlib.util.find_spec("pytest") is None:
        raise Missing("pytest is not installed")
    # Plugins and settings of the repository's own pytest runs need packages that this check does not.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:timeout",
        "--import-mode=importlib",
        "-q",
        "-ra",
    ]
    done = subprocess.run(
        [*command, "-W", "ignore::pytest.PytestConfigWarning", *arguments], capture_output=True, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    *_, last = [line for line in done.stdout.splitlines() if line.strip()] or [""]
    if done.returncode == 0 and not re.search(r"\d+ passed", last):
        raise AssertionError(f"no test ran: {last}")
    assert done.returncode == 0, last
    return {"tests": last.strip("= ")}


def codec(cpu: bool) -> dict[str, str]:
    """States made on the device, as an engine's cache holds them, through every form that a store knows.

    Raises:
        AssertionError: other bits came back.
    """
    from draftsmith.store.codec import decode, encode_states

    device = device_of(cpu)
    tokens = 650 if device.type == "cuda" else 40
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.manual_seed(0)
        states = (
            torch.randn(tokens, 4, 4096, device=device) * torch.tensor([0.05, 0.3, 1.0, 4.0], device=device)[:, None]
        ).to(dtype)
        on_host = states.cpu()
        for form in ("none", "lossless", "int8"):
            begun = time.perf_counter()
            encoded = encode_states(on_host, form)
            seconds = time.perf_counter() - begun
            name = str(dtype).removeprefix("torch.")
            if form != "none":
                again = decode(encoded.data, form, encoded.shape, dtype)
                if form == "lossless":
                    assert torch.equal(again.view(torch.uint8), on_host.view(torch.uint8)), (
                        f"{name}: other bits came back"
                    )
                else:
                    error = (again.float() - on_host.float()).norm() / on_host.float().norm()
                    assert error < 0.02, f"{name}, int8: relative error {error:.3f}"
            found[f"{name}, {form}"] = (
                f"{on_host.nbytes / seconds / 1e6:.0f} MB/s, {len(encoded.data) / on_host.nbytes:.2f} of the bytes"
            )
    return found


def states_copy(cpu: bool) -> dict[str, str]:
    """What extraction's connector takes of an engine's steps into ordinary memory.

    Each step's states are written right before they are taken, and written over right after: the copy must come between.

    Raises:
        AssertionError: other states came out.
    """
    from draftsmith.extract.gpu_copy import GpuCopier
    from draftsmith.extract.states_pool import StatesPool

    device = device_of(cpu)
    block_size, layers, hidden, tokens = (16, 4, 4096, 8192) if device.type == "cuda" else (4, 3, 64, 64)
    steps, blocks = 6, 6 * tokens // block_size
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        pool = StatesPool(blocks, block_size, layers, hidden, dtype)
        size = tokens * layers * hidden * dtype.itemsize
        copier = (
            GpuCopier(pool, size, tokens)
            if device.type == "cuda"
            else GpuCopier(pool, size, tokens, _NoCuda(), _plain_memory)
        )
        slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(0)).view(steps, tokens)
        made = torch.randn(steps, tokens, layers, hidden, device=device).to(dtype)
        buffer, slot_buffer = torch.empty_like(made[0]), torch.empty_like(slots[0], device=device)
        rates = []
        for _ in range(2):  # the first time memory is new
            wait_for(device)
            begun = time.perf_counter()
            for number in range(steps):
                buffer.copy_(made[number])
                slot_buffer.copy_(slots[number])
                copier.start(slot_buffer, buffer)
            buffer.fill_(-1)
            slot_buffer.fill_(-1)
            assert copier.last is not None
            copier.last.result()
            rates.append(f"{steps * size / (time.perf_counter() - begun) / 1e9:.2f}")
        expected = torch.empty(blocks * block_size, layers, hidden, dtype=dtype)
        expected[slots.flatten()] = made.flatten(0, 1).cpu()
        assert torch.equal(pool.get(range(blocks), blocks * block_size), expected), f"{dtype}: other states came out"
        found[str(dtype).removeprefix("torch.")] = f"{steps} steps right, {rates[0]} GB/s at first, then {rates[1]}"
    return found


def _plain_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class _NoCuda:
    """What `torch.cuda` is asked for, on a CPU, where everything has happened at once."""

    def Event(self, *, blocking: bool) -> _NoCuda:
        return self

    def record(self) -> None: ...

    def synchronize(self) -> None: ...
