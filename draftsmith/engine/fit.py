"""Whether a run's engines fit into this machine, told before any of them starts.

On a CPU vLLM takes what it is told to, and a machine that runs out of memory kills processes; so what all engines of a stage need is
compared with what is available. On GPUs vLLM stays within its share and fails, minutes after it started, if that is too little;
two engines beside each other are placed by `serve/evaluation/lineup.py`. The hidden states of an extraction lie in ordinary memory there too.
Needs are estimates (`memory.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftsmith.config.extraction import ExtractConfig
from draftsmith.config.recipe import EngineConfig
from draftsmith.engine import environment
from draftsmith.engine.memory import (
    BYTES,
    GIB,
    EngineMemory,
    copy_buffer_bytes,
    cpu_engine_memory,
    engine_memory,
    kv_values,
    kv_values_on_each,
    state_bytes,
)
from draftsmith.engine.quantization import require_quantization
from draftsmith.run.errors import UserError
from draftsmith.run.machine_memory import available_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def require_extraction(
    engine: EngineConfig,
    options: ExtractConfig,
    config: PretrainedConfig,
    *,
    target: str,
    target_bytes: int,
    dtype: str,
    layers: int,
) -> None:
    """Check that extraction's engines fit.

    Args:
        engine: how the recipe runs vLLM.
        options: the recipe's.
        config: of the target's language model.
        target: its name.
        target_bytes: of its weights, as they are served.
        dtype: of the computation.
        layers: number of layer ids, whose states lie in ordinary memory until a sequence is finished.

    Raises:
        UserError: they do not, or vLLM cannot divide the target as asked, or not run it in its form.
    """
    environment.require_full_attention(config, target=target)
    environment.require_parallelism(engine, config)
    require_quantization(engine, config, target=target, dtype=dtype)
    gpus = environment.gpus()
    if not gpus:
        kv_cache = engine.kv_cache_gib * GIB / options.workers
        states = state_bytes(
            config,
            layers=layers,
            dtype=dtype,
            engine=engine,
            kv_cache_bytes=kv_cache,
            tokens=options.max_num_seqs * engine.max_model_len,
        )
        one = cpu_engine_memory(
            config,
            target_bytes=target_bytes,
            drafter_bytes=0,
            dtype=dtype,
            step_tokens=options.max_num_batched_tokens,
            kv_cache_bytes=kv_cache,
            states=states,
            processes=engine.tensor_parallel_size,
        )
        more_keys = "extract.workers, " if options.workers > 1 else ""
        _require("Extraction from", target, [one] * options.workers, more_keys, "target.dtype")
        return
    need = engine_memory(
        config,
        target_bytes=target_bytes,
        drafter_bytes=0,
        dtype=dtype,
        tokens=engine.max_model_len,
        engine=engine,
        extracts=True,
        sequences=1,
    )
    least = replace(need, working=0)  # a guess, and nothing is to be refused that would run
    memory = min(gpu.memory_bytes for gpu in gpus)
    granted = memory * engine.gpu_memory_utilization
    if least.total > granted:
        raise UserError(
            f"Extraction from {target} does not fit on this machine: an engine needs at least {least.total / GIB:.1f} GiB on each of "
            f"its GPUs ({least.in_words()}), and engine.gpu_memory_utilization grants {granted / GIB:.1f} of {memory / GIB:.1f} GiB. Split "
            "the target over more GPUs (engine.tensor_parallel_size), lower engine.max_model_len, or choose a smaller target."
        )
    kv_cache = max(0.0, granted - replace(need, kv_cache=0).total)  # of one process, which has its share of each token
    kv_cache *= kv_values(config, extracts=True) / kv_values_on_each(config, engine, extracts=True)
    _require_host(engine, options, config, target=target, dtype=dtype, layers=layers, kv_cache_bytes=kv_cache)


def _require_host(
    engine: EngineConfig,
    options: ExtractConfig,
    config: PretrainedConfig,
    *,
    target: str,
    dtype: str,
    layers: int,
    kv_cache_bytes: float,
) -> None:
    """Check that the ordinary memory beside the GPUs holds what extraction keeps there.

    Args:
        kv_cache_bytes: of an engine, on all its GPUs together. Others as for `require_extraction`.

    Raises:
        UserError: it does not.
    """
    tokens = options.max_num_seqs * engine.max_model_len
    states = state_bytes(
        config, layers=layers, dtype=dtype, engine=engine, kv_cache_bytes=kv_cache_bytes, tokens=tokens
    )
    step = options.max_num_batched_tokens
    buffer = copy_buffer_bytes(step * layers * config.hidden_size * BYTES[dtype], step)
    available, needed = available_memory(), options.workers * (states + buffer)
    if available is None or needed <= available:
        return
    engines = "one engine keeps" if options.workers == 1 else f"{options.workers} engines keep"
    fewer = "extract.workers, " if options.workers > 1 else ""
    raise UserError(
        f"Extraction from {target} does not fit into this machine's ordinary memory, beside its GPUs': {engines} up to {needed / GIB:.1f} GiB of "
        f"hidden states there, of sequences that are not finished ({'each ' if options.workers > 1 else ''}{states / GIB:.1f}, and "
        f"{buffer / GIB:.1f} to copy through), and {available / GIB:.1f} GiB are available. Lower {fewer}extract.max_num_seqs, "
        "engine.max_model_len or engine.gpu_memory_utilization, extract fewer layers (extract.layer_ids), or end other programs."
    )


def require_two_engines(
    engine: EngineConfig,
    config: PretrainedConfig,
    *,
    target: str,
    target_bytes: int,
    drafter_bytes: int,
    dtype: str,
) -> None:
    """Check, for a CPU, that the baseline and one speculative engine fit beside each other, as evaluation and tuning need.

    Args:
        engine: how the recipe runs vLLM.
        config: of the target's language model.
        target: its name.
        target_bytes: of its weights, as they are served.
        drafter_bytes: of the largest drafter's.
        dtype: of the computation.

    Raises:
        UserError: they do not.
    """
    needs = [
        cpu_engine_memory(
            config,
            target_bytes=target_bytes,
            drafter_bytes=drafter,
            dtype=dtype,
            kv_cache_bytes=engine.kv_cache_gib * GIB / 2,
            processes=engine.tensor_parallel_size,
        )
        for drafter in (0, drafter_bytes)
    ]
    _require(f"In {dtype}, evaluating or tuning a drafter for", target, needs, "", "target.dtype, evaluate.dtypes")


def _require(what: str, target: str, engines: list[EngineMemory], more_keys: str, dtype_key: str) -> None:
    """
    Args:
        more_keys: of the recipe, with which less is needed, before the others.
        dtype_key: the recipe's key with what is computed in.

    Raises:
        UserError: less memory is available than engines need that are up together.
    """
    available = available_memory()
    needed = sum(one.total for one in engines)
    if available is None or needed <= available:
        return
    largest = max(engines, key=lambda one: one.total)
    one_engine = len(engines) == 1
    count = "one engine needs" if one_engine else f"{len(engines)} engines side by side need"
    raise UserError(
        f"{what} {target} does not fit into this machine's memory: {count} about {needed / GIB:.1f} GiB "
        f"({'' if one_engine else 'each '}{largest.in_words()}), and {available / GIB:.1f} GiB are available. Lower "
        f"{more_keys}engine.kv_cache_gib{'' if one_engine else ', which all engines share'}, choose a smaller type ({dtype_key}) or a smaller target, or end other programs."
    )
