"""K by load: vLLM's `num_speculative_tokens_per_batch_size`, as tuning chooses it and serving and evaluation read it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftsmith.engine.speculation import drafter_sha256
from draftsmith.run import stage


def make_schedule(speedups: Mapping[int, Mapping[int, float]], *, most: int) -> list[list[int]]:
    """The best K by number of sequences, as vLLM takes it: `[[from, to, K], ...]`.

    Between two batch sizes the larger one's K holds: speculation gains less there. K is 0 everywhere if no load gains anything.

    Args:
        speedups: by batch size and K; at K = 0, for the cost of an idle drafter, 1 if not given.
        most: sequences that an engine runs at once; the last range extends to it.
    """
    if all(speedup <= 1 for of_batch in speedups.values() for k, speedup in of_batch.items() if k):
        return [[1, max(most, *speedups), 0]]
    ranges: list[list[int]] = []
    for batch in sorted(speedups):
        of_batch = {0: 1.0} | dict(speedups[batch])
        k = max(sorted(of_batch), key=lambda k: of_batch[k])
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = batch
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, batch, k])
    ranges[-1][1] = max(ranges[-1][1], most)
    return ranges


def schedule_of(run_dir: Path, output: str, speculates_with: Mapping[str, str] | None = None) -> list[list[int]] | None:
    """The schedule that tuning, in the recipe's `tune.output`, chose; None if not tuned.

    Args:
        speculates_with: `Speculator.sha256` of what it must have been chosen for; None for the run's present drafter.
    """
    record = stage.read(run_dir / output) if (run_dir / output).is_dir() else None
    if record is None or record.get("stage") != "tune":
        return None
    tuned = record["figures"]
    wanted = drafter_sha256(run_dir / "vllm") if speculates_with is None else dict(speculates_with)
    return list(tuned["schedule"]) if tuned["drafter_sha256"] == wanted else None


def k_at(schedule: Sequence[Sequence[int]] | None, in_flight: int) -> int | None:
    """K for a number of requests in flight, 0 where the schedule does not speculate; None if there is no schedule.

    Beyond the last range its K goes on, as in vLLM (vllm/v1/spec_decode/dynamic/utils.py).
    """
    if not schedule:
        return None
    return next((k for _, last, k in schedule if in_flight <= last), schedule[-1][2])
