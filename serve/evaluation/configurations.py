"""The configurations whose speed is compared: the baseline and the drafter in every dtype of the machine, and other methods.

Speculation is worth its gain over the fastest baseline of the machine: where bfloat16 is faster than float32, a speedup over
float32 alone says little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.config.recipe import Recipe
from draftsmith.engine.environment import is_cpu
from draftsmith.engine.platform import current_platform
from draftsmith.serve.evaluation.schema import (
    AtStart,
    Difference,
    Execution,
    Fidelity,
    Measured,
    Ratio,
    Throughput,
    Variant,
)
from draftsmith.serve.evaluation.throughput import engine_speed, paired, speedup, tokens_per_second
from draftsmith.target.quantization import stated_quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AGAIN = ", again"
"""Suffix of the name of a second, identical engine."""
BESIDE = ", beside it"
"""Suffix of the name under which an engine start has the baseline as it ran beside the configuration of the rest of the name: only two
engines are up at a time (`lineup.py`)."""
SIDE_BY_SIDE = ", side by side"
"""Suffix of the names of two configurations of different dtypes as they ran beside each other."""


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
    def is_drafter(self) -> bool:
        """Whether the run's drafter speculates."""
        return isinstance(self.speculation, int) and self.speculation != 0

    @property
    def baseline(self) -> Configuration:
        """What it is compared with."""
        return Configuration(0, self.dtype)


def machine_dtypes() -> list[str]:
    """The dtypes that this machine has arithmetic for and that the baseline may be fastest in; never float32 on a GPU."""
    if not is_cpu():
        return ["bfloat16"] if current_platform().has_bfloat16() else ["float16"]
    # Emulated, bfloat16 is slower than float32.
    return ["float32", "bfloat16"] if current_platform().has_bfloat16() else ["float32"]


def timed_dtypes(recipe: Recipe, config: PretrainedConfig) -> list[str]:
    """The recipe's `evaluate.dtypes`; by default those of the machine, or a quantized target's own alone: for most quantized weights vLLM
    has no arithmetic in float32 (`engine/quantization.py`), which is among a CPU's.

    Args:
        config: of the target's language model.
    """
    quantized = stated_quantization(config) or recipe.engine.options.get("quantization")
    return list(recipe.evaluate.dtypes or ([recipe.target.dtype] if quantized else machine_dtypes()))


def configurations(recipe: Recipe, k: int, *, in_flight: int = 1) -> list[Configuration]:
    """The baseline, twice, and the drafter in the recipe's dtype, both once in other dtypes, then other methods, unless several requests
    are in flight and the recipe does not ask for `methods_under_load`.

    Args:
        recipe: with `evaluate.dtypes` as `timed_dtypes` has them.
    """
    own = recipe.target.dtype
    assert recipe.evaluate.dtypes is not None
    others = [dtype for dtype in recipe.evaluate.dtypes if dtype != own]
    timed_methods = in_flight == 1 or recipe.evaluate.methods_under_load
    return [
        Configuration(0, own),
        Configuration(0, own, again=True),
        Configuration(k, own),
        *(Configuration(speculation, dtype) for dtype in others for speculation in (0, k)),
        *(Configuration(name, own) for name in (recipe.evaluate.methods if timed_methods else ())),
    ]


def with_baselines(known: Mapping[str, AtStart], measured: Mapping[Configuration, AtStart]) -> dict[str, AtStart]:
    """Add the figures of engines that ran together, by name: each with the baseline of its dtype as it ran beside it.

    The baseline's own are those beside the run's drafter.
    """
    found = {one.name: at for one, at in measured.items()}
    for one in measured:
        if one != one.baseline:
            found[one.name + BESIDE] = measured[one.baseline]
    return {**known, **found} if any(one.is_drafter for one in measured) else {**found, **known}


def fastest_speculative(starts: Sequence[Mapping[str, AtStart]], of: Sequence[Configuration]) -> Configuration:
    """The configuration of the run's drafter with the most tokens per second over all engine starts. Those of different dtypes ran one after
    the other, not side by side."""
    return _fastest([one for one in of if one.is_drafter], starts)


def other_baseline(starts: Sequence[Mapping[str, AtStart]], of: Sequence[Configuration]) -> Configuration | None:
    """The fastest baseline of another dtype than the fastest speculative configuration's; None if there is one dtype alone.

    Groups of engines run minutes apart, and machines drift: which baseline is the fastest is told by a comparison side by side only.
    """
    dtype = fastest_speculative(starts, of).dtype
    others = [one for one in of if one == one.baseline and one.dtype != dtype]
    return _fastest(others, starts) if others else None


