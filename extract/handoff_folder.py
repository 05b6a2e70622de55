"""The folder for handoff files: in memory if there is room for them, otherwise in the run's folder.

Handoff files are read at once and removed. A run's folder is often on a network file system, which they would cross twice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def handoff_folder(directory: Path, needed: int, *, shared: bool = False) -> Iterator[Path]:
    """A folder for the handoff files of one extraction, removed afterwards.

    Args:
        directory: holds the folder if memory has no room. What a killed extraction left there is removed.
        needed: the most bytes that the files take.
        shared: the engine that writes them may be on another machine, which sees `directory` but not this one's memory.
    """
    in_directory = directory / "handoff"
    shutil.rmtree(in_directory, ignore_errors=True)
    if shared or room_in_memory(_MEMORY) < needed:
        in_directory.mkdir(parents=True)
        try:
            yield in_directory
        finally:
            shutil.rmtree(in_directory, ignore_errors=True)
        return
    with locked_folder(_MEMORY, "draftsmith-handoff-") as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def room_in_memory(folder: Path) -> int:
    """Bytes that files may take in `folder`, a file system in memory: half of what machine and control group leave free.

    0 if the folder does not exist or cannot be written to.
    """
    if not os.access(folder, os.W_OK):
        return 0
    system = os.statvfs(folder)
    available = [2 * system.f_bavail * system.f_frsize]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))))
    with suppress(OSError, ValueError):  # "max" if there is no limit
        used = int((_CGROUP / "memory.current").read_text())
        available.append(int((_CGROUP / "memory.max").read_text()) - used)
    return max(0, min(available) // 2)


@contextmanager
def locked_folder(where: Path, prefix: str) -> Iterator[Path]:
    """A new folder, which the caller removes. Folders of killed processes are removed first: their locks are free."""
    for path in where.glob(f"{prefix}*/lock"):
        with suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held while its process lives
            shutil.rmtree(path.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
    with (folder / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "new").rename(folder / "lock")  # so that others only ever see it locked
        yield folder
