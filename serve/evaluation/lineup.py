"""Which engines are up together, and on which GPUs.

Engines that are compared alternate, so they should all be up at once. On a CPU they are; on GPUs if they fit. Otherwise they come in
groups, the baseline always up and as many others beside it as there is room for, so that every ratio over the baseline is still of
engines that alternated.
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
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.target.info import TargetInfo

_WARM_UP_TOKENS = 8

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Place:
    """Where one engine runs."""

    gpus: tuple[str, ...]
    """As in CUDA_VISIBLE_DEVICES; empty on a CPU."""
    memory_share: float
    """Its part of the memory that the recipe grants."""


@dataclass(frozen=True)
class Placement:
    """The room that this machine has for engines that are compared."""

    sets: tuple[tuple[str, ...], ...] = ()
    """Sets of GPUs, each of the size that an engine is split over; empty on a CPU."""
    on_each: int = 0
    """Engines that fit side by side on each set."""

    @property
    def at_once(self) -> int | None:
        """Engines that can be up together; None if any number can."""
        return len(self.sets) * self.on_each if self.sets else None

    def places(self, count: int, start: int = 0) -> list[Place]:
        """Places for `count` engines that are up together, on as few GPUs as hold them.

        Engines that are compared share a chip if they fit; if not, each moves to another chip at every engine start, so that a GPU
        that is faster than its neighbor shows as noise, not as a speedup.

        Args:
            count: no more than `at_once`.
            start: number of the engine start, from 0.
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
    """The room for engines of one target: any number on a CPU; on GPUs by the memory that an engine needs.

    Args:
        engine: how the recipe runs vLLM.
        target: what all of them serve.
        speculative: vLLM's `speculative_config` of each; None for the baseline.
        dtypes: what they compute in.
        tokens: room that each gets in its KV cache.
        at_least: room that each must have if two do not fit otherwise; in a larger batch some answers then wait for others.
        smaller: the recipe's key that lowers it, for the error.

    Raises:
        UserError: there are too few GPUs for one engine, or too little memory for two.
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
    """The room on these GPUs for engines with these needs.

    Raises:
        UserError: as in `find_placement`.
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
            f"The baseline of {target} and an engine that speculates beside it do not fit on this machine: an "
            f"engine needs about {largest.total / GIB:.1f} GiB on each of its GPUs ({largest.in_words()}), and "
            f"engine.gpu_memory_utilization grants {smallest * grants / GIB:.1f} of {smallest / GIB:.1f} GiB on "
            f"{'the one GPU' if len(gpus) == 1 else f'each of the {len(gpus)} GPUs'} here. Lower {smaller} or "
            "engine.max_model_len, which the KV cache follows, split the target over more GPUs (engine.tensor_parallel_size), or "
            "make more of them visible (CUDA_VISIBLE_DEVICES)."
        )
    return found


def _drafter_bytes(speculative: Mapping[str, Any] | None, dtype: str) -> int:
    """Bytes of the weights that speculation adds; 0 if there are none, or they are part of the target's files."""
    return weight_bytes(Path(speculative["model"]), dtype) if speculative and "model" in speculative else 0


def groups(keys: Sequence[Key], baseline_of: Callable[[Key], Key], at_once: int | None) -> list[list[Key]]:
    """Engines that are up together, each group's baseline first.

    Args:
        keys: of all engines that are compared.
        baseline_of: the baseline of each; of a baseline, itself.
        at_once: engines that can be up together, two or more; None if any number can.
    """
    if at_once is None or len(keys) <= at_once:
        return [list(keys)]
    found: list[list[Key]] = []
    for baseline in dict.fromkeys(baseline_of(key) for key in keys):
        others = [key for key in keys if key != baseline and baseline_of(key) == baseline]
        firsts = range(0, max(1, len(others)), at_once - 1)
        found += [[baseline, *others[first : first + at_once - 1]] for first in firsts]
    return found


def engine_starter(
    log_dir: Path, *, warm_up: Sequence[int] | None = None
) -> Callable[[list[EngineSpec]], list[EngineHost]]:
    """Starts engines with a progress bar and returns them ready.

    Args:
        log_dir: for the engines' logs.
        warm_up: a prompt that each answers once: first calls allocate and choose kernels.
    """

    def start(specs: list[EngineSpec]) -> list[EngineHost]:
        with Bar("start engines", total=len(specs), unit="engines") as bar:
            hosts = start_engines(specs, log_dir, on_ready=bar.update)
        if warm_up is None:
            return hosts
        try:
            for host in hosts:
                host.generate([warm_up], max_tokens=_WARM_UP_TOKENS)
        except BaseException:
            for host in hosts:
                host.close()
            raise
        return hosts

    return start


class Lineup(Generic[Key]):
    """The engines of one engine start; `close` ends them.

    Args:
        placement: the machine's room for them.
        start: starts engines and returns them ready, in order (`engine_starter`).
        number: of the engine start, from 0.
    """

    def __init__(
        self, placement: Placement, start: Callable[[list[EngineSpec]], Sequence[EngineHost]], number: int = 0
    ) -> None:
        self._placement, self._start, self._number = placement, start, number
        self._up: dict[Key, tuple[int, EngineHost]] = {}  # with its slot, its place among those that are up together

    def turns(
        self, specs: Mapping[Key, EngineSpec], baseline_of: Callable[[Key], Key]
    ) -> Iterator[dict[Key, EngineHost]]:
        """Groups of engines that are up together, until each was in one. The last group stays up.

        Engines that are up already, also from an earlier call, are not started again; those outside the next group end before it
        starts.

        Args:
            specs: by key; where each runs is decided here.
            baseline_of: as in `groups`.
        """
        every = groups(list(specs), baseline_of, self._placement.at_once)
        places = self._placement.places(max(map(len, every)), self._number)
        for group in every:
            for key in [key for key in self._up if key not in group]:
                self._up.pop(key)[1].close()
            taken = {slot for slot, _ in self._up.values()}
            free = [slot for slot in range(len(group) + len(taken)) if slot not in taken]
            new = dict(zip([key for key in group if key not in self._up], free, strict=False))
            hosts = self._start([_placed(specs[key], places[slot % len(places)]) for key, slot in new.items()])
            self._up |= {key: (new[key], host) for key, host in zip(new, hosts, strict=True)}
            yield {key: self._up[key][1] for key in group}

    def restart(self, number: int) -> None:
        """End the engines; those of `turns` from here on are of engine start `number`."""
        self.close()
        self._number = number

    def close(self) -> None:
        for _, host in self._up.values():
            host.close()
        self._up = {}


def _placed(spec: EngineSpec, where: Place) -> EngineSpec:
    return replace(spec, gpus=where.gpus, memory_share=where.memory_share)
