"""The store as training reads it: the schedule of steps, micro-batches, and batches for initialization and prediction."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from accelerate import Accelerator

from draftsmith.config.recipe import Recipe
from draftsmith.drafters import drafter_class
from draftsmith.drafters.batch import Batch
from draftsmith.run.errors import UserError
from draftsmith.run.prefetch import prefetched
from draftsmith.store.reader import Store
from draftsmith.train.packing import balance_tokens, pack, pack_epoch, pack_in_order

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")


def store_dirs(recipe: Recipe, run_dir: Path) -> list[Path]:
    """The stores that a run is trained on, its own first. Raises UserError: its own is named among the others."""
    own, others = run_dir / "store", [Path(folder.path) for folder in recipe.train.extra_stores]
    if own.resolve() in [other.resolve() for other in others]:
        raise UserError(
            f"`train.extra_stores` names {own}, the run's own store, on which it is trained anyway. Leave it out."
        )
    return [own, *others]


class ScheduledStep(NamedTuple):
    """An optimizer step, of all processes together."""

    epoch: int
    """From 0."""
    rows: list[int]
    """The sequences to train on, by their numbers in the store."""


class MicroBatch(NamedTuple):
    """What one process runs forward and backward at once, on the CPU."""

    batch: Batch
    idle: bool
    """The step has fewer sequences than micro-batches: this one repeats a sequence and counts for nothing. It is there because
    every process must take part in collective operations."""


@dataclass(frozen=True)
class TrainingData:
    """A store's sequences as one drafter reads them.

    Iterating gives the training sequences one by one, packed and on the device, for `Drafter.init_from_target`; each iteration
    reads them again, since together they may be larger than memory.
    """

    recipe: Recipe
    accelerator: Accelerator
    store: Store
    columns: list[int]
    """Which of the store's states the drafter reads."""
    last_column: int
    """Which of the store's states is the target's last, for the teacher."""
    ttt_steps: int
    """K, the number of chain steps to train."""
    state_scales: Sequence[float] = ()
    """What the states are divided by, one a layer id (`Drafter.scales_states`)."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.in_order(lambda row: self.batch([row]), self.store.rows(held_out=False)):
            yield self.on_device(batch)

    def schedule(self) -> list[ScheduledStep]:
        """Every optimizer step of the run."""
        options = self.recipe.train
        rows = self.store.rows(held_out=False)
        lengths = [self.store.length(row) for row in rows]
        schedule = []
        for epoch in range(math.ceil(options.epochs)):
            steps = pack_epoch(lengths, tokens_per_step=options.tokens_per_step, seed=self.recipe.seed, epoch=epoch)
            share = min(1.0, options.epochs - epoch)
            schedule += [
                ScheduledStep(epoch, [rows[i] for i in step]) for step in steps[: math.ceil(len(steps) * share)]
            ]
        return schedule

    def micro_batches(self, number: int, rows: list[int]) -> list[MicroBatch]:
        """This process's part of the step `number`, which trains on `rows`."""
        options, accelerator = self.recipe.train, self.accelerator
        accumulation = options.gradient_accumulation_steps
        shares = balance_tokens([self.store.length(row) for row in rows], accelerator.num_processes * accumulation)
        first = accelerator.process_index * accumulation
        loaded = []
        for share in shares[first : first + accumulation]:
            share_rows = [rows[i] for i in share] or [min(rows, key=self.store.length)]
            batch = self.batch(share_rows, prompt_weight=options.prompt_loss_weight)
            # What is drawn for a sequence depends on it and on the step, not on the process that trains on it.
            draws = [torch.Generator().manual_seed(step_seed(self.recipe.seed, number, row)) for row in share_rows]
            lengths = [self.store.length(row) for row in share_rows]
            if options.state_dropout:
                states = batch.hidden_states.float().split(lengths)
                dropped = [
                    _dropout(of_row, options.state_dropout, draw) for of_row, draw in zip(states, draws, strict=True)
                ]
                batch = replace(batch, hidden_states=torch.cat(dropped))
            choose = drafter_class(options.drafter.kind).trained_rows
            weights = zip(batch.loss_weights.split(lengths), draws, strict=True)
            trained = [choose(options.drafter, of_row, draw) for of_row, draw in weights]
            batch = replace(batch, loss_weights=torch.cat(trained))
            # Copies from pinned memory are several times as fast, and nothing waits for them.
            if accelerator.device.type == "cuda":
                batch = batch.pinned()
            loaded.append(MicroBatch(batch, idle=not share))
        return loaded

    def batch(self, rows: list[int], *, prompt_weight: float = 0.0) -> Batch:
        """Store rows packed, with the target's last states, on the CPU and as they are stored: what a GPU is sent is then half of what it
        would be in float32."""
        packed = pack(self.store.read(rows), steps=self.ttt_steps, prompt_weight=prompt_weight)
        return packed.with_layers(self.columns, self.last_column)

    def on_device(self, batch: Batch) -> Batch:
        """A batch of `batch` or `micro_batches` on this process's device, its states in float32 and as the drafter reads them."""
        return batch.to(self.accelerator.device).to_dtype(torch.float32).divided(self.state_scales)

    def held_out(self, *, steps: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Held-out sequences (`Store.rows_to_predict`), a few in a batch, for the prediction of acceptance with K = `steps`; each is read when it is due.
        Processes that divide them take every `parts`-th, from number `part` on."""
        rows = self.store.rows_to_predict()[part::parts]
        for batch in pack_in_order(self.in_order(self.store.__getitem__, rows), steps=steps):
            yield batch.with_layers(self.columns, self.last_column).divided(self.state_scales)

    def in_order(self, load: Callable[[Item], Loaded], items: Iterable[Item]) -> Iterator[Loaded]:
        """`load(item)` of each item, some of them early in background threads where that leaves the cores to training."""
        return prefetched(load, items) if _loads_ahead(self.accelerator.device) else map(load, items)


def step_seed(seed: int, step: int, part: int) -> int:
    """Seed of a step's randomness: it depends on the step's number, so that a resumed run draws what an uninterrupted one does.
    `part` is what in the step draws: a store row or a micro-batch."""
    return (seed * 1_000_003 + step) * 4099 + part


def _dropout(states: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    kept = torch.rand(states.shape, generator=generator) >= share
    return states * kept / (1 - share)


def _loads_ahead(device: torch.device) -> bool:
    """Whether to read, decompress and pack the next steps during this one; on a CPU that would take cores from training."""
    return device.type != "cpu"
