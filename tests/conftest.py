"""Where pytest runs in several processes (`make test`), each keeps to cores of its own, and so do its engines: threads
of two engines on the same cores wait for one another.

Done as this file is imported, before any that imports torch: OpenMP makes as many threads as there are cores when it loads.
"""

import os
from pathlib import Path

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

LONGEST = (
    "integration/test_extract.py", "integration/test_lossless.py", "integration/test_served.py", "integration/test_measuring.py",
    "integration/test_evaluate.py", "integration/test_kinds.py", "integration/test_families.py", "integration/test_forms.py",
    "integration/test_extract_server.py", "integration/test_publish.py", "integration/test_server.py", "integration/test_shared_engine.py",
    "integration/test_generate.py", "unit/test_publish.py", "unit/test_trainer_processes.py", "unit/test_trainer_resumes.py",
    "unit/test_launch.py",
)  # fmt: skip
"""Files that take a minute or nearly so, the longest first; the order among neighbors hardly matters."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first. `make test` deals files out to its processes in order, each to one that is nearly done with those that it
    has: a long file that is dealt out last is waited for by all but one of them."""
    assert all((Path(__file__).parent / name).is_file() for name in LONGEST), "a file has another name now"
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))
