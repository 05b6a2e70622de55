"""The configurations whose speed is compared: the baseline and the drafter in every dtype of the machine, and other methods.

Speculation is worth its gain over the fastest baseline of the machine: where bfloat16 is faster than float32, a speedup over
float32 alone says little.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.engine.environment import is_cpu
from draftsmith.run.cuda import native_bfloat16
from draftsmith.serve.evaluation.schema import AtStart, Fidelity, Measured, Throughput, Variant
from draftsmith.serve.evaluation.throughput import paired, speedup, tokens_per_second

AGAIN = ", again"
"""Suffix of the name of a second, identical engine."""
BESIDE = ", beside it"
"""Suffix of the name under which an engine start has the baseline as it ran beside the configuration of the rest of the name, if
not all engines fit at once (`lineup.py`)."""


@dataclass(frozen=True)
class Configuration:
    """One engine whose speed is measured."""

    speculation: Variant
    dtype: str
    """What the target and the drafter compute in."""
    again: bool = False
    """A second, identical engine: its distance from the first is the machine's noise."""

    @property
    def name(self) -> str:
        """Its key in `results.json`."""
        what = "baseline" if self.speculation == 0 else self.speculation
        return f"{f'K = {what}' if isinstance(what, int) else what}, {self.dtype}{AGAIN if self.again else ''}"

    @property
    def file_name(self) -> str:
        """For its engine's log."""
        return "".join(
            one if one.isalnum() or one in ".-" else "-" for one in self.name.replace(" = ", "").replace(", ", "-")
        )

    @property
    def baseline(self) -> Configuration:
        """What it is compared with."""
        return Configuration(0, self.dtype)


def machine_dtypes() -> list[str]:
    """The dtypes that this machine has arithmetic for and that the baseline may be fastest in; never float32 on a GPU."""
    if not is_cpu():
        return ["bfloat16"] if native_bfloat16() else ["float16"]
    # Emulated, bfloat16 has half the speed of float32.
    return ["float32", "bfloat16"] if native_bfloat16() else ["float32"]


def configurations(recipe: Recipe, k: int, *, in_flight: int = 1) -> list[Configuration]:
    """The baseline twice in the recipe's dtype and once in the others, the drafter in each, then other methods.

    Other methods are only measured with one request in flight.
    """
    own = recipe.target.dtype
    others = [dtype for dtype in recipe.evaluate.dtypes or machine_dtypes() if dtype != own]
    return [
        Configuration(0, own),
        Configuration(0, own, again=True),
        Configuration(k, own),
        *(Configuration(speculation, dtype) for dtype in others for speculation in (0, k)),
        *(Configuration(name, own) for name in (recipe.evaluate.methods if in_flight == 1 else ())),
    ]


def beside_baseline(measured: Mapping[Configuration, AtStart]) -> dict[str, AtStart]:
    """The figures of engines that ran together, by name: each with the baseline of its dtype as it ran beside it."""
    found = {one.name: at for one, at in measured.items()}
    for one in measured:
        if one != one.baseline:
            found[one.name + BESIDE] = measured[one.baseline]
    return found


def throughput(
    starts: Sequence[Mapping[str, AtStart]],
    of: Sequence[Configuration],
    *,
    in_flight: int,
    requests: int,
    fidelity: Mapping[str, Fidelity],
) -> Throughput:
    """Combine the figures of all engine starts.

    Args:
        starts: by engine start, then name of the configuration.
        of: the configurations, in the order of `configurations`.
        in_flight: requests in flight.
        requests: counted in each start.
        fidelity: by name of the configuration.
    """
    by_name = {one.name: [start[one.name] for start in starts] for one in of}
    beside = {one.name: [start[one.name + BESIDE] for start in starts] for one in of if one != one.baseline}
    rates = {name: tokens_per_second(measured) for name, measured in by_name.items()}
    _, again, drafter = of[:3]
    baselines = {one.dtype: one.name for one in of if one.speculation == 0 and not one.again}
    fastest_baseline = max(baselines.values(), key=lambda name: rates[name])
    # Other methods are compared, not offered.
    noise = paired(beside[again.name], by_name[again.name])
    own = [one.name for one in of if isinstance(one.speculation, int) and one.speculation]
    fastest_speculative = max(own, key=lambda name: rates[name])
    same_dtype = fastest_baseline in [baselines[one.dtype] for one in of if one.name == fastest_speculative]
    below = beside[fastest_speculative] if same_dtype else by_name[fastest_baseline]
    found: dict[str, Measured] = {
        one.name: {
            "speculation": one.speculation,
            "dtype": one.dtype,
            "tokens_per_second": rates[one.name],
            "first_token_seconds": statistics.median([start["first_token_seconds"] for start in by_name[one.name]]),
            "seconds_per_token": statistics.median([start["seconds_per_token"] for start in by_name[one.name]]),
            "starts": by_name[one.name],
        }
        for one in of
    }
    for one in of:
        if beside.get(one.name, by_name[baselines[one.dtype]]) != by_name[baselines[one.dtype]]:
            found[one.name]["baseline_starts"] = beside[one.name]
    return {
        "in_flight": in_flight,
        "requests": requests,
        "engine_starts": len(starts),
        "configurations": found,
        "speedup": speedup(beside[drafter.name], by_name[drafter.name], noise=noise),
        "speedups": {
            one.name: speedup(beside[one.name], by_name[one.name], noise=noise) for one in of if one.speculation != 0
        },
        "fastest_baseline": fastest_baseline,
        "fastest_speculative": fastest_speculative,
        "speedup_over_fastest_baseline": speedup(below, by_name[fastest_speculative], noise=noise),
        "noise": speedup(beside[again.name], by_name[again.name]),
        "fidelity": dict(fidelity),
    }


def baseline_again_drafter(of: Mapping[str, Any]) -> list[Measured]:
    """Of a `Throughput`, in the recipe's dtype: the baseline, the second, identical engine, and the drafter."""
    every: dict[str, Measured] = of["configurations"]
    again = next(name for name in every if name.endswith(AGAIN))
    baseline = every[again.removesuffix(AGAIN)]
    drafter = next(
        one
        for one in every.values()
        if isinstance(one["speculation"], int) and one["speculation"] and one["dtype"] == baseline["dtype"]
    )
    return [baseline, every[again], drafter]
