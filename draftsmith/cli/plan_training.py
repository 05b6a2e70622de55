"""The cost of training a drafter, and of converting it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from draftsmith.cli.plan_stage import StagePlan, conversation_counts, counted, devices_of, hours_of
from draftsmith.config.hardware import Assumptions
from draftsmith.config.recipe import Recipe
from draftsmith.convert.quantize import SCHEMES, quantized_bytes
from draftsmith.drafters.base import Drafter
from draftsmith.engine.memory import BYTES, GIB
from draftsmith.run import stage
from draftsmith.run.errors import UserError
from draftsmith.train.loss import rows_at_once
from draftsmith.train.muon import bands

_FLOAT32_ON_GPU = 1 / 16
"""A GPU's rate in float32 relative to half precision: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100."""
_FLOAT32_ON_CPU = 1 / 2
"""The same of a CPU with arithmetic for bfloat16: 0.2 of 0.42 TFLOP/s with AVX512-BF16 (docs/log.md)."""


def plan_train(recipe: Recipe, assumed: Assumptions, drafter: Drafter, *, layers: int) -> StagePlan:
    """Estimate training on the training part: its responses, and its prompts where the recipe weighs them (`prompt_loss_weight`).

    Memory is that of one process: float32 parameters with gradients, AdamW's two moments (Muon: one) and the average (`ema`),
    each divided by the number of processes with `fsdp`; the tensors shared with the target and the teacher's head; the
    activations of a micro-batch, inputs and outputs of every matrix product (less with `activation_checkpointing`); and what the loss works
    with. The initialization, before that on one process, has the whole drafter, the shared tensors, and its sums of products.
    """
    options, hardware = recipe.train, assumed.hardware
    steps = drafter.max_draft_tokens or options.ttt_steps
    device = "cuda" if hardware and hardware.memory_gib else "cpu"
    precision = options.precision_on(native_bfloat16=hardware is not None and hardware.native_bfloat16)
    training, _ = conversation_counts(recipe, assumed)
    length = assumed.prompt_tokens + assumed.response_tokens
    others, answered_by_others = _of_other_stores(recipe)
    rows, answers = training * length + others, training * assumed.response_tokens + answered_by_others
    predicting = options.drafter.share_of_positions * (1 if options.prompt_loss_weight else answers / rows)
    tokens = rows * options.epochs
    answered = predicting * tokens
    optimizer_steps = math.ceil(tokens / options.tokens_per_step)
    trained, by_muon = trained_parameters(recipe, drafter)

    def of_trained(of_steps: Callable[[int], float]) -> float:
        """What a row takes, given what it takes with so many draft steps: some kinds train later ones on part of the rows."""
        first = of_steps(1)
        return first + (of_steps(steps) - first) * options.drafter.share_of_later_steps

    flop = answered * of_trained(lambda steps: flop_of_row(recipe, drafter, steps, predicts=True))
    flop += (tokens - answered) * of_trained(lambda steps: flop_of_row(recipe, drafter, steps, predicts=False))
    muon = optimizer_steps * sum(flop_of_muon(rows, columns, precision, device) for rows, columns in by_muon)
    shared = sum(value.numel() for value in drafter.buffers() if value.is_floating_point())
    own = sum(value.numel() for value in drafter.parameters())
    muons = sum(rows * columns for rows, columns in by_muon)
    start = drafter.init_cost(drafter.config, rows=round(rows), answered=round(answers))
    seconds: dict[str, float] = {}
    if hardware:
        rate = hardware.matmul_tflops * 1e12 * hardware.train_utilization
        in_float32 = _FLOAT32_ON_GPU if hardware.memory_gib else _FLOAT32_ON_CPU if hardware.native_bfloat16 else 1
        products = rate * (in_float32 if precision == "float32" else 1)
        row_bytes = layers * drafter.config.hidden_size * BYTES[recipe.target.dtype]
        plain_bytes = tokens * row_bytes
        seconds = {
            "forward and backward passes": flop / (products * hardware.count),
            "Muon": muon / products,  # repeated by every process
            # On one process, while the others wait.
            "initialization": start.flop / (rate * in_float32)
            + start.rows_read * row_bytes / (hardware.load_mb_per_second * 1e6),
            "reading the store": plain_bytes / (hardware.load_mb_per_second * 1e6 * hardware.count),
        }
    processes = hardware.count if hardware else 1
    step_rows = options.tokens_per_step / (processes * options.gradient_accumulation_steps)
    parts, number = processes if options.fsdp else 1, BYTES[precision]
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
                step_rows
                * (
                    predicting * of_trained(lambda steps: kept_by_row(drafter, steps, layers=layers, number=number))
                    + (1 - predicting) * kept_by_row(drafter, 0, layers=layers, number=number)
                )
            ),
            "the loss": int(
                loss_bytes(
                    recipe,
                    drafter,
                    step_rows * predicting,
                    step_rows * predicting * of_trained(float),
                    number=number,
                    device=device,
                )
            ),
        },
        memory_limit=int(hardware.memory_gib * GIB) if hardware and hardware.memory_gib else None,
        flop=start.flop + flop + muon * processes,
        seconds=seconds,
        hours=hours_of(hardware, seconds, beside="reading the store"),
        more={
            "parameters_trained": trained,
            "optimizer_steps": optimizer_steps,
            "initialization": {"flop": start.flop, "memory_bytes": 4 * (own + shared) + start.memory_bytes},
        }
        | devices_of(hardware, counted(processes, "process"), processes),
    )


