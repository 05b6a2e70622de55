"""Memory of the machine as vLLM's CPU build counts it: by NUMA node, within the container's limit."""

from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
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
    """Bytes that new processes can use, cached files given back; None if the system does not say."""
    nodes = [*memory_nodes()]
    if not nodes:
        return None
    cached = [line.split()[1] for line in cgroup("memory.stat").splitlines() if line.startswith("inactive_file ")]
    limited = _cgroup_bytes("memory.max") is not None
    return sum(available for _, available in nodes) + (sum(map(int, cached)) if limited else 0)


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
