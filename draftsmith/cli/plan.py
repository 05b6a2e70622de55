"""What a run will cost before anything is loaded or started: arithmetic on the target's config and the recipe.

Units: FLOP are floating-point operations, two for each weight that a token meets in a product; bytes; seconds. A rate that
the recipe states (`plan.hardware`) is multiplied with the share of it that the work is assumed to reach. Means stand for
distributions, so hours are for orders of magnitude: how far off they were is in docs/log.md.

Not counted: downloads, predicting acceptance between epochs, and attention inside the drafter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from draftsmith.config.hardware import Assumptions, Hardware
from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.engine.memory import engine_memory, side_by_side
from draftsmith.run.errors import UserError
from draftsmith.store.format import StoreIdentity
from draftsmith.store.writer import most_bytes
from draftsmith.target.downloads import fetch
from draftsmith.target.info import TargetInfo
from draftsmith.target.layer_ids import default_layer_ids
from draftsmith.target.prepare import read_config, target_name
from draftsmith.target.tensors import TargetTensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig
from draftsmith.engine.step_cost import EngineStep, TargetSizes, flop_of_text, target_sizes

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GIB = 1024**3
_FLOAT32_ON_GPU = 1 / 16
"""A GPU's rate in float32, where that of its half-precision products is 1: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100."""
_COST_TOKENS = 16
"""Response tokens of an answer whose steps evaluation times; as in `serve/evaluation/step_cost.py`."""
_REQUESTS = 10
"""Requests for each of those in flight; as in `serve/evaluation/throughput.py`."""


@dataclass(frozen=True)
class StagePlan:
    """What a stage is expected to take."""

    tokens: int
    """Tokens that it works on; in training all epochs' together."""
    disk_bytes: int
    """What it leaves on disk, at most."""
    memory_bytes: dict[str, int]
    """What has to be in the memory of one device (on a CPU: of the machine) at a time, by what it is."""
    memory_limit: int | None
    """Bytes that a device has for it; None on a CPU and where the recipe names no hardware."""
    flop: float
    """Floating-point operations, all devices together."""
    seconds: dict[str, float]
    """How long each part of its work takes; empty where the recipe names no hardware."""
    hours: float | None
    """All of it: parts that run side by side count once. None where the recipe names no hardware."""
    more: dict[str, Any] = field(default_factory=dict)
    """Figures that only this stage has."""


