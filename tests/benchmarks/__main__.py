"""`make bench`: every benchmark, medians of interleaved runs, into `runs/bench/results.json`.

Names after the command choose some: `make bench ONLY="store_costs memory_growth"`; other figures of the file stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.progress import console
from draftsmith.stage import write_json
from tests.benchmarks.bench_convert import convert_costs
from tests.benchmarks.bench_extract import extraction_ratios, memory_growth
from tests.benchmarks.bench_int8 import int8_acceptance
from tests.benchmarks.bench_learn import learning_eagle, learning_eagle3, learning_medusa, learning_mlp
from tests.benchmarks.bench_memory import step_memory
from tests.benchmarks.bench_quantised import quantised_drafters
from tests.benchmarks.bench_store import store_costs
from tests.benchmarks.bench_train import time_to_peer, training_step

BENCHMARKS = (
    extraction_ratios, memory_growth, store_costs, int8_acceptance, training_step, time_to_peer, learning_eagle3,
    learning_eagle, learning_medusa, learning_mlp, step_memory, convert_costs, quantised_drafters,
)  # fmt: skip
OUTPUT = Path("runs/bench/results.json")


def main(names: list[str]) -> None:
    known = {benchmark.__name__: benchmark for benchmark in BENCHMARKS}
    if unknown := set(names) - set(known):
        raise UserError(f"No benchmark is called {', '.join(sorted(unknown))}. There are {', '.join(known)}.")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        results = known[name]()
        for figure, entry in results.items():
            limit = f", limit {entry['limit']}" if entry["limit"] is not None else ""
            console.print(
                f"{figure}: {entry['value']:.3g} {entry['unit']} (against {entry['against']}{limit})", highlight=False
            )
        earlier = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
        write_json(OUTPUT, earlier | results)
    console.print(f"written to {OUTPUT}", highlight=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
