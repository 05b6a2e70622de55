"""Speedups by arithmetic: steps that take as long as their bytes or FLOP (Williams et al., 2009), whichever is more."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.config.methods import TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.data.turns import Turn
from draftsmith.engine.memory import cache_bytes, matrix_weights, weight_bytes
from draftsmith.engine.speculation import drafter_split, longest_draft, serving_spec
from draftsmith.engine.step_cost import EngineStep, decoding_seconds, target_sizes
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.serve.speculator import Speculator
from draftsmith.target.info import TargetInfo

_HEAD, _EMBEDDING = ("*lm_head.*",), ("*embed_tokens.weight",)


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
    drafter = _drafter(recipe, target, speculator)

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

    def drafting(batch: int, k: int) -> float:
        return sum(
            decoding_seconds(hardware, flop=2 * batch * multiplied, bytes_read=read, devices=drafter.devices)
            for read, multiplied in drafter.passes(k)
        )

    return {
        batch: {
            k: length * seconds(batch, 1) / (seconds(batch, 1 + k) + drafting(batch, k))
            for k, length in lengths.items()
        }
        for batch in recipe.tune.concurrency
    }


@dataclass(frozen=True)
class _Weights:
    """Weights of a drafter that are read together."""

    read: int = 0
    """Bytes."""
    multiplied: int = 0
    """Weights of matrices, each of which multiplies a row once."""


@dataclass(frozen=True)
class _Drafter:
    """What is read and computed for a draft, as vLLM drafts. Attention to the text, which is little beside the target's, is not counted."""

    layers: _Weights = _Weights()
    head: _Weights = _Weights()
    """The vocabulary head, where it is applied to the rows alone that a draft token is predicted from."""
    per_token: _Weights = _Weights()
    """Read and multiplied once per draft token, after a single pass."""
    in_parallel: bool = False
    """All draft tokens come from a single forward pass."""
    one_position: bool = False
    """See `ServingSpec.reads_one_position`."""
    adds_rows: bool = False
    """The single pass has the rows of the target's step and one more for each draft token after the first."""
    devices: int = 1
    """GPUs that it is split over."""

    def passes(self, k: int) -> list[tuple[int, int]]:
        """The forward passes of a draft of K tokens: bytes that each reads, and weights times the rows that they multiply, for each sequence."""
        # The target's step has K + 1 rows, of which rejected ones are padding in the drafter's first pass (vllm/v1/spec_decode/llm_base_proposer.py).
        first = 1 if self.one_position else 2 * k if self.adds_rows else k + 1
        read = self.layers.read + self.head.read
        if not self.in_parallel:
            rows = [first] + [1] * (k - 1)
            return [(read, self.layers.multiplied * each + self.head.multiplied) for each in rows]
        whole = self.layers.multiplied * first + self.head.multiplied * k
        return [(read, whole)] + [(self.per_token.read, self.per_token.multiplied)] * k


def _drafter(recipe: Recipe, target: TargetInfo, speculator: Speculator) -> _Drafter:
    """The weights by when they are read: once for all tokens of a draft, as those of a block or of heads for each position, or for each token, as
    of one module for all positions."""
    directory, spec, config = speculator.drafter_dir, None, {}
    if not speculator.own:
        config = speculator.config(target, recipe.engine.tensor_parallel_size) or {}
        if "model" not in config:  # lookup, or the target's own layers, which are small beside it
            return _Drafter()
        directory = Path(config["model"])
    if isinstance(speculator.method, TrainedDrafter):
        spec = serving_spec(directory)

    def weights(only: Sequence[str] | None = None, *, but: Sequence[str] = ()) -> _Weights:
        read = weight_bytes(directory, recipe.target.dtype, only=only)
        read -= weight_bytes(directory, recipe.target.dtype, only=but)
        return _Weights(read, matrix_weights(directory, only=only) - matrix_weights(directory, only=but))

    if spec is None:  # a whole model, whose head may be its embedding
        head, parallel = weights(_HEAD), bool(config.get("parallel_drafting"))
        head = head if head.read else weights(_EMBEDDING)
        devices = drafter_split(config, recipe.engine.tensor_parallel_size)
        layers = weights(but=(*_HEAD, *_EMBEDDING))
        return _Drafter(layers, head, in_parallel=parallel, adds_rows=parallel, devices=devices)
    devices = 1 if spec.whole_on_each_gpu else recipe.engine.tensor_parallel_size
    if spec.weights_per_token:
        whole, count = weights(but=spec.rows_read), longest_draft(directory) or 1
        return _Drafter(_Weights(whole.read // count, whole.multiplied // count), one_position=True, devices=devices)
    if spec.reads_one_position:
        return _Drafter(weights(but=spec.rows_read), in_parallel=spec.single_pass, one_position=True, devices=devices)
    head = weights(_HEAD)
    if spec.shares_embedding and not head.read:
        # vLLM gives it the target's head.
        number = getattr(torch, recipe.target.dtype).itemsize
        size = target.vocab_size * target.hidden_size
        head = _Weights(size * number, size)
    return _Drafter(
        weights(but=(*_HEAD, *spec.rows_read, *spec.read_per_token)),
        head,
        weights(spec.read_per_token),
        in_parallel=spec.single_pass,
        adds_rows=spec.parallel_drafting,
        devices=devices,
    )
