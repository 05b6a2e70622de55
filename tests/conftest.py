"""Where pytest runs in several processes (`make test`), each keeps to cores of its own, and so do its engines: threads
of two engines on the same cores wait for one another."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        os.sched_setaffinity(0, mine or cores)
