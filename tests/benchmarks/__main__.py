"""`make bench`: every benchmark, medians of interleaved runs, into `runs/bench/results.json`."""

from __future__ import annotations

from pathlib import Path

from draftsmith.progress import console
from draftsmith.stage import write_json
from tests.benchmarks.bench_extract import extraction_ratios, memory_growth
from tests.benchmarks.bench_store import store_costs
from tests.benchmarks.bench_train import training_step


def main() -> None:
    results = extraction_ratios() | memory_growth() | store_costs() | training_step()
    for name, entry in results.items():
        console.print(f"{name}: {entry['value']:.3g} {entry['unit']} (against {entry['against']})", highlight=False)
    output = Path("runs/bench/results.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, results)
    console.print(f"written to {output}", highlight=False)


if __name__ == "__main__":
    main()
