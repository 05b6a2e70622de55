"""Whether answers are right, where that is cheap to tell: a number at the end, or a function that passes its tests.

Speculation must not change answers. Where they are identical nothing more is to be shown; in bf16, where near-ties fall either
way, equal scores are what says that nothing was lost.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from tempfile import TemporaryDirectory
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.S)
_SECONDS = 10
"""That a function's tests may take."""
_MEMORY = 2 * 1024**3
"""Bytes of address space that they may use."""


def last_number(answer: str, reference: dict[str, Any]) -> bool:
    """Whether the last number of an answer is that of the reference: exact match as customary for GSM8K (Cobbe et al. 2021)."""
    wanted = _NUMBER.findall(str(reference["answer"]))
    found = _NUMBER.findall(answer)
    return bool(found) and _value(found[-1]) == _value(wanted[-1])


def unit_tests(answer: str, reference: dict[str, Any]) -> bool:
    """Whether the function that an answer holds passes its tests: pass@1 of HumanEval (Chen et al. 2021, section 2.1).

    **Runs what the model wrote**, in a process with a limit on time, memory and files and an empty folder, which protects against
    accidents and not against malice.

    Args:
        answer: with the function in a block of code, whole or its body alone.
        reference: HumanEval's `prompt`, `test` and `entry_point`.
    """
    prompt, test, name = (str(reference[key]) for key in ("prompt", "test", "entry_point"))
    block = _BLOCK.search(answer)
    code = block[1] if block else answer
    if not re.search(rf"^def {re.escape(name)}\b", code, re.M):  # the body alone
        indented = all(line.startswith((" ", "\t")) or not line.strip() for line in code.splitlines())
        code = prompt + (code if indented else "".join(f"    {line}\n" for line in code.splitlines()))
    else:
        code = prompt[: prompt.index(f"def {name}")] + code  # with what the prompt imports
    program = f"{_LIMITS}{code}\n{test}\ncheck({name})\n"
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-"], cwd=folder, env={}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process.communicate(program.encode(errors="replace"), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
    return process.returncode == 0


_LIMITS = f"""import resource
for what, most in ((resource.RLIMIT_AS, {_MEMORY}), (resource.RLIMIT_CPU, {_SECONDS}), (resource.RLIMIT_FSIZE, 1 << 20)):
    resource.setrlimit(what, (most, most))
"""

NEEDS = {"last_number": "an `answer` with a number", "unit_tests": "`prompt`, `test` and `entry_point`"}
"""What a row must have, for people."""

MEASURES: dict[str, Callable[[str, dict[str, Any]], bool]] = {"last_number": last_number, "unit_tests": unit_tests}
"""By their names in the recipe (`evaluate.suites.NAME.score`)."""


def can_score(measure: str, reference: dict[str, Any] | None) -> bool:
    """Whether a row has what a measure needs."""
    reference = reference or {}
    if measure == "last_number":
        return bool(_NUMBER.search(str(reference.get("answer", ""))))
    return all(reference.get(key) for key in ("prompt", "test", "entry_point"))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
