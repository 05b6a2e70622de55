"""Which engines are up together, and where: the baseline and one other at a time.

What is compared alternates, so it has to be up at once, and every engine holds the target's weights and a KV cache of its own. Two
engines, whatever a recipe compares, are what a machine must hold: the baseline stays up and the others come and go beside it, so that
every ratio over the baseline is of engines that alternated. The drafter at every K is one engine where vLLM can change K without
a change of what a step costs (`serves_every_k`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from draftsmith.config import recipe
from draftsmith.config.methods import Method
from draftsmith.engine import environment
from draftsmith.engine.environment import Gpu
from draftsmith.engine.fit import require_two_engines
from draftsmith.engine.memory import GIB, EngineMemory, engine_memory, side_by_side, weight_bytes
from draftsmith.engine.quantization import require_drafter_dtype, require_quantization
from draftsmith.engine.speculation import drafter_split, drafts_fixed_k, has_8_bit_weights
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, SharedEngine, start_engines
from draftsmith.target.info import TargetInfo

_WARM_UP_TOKENS = 8

Key = TypeVar("Key", bound=Hashable)


# ---- where ----


@dataclass(frozen=True)
class Place:
    """Where one engine runs."""

    gpus: tuple[str, ...]
    """As in CUDA_VISIBLE_DEVICES; empty on a CPU."""
    memory_share: float
    """Its part of the memory that the recipe grants."""


@dataclass(frozen=True)
class Placement:
    """The room that this machine has for two engines."""

    sets: tuple[tuple[str, ...], ...] = ()
    """Sets of GPUs, each of the size that an engine is split over; empty on a CPU."""
    together: bool = True
    """Whether a set holds both."""

    def places(self, start: int = 0) -> list[Place]:
        """Places for two engines that are up together, on as few GPUs as hold them.

        Engines that are compared share a chip if they fit; if not, each moves to another chip at every engine start, so that a GPU
        that is faster than its neighbor shows as noise, not as a speedup.

        Args:
            start: number of the engine start, from 0.
        """
        if not self.sets:
            return [Place((), 0.5)] * 2
        if self.together:
            return [Place(self.sets[start % len(self.sets)], 0.5)] * 2
        return [Place(self.sets[(slot + start) % len(self.sets)], 1.0) for slot in range(2)]


def find_placement(
    engine: recipe.EngineConfig,
    target: TargetInfo,
    speculative: Sequence[Mapping[str, Any] | None],
    *,
    dtypes: Sequence[str],
    room: tuple[int, int],
    at_least: tuple[int, int],
    smaller: str,
) -> Placement:
    """The room for the baseline of a target and one other engine.

    Args:
        engine: how the recipe runs vLLM.
        target: what all of them serve.
        speculative: vLLM's `speculative_config` of each engine; None for the baseline.
        dtypes: what they compute in.
        room: sequences that each is to hold in its KV cache at once, on a GPU, and the tokens of each of them.
        at_least: the same for what each must hold if two do not fit otherwise; in a larger batch some answers then wait for others.
        smaller: the recipe's key that lowers it, for the error.

    Raises:
        UserError: vLLM cannot divide the target as asked, or not run it in its form, there are too few GPUs for one engine, or too little memory for two.
    """
    environment.require_parallelism(engine, target.config)
    for dtype in dtypes:
        require_quantization(engine, target.config, target=target.name, dtype=dtype)
        for one in speculative:
            if one and _has_quantized_weights(one):
                require_drafter_dtype(dtype, drafter=f"in {one['model']}")
    quantization = engine.options.get("quantization")
    targets = {dtype: weight_bytes(target.path, dtype, quantization) for dtype in dtypes}
    found = environment.gpus()
    if not found:
        for dtype in dtypes:
            require_two_engines(
                engine,
                target.config,
                target=target.name,
                target_bytes=targets[dtype],
                drafter_bytes=max(_drafter_bytes(one, dtype) for one in speculative),
                dtype=dtype,
            )
        return Placement()

    def needs(sequences: int, length: int) -> list[EngineMemory]:
        return [
            engine_memory(
                target.config,
                target_bytes=targets[dtype],
                drafter_bytes=_drafter_bytes(one, dtype),
                dtype=dtype,
                tokens=max(sequences * length, engine.max_model_len),
                engine=engine,
                sequences=sequences,
                drafter_split=drafter_split(one or {}, engine.tensor_parallel_size),
            )
            for dtype in dtypes
            for one in speculative
        ]

    try:
        return place(engine, found, needs(*room), target=target.name, smaller=smaller)
    except UserError:
        return place(engine, found, needs(*at_least), target=target.name, smaller=smaller)


def place(
    engine: recipe.EngineConfig, gpus: Sequence[Gpu], needs: Sequence[EngineMemory], *, target: str, smaller: str
) -> Placement:
    """The room on these GPUs for two engines with these needs. Ray chooses GPUs itself, and gives an engine all of each.

    Raises:
        UserError: as in `find_placement`.
    """
    split, grants = engine.tensor_parallel_size, engine.gpu_memory_utilization
    smallest = min(gpu.memory_bytes for gpu in gpus)
    on_each = side_by_side(needs, smallest, grants)
    names = [gpu.name for gpu in gpus]
    sets = tuple(tuple(names[first : first + split]) for first in range(0, len(names) - split + 1, split))
    if engine.on_ray:
        sets, on_each = ((), ()), min(on_each, 1)
    if on_each * len(sets) < 2:
        largest = max(needs, key=lambda need: need.total)
        raise UserError(
            f"The baseline of {target} and an engine that speculates beside it do not fit on this machine: an "
            f"engine needs about {largest.total / GIB:.1f} GiB on each of its GPUs ({largest.in_words()}), and "
            f"engine.gpu_memory_utilization grants {smallest * grants / GIB:.1f} of {smallest / GIB:.1f} GiB on "
            f"{'the one GPU' if len(gpus) == 1 else f'each of the {len(gpus)} GPUs'} here. Lower {smaller} or "
            "engine.max_model_len, which the KV cache follows, split the target over more GPUs (engine.tensor_parallel_size), or "
            "make more of them visible (CUDA_VISIBLE_DEVICES)."
        )
    return Placement(sets, together=on_each >= 2)


def _drafter_bytes(speculative: Mapping[str, Any] | None, dtype: str) -> int:
    """Bytes of the weights that speculation adds; 0 if there are none, or they are part of the target's files."""
    return weight_bytes(Path(speculative["model"]), dtype) if speculative and "model" in speculative else 0


