"""Extraction on a real Ray cluster with real engines: whoever is killed, the store is what one engine makes."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from draftsmith.store.reader import Store
from tests.integration.conftest import check_same
from tests.soak import in_soak

pytestmark = [
    pytest.mark.integration,
    in_soak,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of two machines with one core each, both on this one."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: sockets lie in it
        # Ray notes there which cluster is the current one; where the user's own has its note must not matter, nor exist.
        monkeypatch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster()
        try:  # from the first machine on: what has started must not stay where the next does not start
            cluster.add_node(**small, temp_dir=folder)
            cluster.add_node(**small)
            yield cluster.address
        finally:
            cluster.shutdown()


def _sequences(store: Path) -> int:
    return len(Store(store)) if (store / "manifest.json").exists() else 0


def _started(command: list[str], address: str) -> subprocess.Popen:
    environment = os.environ | {"RAY_ADDRESS": address}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _wait_for(count: int, store: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while _sequences(store) < count:
        assert process.poll() is None, f"it ended before the kill: {process.communicate()[1]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _actors() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if process.cmdline()[0].startswith("ray::Machine"):
                found.append(process)
    return found


def test_a_machine_is_killed(address: str, whole: tuple[Path, Path], tmp_path: Path) -> None:
    path, by_one_engine = whole
    store = tmp_path / "test" / "store"
    command = [sys.executable, "-m", "draftsmith.cli", "extract", str(path), "--runs", str(tmp_path)]
    command += ["-s", "extract.machines=all"]

    driver = _started(command, address)
    _wait_for(1, store, driver)
    actors = _actors()
    assert len(actors) == 2
    victim = next(actor for actor in actors if actor.children())
    engines = victim.children(recursive=True)
    victim.kill()
    _, said = driver.communicate(timeout=300)
    assert driver.returncode == 0, said
    assert "The other machines take over" in said
    assert psutil.wait_procs(engines, timeout=60)[1] == [], "the dead machine's engines have ended"
    assert not list(store.glob(".machine-*"))

    assert len(list(store.glob("shard-*"))) == len(json.loads((store / "manifest.json").read_text())["shards"])
    check_same(store, by_one_engine / "store")
