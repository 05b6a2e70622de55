"""Where pytest runs in several processes (`make test`), each keeps to cores of its own, and so do its engines: threads
of two engines on the same cores wait for one another.

Done as this file is imported, before any that imports torch: OpenMP makes as many threads as there are cores when it loads.
"""

import os

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("any-time", deadline=None)
settings.load_profile("any-time")


def _keep_to_own_cores() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
        os.sched_setaffinity(0, mine or cores)


_keep_to_own_cores()

LONGEST = ("integration/test_extract.py", "integration/test_served.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: they are dealt out to the processes in order, and the last one should be short."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