def _has_quantized_weights(speculative: Mapping[str, Any]) -> bool:
    drafter = Path(speculative.get("model", ""))
    return (drafter / "config.json").is_file() and has_8_bit_weights(drafter)


# ---- which ----


def serves_every_k(method: Method, engine: recipe.EngineConfig) -> bool:
    """Whether an engine that drafts K tokens can also draft fewer, as one that was started with fewer does.

    Some methods have a fixed K. CUDA graphs are captured for the batches of one K; with other numbers of tokens a step is padded
    to a larger graph, or runs without one.
    """
    return not drafts_fixed_k(method) and (environment.is_cpu() or bool(environment.resolved(engine).enforce_eager))


def groups(specs: Mapping[Key, EngineSpec], baseline_of: Callable[[Key], Key]) -> list[list[Key]]:
    """What is asked together: a baseline, and the variants of one other engine.

    Args:
        specs: of all that is compared; each baseline with at least one other.
        baseline_of: the baseline of each; of a baseline, itself.
    """
    found: dict[tuple[Key, str], list[Key]] = {}
    for key, spec in specs.items():
        if (baseline := baseline_of(key)) != key:
            found.setdefault((baseline, spec.name), [baseline]).append(key)
    return list(found.values())


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
    """The engines that are up, two at most; `close` ends them.

    Args:
        placement: the machine's room for them.
        start: starts engines and returns them ready, in order (`engine_starter`).
    """

    def __init__(self, placement: Placement, start: Callable[[list[EngineSpec]], Sequence[EngineHost]]) -> None:
        self._placement, self._start, self._number = placement, start, 0
        self._up: dict[str, tuple[int, EngineHost]] = {}  # by name, with the index of its place
        self.peak = 0
        """Most engines that were up at a time."""

    def turns(
        self, specs: Mapping[Key, EngineSpec], baseline_of: Callable[[Key], Key]
    ) -> Iterator[dict[Key, EngineHost]]:
        """Groups of what is asked together, until each was in one. The engines of the last group stay up.

        Engines that are up already, also from an earlier call, are not started again: what they serve comes first, and a baseline's groups
        follow one another. Engines outside the next group end before its start.

        Args:
            specs: by key; where each runs is decided here.
            baseline_of: as in `groups`.
        """
        every = groups(specs, baseline_of)
        order = list(dict.fromkeys(group[0] for group in every))

        def rank(group: list[Key]) -> tuple[bool, int, bool]:
            baseline, other, *_ = (specs[key].name in self._up for key in group)
            return not baseline, order.index(group[0]), not other

        every.sort(key=rank)
        places = self._placement.places(self._number)
        for group in every:
            wanted = {specs[key].name: specs[key] for key in group}
            for name in [name for name in self._up if name not in wanted]:
                self._up.pop(name)[1].close()
            taken = {slot for slot, _ in self._up.values()}
            free = [slot for slot in range(len(places)) if slot not in taken]
            new = dict(zip(free, [spec for name, spec in wanted.items() if name not in self._up], strict=False))
            hosts = self._start([_placed(spec, places[slot]) for slot, spec in new.items()]) if new else []
            self._up |= {spec.name: (slot, host) for (slot, spec), host in zip(new.items(), hosts, strict=True)}
            self.peak = max(self.peak, len(self._up))
            yield {key: _asked(self._up[specs[key].name][1], specs[key]) for key in group}

    def restart(self, number: int) -> None:
        """End the engines; those of `turns` from here on are of engine start `number`, from 0."""
        self.close()
        self._number = number

    def close(self) -> None:
        for _, host in self._up.values():
            host.close()
        self._up = {}


def _placed(spec: EngineSpec, where: Place) -> EngineSpec:
    return replace(spec, gpus=where.gpus, memory_share=where.memory_share, k_by_load=None)  # K is set when it is asked


def _asked(host: EngineHost, spec: EngineSpec) -> EngineHost:
    return SharedEngine(host, spec) if spec.k_by_load is not None else host
