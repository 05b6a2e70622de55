"""The configurations whose speed is compared: plain decoding in every dtype of the machine, the drafter in each, other methods.

Speculation is worth what it gains over the fastest plain decoding that the machine has, not over a slow one: where bfloat16 is
faster than float32, a speed-up over float32 alone says little.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired

import torch
from typing_extensions import TypedDict

from draftsmith.config.recipe import Recipe
from draftsmith.engine.environment import is_cpu
from draftsmith.serve.evaluation.fidelity import Fidelity
from draftsmith.serve.evaluation.intervals import Ratio
from draftsmith.serve.evaluation.throughput import AtStart, paired, speedup, tokens_per_second

AGAIN = ", again"
"""End of the name of a second engine that does the same."""
BESIDE = ", beside it"
"""End of the name under which an engine start has plain decoding as it was beside a configuration of the rest of the name, where
not all engines were up at once (serve/evaluation/lineup.py)."""
Speculation = int | str
"""0 for plain decoding, K for the run's drafter, the name of another method."""


@dataclass(frozen=True)
class Configuration:
    """One engine whose speed is measured."""

    speculation: Speculation
    dtype: str
    """What the target and the drafter compute in."""
    again: bool = False
    """A second engine of the same configuration: how far it is from the first is what the machine's noise is."""

    @property
    def name(self) -> str:
        """Its key in `results.json`."""
        what = "plain" if self.speculation == 0 else self.speculation
        return f"{f'K = {what}' if isinstance(what, int) else what}, {self.dtype}{AGAIN if self.again else ''}"

    @property
    def file_name(self) -> str:
        """For its engine's log."""
        return "".join(
            one if one.isalnum() or one in ".-" else "-" for one in self.name.replace(" = ", "").replace(", ", "-")
        )


class Measured(TypedDict):
    """One configuration under one load."""

    speculation: Speculation
    dtype: str
    tokens_per_second: float
    """Response tokens per wall second of all requests together, prompt processing included, over all engine starts."""
    first_token_seconds: float
    """From being asked to the first token: median over requests, and over engine starts."""
    seconds_per_token: float
    """Time per output token, from the first token to the last: likewise."""
    starts: list[AtStart]
    plain_starts: NotRequired[list[AtStart]]
    """Plain decoding in its dtype as it was beside this one, where not all engines were up at once. Ratios are over that; plain
    decoding's own figures are those of its first group."""


class Throughput(TypedDict):
    """So many requests always in flight (serve/evaluation/throughput.py)."""

    in_flight: int
    requests: int
    """Counted ones, in each engine start."""
    engine_starts: int
    configurations: dict[str, Measured]
    """By `Configuration.name`."""
    speedup: Ratio
    """The drafter over plain decoding, both in the recipe's dtype."""
    speedups: dict[str, Ratio]
    """Every speculative configuration over plain decoding in its own dtype."""
    fastest_plain: str
    """The plain configuration with the most tokens per second."""
    fastest_speculative: str
    """The configuration of the run's drafter with the most."""
    speedup_over_fastest_plain: Ratio
    """The latter over the former."""
    noise: Ratio
    """A second plain engine over the first, both in the recipe's dtype: what engines that do the same are apart."""
    fidelity: dict[str, Fidelity]
    """Of every speculative configuration with one request in flight, against plain decoding in its own dtype, in the first
    engine start; empty under other loads."""


def machine_dtypes() -> list[str]:
    """The dtypes that this machine has arithmetic for and that plain decoding may be fastest in; on a GPU never float32."""
    if not is_cpu():
        return ["bfloat16"] if torch.cuda.is_bf16_supported() else ["float16"]
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    # Without these instructions the processor emulates bfloat16, at half the speed of float32.
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))
    return ["float32", "bfloat16"] if native else ["float32"]


def configurations(recipe: Recipe, k: int) -> list[Configuration]:
    """What is measured: plain decoding twice in the recipe's dtype, once in the others, the drafter in each, other methods."""
    own = recipe.target.dtype
    others = [dtype for dtype in recipe.evaluate.dtypes or machine_dtypes() if dtype != own]
    return [
        Configuration(0, own),
        Configuration(0, own, again=True),
        Configuration(k, own),
        *(Configuration(speculation, dtype) for dtype in others for speculation in (0, k)),
        *(Configuration(name, own) for name in recipe.evaluate.methods),
    ]


def beside_plain(measured: Mapping[Configuration, AtStart]) -> dict[str, AtStart]:
    """What engines that were up together measured, by name: each with plain decoding in its dtype as it was beside it."""
    found = {one.name: at for one, at in measured.items()}
    for one in measured:
        plain = Configuration(0, one.dtype)
        if one != plain:
            found[one.name + BESIDE] = measured[plain]
    return found


def throughput(
    starts: Sequence[Mapping[str, AtStart]],
    of: Sequence[Configuration],
    *,
    in_flight: int,
    requests: int,
    fidelity: Mapping[str, Fidelity],
) -> Throughput:
    """Put the figures of all engine starts together.

    Args:
        starts: by engine start, then by name of the configuration.
        of: the configurations, as `configurations` has them.
        in_flight: requests in flight.
        requests: counted in each start.
        fidelity: by name of the configuration.
    """
    by_name = {one.name: [start[one.name] for start in starts] for one in of}
    plain_beside = {
        one.name: [start[one.name + BESIDE] for start in starts] for one in of if one != Configuration(0, one.dtype)
    }
    rates = {name: tokens_per_second(measured) for name, measured in by_name.items()}
    _, again, drafter = of[:3]
    plain_of = {one.dtype: one.name for one in of if one.speculation == 0 and not one.again}
    fastest_plain = max(plain_of.values(), key=lambda name: rates[name])
    # Other methods are compared, not offered.
    noise = paired(plain_beside[again.name], by_name[again.name])
    own = [one.name for one in of if isinstance(one.speculation, int) and one.speculation]
    fastest_speculative = max(own, key=lambda name: rates[name])
    same_dtype = fastest_plain in [plain_of[one.dtype] for one in of if one.name == fastest_speculative]
    over_fastest = plain_beside[fastest_speculative] if same_dtype else by_name[fastest_plain]
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
        if plain_beside.get(one.name, by_name[plain_of[one.dtype]]) != by_name[plain_of[one.dtype]]:
            found[one.name]["plain_starts"] = plain_beside[one.name]
    return {
        "in_flight": in_flight,
        "requests": requests,
        "engine_starts": len(starts),
        "configurations": found,
        "speedup": speedup(plain_beside[drafter.name], by_name[drafter.name], noise=noise),
        "speedups": {
            one.name: speedup(plain_beside[one.name], by_name[one.name], noise=noise)
            for one in of
            if one.speculation != 0
        },
        "fastest_plain": fastest_plain,
        "fastest_speculative": fastest_speculative,
        "speedup_over_fastest_plain": speedup(over_fastest, by_name[fastest_speculative], noise=noise),
        "noise": speedup(plain_beside[again.name], by_name[again.name]),
        "fidelity": dict(fidelity),
    }


def plain_again_drafter(of: Mapping[str, Any]) -> list[Measured]:
    """Of a `Throughput`: plain decoding in the recipe's dtype, the second engine that does the same, and the drafter beside them."""
    every: dict[str, Measured] = of["configurations"]
    again = next(name for name in every if name.endswith(AGAIN))
    plain = every[again.removesuffix(AGAIN)]
    drafter = next(
        one
        for one in every.values()
        if isinstance(one["speculation"], int) and one["speculation"] and one["dtype"] == plain["dtype"]
    )
    return [plain, every[again], drafter]
