"""What `draftsmith run --plan` prints of a plan."""

from collections.abc import Iterable
from typing import Any

_GIB = 1024**3


def summary(plan: dict[str, Any]) -> list[str]:
    """One line per stage, as at the top of the recipes that come with Draftsmith."""
    stages = plan["stages"]
    extract, train, convert = stages["extract"], stages["train"], stages["convert"]
    lines = [
        f"extract   {extract['more']['conversations']:,} conversations, {_count(extract['tokens'])} tokens; a store of "
        f"{_size(extract['disk_bytes'])} at most{_time(extract)}",
        f"train     {_count(train['tokens'])} tokens, {_count(train['more']['parameters_trained'])} parameters{_time(train)}",
        f"convert   {_size(convert['disk_bytes'])}",
    ]
    if "evaluate" in stages:
        lines.append(f"evaluate  {_count(stages['evaluate']['tokens'])} tokens{_time(stages['evaluate'])}")
    if plan["total_hours"] is not None:
        hardware = plan["assumptions"]["hardware"]
        lines.append(f"together  {_duration(plan['total_hours'])} on {hardware['count']} {hardware['device']}")
    return lines


def report(plan: dict[str, Any]) -> Iterable[str]:
    """The lines of the full report: the summary, work and memory of each stage, and the assumptions."""
    yield f"{plan['run']}: {plan['target']['name']}, {_count(plan['target']['parameters'])} parameters"
    yield from (f"  {line}" for line in summary(plan))
    for name, stage in plan["stages"].items():
        if not stage["memory_bytes"]:
            continue
        needed, limit = sum(stage["memory_bytes"].values()), stage["memory_limit"]
        yield f"{name}: {stage['flop']:.2g} FLOP; memory of a device {_memory(needed, limit)}"
        if "devices" in stage["more"]:
            yield f"  {stage['more']['devices']}"
        yield from (f"  {part}: {size / _GIB:.3f} GiB" for part, size in stage["memory_bytes"].items() if size)
        if states := stage["more"].get("states_bytes"):
            yield f"  hidden states of unfinished sequences: {states / _GIB:.3f} GiB of each machine's ordinary memory"
        yield from (f"  {part}: {_duration(seconds / 3600)}" for part, seconds in stage["seconds"].items())
        if start := stage["more"].get("initialization"):
            yield f"  initialization, on one process: {start['flop']:.2g} FLOP; memory {_memory(start['memory_bytes'], limit)}"
    if problem := plan.get("misfit"):
        yield f"this machine: {problem}"
    yield "assumed (section `plan` of the recipe):"
    for key, value in plan["assumptions"].items():
        if key not in ("hardware", "target_config") and value is not None:
            yield f"  {key.replace('_', ' ')}: {value:g}"
    for key, value in (plan["assumptions"]["hardware"] or {}).items():
        if value is not None:
            yield f"  {key.replace('_', ' ')}: {value if isinstance(value, str) else format(value, 'g')}"


def _memory(needed: int, limit: int | None) -> str:
    room = f" of {limit / _GIB:.1f}" if limit else ""
    fits = ", which is TOO MUCH" if limit and needed > limit else ""
    return f"{needed / _GIB:.2f}{room} GiB{fits}"


def _time(stage: dict[str, Any]) -> str:
    if stage["hours"] is None:
        return ""
    longest = max(stage["seconds"], key=lambda part: stage["seconds"][part])
    return f"; {_duration(stage['hours'])}, mostly {longest}"


def _duration(hours: float) -> str:
    if hours >= 2:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.0f} minutes" if hours * 60 >= 10 else f"{hours * 60:.1f} minutes"


def _count(number: float) -> str:
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.0f}"


def _size(size: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size / 1e3:.3g} kB"
