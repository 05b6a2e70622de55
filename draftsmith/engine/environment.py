"""What vLLM's processes need from the machine: environment variables, devices and memory. Does not import vLLM, but where only vLLM knows
the device (`platform.py`).

The variables are for child processes: some only work if they are set before the process starts (the dynamic linker reads
`LD_PRELOAD`, OpenMP reads `KMP_BLOCKTIME` when it is loaded).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config.drafters import kinds_of
from draftsmith.config.engine_options import EXECUTOR
from draftsmith.config.recipe import EngineConfig
from draftsmith.engine.platform import Device, current_platform, plugins_to_load
from draftsmith.run.errors import UserError
from draftsmith.run.process import malloc_environment
from draftsmith.target.family import FAMILIES, has_experts, layer_configs, target_facts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GIB = 1024**3
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_TRITON_FLOAT32 = "TRITON_F32_DEFAULT"
_COPIED = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def is_cpu() -> bool:
    """Whether engines run on the CPU.
    Raises UserError: vLLM is built for CUDA and torch cannot use a GPU; the driver may be missing or too old."""
    return current_platform().is_cpu


def resolved(engine: EngineConfig) -> EngineConfig:
    """The recipe's engine with `enforce_eager` True or False, chosen by device if the recipe leaves it open."""
    if engine.enforce_eager is not None:
        return engine
    return engine.model_copy(update={"enforce_eager": is_cpu()})


