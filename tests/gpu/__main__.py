"""Runs the checks of `scripts/gpu_check.sh`, each in a process of its own, and prints what came out as a table.

It imports nothing but the standard library, so that it says what is missing instead of failing with it. A check that crashes,
hangs or spoils its CUDA context spoils no other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.checks import CHECKS, PARTS, Check, Missing

RESULTS = Path("runs/gpu-check/results.json")
_LAST_LINE = "gpu-check: "
"""Before a check's figures, on the last line that its process prints."""
_MISSING_STATUS = 77
"""Exit status of a check that cannot run here; the status that automake's tests give."""


@dataclass
class Outcome:
    """What came of a check."""

    part: str
    name: str
    result: str
    """`pass`, `fail` or `cannot run`."""
    figures: dict[str, str]
    seconds: float
    why: str = ""
    """Of a check that did not pass: the last line of what it said."""


def command_of(check: Check, *, cpu: bool) -> list[str]:
    """What runs a check by itself."""
    return [sys.executable, "-m", "tests.gpu", check.part, check.name, "--alone", *(["--cpu"] if cpu else [])]


def run_check(check: Check, command: Sequence[str], logs: Path) -> Outcome:
    """Run a check's command; what it prints goes to `logs`."""
    log = logs / f"{check.part}-{check.name}.log"
    begun = time.monotonic()
    with log.open("w+") as written:
        try:
            status = subprocess.run(command, stdout=written, stderr=subprocess.STDOUT, timeout=check.seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        written.seek(0)
        lines = [line.rstrip() for line in written if line.strip()] or [""]
    seconds = time.monotonic() - begun
    figures: dict[str, str] = {}
    if status == 0 and lines[-1].startswith(_LAST_LINE):
        figures = json.loads(lines[-1].removeprefix(_LAST_LINE))
        return Outcome(check.part, check.name, "pass", figures, seconds)
    if status is None:
        return Outcome(check.part, check.name, "fail", figures, seconds, f"not done after {check.seconds} s, see {log}")
    result = "cannot run" if status == _MISSING_STATUS else "fail"
    return Outcome(check.part, check.name, result, figures, seconds, f"{lines[-1][:300]} (see {log})")


def run_here(check: Check, *, cpu: bool) -> int:
    """The check itself; returns this process's exit status."""
    try:
        figures = check.run(cpu)
    except (Missing, ModuleNotFoundError) as missing:
        name = getattr(missing, "name", None) or ""
        if name.partition(".")[0] in ("draftsmith", "tests"):
            raise  # a fault of these files, not of the machine
        print(missing)
        return _MISSING_STATUS
    print(f"{_LAST_LINE}{json.dumps(figures)}", flush=True)
    return 0


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One row a check, one line a figure."""
    wide = max(len(one.name) for one in outcomes)
    print()
    for one in outcomes:
        lines = [f"{name}: {value}" for name, value in one.figures.items()] or [one.why]
        head = f"{one.part}  {one.name:<{wide}}  {one.result:<10}  {one.seconds:6.0f} s  "
        print(head + lines[0])
        for line in lines[1:]:
            print(" " * len(head) + line)
    counts = [sum(one.result == result for one in outcomes) for result in ("pass", "fail", "cannot run")]
    print(f"\n{counts[0]} passed, {counts[1]} failed, {counts[2]} could not run. Figures: {RESULTS}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description="What a GPU does to Draftsmith.")
    parser.add_argument(
        "part",
        nargs="?",
        choices=[*PARTS, "all"],
        default="all",
        help="; ".join(f"{part}: {what}" for part, what in PARTS.items()),
    )
    parser.add_argument("checks", nargs="*", help="names of checks; absent: all of the part")
    parser.add_argument("--list", action="store_true", help="print the checks and end")
    parser.add_argument("--cpu", action="store_true", help="the same code at a small size, on a CPU")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_intermixed_args()
    of_part = [check for check in CHECKS if asked.part in (check.part, "all")]
    if unknown := sorted({*asked.checks} - {check.name for check in of_part}):
        parser.error(f"no check named {', '.join(unknown)}; there are {', '.join(check.name for check in of_part)}")
    checks = [check for check in of_part if not asked.checks or check.name in asked.checks]
    if asked.list:
        for check in checks:
            print(f"{check.part}  {check.name:<18} {check.what}")
        return 0
    if asked.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if asked.alone:
        return run_here(checks[0], cpu=asked.cpu)

    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for check in checks:
        print(f"{check.part}  {check.name}: {check.what}", flush=True)
        outcomes.append(run_check(check, command_of(check, cpu=asked.cpu), RESULTS.parent))
        # Written each time: whoever runs out of time on a lent machine keeps what is done.
        RESULTS.write_text(json.dumps([asdict(one) for one in outcomes], indent=2))
    print_table(outcomes)
    if any(one.result == "fail" for one in outcomes):
        return 1
    return 3 if any(one.result == "cannot run" for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
