"""The machine that figures were measured on, and how vLLM ran there."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine.environment import resolved
from draftsmith.engine.platform import current_platform
from draftsmith.serve.evaluation.schema import Engines, Machine


def describe_machine() -> Machine:
    processor = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": memory / 1024**3,
        "gpus": current_platform().device_names(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def describe_engines(engine: EngineConfig, peak: int) -> Engines:
    """How vLLM runs here with the recipe's `engine`; `peak` is `Lineup.peak`."""
    eager = resolved(engine).enforce_eager
    assert eager is not None
    found: Engines = {"enforce_eager": eager, "tensor_parallel_size": engine.tensor_parallel_size, "peak_engines": peak}
    return {**found, "options": engine.options} if engine.options else found
