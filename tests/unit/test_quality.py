"""Right and wrong answers, and the limits on code that a model wrote."""

import time
from pathlib import Path

import pytest

from draftsmith.run.errors import DraftsmithError
from draftsmith.serve.evaluation.quality import can_score, last_number, unit_tests

ADD = {
    "prompt": 'import math\n\n\ndef add(a: int, b: int) -> int:\n    """The sum."""\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So 3 + 4 = 7 apples, and she sells 1,064.50 of them.\n#### 1064.5", True),
        ("The answer is $1,064.50.", True),
        ("1064.5 and then 3", False),
        ("-1064.5", False),
        ("It is 1064.5-1064.5", True),  # no minus
        ("It is x=3,1064.5", True),
        ("It is 1,064.5.", True),
        ("none", False),
        ("", False),
    ],
)
def test_the_last_number_counts(answer: str, right: bool) -> None:
    assert last_number(answer, {"answer": "12 * 88 = 1056\n#### 1,064.50"}) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here you are:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", True),
        ("```\ndef add(a, b):\n    return math.floor(a + b)\n```", True),  # with what the prompt imports
        ("    return a + b\n", True),  # the body alone, as base models go on
        ("```python\nreturn a + b\n```", True),
        ("```python\ndef add(a, b):\n    return a + b", True),  # cut off by the longest response
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```Python3 \r\ndef add(a, b):\n    return a + b\n```", True),
        (
            "For example:\n```python\nadd(1, 2)\n```\n1. So:\n   ```py\n   def add(a, b):\n       return a + b\n   ```",
            True,
        ),
        ("```python\nimport sys\nsys.exit(0)\n```", False),
        ("I cannot do that.", False),
        ("```python\ndef add(a, b):\n    while True: pass\n```", False),
        ("", False),
    ],
)
def test_functions_are_run_against_their_tests(answer: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.serve.evaluation.quality._SECONDS", 4)
    assert unit_tests(answer, ADD) is right


def test_code_that_a_model_wrote_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of mine")
    told = tmp_path / "told"
    code = f"""    import os, subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); open({str(told)!r}, 'w')"])
    assert "A_SECRET" not in os.environ and not os.listdir()
    return a + b
"""
    assert unit_tests(code, ADD)
    time.sleep(1.5)
    assert not told.exists()  # what it started has ended with it
    assert not unit_tests("    x = bytearray(3 << 30)\n    return a + b\n", ADD)
    assert not unit_tests("    open('x', 'wb').write(bytes(2 << 20))\n    return a + b\n", ADD)


def test_rows_that_cannot_be_scored_are_known() -> None:
    assert can_score("last_number", {"answer": 42})
    assert not can_score("last_number", {"answer": "forty-two"})
    assert not can_score("last_number", None)
    assert can_score("unit_tests", ADD)
    assert not can_score("unit_tests", {"prompt": "def f(): ..."})
    assert not can_score("unit_tests", ADD | {"entry_point": "subtract"})


def test_nothing_is_scored_if_no_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.serve.evaluation.quality._LIMITS", "raise SystemExit(1)\n")
    with pytest.raises(DraftsmithError, match=r"code cannot be run: .*Leave `score: unit_tests` out"):
        unit_tests("    return a + b", ADD)
