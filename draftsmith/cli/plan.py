"""`draftsmith run --plan`: estimate the cost of a run from the target's config and the recipe, without loading a model.

Units: FLOP (floating-point operations, two per weight and token of a matrix product), bytes, seconds. Rates are those of
`plan.hardware` times the share of them that the work is assumed to reach. Mean lengths stand for distributions, so hours are
orders of magnitude; docs/log.md compares them with measurements.

Not counted: downloads, predicting acceptance length between epochs, and attention inside the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.config.hardware import Assumptions, Hardware
from draftsmith.config.recipe import Recipe
from draftsmith.config.sources import Prompts
from draftsmith.drafters import drafter_class, layer_ids_to_read
from draftsmith.drafters.base import Drafter
from draftsmith.engine.environment import states_arguments
from draftsmith.engine.memory import cpu_engine_memory, engine_memory, kv_values, kv_values_on_each, side_by_side
from draftsmith.engine.options import check_options
from draftsmith.run.atomic_io import read_json
from draftsmith.run.errors import UserError
from draftsmith.store.format import StoreIdentity
from draftsmith.store.writer import most_bytes
from draftsmith.target.downloads import fetch
from draftsmith.target.info import TargetInfo
from draftsmith.target.layer_ids import check_layer_ids, default_layer_ids
from draftsmith.target.prepare import read_config, target_name
from draftsmith.target.pretrained import language_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig
from draftsmith.engine.step_cost import EngineStep, TargetSizes, flop_of_text, target_sizes

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GIB = 1024**3
_FLOAT32_ON_GPU = 1 / 16
"""A GPU's rate in float32 relative to half precision: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100."""
_COST_STEPS = 6
"""Steps of an answer whose time evaluation measures, as in `serve/evaluation/step_cost.py`."""
_REQUESTS = 10
"""Requests per request in flight, 64 at least under a load, as in `serve/evaluation/throughput.py`."""


