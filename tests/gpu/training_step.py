"""A training step at a real target's shape: tokens per second, memory, and what share of the machine's products it reaches.

The plan (`draftsmith run --plan`) says by arithmetic what a step needs; here its FLOP and its memory stand beside what was
measured. States and tokens are random: what is learned does not matter, and no target is needed.
"""

from __future__ import annotations

import json
import math
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.cli.plan_training import flop_of_muon, flop_of_row, plan_train, trained_parameters
from draftsmith.config.hardware import Assumptions
from draftsmith.config.loading import load_recipe
from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class
from draftsmith.drafters.batch import Batch
from draftsmith.run.cuda import native_bfloat16
from draftsmith.store.format import Sequence
from draftsmith.target.downloads import fetch
from draftsmith.target.info import TargetInfo
from draftsmith.target.tensors import TargetTensors
from draftsmith.train.loss import BlockLoss, ChainLoss
from draftsmith.train.optimizers import make_optimizers, set_learning_rates
from draftsmith.train.packing import pack
from tests.gpu.torch_alone import device_of, matmul_rate, seconds_of, wait_for

_ON_GPU = ("recipes/llama-3.1-8b-eagle3.yaml", 4096)
"""Recipe, and rows of a step on one device: its share of the recipe's step on eight."""
_ON_CPU = ("recipes/demo.yaml", 256)
_DSPARK = ("recipes/qwen3-8b-dspark.yaml", "recipes/smollm2-dspark.yaml")
"""On a GPU, and on a CPU."""
_WARMING_UP = 0.1
"""Of the recipe's learning rates: training warms up, and from random weights a whole step overshoots. DSpark's confidence, one number a
draft token that all rows move alike, went from -0.3 to 3.5 where 0.6 was right."""
_DFLASH = "{kind: dflash, num_layers: 2, block_size: 8, passes: 2, draft_vocab_size: 32000}"
_P_EAGLE = "{kind: p_eagle, draft_vocab_size: 32000}"


def adamw(cpu: bool) -> dict[str, str]:
    return _step(cpu, ["train.optimizer=adamw"])


def muon(cpu: bool) -> dict[str, str]:
    return _step(cpu, [])


# What a block costs on a CPU does not matter here, only that all of it runs.
_SMALL = ["train.optimizer=adamw", "train.drafter.draft_vocab_size=512", "train.drafter.num_layers=1"]


def dspark(cpu: bool) -> dict[str, str]:
    return _step(cpu, _SMALL if cpu else [], recipes=_DSPARK, rows=32 if cpu else None, rates=_WARMING_UP)


def dflash(cpu: bool) -> dict[str, str]:
    settings = _SMALL if cpu else [f"train.drafter={_DFLASH}"]
    return _step(cpu, settings, recipes=(_ON_GPU[0], "recipes/smollm2-dflash.yaml"), rows=32 if cpu else None)


def p_eagle(cpu: bool) -> dict[str, str]:
    settings = _SMALL if cpu else [f"train.drafter={_P_EAGLE}"]
    return _step(cpu, settings, recipes=(_ON_GPU[0], "recipes/smollm2-p-eagle.yaml"), rows=32 if cpu else None)


def long(cpu: bool) -> dict[str, str]:
    """A micro-batch of 16k tokens in two documents, whose scores would not fit."""
    rows, length = (64, 32) if cpu else (16384, 8192)
    return _step(cpu, _SMALL if cpu else [], recipes=_DSPARK, rows=rows, length=length, rates=_WARMING_UP)