def sequences_at_once(recipe: Recipe, hardware: Hardware | None, sizes: TargetSizes, *, tokens: float) -> int:
    """Sequences of so many tokens whose keys and values fit beside the target; on a CPU, in all engines together."""
    engine, number = recipe.engine, _BYTES[recipe.target.dtype]
    limit = _engine_memory(recipe, hardware)
    if limit is None:
        room = engine.kv_cache_gib * _GIB
    else:
        room = limit * engine.tensor_parallel_size - sizes.parameters * number
    return max(1, int(room // (tokens * sizes.kv_values * number)))


def _engine_memory(recipe: Recipe, hardware: Hardware | None) -> int | None:
    """Bytes of a device that vLLM may take; None on a CPU."""
    if hardware is None or hardware.memory_gib is None:
        return None
    return int(hardware.memory_gib * _GIB * recipe.engine.gpu_memory_utilization)


def plan_extract(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, layer_ids: tuple[int, ...], hidden: int
) -> StagePlan:
    """The store: every token's states at every layer id, answers at their mean length.

    An engine prefills all prompts at the rate of products, and then answers `max_num_seqs` at a time (fewer where the KV
    cache is full) by one step a token. Beside it, the driver writes the store; on a CPU it takes the same cores.
    """
    options, hardware, number = recipe.extract, assumed.hardware, _BYTES[recipe.target.dtype]
    conversations = sum(conversation_counts(recipe, assumed))
    length = assumed.prompt_tokens + assumed.response_tokens
    machines = assumed.machines if options.machines == "all" else options.machines or 1
    on_cpu = hardware is not None and hardware.memory_gib is None
    sharing = options.workers if on_cpu else 1  # engines that divide one device, and are counted as one here
    engines = machines * options.workers // sharing
    at_once = min(
        options.max_num_seqs * sharing,
        sequences_at_once(recipe, hardware, sizes, tokens=length),
        math.ceil(conversations / engines),
    )
    read = length if options.mode == "prefill" else assumed.prompt_tokens
    reading = conversations * flop_of_text(sizes, first=0, last=read)
    answering = conversations * flop_of_text(sizes, first=read, last=length)
    plain_bytes = conversations * length * len(layer_ids) * hidden * number
    seconds: dict[str, float] = {}
    if hardware:
        rate = engines * recipe.engine.tensor_parallel_size * hardware.matmul_tflops * 1e12
        step = EngineStep(sizes, number, recipe.engine.tensor_parallel_size, at_once, (read + length) / 2)
        steps = conversations * (length - read) / (at_once * engines)
        seconds = {
            "prefill": reading / (rate * hardware.prefill_utilization),
            "decoding": steps * step.seconds(hardware),
            "writing the store": plain_bytes / (machines * hardware.store_mb_per_second * 1e6),
            "starting": hardware.start_seconds,
        }
    identity = StoreIdentity(
        target="", target_revision="", target_config_hash="", tokenizer_hash="", chat_template_hash=None,
        layer_ids=layer_ids, hidden_size=hidden, dtype=recipe.target.dtype, sampling={},
    )  # fmt: skip
    return StagePlan(
        tokens=round(conversations * length),
        disk_bytes=most_bytes(
            identity, options.compression, tokens=math.ceil(conversations * length), sequences=conversations
        ),
        memory_bytes={
            "target": sharing * sizes.parameters * number // recipe.engine.tensor_parallel_size,
            "KV cache": int(at_once * length * sizes.kv_values * number / recipe.engine.tensor_parallel_size),
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=reading + answering,
        seconds=seconds,
        hours=_hours(hardware, seconds, beside="writing the store"),
        more={"conversations": conversations, "sequences_at_once": at_once, "layer_ids": list(layer_ids)}
        | _devices(
            hardware,
            f"{_number(options.workers, 'engine')}{f' a machine, of {machines}' if machines > 1 else ''}",
            options.workers * recipe.engine.tensor_parallel_size,
        ),
    )


def plan_train(recipe: Recipe, assumed: Assumptions, drafter: Drafter, *, layers: int) -> StagePlan:
    """Training on the responses of the training part, `epochs` times over.

    Memory is that of one process: what it trains in float32, with a gradient, AdamW's two moments (Muon: one) and their
    average (`ema`), each divided among the processes with `shard`; what it shares with the target, the teacher's head; and
    what a micro-batch keeps for its backward pass, input and output of every product (`activation_checkpointing`: less). The start,
    on one process before all that, has the whole drafter, what it shares with the target, and its sums of products.
    """
    options, hardware = recipe.train, assumed.hardware
    steps = drafter.max_draft_tokens or options.ttt_steps
    precision = options.precision_on("cuda" if hardware and hardware.memory_gib else "cpu")
    training, _ = conversation_counts(recipe, assumed)
    length = assumed.prompt_tokens + assumed.response_tokens
    tokens, answered = training * length * options.epochs, training * assumed.response_tokens * options.epochs
    optimizer_steps = math.ceil(tokens / options.tokens_per_step)
    trained, by_muon = trained_parameters(recipe, drafter)
    flop = answered * flop_of_row(recipe, drafter, steps, predicts=True)
    flop += (tokens - answered) * flop_of_row(recipe, drafter, steps, predicts=False)
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
            "products": flop / (rate * hardware.count),
            "Muon": muon / rate,  # every process does all of it
            # One process, the others wait.
            "start": start.flop / (rate * slower) + start.rows_read * row_bytes / (hardware.load_mb_per_second * 1e6),
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
            "activations": int(rows * kept_by_row(drafter, steps, layers=layers, number=_BYTES[precision])),
        },
        memory_limit=int(hardware.memory_gib * _GIB) if hardware and hardware.memory_gib else None,
        flop=start.flop + flop + muon * processes,
        seconds=seconds,
        hours=_hours(hardware, seconds, beside="reading the store"),
        more={
            "parameters_trained": trained,
            "optimizer_steps": optimizer_steps,
            "start": {"flop": start.flop, "memory_bytes": 4 * (own + shared) + start.memory_bytes},
        }
        | _devices(hardware, _number(processes, "process"), processes),
    )


def plan_convert(recipe: Recipe, drafter: Drafter) -> StagePlan:
    """The drafter's tensors in the dtype that they are served in."""
    number = _BYTES[recipe.convert.dtype or recipe.target.dtype]
    parameters = sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    return StagePlan(0, number * parameters, {}, None, 0.0, {}, 0.0, {"parameters": parameters})


def plan_evaluate(
    recipe: Recipe, assumed: Assumptions, sizes: TargetSizes, drafter: Drafter, config: PretrainedConfig
) -> StagePlan:
    """Plain and speculative engines side by side, as if no draft were ever accepted: at most.

    Where a GPU does not hold them all, as many as it holds (serve/evaluation/lineup.py); memory is that of one GPU.

    All answers of the first suite at every K, of the others at two, and by every other method; then one at a time for the clock,
    and in batches. Of requests at their rates the time is counted, until the last is sent. Conversations of which every turn is
    answered count as two, which they are in MT-Bench.
    """
    options, hardware, number = recipe.evaluate, assumed.hardware, _BYTES[recipe.target.dtype]
    ks = sorted({*options.k, options.acceptance_k})
    of_drafter = number * sum(math.prod(shape) for shape in drafter.shapes(drafter.config).values())
    names = list(options.only or options.suites)
    tokens, flop, answering, answer_tokens = 0, 0.0, 0.0, options.timing_tokens

    def answer(prompts: float, response: float, *, k: int, at_once: int) -> None:
        nonlocal tokens, flop, answering
        at_once = max(1, min(at_once, math.ceil(prompts)))
        context = assumed.prompt_tokens + response / 2
        step = EngineStep(sizes, number, recipe.engine.tensor_parallel_size, at_once, context, tokens=1 + k)
        reading = prompts * flop_of_text(sizes, first=0, last=assumed.prompt_tokens)
        steps = math.ceil(prompts / at_once) * response
        tokens += round(prompts * (assumed.prompt_tokens + response))
        flop += reading + steps * step.flop()
        if hardware:
            rate = recipe.engine.tensor_parallel_size * hardware.matmul_tflops * 1e12
            answering += reading / (rate * hardware.prefill_utilization) + steps * step.seconds(hardware)

    for name in names:
        suite = options.suites[name]
        prompts = assumed.suite_prompts
        if suite.prompts == "held_out":
            prompts = conversation_counts(recipe, assumed)[1]
        elif suite.prompts.limit:
            prompts = suite.prompts.limit
        if suite.turns == "all":
            prompts *= 2
        longest = suite.max_tokens or recipe.extract.response_tokens(held_out=True)
        answer_tokens = max(answer_tokens, longest)
        first = name == names[0]
        # What guesses by lookup guesses as far as it likes, which is not far on average.
        methods = [method.num_speculative_tokens or ks[-1] for method in options.methods.values()]
        for k in (0, *(ks if first else ks[-2:]), *methods):
            answer(prompts, longest, k=k, at_once=options.acceptance_batch_size)
        starts = options.engine_starts
        for k in (0, *ks) if first else ():
            answer(starts * min(prompts, options.step_cost_prompts), _COST_TOKENS, k=k, at_once=1)
        # Plain decoding twice and the drafter, and both in every further dtype. Which those are is known where the recipe says so.
        further = sum(dtype != recipe.target.dtype for dtype in options.dtypes or ())
        timed = (0, 0, ks[-1], *(further * (0, ks[-1])))
        for k in (*timed, *methods):
            answer(
                starts * (1 + max(_REQUESTS, min(prompts, options.timing_prompts))),
                options.timing_tokens,
                k=k,
                at_once=1,
            )
        for k in timed if first else ():
            for size in options.concurrency:
                answer(starts * (1 + _REQUESTS) * size, options.timing_tokens, k=k, at_once=size)
    engines = len(ks) + len(options.methods) + 1
    length = min(recipe.engine.max_model_len, math.ceil(assumed.prompt_tokens + answer_tokens))
    need = engine_memory(
        config, target_bytes=sizes.parameters * number, drafter_bytes=of_drafter, dtype=recipe.target.dtype,
        tokens=max(recipe.engine.max_model_len, max(options.acceptance_batch_size, *options.concurrency, 1) * length),
        gpus=recipe.engine.tensor_parallel_size,
    )  # fmt: skip
    together, gpus = engines, recipe.engine.tensor_parallel_size
    if hardware and hardware.memory_gib:
        memory, utilization = int(hardware.memory_gib * _GIB), recipe.engine.gpu_memory_utilization
        on_each = max(1, side_by_side([need], memory, utilization))
        together = min(engines, on_each * max(1, hardware.count // gpus))
        gpus *= math.ceil(together / on_each)
        engines = min(engines, on_each)
    seconds = {}
    if hardware:  # engines start anew for step costs and for speeds
        starting = 2 * options.engine_starts * hardware.start_seconds
        seconds = {"answers without an accepted draft": answering, "starting": starting}
    if hardware and options.request_rates:
        seconds["requests at their rates"] = sum(2 * options.request_prompts / rate for rate in options.request_rates)
    return StagePlan(
        tokens=tokens,
        disk_bytes=0,
        memory_bytes={
            f"target, in {engines} engines": engines * need.target,
            f"drafter, in {engines - 1} of them": (engines - 1) * need.drafter,
            "KV caches": engines * need.kv_cache,
            "working memory": engines * need.working,
        },
        memory_limit=_engine_memory(recipe, hardware),
        flop=flop,
        seconds=seconds,
        hours=_hours(hardware, seconds),
        more=_devices(hardware, f"{_number(together, 'engine')} at a time", gpus),
    )


def _devices(hardware: Hardware | None, work: str, gpus: int) -> dict[str, str]:
    """What a stage does on the first so many GPUs of a machine, as a figure of its `more`; nothing on CPUs."""
    if hardware is None or hardware.memory_gib is None:
        return {}
    where = "GPU 0" if gpus == 1 else f"GPUs 0 to {gpus - 1}"
    beyond = f", which is MORE than the {hardware.count} of `plan.hardware`" if gpus > hardware.count else ""
    return {"devices": f"{work} on {where}{beyond}"}


def _hours(hardware: Hardware | None, seconds: dict[str, float], *, beside: str | None = None) -> float | None:
    """Hours of all parts together.

    Args:
        beside: the part that runs beside the others where devices are not the host's own cores.
    """
    if hardware is None:
        return None
    together = sum(seconds.values())
    if beside and hardware.memory_gib is not None:
        together = max(seconds[beside], together - seconds[beside])
    return together / 3600


def conversation_counts(recipe: Recipe, assumed: Assumptions) -> tuple[int, int]:
    """Sequences of the training part and of the held-out part.

    Raises:
        UserError: neither the prompts' limit nor the plan says how many prompts there are.
    """
    options = recipe.extract
    known = [number for number in (assumed.conversations, options.prompts.limit) if number is not None]
    if not known:
        raise UserError(
            "How many prompts there are is not known before they are read: set `plan.conversations`, or limit them with "
            "`extract.prompts.limit`."
        )
    prompts = min(known)
    held_out = round(prompts * options.held_out_fraction)
    training = prompts - held_out
    if options.held_out is not None:
        training, held_out = prompts, options.held_out.limit or assumed.suite_prompts
    return training * options.samples, held_out


def trained_parameters(recipe: Recipe, drafter: Drafter) -> tuple[int, list[tuple[int, int]]]:
    """Numbers that training changes, and the shapes of the matrices that Muon does among them."""
    heads, tables = ({id(p) for p in group} for group in (drafter.head_parameters(), drafter.embedding_parameters()))
    frozen = set() if recipe.train.train_lm_head else heads
    trained = [p for p in drafter.parameters() if id(p) not in frozen]
    by_muon = [p for p in trained if p.ndim == 2 and id(p) not in heads | tables]
    shapes = [(p.shape[0], p.shape[1]) for p in by_muon] if recipe.train.optimizer == "muon" else []
    return sum(p.numel() for p in trained), shapes


def flop_of_row(recipe: Recipe, drafter: Drafter, steps: int, *, predicts: bool) -> float:
    """FLOP of training on one row: forward, and as many again for the gradient of what is multiplied and of the weight.

    A row that something is predicted from meets the head at every step (frozen, it needs no gradient of its own), and the
    teacher's head once where the target's distribution is taught. That teacher and drafter choose the loss's part
    of the vocabulary is not counted: a few rows of a step are asked.
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
    return flop


def flop_of_muon(rows: int, columns: int, precision: Literal["float32", "bfloat16"]) -> float:
    """FLOP of one step of Muon on a matrix, five iterations (see `train/muon.py`). In float32 on its Gram matrix: 17 products
    of that size in all, and the long side twice. In bfloat16 on the matrix: one and two in each."""
    short, long = sorted((rows, columns))
    of_gram, of_matrix = (17, 2) if precision == "float32" else (5, 10)
    return of_gram * 2 * short**3 + of_matrix * 2 * short * short * long


def kept_by_row(drafter: Drafter, steps: int, *, layers: int, number: int) -> float:
    """Bytes that a row of a step keeps until its backward pass: its states, and input and output of every product.

    Logits are not kept: the loss works through them in parts.

    Args:
        layers: states of the store that are read, all of them in float32.
        number: bytes of a number that products are computed in.
    """
    shapes = drafter.shapes(drafter.config)
    numbers = steps * _head_width(drafter)
    for name, (_, of_predicting) in drafter.matmul_counts(drafter.config, steps).items():
        numbers += of_predicting * sum(shapes[name])
    return 4.0 * layers * drafter.config.hidden_size + number * numbers


def _head_width(drafter: Drafter) -> int:
    """Width of what the vocabulary heads read."""
    return next((head.shape[1] for head in drafter.head_parameters()), drafter.config.hidden_size)


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Every stage's `StagePlan` as JSON-like values, by the stage's name; `assumptions`: what they rest on; `total_hours`.

    Raises:
        UserError: the recipe states too little, or the target's config is not to be had.
    """
    assumed = recipe.plan
    if assumed is None:
        raise UserError(
            "A plan needs to know how long texts are: add `plan: { prompt_tokens: 100, response_tokens: 200 }` with your "
            "own means to the recipe, and `plan.hardware` for hours. The recipes that come with Draftsmith have both."
        )
    config = _config_of_target(recipe, assumed)
    sizes = target_sizes(config)
    last = config.num_hidden_layers
    layer_ids = recipe.extract.layer_ids or default_layer_ids(last)
    drafter = _drafter(recipe, config, layer_ids)
    stages = {
        "extract": plan_extract(recipe, assumed, sizes, layer_ids, config.hidden_size),
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


def _config_of_target(recipe: Recipe, assumed: Assumptions) -> PretrainedConfig:
    """The plan's own copy of the target's config where it has one, so that it needs no network; else the target's."""
    if assumed.target_config is None:
        return read_config(recipe.target)
    from transformers import AutoConfig

    path = fetch(assumed.target_config)
    try:
        fields = json.loads(path.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"`plan.target_config`: {path} is not the config.json of a model: {error}.") from None


def _drafter(recipe: Recipe, config: PretrainedConfig, layer_ids: tuple[int, ...]) -> Drafter:
    """The recipe's drafter without memory for its tensors (torch's meta device)."""
    options = recipe.train.drafter
    kind = drafter_class(options.kind)
    vocabulary, last = config.vocab_size, config.num_hidden_layers
    target = TargetInfo(
        path=Path(), name="", revision="", config_hash="", tokenizer_hash="", chat_template_hash=None,
        num_hidden_layers=last, hidden_size=config.hidden_size, vocab_size=vocabulary, config=config,
    )  # fmt: skip
    draft_vocabulary = min(options.draft_vocab_size or vocabulary, vocabulary)
    with torch.device("meta"):
        table, norm = torch.empty(vocabulary, config.hidden_size), torch.empty(config.hidden_size)
        tensors = TargetTensors(table, table, norm, {}, "")
        shape = kind.make_config(options, target, kind.layer_ids(options, layer_ids, last), draft_vocabulary)
        return kind.from_target(shape, tensors, torch.arange(draft_vocabulary))


def summary(plan: dict[str, Any]) -> list[str]:
    """One line a stage, as they stand on top of the recipes that come with Draftsmith."""
    stages = plan["stages"]
    extract, train, convert = stages["extract"], stages["train"], stages["convert"]
    lines = [
        f"extract   {extract['more']['conversations']:,} conversations, {_count(extract['tokens'])} tokens; a store of "
        f"{_size(extract['disk_bytes'])} at most{_time(extract)}",
        f"train     {_count(train['tokens'])} tokens, {_count(train['more']['parameters_trained'])} parameters{_time(train)}",
        f"convert   {_size(convert['disk_bytes'])}",
    ]
    if "evaluate" in stages:
        lines.append(f"evaluate  {_count(stages['evaluate']['tokens'])} tokens{_time(stages['evaluate'])}")
    if plan["total_hours"] is not None:
        hardware = plan["assumptions"]["hardware"]
        lines.append(f"together  {_duration(plan['total_hours'])} on {hardware['count']} {hardware['device']}")
    return lines


def report(plan: dict[str, Any]) -> Iterable[str]:
    """Everything, line by line: the summary, work and memory of each stage, and what it all rests on."""
    yield f"{plan['run']}: {plan['target']['name']}, {_count(plan['target']['parameters'])} parameters"
    yield from (f"  {line}" for line in summary(plan))
    for name, stage in plan["stages"].items():
        if not stage["memory_bytes"]:
            continue
        needed, limit = sum(stage["memory_bytes"].values()), stage["memory_limit"]
        yield f"{name}: {stage['flop']:.2g} FLOP; memory of a device {_memory(needed, limit)}"
        if "devices" in stage["more"]:
            yield f"  {stage['more']['devices']}"
        yield from (f"  {part}: {size / _GIB:.3f} GiB" for part, size in stage["memory_bytes"].items() if size)
        yield from (f"  {part}: {_duration(seconds / 3600)}" for part, seconds in stage["seconds"].items())
        if start := stage["more"].get("start"):
            yield f"  the start, on one process: {start['flop']:.2g} FLOP; memory {_memory(start['memory_bytes'], limit)}"
    yield "assumed (section `plan` of the recipe):"
    for key, value in plan["assumptions"].items():
        if key not in ("hardware", "target_config") and value is not None:
            yield f"  {key.replace('_', ' ')}: {value:g}"
    for key, value in (plan["assumptions"]["hardware"] or {}).items():
        if value is not None:
            yield f"  {key.replace('_', ' ')}: {value if isinstance(value, str) else format(value, 'g')}"


def _memory(needed: int, limit: int | None) -> str:
    room = f" of {limit / _GIB:.1f}" if limit else ""
    fits = ", which is TOO MUCH" if limit and needed > limit else ""
    return f"{needed / _GIB:.2f}{room} GiB{fits}"


def _time(stage: dict[str, Any]) -> str:
    if stage["hours"] is None:
        return ""
    longest = max(stage["seconds"], key=lambda part: stage["seconds"][part])
    return f"; {_duration(stage['hours'])}, mostly {longest}"


def _duration(hours: float) -> str:
    if hours >= 2:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours * 60 >= 10 else f"{hours * 60:.1f} minutes"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def _count(number: float) -> str:
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.0f}"


def _size(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"
