"""Memory of the machine within the container's limit: by NUMA node, as vLLM's CPU build counts it, and of the whole system."""

from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_SYSTEM = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def memory_nodes() -> Iterator[tuple[int, int]]:
    """Total and available bytes of each NUMA node, counted as in vllm/utils/cpu_resource_utils.py; none if the system does not say."""
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current") or 0
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))):
        values = {}
        for line in (folder / "meminfo").read_text().splitlines():
            _, _, name, value, *_ = line.split()
            values[name.rstrip(":")] = int(value) * 1024
        total = values["MemTotal"]
        available = sum(values[name] for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))
        if limit is not None and limit < total:
            total, available = limit, min(available, max(0, limit - used))
        yield total, available


def available_memory() -> int | None:
    """Bytes that new processes can use, cached files given back; None if the system does not say.

    The system's own figure, not the sum of the nodes': in virtual machines that get memory as they run, the nodes count only part of it.
    """
    try:
        lines = _SYSTEM.read_text().splitlines()
    except OSError:
        return None
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    limit = _cgroup_bytes("memory.max")
    if available is None or limit is None:
        return available
    cached = [line.split()[1] for line in cgroup("memory.stat").splitlines() if line.startswith("inactive_file ")]
    unused = max(0, limit - (_cgroup_bytes("memory.current") or 0))
    return min(available, unused + sum(map(int, cached)))


def cgroup(name: str) -> str:
    """A file of the container's control group; empty if there is none."""
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


def _cgroup_bytes(name: str) -> int | None:
    """A memory figure of the container; None without a limit."""
    text = cgroup(name)
    return int(text) if text.isdigit() else None