def _step(
    cpu: bool,
    settings: list[str],
    *,
    recipes: tuple[str, str] = (_ON_GPU[0], _ON_CPU[0]),
    rows: int | None = None,
    length: int | None = None,
    rates: float = 1.0,
) -> dict[str, str]:
    """
    Args:
        recipes: on a GPU, and on a CPU.
        rows: of the step.
        length: of a document; None for what the recipe's plan assumes.
        rates: share of the recipe's learning rates.

    Raises:
        AssertionError: the loss is not finite, or does not fall on a batch that is taken again and again.
    """
    device = device_of(cpu)
    rows = rows or (_ON_CPU if cpu else _ON_GPU)[1]
    narrow = not cpu or native_bfloat16()  # emulated, a step would take minutes
    recipe = load_recipe(
        Path(recipes[cpu]),
        [
            "train.optimizer=muon",
            f"train.precision={'bfloat16' if narrow else 'float32'}",
            f"train.tokens_per_step={rows}",
            "plan.hardware.count=1",
            *settings,
        ],
    )
    assumed = recipe.plan
    assert assumed is not None
    loss = make_loss(recipe, assumed, device)
    drafter, steps = loss.drafter, loss.ttt_steps
    length = length or round(assumed.prompt_tokens + assumed.response_tokens)
    batch = with_trained_rows(recipe, make_batch(drafter, rows, length, round(assumed.prompt_tokens), steps))
    if narrow:  # as a store of the target's states holds them
        batch = batch.to_dtype(torch.bfloat16)
    if device.type == "cuda":
        batch = batch.pinned()
    optimizers = make_optimizers(recipe.train, drafter)
    set_learning_rates(optimizers, rates)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
            value = loss(batch.to(device).to_dtype(torch.float32)).loss
        value.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), recipe.train.max_grad_norm)
        for one in optimizers:
            one.step()
            one.zero_grad()
        return value.detach()

    first = float(step())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(step, device, repeats=2 if cpu else 5)
    peak = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    last = float(step())
    optimizing = seconds_of(lambda: _only_optimizers(optimizers, drafter), device, repeats=2)  # along random gradients
    assert math.isfinite(last), f"the loss is {last}"
    assert last < first, f"the loss of one batch was {first:.3f} at the first step and is {last:.3f} after some"

    flop = flop_of_batch(recipe, drafter, batch)
    trained, matrices = trained_parameters(recipe, drafter)
    flop += sum(flop_of_muon(*shape, "bfloat16" if narrow else "float32", device.type) for shape in matrices)
    rate = matmul_rate(device)
    planned = sum(plan_train(recipe, assumed, drafter, layers=len(drafter.config.layer_ids)).memory_bytes.values())
    return {
        "of": f"{recipe.name}, {rows} rows, {trained / 1e6:.0f} M parameters trained, {steps} draft tokens",
        "tokens per second": f"{rows / seconds:.0f} ({seconds * 1000:.0f} ms a step, the optimizer's {optimizing * 1000:.0f})",
        "share of bfloat16 products": f"{flop / seconds / rate:.2f} ({flop / seconds / 1e12:.3g} of {rate / 1e12:.3g} TFLOP/s)",
        "peak memory": f"{peak / 2**30:.1f} GiB ({planned / 2**30:.1f} by the plan's arithmetic)",
        "loss": f"{first:.3f} to {last:.3f} on one batch",
    }


def start(cpu: bool) -> dict[str, str]:
    """What precedes training: least squares on some of the store, on the device.

    Raises:
        AssertionError: a weight is not finite, or the start changed nothing.
    """
    device = device_of(cpu)
    path, _ = _ON_CPU if cpu else _ON_GPU
    recipe = load_recipe(Path(path))
    assumed = recipe.plan
    assert assumed is not None
    assert assumed.target_config is not None
    drafter, _ = make_drafter(recipe, fetch(assumed.target_config), device)
    _, tensors = make_drafter(recipe, fetch(assumed.target_config), torch.device("cpu"))
    steps = drafter.max_draft_tokens or recipe.train.ttt_steps
    length, prompt = round(assumed.prompt_tokens + assumed.response_tokens), round(assumed.prompt_tokens)
    sequences, rows, answered = 4 if cpu else 64, 0, 0
    batches = []
    for number in range(sequences):
        batch = make_batch(drafter, length, length, prompt, steps, seed=number)
        rows, answered = rows + length, answered + int(batch.loss_weights.sum(1).count_nonzero())
        batches.append(batch.to(device))
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    wait_for(device)
    begun = time.perf_counter()
    drafter.init_from_target(tensors, batches)
    wait_for(device)
    seconds = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    after = dict(drafter.named_parameters())
    assert all(bool(torch.isfinite(value).all()) for value in after.values()), "a weight is not finite"
    changed = sum(not torch.equal(before[name], value) for name, value in after.items())
    assert changed > 1, "the start changed nothing"
    cost = drafter.init_cost(drafter.config, rows=rows, answered=answered)
    found = {
        "of": f"{recipe.name}, {sequences} sequences of {length} tokens, {changed} of {len(after)} weights changed",
        "time": f"{seconds:.1f} s, {cost.flop / seconds / 1e12:.3g} TFLOP/s in float32 by the plan's {cost.flop:.2g} FLOP",
    }
    if device.type == "cuda":
        found["memory beside the drafter"] = (
            f"{peak / 2**30:.1f} GiB ({cost.memory_bytes / 2**30:.1f} by the plan's arithmetic)"
        )
    return found


