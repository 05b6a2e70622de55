"""Scores of answers that are cheap to check: a number at the end, or a function that passes its tests.

Speculation must not change answers. Identical answers need no score; in bfloat16, where near-ties fall either way, equal scores show
that nothing was lost.
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
"""A sign counts only if no number or word ends before it: `3-4` is not minus four."""
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.S)
_SECONDS = 10
"""Time limit of a function's tests."""
_MEMORY = 2 * 1024**3
"""Their limit of address space, in bytes."""


def last_number(answer: str, reference: dict[str, Any]) -> bool:
    """Whether an answer and the reference end with the same number.

    GSM8K's references (Cobbe et al., 2021) end with it, after `####`, which answers need not have.
    """
    wanted = _NUMBER.findall(str(reference["answer"]))
    found = _NUMBER.findall(answer)
    return bool(found) and _value(found[-1]) == _value(wanted[-1])


def unit_tests(answer: str, reference: dict[str, Any]) -> bool:
    """Whether the function in an answer passes its tests: pass@1 of HumanEval (Chen et al., 2021, section 2.1).

    **Runs code that the model wrote**, in a process with limits on time, memory and files and an empty folder, which protects against
    accidents, not malice.

    Args:
        answer: with the function in a code block, whole or only its body.
        reference: HumanEval's `prompt`, `test` and `entry_point`.

    Raises:
        DraftsmithError: not even an empty program runs under these limits.
    """
    require_programs_run()
    prompt, test, name = (str(reference[key]) for key in ("prompt", "test", "entry_point"))
    return _program_runs(f"{_with_function(answer, prompt, name)}\n{test}\ncheck({name})\n")


def require_programs_run() -> None:
    """Raises DraftsmithError: not even an empty program runs under the limits of `unit_tests`."""
    if not _program_runs(""):
        raise DraftsmithError(
            f"The answers' code cannot be run: an empty program in {sys.executable} fails under limits of {_MEMORY >> 30} GiB, "
            f"{_SECONDS} s and 1 MiB of files. Leave `score: unit_tests` out."
        )


def _with_function(answer: str, prompt: str, name: str) -> str:
    """The prompt's code with the answer's function."""
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall(answer)] or [textwrap.dedent(answer)]
    whole = next((block for block in blocks if _beginning(name).search(block)), None)
    if whole is None:
        return prompt + textwrap.indent(blocks[0], "    ")
    begins = _beginning(name).search(prompt)
    return prompt[: begins.start() if begins else 0] + whole  # with the prompt's imports and other functions


def _program_runs(code: str) -> bool:
    """Whether a program runs to its end without an error, within the limits."""
    ended = secrets.token_hex(8)  # printed last: an earlier exit, as with `sys.exit(0)`, does not count
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
                os.killpg(process.pid, signal.SIGKILL)  # with its children
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
"""What a row must have, for messages."""

MEASURES: dict[str, Callable[[str, dict[str, Any]], bool]] = {"last_number": last_number, "unit_tests": unit_tests}
"""By their names in the recipe (`evaluate.suites.NAME.score`)."""


def can_score(measure: str, reference: dict[str, Any] | None) -> bool:
    """Whether a row has the reference that a measure needs."""
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
