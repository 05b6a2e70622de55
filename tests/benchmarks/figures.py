"""A benchmark's figure: what was measured, which way is better, and the bar that it must reach."""

from __future__ import annotations

import statistics
from typing import Any, Literal

Direction = Literal["higher", "lower"]
Figure = dict[str, Any]


def figure(
    runs: list[float], unit: str, against: str, *, direction: Direction | None = None, bar: float | None = None
) -> Figure:
    """An entry of `runs/bench/results.json`.

    Args:
        runs: what each run found; the figure's value is their median.
        unit: of the value, for people.
        against: what it is set against, for people.
        direction: whether higher or lower is better; None where neither is.
        bar: the worst value that passes; None for a figure that is there to be known.

    Returns:
        `value`, `unit`, `runs`, `against`, `direction`, `bar`, `passed` (None without a bar), and the bar once more as `limit`,
        the name that results had for it first.

    Raises:
        ValueError: a bar without a direction says nothing.
    """
    if bar is not None and direction is None:
        raise ValueError(f"a bar of {bar} {unit} needs a direction")
    value = statistics.median(runs)
    passed = None
    if bar is not None:
        passed = bool(value >= bar if direction == "higher" else value <= bar)  # false for NaN either way
    return {
        "value": value, "unit": unit, "runs": runs, "against": against, "limit": bar, "direction": direction, "bar": bar,
        "passed": passed,
    }  # fmt: skip


def missed(figures: dict[str, Figure]) -> list[str]:
    """The names of the figures that miss their bars."""
    return [name for name, entry in figures.items() if entry["passed"] is False]


def table(figures: dict[str, Figure]) -> list[str]:
    """A line a figure: passed or missed, name, value, bar, unit."""
    signs = {"higher": "at least", "lower": "at most"}
    rows = [
        (
            {True: "passed", False: "MISSED", None: ""}[entry["passed"]],
            name,
            f"{entry['value']:.4g}",
            "" if entry["bar"] is None else f"{signs[entry['direction']]} {entry['bar']:.4g}",
            entry["unit"],
        )
        for name, entry in figures.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