def _only_optimizers(optimizers: list[torch.optim.Optimizer], drafter: nn.Module) -> None:
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.randn_like(parameter) * 1e-4
    for one in optimizers:
        one.step()


def with_trained_rows(recipe: Recipe, batch: Batch) -> Batch:
    """The batch with weights at the rows that training would draw."""
    kind, draw = drafter_class(recipe.train.drafter.kind), torch.Generator().manual_seed(0)
    parts = batch.loss_weights.split(batch.documents.unique_consecutive(return_counts=True)[1].tolist())
    weights = [kind.trained_rows(recipe.train.drafter, part, draw) for part in parts]
    return replace(batch, loss_weights=torch.cat(weights))


def flop_of_batch(recipe: Recipe, drafter: Any, batch: Batch) -> float:
    """FLOP of a step without the optimizer's, as the plan counts them, for the rows that are drafted from at each draft token."""
    weights = batch.loss_weights > 0
    rows, steps = weights.shape
    in_blocks = drafter.loss_terms(recipe.train.drafter).in_blocks
    reached = [int((weights if in_blocks else weights[:, k:]).any(1).sum()) for k in range(steps)]
    total = (rows - reached[0]) * flop_of_row(recipe, drafter, steps, predicts=False)
    before = 0.0
    for k in range(steps):
        upto = flop_of_row(recipe, drafter, k + 1, predicts=True)
        total, before = total + reached[k] * (upto - before), upto
    return total


def make_loss(recipe: Recipe, assumed: Assumptions, device: torch.device) -> ChainLoss:
    """The recipe's drafter and its loss for a target with random weights."""
    assert assumed.target_config is not None
    drafter, tensors = make_drafter(recipe, fetch(assumed.target_config), device)
    terms = drafter.loss_terms(recipe.train.drafter)
    return (BlockLoss if terms.in_blocks else ChainLoss)(
        drafter,
        teacher_norm=nn.RMSNorm(drafter.config.hidden_size).to(device),
        teacher_head=tensors.lm_head[drafter.draft_token_ids].float(),
        ttt_steps=drafter.max_draft_tokens or recipe.train.ttt_steps,
        ttt_loss_decay=recipe.train.ttt_loss_decay,
        loss=recipe.train.loss,
        loss_vocab_size=recipe.train.loss_vocab_size,
        terms=terms,
    ).to(device)


def make_drafter(recipe: Recipe, target_config: Path, device: torch.device) -> tuple[Any, TargetTensors]:
    """The recipe's drafter on the device, with random weights, and the target's tensors that it shares."""
    from transformers import AutoConfig

    fields = json.loads(target_config.read_text())
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    options, last = recipe.train.drafter, config.num_hidden_layers
    kind = drafter_class(options.kind)
    target = TargetInfo(
        path=Path(),
        name="",
        revision="",
        config_hash="",
        tokenizer_hash="",
        chat_template_hash=None,
        num_hidden_layers=last,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        config=config,
    )
    layers = recipe.extract.layer_ids or (2, last // 2, last)
    wide = min(options.draft_vocab_size or config.vocab_size, config.vocab_size)
    with device:
        table = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16) * 0.02
        tensors = TargetTensors(table, table, torch.ones(config.hidden_size))
        shape = kind.make_config(options, target, kind.layer_ids(options, layers, last), wide)
        drafter = kind.from_target(shape, tensors, torch.arange(wide))
    for head in drafter.head_parameters():
        head.requires_grad_(recipe.train.train_lm_head)
    return drafter, tensors


def make_batch(drafter: Any, rows: int, length: int, prompt: int, steps: int, seed: int = 0) -> Batch:
    """Random states on the host, as in training."""
    config = drafter.config
    generator = torch.Generator().manual_seed(seed)
    sequences: list[Sequence] = []
    left = rows
    while left > 0:
        size = min(length, left)
        ids = torch.randint(0, config.draft_vocab_size, (size + 1,), generator=generator)
        states = torch.randn(size, len(config.layer_ids), config.hidden_size, generator=generator)
        sequences.append(Sequence(len(sequences), False, ids, torch.arange(size + 1) >= min(prompt, size // 2), states))
        left -= size
    last_states = torch.randn(rows, config.hidden_size, generator=generator)
    return replace(pack(sequences, steps=steps), last_states=last_states)
