"""Handoff files lie in memory where it has room for them, and nothing of them is left."""

import fcntl
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.extract import handoff_folder as module
from draftsmith.extract.handoff_folder import handoff_folder, locked_folder, room_in_memory


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm, with room for 1000 bytes."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(module, "_MEMORY", folder)
    monkeypatch.setattr(module, "room_in_memory", lambda where: 1000 if where == folder else 0)
    return folder


def test_the_folder_is_in_memory_where_there_is_room(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    (run / "handoff").mkdir(parents=True)
    (run / "handoff" / "left by one that was killed").touch()
    with handoff_folder(run, 1000) as folder:
        assert folder.parent == memory
        assert not (run / "handoff").exists()
        (folder / "file").touch()
    assert not [*memory.iterdir()]
    with handoff_folder(run, 1001) as folder:
        assert folder == run / "handoff"
        assert not [*folder.iterdir()]
    assert not (run / "handoff").exists()
    with handoff_folder(run, 1, shared=True) as folder:
        assert folder == run / "handoff", "other machines do not see this one's memory"
    for needed in (1, 2000):
        with pytest.raises(KeyboardInterrupt), handoff_folder(run, needed) as folder:
            raise KeyboardInterrupt
        assert not folder.exists()


def test_folders_of_killed_runs_are_removed_and_those_of_living_ones_are_not(tmp_path: Path, memory: Path) -> None:
    killed = memory / "draftsmith-handoff-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (memory / "another program's").mkdir()
    with handoff_folder(tmp_path / "a", 1) as first, handoff_folder(tmp_path / "b", 1) as second:
        assert {*memory.iterdir()} == {first, second, memory / "another program's"}
        with (first / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with locked_folder(memory, "draftsmith-handoff-") as kept:
        pass
    assert kept.exists(), "who made it removes it"


def test_room_is_what_folder_machine_and_control_group_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room_in_memory(tmp_path / "no such folder") == 0
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    unlimited = room_in_memory(tmp_path)
    assert 0 < unlimited <= shutil.disk_usage(tmp_path).free
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert room_in_memory(tmp_path) > 10**6
    (tmp_path / "memory.max").write_text("5000\n")
    assert room_in_memory(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("2000\n")
    assert room_in_memory(tmp_path) == 0
    (tmp_path / "memory.max").unlink()
    monkeypatch.setattr(module.os, "statvfs", lambda where: SimpleNamespace(f_bavail=7, f_frsize=4096))
    assert room_in_memory(tmp_path) == 7 * 4096