def _of_other_stores(recipe: Recipe) -> tuple[float, float]:
    """Tokens, and those of answers, in the training parts of `train.extra_stores`: what they record, with all conversations as long as each
    other. Those that are not there count as nothing (`plan.py` says so). Raises UserError: one is no store."""
    tokens = answers = 0.0
    for folder in recipe.train.extra_stores:
        if (record := stage.read(Path(folder.path))) is not None:
            figures = record["figures"]
            if "held_out_sequences" not in figures:
                raise UserError(
                    f"`train.extra_stores` names {folder.path}, which is not a store: it holds what the stage `{record.get('stage')}` made. "
                    "Name the folder `store` of a run."
                )
            training = 1 - figures["held_out_sequences"] / max(1, figures["sequences"])
            tokens += training * figures["tokens"]
            answers += training * figures["response_tokens"]
    return tokens, answers


def plan_convert(recipe: Recipe, drafter: Drafter) -> StagePlan:
    """Estimate conversion: the drafter's tensors in their serving dtype, or in 8 bits."""
    number, shapes = BYTES[recipe.convert.dtype or recipe.target.dtype], drafter.shapes(drafter.config)
    parameters = sum(map(math.prod, shapes.values()))
    size, eight_bits = number * parameters, drafter.vllm_layout.eight_bits
    if recipe.convert.quantize is not None and eight_bits is not None:
        but = eight_bits.floating(rounds_inputs=SCHEMES[recipe.convert.quantize].inputs is not None)
        size = quantized_bytes(shapes, but=but, scale_bytes=number)
    return StagePlan(0, size, {}, None, 0.0, {}, 0.0, {"parameters": parameters})


def trained_parameters(recipe: Recipe, drafter: Drafter) -> tuple[int, list[tuple[int, int]]]:
    """Number of trained parameters, and the shapes of the matrices among them that Muon optimizes."""
    heads, tables = ({id(p) for p in group} for group in (drafter.head_parameters(), drafter.embedding_parameters()))
    frozen = {id(p) for p in drafter.frozen_parameters(recipe.train.drafter)}
    frozen |= set() if recipe.train.train_lm_head else heads
    trained = [p for p in drafter.parameters() if id(p) not in frozen]
    by_muon = [p for p in trained if p.ndim == 2 and id(p) not in heads | tables]
    shapes = [(p.shape[0], p.shape[1]) for p in by_muon] if recipe.train.optimizer == "muon" else []
    return sum(p.numel() for p in trained), shapes