def vllm_environment(engine: EngineConfig) -> dict[str, str]:
    """Environment variables for a child process that will import vLLM.

    Variables that the user has set are kept, except the first; VLLM_PLUGINS gets ours in addition. An engine's memory is not among them: pass
    `memory_arguments` to the engine.
    """
    values = {
        # The engine runs in the child itself. For several GPUs vLLM starts worker processes of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Ours serves MLP speculators and fixes sampling on CPUs.
        "VLLM_PLUGINS": plugins_to_load(),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if engine.tensor_parallel_size > 1 or EXECUTOR in engine.options:
        values["VLLM_WORKER_MULTIPROC_METHOD"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if engine.on_ray:
        # Of variables with other names than its own, vLLM copies to its workers on other machines those that begin as one of these.
        asked = os.environ.get(_COPIED, "").split(",")
        values[_COPIED] = ",".join(dict.fromkeys([*filter(None, asked), _TRITON_FLOAT32, "DRAFTSMITH_"]))
    if is_cpu():
        values |= openmp_environment() | malloc_environment()
        if engine.tensor_parallel_size > 1 and _BIND not in os.environ:
            values[_BIND] = _bound(_cores(), engine.tensor_parallel_size)
    return values


def float32_environment(dtype: str) -> dict[str, str]:
    """Environment variables for a child process whose engine computes in `dtype`, with which float32 is float32 on GPUs too.

    In float32, vLLM's attention there is Triton's, which cuts products to TF32: hidden states are then wrong by a thousandth, and draft
    tokens differ from the drafter's own (docs/log.md, 2026-11-27). In another dtype the variable could slow kernels that mean TF32.
    """
    if dtype != "float32" or is_cpu():
        return {}
    return {_TRITON_FLOAT32: os.environ.get(_TRITON_FLOAT32, "ieee")}


def _cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def _bound(cores: Sequence[int], processes: int) -> str:
    """Equal parts of the cores for an engine's processes, as VLLM_CPU_OMP_THREADS_BIND lists them. By itself vLLM wants a NUMA
    node for each process, which few machines have."""
    parts = [cores[one * len(cores) // processes : (one + 1) * len(cores) // processes] for one in range(processes)]
    return "|".join(",".join(map(str, part)) for part in parts)


def openmp_environment() -> dict[str, str]:
    """Environment variables that make vLLM fast on a CPU: Intel's OpenMP, if installed, is loaded before torch's."""
    # Milliseconds that a thread spins after its work. The default of 200 takes the cores from whatever runs next.
    values = {"KMP_BLOCKTIME": os.environ.get("KMP_BLOCKTIME", "5")}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # where the package intel-openmp puts it
    # vLLM adds torch's own to the variable of the process that makes its config, and refuses to run with two.
    preloaded = [
        path
        for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":")
        if path and not ("/torch" in path and "libgomp" in path)
    ]
    if library.is_file() and not any(name in path for path in preloaded for name in ("libiomp", "libomp", "libgomp")):
        values["LD_PRELOAD"] = ":".join([str(library), *preloaded])
    return values


Gpu = Device
"""A visible GPU, or another device that engines run on."""


def gpus() -> list[Gpu]:
    """The visible GPUs, or other devices that engines run on, in order; none on a CPU."""
    return current_platform().devices()


def only_these_gpus(names: Sequence[str]) -> dict[str, str]:
    """Environment variables that show a child process only these devices; with no names, those that this process sees."""
    return {current_platform().visible_devices: ",".join(names)} if names else {}


def share_of_machine(number: int, count: int, engine: EngineConfig) -> dict[str, str]:
    """Environment variables that give engine `number` of `count` its own cores or GPUs; none where Ray places its processes.
    Raises UserError: there are not enough cores or GPUs."""
    if count == 1 or engine.on_ray:
        return {}
    if is_cpu():
        cores = _cores()
        if count * engine.tensor_parallel_size > len(cores):
            each = f" with {engine.tensor_parallel_size} processes each" if engine.tensor_parallel_size > 1 else ""
            raise UserError(
                f"extract.workers is {count}{each}, and this machine has {len(cores)} cores; use fewer workers."
            )
        mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        return {_BIND: _bound(mine, engine.tensor_parallel_size)}
    devices = [gpu.name for gpu in gpus()]
    if count * engine.tensor_parallel_size > len(devices):
        raise UserError(
            f"extract.workers is {count} with {engine.tensor_parallel_size} GPUs each, and {len(devices)} GPUs are visible; use fewer."
        )
    return only_these_gpus(devices[number * engine.tensor_parallel_size : (number + 1) * engine.tensor_parallel_size])


def require_full_attention(config: PretrainedConfig, *, target: str) -> None:
    """Check that an engine may speculate, as it does to hand out hidden states too.

    On a CPU, vLLM 0.32 decodes linear attention right without speculation only: with it, tokens and states after a prompt are not the
    target's, and nothing says so (docs/log.md).

    Args:
        config: of the target's language model.
        target: its name.

    Raises:
        UserError: it may not.
    """
    if is_cpu() and "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(
            f"{target} has layers of linear attention (type `{config.model_type}`), and on CPUs vLLM 0.32 computes wrong tokens and hidden states "
            "with them as soon as an engine speculates or hands out states. Use a GPU; or extract with `extract.backend: transformers`, which "
            "is slow, and serve without speculation here."
        )


def divides_heads(split: int, layer: Any) -> bool:
    """Whether vLLM can give each of `split` processes its heads of a layer: as many queries', and key/value heads or copies of one."""
    heads, shared = layer.num_attention_heads, getattr(layer, "num_key_value_heads", None)
    if heads % split:
        return False
    return shared is None or bool(getattr(layer, "kv_lora_rank", None)) or shared % split == 0 or split % shared == 0


def require_divided_heads(split: int, config: PretrainedConfig) -> None:
    """
    Raises:
        UserError: vLLM cannot divide the attention heads of a target with this config among `split` processes.
    """
    layers = layer_configs(config)
    undivided = [layer for layer in layers if split > 1 and not divides_heads(split, layer)]
    if undivided:
        heads, shared = undivided[0].num_attention_heads, getattr(undivided[0], "num_key_value_heads", None)
        fitting = ", ".join(
            str(size) for size in range(1, heads + 1) if all(divides_heads(size, layer) for layer in layers)
        )
        more = (
            f" and {shared} key/value heads, which it must divide or be a multiple of"
            if shared not in (None, heads)
            else ""
        )
        raise UserError(
            f"engine.tensor_parallel_size is {split}, and the target has {heads} attention heads, which must divide by it{more}: use one "
            f"of {fitting}."
        )


def require_parallelism(engine: EngineConfig, config: PretrainedConfig) -> None:
    """Check that vLLM can divide a target as the recipe asks, on a machine like this one.

    Args:
        engine: how the recipe runs vLLM.
        config: of the target's language model.

    Raises:
        UserError: it cannot.
    """
    split = engine.tensor_parallel_size
    require_divided_heads(split, config)
    if not is_cpu():
        if not engine.on_ray and split > (visible := len(gpus())):
            raise UserError(
                f"engine.tensor_parallel_size is {split}, and {visible} GPUs are visible. Lower it, make more GPUs visible "
                f"(CUDA_VISIBLE_DEVICES), or let the engine span the machines of a Ray cluster (`engine.options.{EXECUTOR}: ray`)."
            )
        return
    if engine.on_ray:
        raise UserError(
            f"`engine.options.{EXECUTOR}: ray` needs GPUs: vLLM 0.32 starts no engine on CPUs through Ray. Leave it out; on CPUs "
            "`extract.machines` runs an engine on each machine of a Ray cluster."
        )
    if split > (cores := len(_cores())):
        raise UserError(
            f"engine.tensor_parallel_size is {split}, and this machine has {cores} cores; each process needs one."
        )


def states_arguments(config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that must hand out hidden states: where vLLM's own model of a family does not, vLLM's
    transformers backend does. That is told the factor of the family's logits, which it does not know by the family's name for it: sampled
    answers would follow other probabilities.

    With `model_impl: transformers`, vLLM 0.32 looks for the drafter among transformers' models too, and fails.

    `config` is the target's language model's; `hf_overrides` among the recipe's `engine.options` stay.
    Raises UserError: neither does.
    """
    states = FAMILIES[config.model_type].states if config.model_type in FAMILIES else "own"
    if states == "own":
        return {}
    if states == "none" and not FAMILIES[config.model_type].last_state_is_normed:
        raise UserError(
            f"vLLM 0.32 hands out no hidden states of {config.name_or_path} (type `{config.model_type}`), and serves no trained drafter with it."
        )
    if states == "none":
        raise UserError(
            f"vLLM 0.32 hands out no hidden states of {config.name_or_path} (type `{config.model_type}`). Extract with "
            "`extract.backend: transformers`, which is slow, and train a drafter that vLLM serves from its last state alone "
            f"(`train.drafter.kind`: {kinds_of(lambda spec: not spec.shares_embedding)})."
        )
    backend = f"Transformers{'MoE' if has_experts(config) else ''}ForCausalLM"
    overrides = {**options.get("hf_overrides", {}), "architectures": [backend]}
    family = FAMILIES[config.model_type]
    if (family.multiplier or family.divisor or "logit_scale") != "logit_scale":
        # The one name by which the backend finds a factor of logits (vllm/model_executor/models/transformers/causal.py).
        overrides["logit_scale"] = target_facts(config).logit_scale
    return {"hf_overrides": overrides}


def memory_arguments(engine: EngineConfig, *, share: float = 1.0) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that limit an engine's memory to its share of what the recipe allows to those side by side."""
    if is_cpu():
        # Not VLLM_CPU_KVCACHE_SPACE, which takes whole GiB only.
        return {
            "kv_cache_memory_bytes": int(engine.kv_cache_gib * share * _GIB / engine.tensor_parallel_size)
        }  # each process takes as much
    return {"gpu_memory_utilization": engine.gpu_memory_utilization * share}