def _fastest(among: Sequence[Configuration], starts: Sequence[Mapping[str, AtStart]]) -> Configuration:
    return max(among, key=lambda one: tokens_per_second([start[one.name] for start in starts]))


def throughput(
    starts: Sequence[Mapping[str, AtStart]],
    of: Sequence[Configuration],
    *,
    in_flight: int,
    requests: int,
    max_tokens: int,
    executions: Mapping[str, Execution],
    fidelity: Mapping[str, Fidelity],
    differences: Mapping[str, list[Difference]],
) -> Throughput:
    """Combine the figures of all engine starts.

    Args:
        starts: by engine start, then name of the configuration. With the suffix `SIDE_BY_SIDE` also `other_baseline` and
            `fastest_speculative`, if there are several dtypes.
        of: the configurations, in the order of `configurations`.
        in_flight: requests in flight.
        requests: counted in each start.
        max_tokens: longest answer.
        executions: by name of the configuration.
        fidelity: by name of the configuration.
        differences: the first few, likewise.
    """
    by_name = {one.name: [start[one.name] for start in starts] for one in of}
    beside = {one.name: [start[one.name + BESIDE] for start in starts] for one in of if one != one.baseline}
    again = next(one.name for one in of if one.again)
    noise = paired(beside[again], by_name[again])

    def over_baseline(name: str) -> Ratio:
        return speedup(beside[name], by_name[name], noise=noise)

    drafter = next(one for one in of if one.is_drafter and one.dtype == of[0].dtype)
    speculative, other = fastest_speculative(starts, of), other_baseline(starts, of)
    fastest_baseline, over_fastest = speculative.baseline, over_baseline(speculative.name)
    if other is not None:
        below, above = ([start[one.name + SIDE_BY_SIDE] for start in starts] for one in (other, speculative))
        over_other = speedup(below, above, noise=noise)
        if over_other["value"] < over_fastest["value"]:
            fastest_baseline, over_fastest = other, over_other
    found: dict[str, Measured] = {
        one.name: {
            "speculation": one.speculation,
            "dtype": one.dtype,
            **engine_speed(by_name[one.name]),
            "starts": by_name[one.name],
            "execution": executions[one.name],
        }
        for one in of
    }
    for one in of:
        if beside.get(one.name, by_name[one.baseline.name]) != by_name[one.baseline.name]:
            found[one.name]["baseline_starts"] = beside[one.name]
    return {
        "in_flight": in_flight,
        "requests": requests,
        "max_tokens": max_tokens,
        "engine_starts": len(starts),
        "configurations": found,
        "speedup": over_baseline(drafter.name),
        "speedups": {one.name: over_baseline(one.name) for one in of if one.speculation != 0},
        "fastest_baseline": fastest_baseline.name,
        "fastest_speculative": speculative.name,
        "speedup_over_fastest_baseline": over_fastest,
        "noise": speedup(beside[again], by_name[again]),
        "fidelity": {one.name: fidelity[one.name] for one in of if one.name in fidelity},
        "differences": {one.name: differences[one.name] for one in of if one.name in differences},
    }


def baseline_again_drafter(of: Mapping[str, Any]) -> tuple[Measured, Measured, Measured]:
    """Of a `Throughput`: the baseline, a second, identical engine, and the run's drafter, in the recipe's dtype."""
    baseline, again, *others = of["configurations"].values()
    drafter = next(
        one
        for one in others
        if isinstance(one["speculation"], int) and one["speculation"] and one["dtype"] == baseline["dtype"]
    )
    return baseline, again, drafter


def execution_in_words(of: Measured) -> str:
    """How vLLM executed its steps."""
    scheduling = "asynchronous" if of["execution"]["async_scheduling"] else "synchronous"
    return f"runner {of['execution']['model_runner']}, {scheduling} scheduling"


def executed_otherwise(of: Throughput) -> dict[str, tuple[str, str]]:
    """Speculative configurations whose steps vLLM executed otherwise than those of the baseline of the same dtype: how, and how the baseline's."""
    found = {}
    for name, one in of["configurations"].items():
        baseline = of["configurations"][Configuration(0, one["dtype"]).name]
        own, other = execution_in_words(one), execution_in_words(baseline)
        if own != other:
            found[name] = own, other
    return found


def not_tuned_to_speculate(of: Throughput) -> str:
    """What is to be said of a load at which `draftsmith tune` chose K = 0."""
    return (
        f"{of['in_flight']} at once: draftsmith tune chose not to speculate at this load, and draftsmith serve drafts nothing there; "
        f"measured at K = {baseline_again_drafter(of)[2]['speculation']} all the same."
    )
