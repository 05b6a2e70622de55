"""What `make soak` does and `make test` does not: `DRAFTSMITH_SOAK` is set there."""

import os

import pytest

SOAKING = "DRAFTSMITH_SOAK" in os.environ
in_soak = pytest.mark.skipif(not SOAKING, reason="takes minutes, and its logic has quick tests: `make soak` runs it")


def kill_cases(usual: int) -> int:
    """How many processes a test kills: `make soak` asks for more than usual."""
    return int(os.environ.get("DRAFTSMITH_KILL_CASES", usual))
