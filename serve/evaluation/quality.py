"""Whether answers are right, where that is cheap to tell: a number at the end, or a function that passes its tests.

Speculation must not change answers. Where they are identical nothing more is to be shown; in bf16, where near-ties fall either
way, equal scores are what says that nothing was lost.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from draftsmith.run.errors import DraftsmithError

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+")
"""With a sign only where no number or word ends: `3-4` is not minus four."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.S)
_SECONDS = 10
"""That a function's tests may take."""
_MEMORY = 2 * 1024**3
"""Bytes of address space that they may use."""


def last_number(answer: str, reference: dict[str, Any]) -> bool:
    """Whether the last number of an answer is that of the reference.

    GSM8K's (Cobbe et al. 2021) references end with it, after `####`, which answers need not copy.
    """
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

    Raises:
        DraftsmithError: no program at all runs under these limits here.
    """
    if not _program_runs(""):
        raise DraftsmithError(
            f"Answers' code cannot be run here: an empty program in {sys.executable} fails under limits of {_MEMORY >> 30} GiB, "
            f"{_SECONDS} s and 1 MiB of files. Leave `score: unit_tests` out."
        )
    prompt, test, name = (str(reference[key]) for key in ("prompt", "test", "entry_point"))
    return _program_runs(f"{_with_function(answer, prompt, name)}\n{test}\ncheck({name})\n")


def _with_function(answer: str, prompt: str, name: str) -> str:
    """The prompt's code with the function as the answer has it."""
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(answer)] or [textwrap.dedent(answer)]
    whole = next((block for block in blocks if _beginning(name).search(block)), None)
    if whole is None:
        return prompt + textwrap.indent(blocks[0], "    ")
    begins = _beginning(name).search(prompt)
    return prompt[: begins.start() if begins else 0] + whole  # with what the prompt imports, and its other functions


def _program_runs(code: str) -> bool:
    """Whether a program comes to its end without an error, within the limits."""
    ended = secrets.token_hex(8)  # leaving earlier, as with `sys.exit(0)`, is not the end
    program = f"{_LIMITS}{code}\nprint({ended!r})\n"
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-I", "-"], cwd=folder, env={}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=said, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process.communicate(program.encode(errors="replace"), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
        said.seek(0)
        return process.returncode == 0 and said.read().rstrip().endswith(ended.encode())


_LIMITS = f"""import resource
for what, most in ((resource.RLIMIT_AS, {_MEMORY}), (resource.RLIMIT_CPU, {_SECONDS}), (resource.RLIMIT_FSIZE, 1 << 20)):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
"""

NEEDS = {
    "last_number": "an `answer` with a number",
    "unit_tests": "`prompt` (with the function's first lines), `test` and `entry_point`",
}
"""What a row must have, for people."""

MEASURES: dict[str, Callable[[str, dict[str, Any]], bool]] = {"last_number": last_number, "unit_tests": unit_tests}
"""By their names in the recipe (`evaluate.suites.NAME.score`)."""


def can_score(measure: str, reference: dict[str, Any] | None) -> bool:
    """Whether a row has what a measure needs."""
    reference = reference or {}
    if measure == "last_number":
        return bool(_NUMBER.search(str(reference.get("answer", ""))))
    prompt, test, name = (reference.get(key) for key in ("prompt", "test", "entry_point"))
    return all(isinstance(text, str) and text for text in (prompt, test, name)) and bool(
        _beginning(str(name)).search(str(prompt))
    )


def _beginning(function: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?def {re.escape(function)}\b", re.M)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
