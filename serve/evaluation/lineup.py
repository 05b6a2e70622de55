"""Which engines are up together, and on which GPUs.

Engines that are compared take turns, so they should all be up at once. On a CPU they are. On GPUs they are where the GPUs hold
them; otherwise they come in groups, the plain engine always up and as many others beside it as there is room for, so that what is
quoted over plain decoding was still measured in turns with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from draftsmith.config import recipe
from draftsmith.engine import environment
from draftsmith.engine.environment import Gpu
from draftsmith.engine.memory import GIB, EngineMemory, engine_memory, side_by_side, weight_bytes
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec
from draftsmith.target.info import TargetInfo

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Place:
    """Where one engine runs."""

    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES has them; empty on a CPU."""
    memory_share: float
    """Its part of what the recipe grants."""


@dataclass(frozen=True)
class Placement:
    """What this machine has for engines that are compared."""

    sets: tuple[tuple[str, ...], ...] = ()
    """GPUs, as many together as an engine is split over; empty on a CPU."""
    on_each: int = 0
    """Engines that fit side by side on each."""

    @property
    def at_once(self) -> int | None:
        """Engines that can be up together; None where any number can."""
        return len(self.sets) * self.on_each if self.sets else None

    def places(self, count: int, start: int = 0) -> list[Place]:
        """Where to put so many engines that are up together.

        On as few GPUs as hold them: what is compared runs on the same chip where it can, and where it cannot, on another one at
        every engine start, so that a GPU that is faster than its neighbor shows as noise and not as a speed-up.

        Args:
            count: no more than `at_once`.
            start: which of the engine starts this is, from 0.
        """
        if not self.sets:
            return [Place((), 1 / count)] * count
        beside = math.ceil(count / math.ceil(count / self.on_each))  # on each of as few as hold them
        return [Place(self.sets[(slot // beside + start) % len(self.sets)], 1 / beside) for slot in range(count)]


def find_placement(
    engine: recipe.EngineConfig,
    target: TargetInfo,
    speculative: Sequence[Mapping[str, Any] | None],
    *,
    dtypes: Sequence[str],
    tokens: int,
    at_least: int,
    smaller: str,
) -> Placement:
    """Room for engines of one target on this machine: any number on a CPU; on GPUs by what an engine needs.

    Args:
        engine: how the recipe runs vLLM.
        target: what all of them serve.
        speculative: vLLM's `speculative_config` of each; None for plain decoding.
        dtypes: what they compute in.
        tokens: that each is to have room for in its KV cache.
        at_least: that each must have room for where two would not fit otherwise; of a batch with more, some answers wait for others.
        smaller: the key of the recipe that makes that less, for the error.

    Raises:
        UserError: there are not enough GPUs for one engine, or not enough memory for two.
    """
    found = environment.gpus()
    if not found:
        return Placement()

    def needs(tokens: int) -> list[EngineMemory]:
        return [
            engine_memory(
                target.config, target_bytes=weight_bytes(target.path, dtype), drafter_bytes=_drafter_bytes(one, dtype),
                dtype=dtype, tokens=max(tokens, engine.max_model_len), gpus=engine.tensor_parallel_size,
            )
            for dtype in dtypes
            for one in speculative
        ]  # fmt: skip

    try:
        return place(engine, found, needs(tokens), target=target.name, smaller=smaller)
    except UserError:
        return place(engine, found, needs(at_least), target=target.name, smaller=smaller)


def place(
    engine: recipe.EngineConfig, gpus: Sequence[Gpu], needs: Sequence[EngineMemory], *, target: str, smaller: str
) -> Placement:
    """Room on these GPUs for engines that need this much.

    Raises:
        UserError: as `find_placement`.
    """
    split, grants = engine.tensor_parallel_size, engine.gpu_memory_utilization
    if split > len(gpus):
        raise UserError(
            f"engine.tensor_parallel_size is {split}, and {len(gpus)} GPUs are visible. Lower it, or make more GPUs visible "
            "(CUDA_VISIBLE_DEVICES)."
        )
    names = [gpu.name for gpu in gpus]
    sets = tuple(tuple(names[first : first + split]) for first in range(0, len(names) - split + 1, split))
    smallest = min(gpu.memory_bytes for gpu in gpus)
    found = Placement(sets, side_by_side(needs, smallest, grants))
    if (found.at_once or 0) < 2:
        largest = max(needs, key=lambda need: need.total)
        raise UserError(
            f"Plain decoding of {target} and speculation beside it, which are measured in turns, do not fit on this machine: an "
            f"engine needs about {largest.total / GIB:.1f} GiB on each of its GPUs ({largest.in_words()}), and "
            f"engine.gpu_memory_utilization grants {smallest * grants / GIB:.1f} of {smallest / GIB:.1f} GiB on "
            f"{'the one GPU' if len(gpus) == 1 else f'each of the {len(gpus)} GPUs'} here. Lower {smaller} or "
            "engine.max_model_len, which the KV cache follows, split the target over more GPUs (engine.tensor_parallel_size), or "
            "make more of them visible (CUDA_VISIBLE_DEVICES)."
        )
    return found


def _drafter_bytes(speculative: Mapping[str, Any] | None, dtype: str) -> int:
    """Of the weights that speculation adds; 0 where it reads none, or they are part of the target's files."""
    return weight_bytes(Path(speculative["model"]), dtype) if speculative and "model" in speculative else 0


def groups(keys: Sequence[Key], plain_of: Callable[[Key], Key], at_once: int | None) -> list[list[Key]]:
    """Which engines are up together, first the plain one that the others are held against.

    Args:
        keys: of all engines that are compared.
        plain_of: the plain engine of each, its own key for a plain one.
        at_once: engines that can be up together, two or more; None where any number can.
    """
    if at_once is None or len(keys) <= at_once:
        return [list(keys)]
    found: list[list[Key]] = []
    for plain in dict.fromkeys(plain_of(key) for key in keys):
        others = [key for key in keys if key != plain and plain_of(key) == plain]
        found += [[plain, *others[first : first + at_once - 1]] for first in range(0, max(1, len(others)), at_once - 1)]
    return found


class Lineup(Generic[Key]):
    """The engines of one engine start. Ends them all with `close`.

    Args:
        placement: what the machine has for them.
        start: starts engines and returns them ready, in order.
        number: which of the engine starts this is, from 0.
    """

    def __init__(
        self, placement: Placement, start: Callable[[list[EngineSpec]], Sequence[EngineHost]], number: int = 0
    ) -> None:
        self._placement, self._start, self._number = placement, start, number
        self._up: dict[Key, tuple[int, EngineHost]] = {}  # with its slot, its place among those that are up together

    def turns(
        self, configs: Mapping[Key, EngineSpec], plain_of: Callable[[Key], Key]
    ) -> Iterator[dict[Key, EngineHost]]:
        """Groups of engines that are up together, until each was in one. The last group stays up.

        Engines that are up already, from an earlier call too, are not started again; those that are not in the next group end
        before it starts.

        Args:
            configs: by key; where each runs is decided here.
            plain_of: as in `groups`.
        """
        every = groups(list(configs), plain_of, self._placement.at_once)
        places = self._placement.places(max(map(len, every)), self._number)
        for group in every:
            for key in [key for key in self._up if key not in group]:
                self._up.pop(key)[1].close()
            taken = {slot for slot, _ in self._up.values()}
            free = [slot for slot in range(len(group) + len(taken)) if slot not in taken]
            new = dict(zip([key for key in group if key not in self._up], free, strict=False))
            hosts = self._start([_placed(configs[key], places[slot % len(places)]) for key, slot in new.items()])
            self._up |= {key: (new[key], host) for key, host in zip(new, hosts, strict=True)}
            yield {key: self._up[key][1] for key in group}

    def close(self) -> None:
        for _, host in self._up.values():
            host.close()
        self._up = {}


def _placed(config: EngineSpec, where: Place) -> EngineSpec:
    return replace(config, gpus=where.gpus, memory_share=where.memory_share)
