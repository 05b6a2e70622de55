"""What vLLM's processes need from the machine: environment variables, devices and memory. Does not import vLLM.

The variables are for child processes: some only work if they are set before the process starts (the dynamic linker reads
`LD_PRELOAD`, OpenMP reads `KMP_BLOCKTIME` when it is loaded).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config.recipe import EngineConfig
from draftsmith.run.errors import UserError
from draftsmith.run.process import malloc_environment
from draftsmith.target.family import FAMILIES, has_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GIB = 1024**3


def is_cpu() -> bool:
    """Whether engines run on the CPU.
    Raises UserError: vLLM is built for CUDA and torch cannot use a GPU; the driver may be missing or too old."""
    import torch

    from draftsmith.run.cuda import require_gpus_for_vllm

    if torch.cuda.is_available():
        return False
    require_gpus_for_vllm()
    return True


def resolved(engine: EngineConfig) -> EngineConfig:
    """The recipe's engine with `enforce_eager` True or False, chosen by device if the recipe leaves it open."""
    if engine.enforce_eager is not None:
        return engine
    return engine.model_copy(update={"enforce_eager": is_cpu()})


def vllm_environment(engine: EngineConfig) -> dict[str, str]:
    """Environment variables for a child process that will import vLLM.

    Variables that the user has set are kept, except the first two. An engine's memory is not among them: pass
    `memory_arguments` to the engine.
    """
    values = {
        # The engine runs in the child itself. For several GPUs vLLM starts worker processes of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Ours serves MLP speculators and fixes sampling on CPUs. Other packages' plugins may need another vLLM.
        "VLLM_PLUGINS": "draftsmith",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if engine.tensor_parallel_size > 1 or "distributed_executor_backend" in engine.options:
        values["VLLM_WORKER_MULTIPROC_METHOD"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if is_cpu():
        values |= openmp_environment() | malloc_environment()
    return values


def openmp_environment() -> dict[str, str]:
    """Environment variables that make vLLM fast on a CPU: Intel's OpenMP, if installed, is loaded before torch's."""
    # Milliseconds that a thread spins after its work. The default of 200 takes the cores from whatever runs next.
    values = {"KMP_BLOCKTIME": os.environ.get("KMP_BLOCKTIME", "5")}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # where the package intel-openmp puts it
    preloaded = os.environ.get("LD_PRELOAD", "")
    if library.is_file() and "libiomp" not in preloaded:
        values["LD_PRELOAD"] = f"{library}:{preloaded}".rstrip(":")
    return values


@dataclass(frozen=True)
class Gpu:
    """A visible GPU."""

    name: str
    """As in CUDA_VISIBLE_DEVICES."""
    memory_bytes: int


def gpus() -> list[Gpu]:
    """The visible GPUs, in order; none on a CPU."""
    import torch

    if is_cpu():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    # CUDA ends the list at the first unknown name.
    return [Gpu(name, torch.cuda.get_device_properties(index).total_memory) for index, name in enumerate(names[:count])]


def only_these_gpus(names: Sequence[str]) -> dict[str, str]:
    """Environment variables that show a child process only these GPUs; with no names, those that this process sees."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}


def share_of_machine(number: int, count: int, tensor_parallel_size: int) -> dict[str, str]:
    """Environment variables that give engine `number` of `count` its own cores, or `tensor_parallel_size` GPUs.
    Raises UserError: there are not enough cores or GPUs."""
    if count == 1:
        return {}
    if is_cpu():
        cores = sorted(os.sched_getaffinity(0))
        if count > len(cores):
            raise UserError(f"extract.workers is {count} and this machine has {len(cores)} cores; use fewer workers.")
        mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}
    devices = [gpu.name for gpu in gpus()]
    if count * tensor_parallel_size > len(devices):
        raise UserError(
            f"extract.workers is {count} with {tensor_parallel_size} GPUs each, and {len(devices)} GPUs are visible; use fewer."
        )
    return only_these_gpus(devices[number * tensor_parallel_size : (number + 1) * tensor_parallel_size])


def states_arguments(config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that must hand out hidden states: where vLLM's own model of a family does not, vLLM's
    transformers backend does.

    With `model_impl: transformers`, vLLM 0.32 looks for the drafter among transformers' models too, and fails.

    `config` is the target's language model's; `hf_overrides` among the recipe's `engine.options` stay.
    Raises UserError: neither does.
    """
    states = FAMILIES[config.model_type].states if config.model_type in FAMILIES else "own"
    if states == "own":
        return {}
    if states == "none":
        raise UserError(
            f"vLLM 0.32 hands out no hidden states of {config.name_or_path} (type `{config.model_type}`). Extract with "
            "`extract.backend: transformers`, which is slow, and train a drafter that vLLM serves from its last state alone "
            "(`train.drafter.kind`: medusa or mlp_speculator)."
        )
    backend = f"Transformers{'MoE' if has_experts(config) else ''}ForCausalLM"
    return {"hf_overrides": {**options.get("hf_overrides", {}), "architectures": [backend]}}


def memory_arguments(engine: EngineConfig, *, share: float = 1.0) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that limit an engine's memory to its share of what the recipe allows to those side by side."""
    if is_cpu():
        # Not VLLM_CPU_KVCACHE_SPACE, which takes whole GiB only.
        return {"kv_cache_memory_bytes": int(engine.kv_cache_gib * share * _GIB)}
    return {"gpu_memory_utilization": engine.gpu_memory_utilization * share}
