"""`make bench`: every benchmark, medians of interleaved runs, into `runs/bench/results.json`.

Names after the command choose some: `make bench ONLY="store_costs memory_growth"`; other figures of the file stay. Ends
with status 1 where a figure that was measured misses its bar, and names it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from draftsmith.run.atomic_io import write_json
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from tests.benchmarks.bench_blocks import block_drafts
from tests.benchmarks.bench_convert import convert_costs
from tests.benchmarks.bench_evaluate import comparisons, load_noise, shared_engine
from tests.benchmarks.bench_extract import extraction_ratios, memory_growth
from tests.benchmarks.bench_int8 import int8_acceptance
from tests.benchmarks.bench_learn import (
    learning_dflash,
    learning_dspark,
    learning_eagle,
    learning_eagle3,
    learning_medusa,
    learning_mlp,
    learning_p_eagle,
    longer_blocks,
)
from tests.benchmarks.bench_lookup import lookup_best
from tests.benchmarks.bench_memory import step_memory
from tests.benchmarks.bench_quantized import quantized_drafters
from tests.benchmarks.bench_sampled import sampled_acceptance, sampled_fidelity
from tests.benchmarks.bench_store import store_costs
from tests.benchmarks.bench_tokens import tokens_at_once
from tests.benchmarks.bench_train import (
    time_to_peer,
    training_step,
    training_step_dflash,
    training_step_dspark,
    training_step_p_eagle,
)
from tests.benchmarks.figures import Figure, missed, table

Benchmark = Callable[[], dict[str, Figure]]
BENCHMARKS: tuple[Benchmark, ...] = (
    extraction_ratios, memory_growth, store_costs, int8_acceptance, training_step, training_step_p_eagle,
    training_step_dflash, training_step_dspark, time_to_peer, learning_eagle3, learning_p_eagle, learning_dflash,
    learning_dspark, learning_eagle, learning_medusa, learning_mlp, longer_blocks, block_drafts, lookup_best, step_memory, convert_costs, quantized_drafters,
    load_noise, comparisons, shared_engine, tokens_at_once, sampled_acceptance,
    sampled_fidelity,
)  # fmt: skip
OUTPUT = Path("runs/bench/results.json")


def main(names: list[str], known: Mapping[str, Benchmark], output: Path) -> int:
    """Run the named benchmarks of `known`, or all; the exit status: 1 where a bar is missed.

    Raises:
        UserError: a name is not known.
    """
    if unknown := set(names) - set(known):
        raise UserError(f"No benchmark is called {', '.join(sorted(unknown))}. There are {', '.join(known)}.")
    output.parent.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Figure] = {}
    for name in names or known:
        figures = known[name]()
        measured |= figures
        for found, entry in figures.items():
            console.print(
                f"{found}: {entry['value']:.3g} {entry['unit']} (against {entry['against']})",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        earlier = json.loads(output.read_text()) if output.exists() else {}
        write_json(output, earlier | figures)
    for line in table(measured):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    if late := missed(measured):
        console.print(f"missed their bars: {', '.join(late)}", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], {benchmark.__name__: benchmark for benchmark in BENCHMARKS}, OUTPUT))
    except UserError as error:
        console.print(str(error), highlight=False, markup=False)
        sys.exit(2)