def flop_of_row(recipe: Recipe, drafter: Drafter, steps: int, *, predicts: bool) -> float:
    """FLOP of training on one token: the forward pass, and as many again for each of the gradients of input and weight.

    A token with a loss (`predicts`) goes through the heads at every step (a frozen one has no weight gradient), and once
    through the teacher's head if the target's distribution is trained on, or at every step in blocks, whose draft tokens share no
    teacher's row. Selecting the loss's part of the vocabulary is not
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
    trained = head if recipe.train.train_lm_head and drafter.head_parameters() else vocabulary * _markov_rank(drafter)
    flop += steps * (4 * head + 2 * trained)
    terms = drafter.loss_terms(recipe.train.drafter)
    if terms.targets == "distribution" or terms.variation_weight or terms.confidence_weight:
        flop += 2 * (steps if terms.in_blocks else 1) * vocabulary * config.hidden_size
    if terms.acceptance_alpha is not None:  # the weights take a pass of their own
        flop += 2 * steps * head
    return flop


def flop_of_muon(rows: int, columns: int, precision: Literal["float32", "bfloat16"], device: str) -> float:
    """FLOP of one step of Muon on a matrix, with five iterations (`train/muon.py`). In float32 they work on the Gram matrix: 17
    products of its size, and two with the long side, all but the last of them symmetric, of which a CPU computes a part. In bfloat16 they
    work on the matrix: one and two per iteration."""
    short, long = sorted((rows, columns))
    of_gram, of_matrix = 2.0 * short**3, 2.0 * short * short * long
    if precision == "bfloat16":
        return 5 * of_gram + 10 * of_matrix
    computed = sum((band.stop - band.start) * (short - band.start) for band in bands(short, device)) / short**2
    return computed * (17 * of_gram + of_matrix) + of_matrix


def kept_by_row(drafter: Drafter, steps: int, *, layers: int, number: int) -> float:
    """Bytes that a token keeps until the backward pass: its hidden states, and the inputs and outputs of every product.

    Args:
        steps: draft tokens that are trained from it; 0 for a token of the context alone.
        layers: number of the store's layer ids, read in float32.
        number: bytes of the data type of the products.
    """
    shapes = drafter.shapes(drafter.config)
    numbers = steps * _head_width(drafter)
    for name, (of_context, of_predicting) in drafter.matmul_counts(drafter.config, max(steps, 1)).items():
        numbers += (of_predicting if steps else of_context) * sum(shapes[name])
    return 4.0 * layers * drafter.config.hidden_size + number * numbers


def loss_bytes(
    recipe: Recipe, drafter: Drafter, rows: float, draft_tokens: float, *, number: int, device: str
) -> float:
    """Bytes that the loss works with (`train/loss.py`), beside what the drafter keeps: the teacher's states and the gradient of the head's
    inputs in float32, those inputs in blocks, where they are put into order, and copies of states and inputs in the data type of the
    products, if that is narrower; and a chunk of logits, several times in float32.

    Args:
        rows: of the batch that are drafted from.
        draft_tokens: that are trained. In blocks each has a row of the teacher's; in chains those of one row of the batch share them.
        number: bytes of the data type of the products.
        device: a type of device, by torch's name.
    """
    vocabulary = recipe.train.loss_vocab_size or drafter.config.draft_vocab_size
    vocabulary = min(vocabulary, drafter.config.draft_vocab_size)
    terms = drafter.loss_terms(recipe.train.drafter)
    taught = draft_tokens if terms.in_blocks else rows
    copy = number if number < 4 else 0
    of_states = taught * (4 + copy) * drafter.config.hidden_size
    of_states += draft_tokens * (4 + copy + 4 * terms.in_blocks) * _head_width(drafter)
    mixed = bool(terms.variation_weight or terms.confidence_weight)
    copies = 5 if mixed else 4 if terms.targets == "distribution" else 3
    return of_states + 4.0 * copies * min(taught, rows_at_once(vocabulary, device)) * vocabulary


def _head_width(drafter: Drafter) -> int:
    """Input width of the vocabulary heads, with that of the Markov head, which is in the same product."""
    width = next((head.shape[1] for head in drafter.head_parameters()), drafter.config.hidden_size)
    return width + _markov_rank(drafter)


def _markov_rank(drafter: Drafter) -> int:
    return int(getattr(drafter.config, "markov_rank", 0))
