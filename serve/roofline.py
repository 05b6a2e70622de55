"""Speedups by arithmetic: steps that take as long as their bytes or FLOP (Williams et al., 2009), whichever is more."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from draftsmith.config.methods import TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn
from draftsmith.engine.memory import cache_bytes, weight_bytes
from draftsmith.engine.speculation import longest_draft, serving_spec
from draftsmith.engine.step_cost import EngineStep, target_sizes
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.serve.speculator import Speculator
from draftsmith.target.info import TargetInfo


def roofline(
    recipe: Recipe, target: TargetInfo, speculator: Speculator, prompts: Sequence[Turn], lengths: Mapping[int, float]
) -> dict[int, dict[int, float]] | None:
    """Speedup by batch size and K on the hardware of the recipe's `plan`, from the acceptance length by K; None if it names none, or
    the target's size is unknown."""
    hardware = recipe.plan.hardware if recipe.plan else None
    if hardware is None:
        return None
    try:
        sizes = target_sizes(
            target.config,
            quantization=recipe.engine.options.get("quantization"),
            trust_remote_code=target.trust_remote_code,
        )
    except UserError as reason:  # what was measured is not lost for it
        console.print(f"tune: no roofline: {reason}", highlight=False, soft_wrap=True)
        return None
    number = getattr(torch, recipe.target.dtype).itemsize
    context = statistics.mean(len(turn.token_ids) for turn in prompts) + recipe.tune.tokens / 2
    once, per_token = _drafter_bytes(recipe, target, speculator)

    def seconds(batch: int, tokens: int) -> float:
        step = EngineStep(
            sizes,
            number,
            recipe.engine.tensor_parallel_size,
            batch,
            context,
            tokens=tokens,
            cached=cache_bytes(recipe.engine, recipe.target.dtype),
        )
        return step.seconds(hardware)

    def drafting(k: int) -> float:
        return (once + k * per_token) / (hardware.memory_gb_per_second * 1e9 * hardware.decode_utilization)

    return {
        batch: {k: length * seconds(batch, 1) / (seconds(batch, 1 + k) + drafting(k)) for k, length in lengths.items()}
        for batch in recipe.tune.concurrency
    }


def _drafter_bytes(recipe: Recipe, target: TargetInfo, speculator: Speculator) -> tuple[int, int]:
    """Bytes of the weights that are read once for all tokens of a draft, as those of a block or of heads for each position, and of those that
    are read for each token, as of one module for all positions."""
    directory, spec = speculator.drafter_dir, None
    if not speculator.own:
        config = speculator.config(target, recipe.engine.tensor_parallel_size) or {}
        if "model" not in config:  # lookup, or the target's own layers, which are small beside it
            return 0, 0
        directory = Path(config["model"])
    if isinstance(speculator.method, TrainedDrafter):
        spec = serving_spec(directory)
    size = weight_bytes(directory, recipe.target.dtype)
    if spec is None:
        return 0, size
    size -= weight_bytes(directory, recipe.target.dtype, only=spec.rows_read)
    if spec.shares_embedding and not weight_bytes(directory, recipe.target.dtype, only=("*lm_head.*",)):
        # vLLM gives it the target's head, of which each GPU reads its part.
        number = getattr(torch, recipe.target.dtype).itemsize
        size += target.vocab_size * target.hidden_size * number // recipe.engine.tensor_parallel_size
    if spec.weights_per_token:
        return 0, size // (longest_draft(directory) or 1)
    if not spec.single_pass:
        return 0, size
    per_token = weight_bytes(directory, recipe.target.dtype, only=spec.read_per_token)
    return size - per_token, per_token