@dataclass(frozen=True)
class StagePlan:
    """The estimated cost of a stage."""

    tokens: int
    """Tokens that it processes, in all epochs together."""
    disk_bytes: int
    """Upper bound of its output on disk."""
    memory_bytes: dict[str, int]
    """Memory that one device (on a CPU: the machine) needs at a time, by purpose."""
    memory_limit: int | None
    """Memory of a device; None on a CPU and without `plan.hardware`."""
    flop: float
    """Floating-point operations of all devices together."""
    seconds: dict[str, float]
    """Time of each part of its work; empty without `plan.hardware`."""
    hours: float | None
    """Total time, in which concurrent parts count once; None without `plan.hardware`."""
    more: dict[str, Any] = field(default_factory=dict)
    """Figures specific to the stage."""


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
    engine, number = recipe.engine, _BYTES[recipe.target.dtype]
    limit = _engine_memory(recipe, hardware)
    if limit is None:
        room, values = engine.kv_cache_gib * _GIB, float(kv_values(config, extracts=extracts))
    else:
        room, values = (
            limit - sizes.weight_bytes(number) / engine.tensor_parallel_size,
            kv_values_on_each(config, engine, extracts=extracts),
        )
    return max(1, int(room // (tokens * values * number)))


def _engine_memory(recipe: Recipe, hardware: Hardware | None) -> int | None:
    """Bytes of a device that vLLM may use; None on a CPU."""
    if hardware is None or hardware.memory_gib is None:
        return None
    return int(hardware.memory_gib * _GIB * recipe.engine.gpu_memory_utilization)


def _engine_devices(recipe: Recipe, hardware: Hardware | None) -> int:
    """Devices of an engine; on a CPU its processes share one."""
    on_cpu = hardware is not None and hardware.memory_gib is None
    return 1 if on_cpu else recipe.engine.tensor_parallel_size


def plan_extract(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, layer_ids: tuple[int, ...], config: PretrainedConfig
) -> StagePlan:
    """Estimate extraction: the hidden states of every token at every layer id.

    An engine first prefills all prompts, limited by matrix products, and then decodes `max_num_seqs` responses at a time (fewer
    if the KV cache is full), one step per token. Meanwhile the driver writes the store, on a CPU with the same cores.
    """
    options, hardware, number = recipe.extract, assumed.hardware, _BYTES[recipe.target.dtype]
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
    devices = _engine_devices(recipe, hardware)
    seconds: dict[str, float] = {}
    if hardware:
        rate = engines * devices * hardware.matmul_tflops * 1e12
        step = EngineStep(sizes, number, devices, at_once, (read + length) / 2)
        steps = conversations * (length - read) / (at_once * engines)
        seconds = {
            "prefill": reading / (rate * hardware.prefill_utilization),
            "decoding": steps * step.seconds(hardware),
            "writing the store": plain_bytes / (machines * hardware.store_mb_per_second * 1e6),
            "starting engines": hardware.start_seconds,
        }
    identity = StoreIdentity(
        target="", target_revision="", target_config_hash="", tokenizer_hash="", chat_template_hash=None,
        layer_ids=layer_ids, hidden_size=config.hidden_size, dtype=recipe.target.dtype, sampling={},
    )  # fmt: skip
    return StagePlan(
        tokens=round(conversations * length),
        disk_bytes=most_bytes(
            identity, options.compression, tokens=math.ceil(conversations * length), sequences=conversations
        ),
        memory_bytes={
            "target": sharing * sizes.weight_bytes(number) // devices,
            "KV cache": int(at_once * length * token_values * number),
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=reading + answering,
        seconds=seconds,
        hours=_hours(hardware, seconds, beside="writing the store"),
        more={
            "conversations": conversations,
            "sequences_at_once": at_once,
            "layer_ids": list(layer_ids),
            "states_bytes": int(engines // machines * at_once * text_bytes),
        }
        | _devices(
            hardware,
            f"{_number(options.workers, 'engine')}{f' a machine, of {machines}' if machines > 1 else ''}",
            options.workers * devices,
        ),
    )


def plan_train(recipe: Recipe, assumed: Assumptions, drafter: Drafter, *, layers: int) -> StagePlan:
    """Estimate training on the responses of the training part.

    Memory is that of one process: float32 parameters with gradients, AdamW's two moments (Muon: one) and the average (`ema`),
    each divided by the number of processes with `fsdp`; the tensors shared with the target and the teacher's head; and the
    activations of a micro-batch, inputs and outputs of every matrix product (less with `activation_checkpointing`). The
    initialization, before that on one process, has the whole drafter, the shared tensors, and its sums of products.
    """
    options, hardware = recipe.train, assumed.hardware
    steps = drafter.max_draft_tokens or options.ttt_steps
    precision = options.precision_on("cuda" if hardware and hardware.memory_gib else "cpu")
    training, _ = conversation_counts(recipe, assumed)
    length = assumed.prompt_tokens + assumed.response_tokens
    share = options.drafter.share_of_positions
    tokens, answered = training * length * options.epochs, share * training * assumed.response_tokens * options.epochs
    optimizer_steps = math.ceil(tokens / options.tokens_per_step)
    trained, by_muon = trained_parameters(recipe, drafter)

    def of_trained(of_steps: Callable[[int], float]) -> float:
        """What a row takes, given what it takes with so many draft steps: some kinds train later ones on part of the rows."""
        first = of_steps(1)
        return first + (of_steps(steps) - first) * options.drafter.share_of_later_steps

    flop = answered * of_trained(lambda steps: flop_of_row(recipe, drafter, steps, predicts=True))
    flop += (tokens - answered) * of_trained(lambda steps: flop_of_row(recipe, drafter, steps, predicts=False))
    muon = optimizer_steps * sum(flop_of_muon(rows, columns, precision) for rows, columns in by_muon)
    shared = sum(value.numel() for value in drafter.buffers() if value.is_floating_point())
    own = sum(value.numel() for value in drafter.parameters())
    muons = sum(rows * columns for rows, columns in by_muon)
    start = drafter.init_cost(
        drafter.config, rows=round(training * length), answered=round(training * assumed.response_tokens)
    )
    seconds: dict[str, float] = {}
    if hardware:
        rate = hardware.matmul_tflops * 1e12 * hardware.train_utilization
        row_bytes = layers * drafter.config.hidden_size * _BYTES[recipe.target.dtype]
        plain_bytes = tokens * row_bytes
        slower = _FLOAT32_ON_GPU if hardware.memory_gib else 1
        seconds = {
            "forward and backward passes": flop / (rate * hardware.count),
            "Muon": muon / rate,  # repeated by every process
            # On one process, while the others wait.
            "initialization": start.flop / (rate * slower)
            + start.rows_read * row_bytes / (hardware.load_mb_per_second * 1e6),
            "reading the store": plain_bytes / (hardware.load_mb_per_second * 1e6 * hardware.count),
        }
    processes = hardware.count if hardware else 1
    rows = options.tokens_per_step / (processes * options.gradient_accumulation_steps)
    parts = processes if options.fsdp else 1
    config = drafter.config
    return StagePlan(
        tokens=round(tokens),
        disk_bytes=4 * sum(math.prod(shape) for shape in drafter.shapes(config).values()),
        memory_bytes={
            "drafter": 4 * own // parts,
            "shared with the target": 4 * shared,
            "the teacher's head": 4 * config.draft_vocab_size * config.hidden_size,
            "copies in bfloat16": 2 * own if precision == "bfloat16" else 0,
            "gradients": 4 * trained // parts,
            "optimizer states": (8 * (trained - muons) + 4 * muons + (4 * own if options.ema else 0)) // parts,
            "activations": int(
                share
                * rows
                * of_trained(lambda steps: kept_by_row(drafter, steps, layers=layers, number=_BYTES[precision]))
            ),
        },
        memory_limit=int(hardware.memory_gib * _GIB) if hardware and hardware.memory_gib else None,
        flop=start.flop + flop + muon * processes,
        seconds=seconds,
        hours=_hours(hardware, seconds, beside="reading the store"),
        more={
            "parameters_trained": trained,
            "optimizer_steps": optimizer_steps,
            "initialization": {"flop": start.flop, "memory_bytes": 4 * (own + shared) + start.memory_bytes},
        }
        | _devices(hardware, _number(processes, "process"), processes),
    )


def plan_convert(recipe: Recipe, drafter: Drafter) -> StagePlan:
    """Estimate conversion: the drafter's tensors in their serving dtype."""
    number = _BYTES[recipe.convert.dtype or recipe.target.dtype]
    parameters = sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    return StagePlan(0, number * parameters, {}, None, 0.0, {}, 0.0, {"parameters": parameters})


def plan_evaluate(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, drafter: Drafter, config: PretrainedConfig
) -> StagePlan:
    """Estimate an upper bound of evaluation, as if no draft token were accepted.

    The baseline and one other engine run side by side, on one GPU if it holds both (serve/evaluation/lineup.py). Memory is that of
    one GPU.

    Counted are all responses of the first suite at every K, of the others at two, and with every other method; then timing at
    concurrency 1 and at each `concurrency`. For `request_rates`, only the time until the last request is sent counts. Suites
    with `turns: all` count two turns per conversation, as in MT-Bench.
    """
    options, hardware, number = recipe.evaluate, assumed.hardware, _BYTES[recipe.target.dtype]
    ks = sorted({*options.k, options.acceptance_k})
    of_drafter = number * sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    names = list(options.only or options.suites)
    devices = _engine_devices(recipe, hardware)
    tokens, flop, answering, answer_tokens = 0, 0.0, 0.0, options.timing_tokens

    def answer(prompts: float, response: float, *, k: int, at_once: int) -> None:
        nonlocal tokens, flop, answering
        at_once = max(1, min(at_once, math.ceil(prompts)))
        context = assumed.prompt_tokens + response / 2
        step = EngineStep(sizes, number, devices, at_once, context, tokens=1 + k)
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
    # Each beside the baseline: the drafter, a second baseline (in a single start for a third of the requests), the drafter in every
    # further dtype that the recipe names, and other methods; with the share of the requests.
    further = sum(dtype != recipe.target.dtype for dtype in options.dtypes or ())
    pairs = [(ks[-1], 1.0), (0, 1 / 3 if starts == 1 else 1.0), *(further * [(ks[-1], 1.0)])]
    for name in names:
        suite = options.suites[name]
        if suite.prompts == "held_out":
            prompts = conversation_counts(recipe, assumed)[1]
        else:
            prompts = _prompt_count(suite.prompts, assumed)
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
        for k, share in (*pairs, *((k, 1.0) for k in methods)):
            for one in (0, k):
                answer(starts * share * requests, options.timing_tokens, k=one, at_once=1)
        for k, share in pairs if first else ():
            for size in options.concurrency:
                for one in (0, k):
                    answer(
                        starts * (size + share * max(64, _REQUESTS * size)), options.timing_tokens, k=one, at_once=size
                    )
    length = min(recipe.engine.max_model_len, math.ceil(assumed.prompt_tokens + answer_tokens))
    if hardware is not None and hardware.memory_gib is None:
        need = cpu_engine_memory(
            config, target_bytes=sizes.weight_bytes(number), drafter_bytes=of_drafter, dtype=recipe.target.dtype,
            kv_cache_bytes=recipe.engine.kv_cache_gib * _GIB / 2, processes=recipe.engine.tensor_parallel_size,
        )  # fmt: skip
    else:
        need = engine_memory(
            config, target_bytes=sizes.weight_bytes(number), drafter_bytes=of_drafter, dtype=recipe.target.dtype,
            tokens=max(recipe.engine.max_model_len, max(options.acceptance_batch_size, *options.concurrency, 1) * length),
            engine=recipe.engine,
        )  # fmt: skip
    engines, gpus = 2, devices
    if hardware and hardware.memory_gib:
        memory = int(hardware.memory_gib * _GIB)
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
        seconds = {"answers without an accepted draft": answering, "starting engines": waves * hardware.start_seconds}
    if hardware and options.request_rates:
        seconds["requests at their rates"] = sum(2 * options.request_prompts / rate for rate in options.request_rates)
    return StagePlan(
        tokens=tokens,
        disk_bytes=0,
        memory_bytes={
            f"target, in {_number(engines, 'engine')}": engines * need.target,
            "drafter": need.drafter,
            "KV caches": engines * need.kv_cache,
            "working memory": engines * need.working,
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=flop,
        seconds=seconds,
        hours=_hours(hardware, seconds),
        more=_devices(hardware, "2 engines at a time", gpus),
    )


def _devices(hardware: Hardware | None, work: str, gpus: int) -> dict[str, str]:
    """The GPUs that a stage uses, for its `more`; empty on CPUs."""
    if hardware is None or hardware.memory_gib is None:
        return {}
    where = "GPU 0" if gpus == 1 else f"GPUs 0 to {gpus - 1}"
    beyond = f", which is MORE than the {hardware.count} of `plan.hardware`" if gpus > hardware.count else ""
    return {"devices": f"{work} on {where}{beyond}"}


def _hours(hardware: Hardware | None, seconds: dict[str, float], *, beside: str | None = None) -> float | None:
    """Hours of all parts together.

    Args:
        beside: the part that runs concurrently with the others, except on a CPU.
    """
    if hardware is None:
        return None
    together = sum(seconds.values())
    if beside and hardware.memory_gib is not None:
        together = max(seconds[beside], together - seconds[beside])
    return together / 3600


def conversation_counts(recipe: Recipe, assumed: Assumptions) -> tuple[int, int]:
    """Number of sequences in the training part and in the held-out part.

    Raises:
        UserError: neither `extract.prompts.limit` nor `plan.conversations` sets the number of prompts.
    """
    options = recipe.extract
    known = [number for number in (assumed.conversations, options.prompts.limit) if number is not None]
    if not known:
        raise UserError(
            "The number of prompts is unknown before they are read: set `plan.conversations`, or limit it with "
            "`extract.prompts.limit`."
        )
    prompts = min(known)
    held_out = round(prompts * options.held_out_fraction)
    training = prompts - held_out
    if options.held_out is not None:
        training, held_out = prompts, _prompt_count(options.held_out, assumed)
    return training * options.samples, held_out


def _prompt_count(source: Prompts, assumed: Assumptions) -> int:
    """Prompts for evaluation: the rows of a local file of JSON lines, no more than the limit; what is assumed if neither is known."""
    known = [source.limit] if source.limit else []
    if source.path and source.path.endswith(".jsonl") and Path(source.path).is_file():
        with open(source.path, "rb") as file:
            known.append(sum(not line.isspace() for line in file))
    return min(known, default=assumed.suite_prompts)


def trained_parameters(recipe: Recipe, drafter: Drafter) -> tuple[int, list[tuple[int, int]]]:
    """Number of trained parameters, and the shapes of the matrices among them that Muon optimizes."""
    heads, tables = ({id(p) for p in group} for group in (drafter.head_parameters(), drafter.embedding_parameters()))
    frozen = set() if recipe.train.train_lm_head else heads
    trained = [p for p in drafter.parameters() if id(p) not in frozen]
    by_muon = [p for p in trained if p.ndim == 2 and id(p) not in heads | tables]
    shapes = [(p.shape[0], p.shape[1]) for p in by_muon] if recipe.train.optimizer == "muon" else []
    return sum(p.numel() for p in trained), shapes


def flop_of_row(recipe: Recipe, drafter: Drafter, steps: int, *, predicts: bool) -> float:
    """FLOP of training on one token: the forward pass, and as many again for each of the gradients of input and weight.

    A token with a loss (`predicts`) goes through the head at every step (a frozen head has no weight gradient), and once
    through the teacher's head if the target's distribution is trained on. Selecting the loss's part of the vocabulary is not
    counted: it uses a few tokens per step.
    """
    shapes, config = drafter.shapes(drafter.config), drafter.config
    flop = 0.0
    for name, (of_context, of_predicting) in drafter.matmul_counts(config, steps).items():
        flop += 6 * math.prod(shapes[name]) * (of_predicting if predicts else of_context)
    if not predicts:
        return flop
    vocabulary = min(recipe.train.loss_vocab_size or config.draft_vocab_size, config.draft_vocab_size)
    head = vocabulary * _head_width(drafter)
    flop += steps * head * (6 if recipe.train.train_lm_head and drafter.head_parameters() else 4)
    terms = drafter.loss_terms(recipe.train.drafter)
    if terms.targets == "distribution":
        flop += 2 * vocabulary * config.hidden_size
    if terms.acceptance_alpha is not None:  # the weights take a pass of their own
        flop += 2 * steps * head
    return flop


def flop_of_muon(rows: int, columns: int, precision: Literal["float32", "bfloat16"]) -> float:
    """FLOP of one step of Muon on a matrix, with five iterations (`train/muon.py`). In float32 they work on the Gram matrix: 17
    products of its size, and two with the long side. In bfloat16 they work on the matrix: one and two per iteration."""
    short, long = sorted((rows, columns))
    of_gram, of_matrix = (17, 2) if precision == "float32" else (5, 10)
    return of_gram * 2 * short**3 + of_matrix * 2 * short * short * long


def kept_by_row(drafter: Drafter, steps: int, *, layers: int, number: int) -> float:
    """Bytes that a token keeps until the backward pass: its hidden states, and the inputs and outputs of every product.

    Logits are not kept, because the loss computes them in parts.

    Args:
        layers: number of the store's layer ids, read in float32.
        number: bytes of the data type of the products.
    """
    shapes = drafter.shapes(drafter.config)
    numbers = steps * _head_width(drafter)
    for name, (_, of_predicting) in drafter.matmul_counts(drafter.config, steps).items():
        numbers += of_predicting * sum(shapes[name])
    return 4.0 * layers * drafter.config.hidden_size + number * numbers


def _head_width(drafter: Drafter) -> int:
    """Input width of the vocabulary heads."""
    return next((head.shape[1] for head in drafter.head_parameters()), drafter.config.hidden_size)


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Estimate every stage.

    Returns:
        JSON values: `run`, `stages` (a `StagePlan` by name), `total_hours`, `target`, `assumptions`.

    Raises:
        UserError: the recipe lacks assumptions, the target's config cannot be read, or vLLM has not the engine options or hands out
            no states.
    """
    assumed = recipe.plan
    if assumed is None:
        raise UserError(
            "A plan needs the mean lengths of texts: add `plan: { prompt_tokens: 100, response_tokens: 200 }` with your own to the "
            "recipe, and `plan.hardware` for hours. The recipes that come with Draftsmith have both."
        )
    check_options(recipe.engine)
    config = config_of_target(recipe, assumed)
    if recipe.extract.backend == "vllm":
        states_arguments(config, recipe.engine.options)  # raises where vLLM hands out no states
    sizes = target_sizes(
        config, quantization=recipe.engine.options.get("quantization"), trust_remote_code=recipe.target.trust_remote_code
    )  # fmt: skip
    layer_ids = recipe.extract.layer_ids or default_layer_ids(config.num_hidden_layers)
    check_layer_ids(layer_ids, config.num_hidden_layers)
    drafter = drafter_on_meta(recipe, config, layer_ids)
    stages = {
        "extract": plan_extract(recipe, assumed, sizes, layer_ids, config),
        "train": plan_train(recipe, assumed, drafter, layers=len(layer_ids)),
        "convert": plan_convert(recipe, drafter),
        "evaluate": plan_evaluate(recipe, assumed, sizes, drafter, config),
    }
    hours = [stage.hours for stage in stages.values()]
    return {
        "run": recipe.name,
        "stages": {name: asdict(stage) for name, stage in stages.items()},
        "total_hours": None if assumed.hardware is None else sum(hour for hour in hours if hour is not None),
        "target": {"name": target_name(recipe.target), "parameters": sizes.parameters},
        "assumptions": assumed.model_dump(mode="json"),
    }


def config_of_target(recipe: Recipe, assumed: Assumptions) -> PretrainedConfig:
    """`plan.target_config`, which needs no network, or the target's own config."""
    if assumed.target_config is None:
        return read_config(recipe.target)
    from transformers import AutoConfig

    path = fetch(assumed.target_config)
    try:
        fields = read_json(path)
        config: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # what a wrong value breaks depends on the config's class
        raise UserError(f"`plan.target_config`: {path} is not the config.json of a model: {error}.") from None
    config = language_config(config)
    config.name_or_path = target_name(recipe.target)  # for messages
    return config


def drafter_on_meta(recipe: Recipe, config: PretrainedConfig, layer_ids: tuple[int, ...]) -> Drafter:
    """The recipe's drafter on torch's meta device, without memory for its tensors."""
    options = recipe.train.drafter
    kind = drafter_class(options.kind)
    vocabulary, last = config.vocab_size, config.num_hidden_layers
    target = TargetInfo(
        path=Path(), name="", revision="", config_hash="", tokenizer_hash="", chat_template_hash=None,
        num_hidden_layers=last, hidden_size=config.hidden_size, vocab_size=vocabulary, config=config,
    )  # fmt: skip
    draft_vocabulary = min(options.draft_vocab_size or vocabulary, vocabulary)
    reads = layer_ids_to_read(options, target, layer_ids, where="this recipe's store")
    return kind.on_meta(kind.make_config(options, target, reads, draft_vocabulary))


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"
