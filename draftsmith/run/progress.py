"""Progress of long work: a live bar on a terminal, a line from time to time elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True)
"""Output for people goes to stderr; stdout is for `--json`."""

_SECONDS_BETWEEN_LINES = 15.0


class Bar:
    """`with Bar("extract", total=400, unit="prompts") as bar: bar.update(done, tokens_per_second=180)`.

    Where several processes do the same work, only one of their bars is `shown`.
    """

    def __init__(self, name: str, *, total: int, unit: str, done: int = 0, shown: bool = True) -> None:
        self._name, self._total, self._unit, self._done = name, total, unit, done
        self._figures = ""
        self._last_line = time.monotonic()
        self._live: Progress | None = None
        self._shown = shown
        if shown and console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[unit]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._task = self._live.add_task(name, total=total, completed=done, unit=unit, figures="")

    def __enter__(self) -> Bar:
        if self._live:
            self._live.start()
        elif self._shown:
            console.print(f"{self._name}: {self._done}/{self._total} {self._unit}", highlight=False)
        return self

    def update(self, done: int, **figures: float | str) -> None:
        """Report that `done` of the total are done, with figures to show beside the bar."""
        self._done = done
        self._figures = "  ".join(
            f"{key.replace('_', ' ')} {value if isinstance(value, str) else f'{value:.4g}'}"
            for key, value in figures.items()
        )
        if self._live:
            self._live.update(self._task, completed=done, figures=self._figures)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._print_line()

    def step(self, **figures: float | str) -> None:
        """Report that one more is done."""
        self.update(self._done + 1, **figures)

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        if self._shown:
            console.print(f"{self._name}: {self._done}/{self._total} {self._unit}  {self._figures}", highlight=False)

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        else:
            self._print_line()
