"""What several files of unit tests share: a tiny run to train on, and a training on it that was never interrupted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tiny_run import make_run
from tests.unit.training_runs import EAGLE3, one_thread, run_dir, train


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and, in `run`, a store of it."""
    path = tmp_path_factory.mktemp("run")
    make_run(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of one process from beginning to end, with the options `EAGLE3`."""
    directory = run_dir(folder, "whole")
    with one_thread():
        train(folder, directory, **EAGLE3)
    return directory
