"""The cost of the stages that run vLLM's engines: extraction and evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from draftsmith.cli.plan_stage import StagePlan, conversation_counts, counted, devices_of, hours_of, prompt_count
from draftsmith.config.hardware import Assumptions, Hardware
from draftsmith.config.recipe import Recipe
from draftsmith.drafters.base import Drafter
from draftsmith.engine.memory import (
    BYTES,
    GIB,
    cache_bytes,
    cpu_engine_memory,
    engine_memory,
    kv_values,
    kv_values_on_each,
    side_by_side,
)
from draftsmith.engine.step_cost import EngineStep, TargetSizes, flop_of_text
from draftsmith.run.errors import UserError
from draftsmith.store.format import StoreIdentity
from draftsmith.store.writer import most_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COST_STEPS = 6
"""Steps of an answer whose time evaluation measures, as in `serve/evaluation/step_cost.py`."""
_REQUESTS = 10
"""Requests per request in flight, 64 at least under a load, as in `serve/evaluation/throughput.py`."""


def sequences_at_once(
    recipe: Recipe,
    hardware: Hardware | None,
    sizes: TargetSizes,
    config: PretrainedConfig,
    *,
    tokens: float,
    extracts: bool,
) -> int:
    """Number of sequences whose keys and values fit beside the target; on a CPU, in all engines together."""
    engine, number = recipe.engine, BYTES[recipe.target.dtype]
    limit = _engine_memory(recipe, hardware)
    if limit is None:
        room, values = engine.kv_cache_gib * GIB, float(kv_values(config, extracts=extracts))
    else:
        room, values = (
            limit - sizes.weight_bytes(number) / engine.tensor_parallel_size,
            kv_values_on_each(config, engine, extracts=extracts),
        )
    return max(1, int(room // (tokens * values * cache_bytes(engine, recipe.target.dtype))))


def _engine_memory(recipe: Recipe, hardware: Hardware | None) -> int | None:
    """Bytes of a device that vLLM may use; None on a CPU."""
    if hardware is None or hardware.memory_gib is None:
        return None
    return int(hardware.memory_gib * GIB * recipe.engine.gpu_memory_utilization)


def _engine_devices(recipe: Recipe, hardware: Hardware | None) -> int:
    """Devices of an engine; on a CPU its processes share one."""
    on_cpu = hardware is not None and hardware.memory_gib is None
    return 1 if on_cpu else recipe.engine.tensor_parallel_size


def _starting(hardware: Hardware, times: int) -> float:
    """Seconds until engines are ready so many times, one after another."""
    later = hardware.start_seconds if hardware.later_start_seconds is None else hardware.later_start_seconds
    return hardware.start_seconds + (times - 1) * later


def plan_extract(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, layer_ids: tuple[int, ...], config: PretrainedConfig
) -> StagePlan:
    """Estimate extraction: the hidden states of every token at every layer id.

    An engine first prefills all prompts, limited by matrix products, and then decodes `max_num_seqs` responses at a time (fewer
    if the KV cache is full), one step per token. Meanwhile the driver writes the store, on a CPU with the same cores.
    """
    options, hardware, number = recipe.extract, assumed.hardware, BYTES[recipe.target.dtype]
    conversations = sum(conversation_counts(recipe, assumed))
    length = assumed.prompt_tokens + assumed.response_tokens
    machines = assumed.machines if options.machines == "all" else options.machines or 1
    on_cpu = hardware is not None and hardware.memory_gib is None
    sharing = options.workers if on_cpu else 1  # engines that share one device count as one
    engines = machines * options.workers // sharing
    token_values = (
        kv_values(config, extracts=True) if on_cpu else kv_values_on_each(config, recipe.engine, extracts=True)
    )
    at_once = min(
        options.max_num_seqs * sharing,
        sequences_at_once(recipe, hardware, sizes, config, tokens=length, extracts=True),
        math.ceil(conversations / engines),
    )
    read = length if options.mode == "prefill" else assumed.prompt_tokens
    reading = conversations * flop_of_text(sizes, first=0, last=read)
    answering = conversations * flop_of_text(sizes, first=read, last=length)
    text_bytes = length * len(layer_ids) * config.hidden_size * number  # of states
    plain_bytes = conversations * text_bytes
    devices, cached = _engine_devices(recipe, hardware), cache_bytes(recipe.engine, recipe.target.dtype)
    seconds: dict[str, float] = {}
    if hardware:
        rate = engines * devices * hardware.matmul_tflops * 1e12
        step = EngineStep(sizes, number, devices, at_once, (read + length) / 2, cached=cached)
        steps = conversations * (length - read) / (at_once * engines)
        seconds = {
            "prefill": reading / (rate * hardware.prefill_utilization),
            "decoding": steps * step.seconds(hardware),
            "writing the store": plain_bytes / (machines * hardware.store_mb_per_second * 1e6),
            "starting engines": _starting(hardware, 1),
        }
    identity = StoreIdentity(
        target="",
        target_revision="",
        target_config_hash="",
        tokenizer_hash="",
        chat_template_hash=None,
        layer_ids=layer_ids,
        hidden_size=config.hidden_size,
        dtype=recipe.target.dtype,
        sampling={},
    )
    return StagePlan(
        tokens=round(conversations * length),
        disk_bytes=most_bytes(
            identity, options.compression, tokens=math.ceil(conversations * length), sequences=conversations
        ),
        memory_bytes={
            "target": sharing * sizes.weight_bytes(number) // devices,
            "KV cache": int(at_once * length * token_values * cached),
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=reading + answering,
        seconds=seconds,
        hours=hours_of(hardware, seconds, beside="writing the store"),
        more={
            "conversations": conversations,
            "sequences_at_once": at_once,
            "layer_ids": list(layer_ids),
            "states_bytes": int(engines // machines * at_once * text_bytes),
        }
        | devices_of(
            hardware,
            f"{counted(options.workers, 'engine')}{f' a machine, of {machines}' if machines > 1 else ''}",
            options.workers * devices,
        ),
    )


def plan_evaluate(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, drafter: Drafter, config: PretrainedConfig
) -> StagePlan:
    """Estimate evaluation as if no draft token were accepted: an upper bound where speculation gains more than drafts and controls of
    differing answers, which are not counted, cost.

    The baseline and one other engine run side by side, on one GPU if it holds both (serve/evaluation/lineup.py). Memory is that of
    one GPU.

    Counted are all responses of the first suite at every K, of the others at two, and with every other method; then timing at
    concurrency 1 and at each `concurrency`. For `request_rates`, only the time until the last request is sent counts. Suites
    with `turns: all` count two turns per conversation, as in MT-Bench.

    Raises:
        UserError: there is no suite, or one has no prompts.
    """
    options, hardware, number = recipe.evaluate, assumed.hardware, BYTES[recipe.target.dtype]
    ks = sorted({*options.k, options.acceptance_k})
    of_drafter = number * sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    names = list(options.only or options.suites)
    if not names:
        raise UserError("There is no suite to evaluate: `evaluate.suites` is empty.")
    devices, cached = _engine_devices(recipe, hardware), cache_bytes(recipe.engine, recipe.target.dtype)
    tokens, flop, answering, answer_tokens = 0, 0.0, 0.0, options.timing_tokens

    def answer(prompts: float, response: float, *, k: int, at_once: int) -> None:
        nonlocal tokens, flop, answering
        at_once = max(1, min(at_once, math.ceil(prompts)))
        context = assumed.prompt_tokens + response / 2
        step = EngineStep(sizes, number, devices, at_once, context, tokens=1 + k, cached=cached)
        reading = prompts * flop_of_text(sizes, first=0, last=assumed.prompt_tokens)
        steps = math.ceil(prompts / at_once) * response
        tokens += round(prompts * (assumed.prompt_tokens + response))
        flop += reading + steps * step.flop()
        if hardware:
            rate = devices * hardware.matmul_tflops * 1e12
            answering += reading / (rate * hardware.prefill_utilization) + steps * step.seconds(hardware)

    starts = options.engine_starts
    # Lookup methods draft any number of tokens, few on average.
    methods = [method.num_speculative_tokens or ks[-1] for method in options.methods.values()]
    # Each beside the baseline: the drafter, a second baseline (in a single start for a third of the requests, if those are 10 for each in
    # flight), the drafter in every further dtype that the recipe names and, with any of them, once more beside a baseline of another
    # dtype, and other methods; with the share of the requests.
    further = sum(dtype != recipe.target.dtype for dtype in options.dtypes or ())
    pairs = [(ks[-1], 1.0), (0, 1 / 3 if starts == 1 else 1.0), *((further + (further > 0)) * [(ks[-1], 1.0)])]
    for name in names:
        suite = options.suites[name]
        if suite.prompts == "held_out":
            prompts = conversation_counts(recipe, assumed)[1]
        else:
            prompts = prompt_count(suite.prompts, assumed)
        if not prompts:
            hold_out = " or raise `extract.held_out_fraction`" if suite.prompts == "held_out" else ""
            raise UserError(
                f"The suite `{name}` has no prompts. Give `evaluate.suites.{name}.prompts` another source{hold_out}."
            )
        if suite.turns == "all":
            prompts *= 2
        longest = suite.max_tokens or recipe.extract.response_tokens(held_out=True)
        answer_tokens = max(answer_tokens, longest)
        first = name == names[0]
        for k in (0, *(ks if first else ks[-2:]), *methods):
            answer(prompts, longest, k=k, at_once=options.acceptance_batch_size)
        for k in (0, *ks) if first else ():
            answer(starts * min(prompts, options.step_cost_prompts), _COST_STEPS, k=k, at_once=1)
        requests = max(_REQUESTS, min(prompts, options.timing_prompts))
        others = [(k, 1.0) for k in methods]
        for k, share in (*pairs, *others):
            for one in (0, k):
                answer(starts * max(share * requests, _REQUESTS), options.timing_tokens, k=one, at_once=1)
        for k, share in (*pairs, *(others if options.methods_under_load else ())) if first else ():
            for size in options.concurrency:
                for one in (0, k):
                    least = max(share * max(64, _REQUESTS * size), _REQUESTS * size)
                    answer(starts * (size + least), options.timing_tokens, k=one, at_once=size)
    length = min(recipe.engine.max_model_len, math.ceil(assumed.prompt_tokens + answer_tokens))
    if hardware is not None and hardware.memory_gib is None:
        need = cpu_engine_memory(
            config,
            target_bytes=sizes.weight_bytes(number),
            drafter_bytes=of_drafter,
            dtype=recipe.target.dtype,
            kv_cache_bytes=recipe.engine.kv_cache_gib * GIB / 2,
            processes=recipe.engine.tensor_parallel_size,
        )
    else:
        sequences = max(options.acceptance_batch_size, *options.concurrency, 1)
        need = engine_memory(
            config,
            target_bytes=sizes.weight_bytes(number),
            drafter_bytes=of_drafter,
            dtype=recipe.target.dtype,
            tokens=max(recipe.engine.max_model_len, sequences * length),
            engine=recipe.engine,
            sequences=sequences,
            drafter_split=1 if recipe.train.drafter.serving.whole_on_each_gpu else recipe.engine.tensor_parallel_size,
        )
    engines, gpus = 2, devices
    if hardware and hardware.memory_gib:
        memory = int(hardware.memory_gib * GIB)
        engines = min(2, max(1, side_by_side([need], memory, recipe.engine.gpu_memory_utilization)))
        gpus *= 2 // engines
    seconds = {}
    if hardware:
        # At each start step costs, then all but the drafter's pair, whose engines stay up the first time; methods for each suite.
        waves = 2 * starts - 1 + starts * (len(pairs) - 1 + len(methods)) + len(names) * len(methods)
        if (
            hardware.memory_gib
        ):  # CUDA graphs are captured for one K: an engine for each, for step costs and for acceptance
            waves += (starts + 1) * (len(ks) - 1)
        seconds = {"answers without an accepted draft": answering, "starting engines": _starting(hardware, waves)}
    if hardware and options.request_rates:
        seconds["requests at their rates"] = sum(2 * options.request_prompts / rate for rate in options.request_rates)
    return StagePlan(
        tokens=tokens,
        disk_bytes=0,
        memory_bytes={
            f"target, in {counted(engines, 'engine')}": engines * need.target,
            "drafter": need.drafter,
            "KV caches": engines * need.kv_cache,
            "working memory": engines * need.working,
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=flop,
        seconds=seconds,
        hours=hours_of(hardware, seconds),
        more=devices_of(hardware, "2 engines at a time", gpus),
    )
