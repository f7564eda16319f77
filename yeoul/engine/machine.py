"""What this machine grants the process: memory, CPUs, a line of description. Must not know what they are used for.

Reads /proc and /sys only; every function takes the root of the file system, for tests.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes this process may use: the least of MemAvailable and the memory limits of its cgroups (v1 and v2)."""
    return min([_mem_available(root), *_cgroup_memory_limits(root)])


def available_cpus(root: Path = ROOT) -> int:
    """CPUs this process may use: the least of its affinity and the CPU quotas of its cgroups; at least 1."""
    quotas = [math.ceil(quota) for quota in _cgroup_cpu_quotas(root)]
    return max(1, min([_affinity(), *quotas]))


def describe_machine(root: Path = ROOT) -> dict[str, str | int]:
    """For the header of logs: system, CPU, CPUs granted, bytes of memory granted, Python."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(root),
        "cpus": available_cpus(root),
        "memory": available_memory(root),
        "python": platform.python_version(),
    }


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mem_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _physical_memory()


def _physical_memory() -> int:
    if not hasattr(os, "sysconf"):
        return UNLIMITED
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name(root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _cgroup_memory_limits(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root, ""):
        yield from _limit(_read(folder / "memory.max"))
    for folder in _cgroup_folders(root, "memory"):
        yield from _limit(_read(folder / "memory.limit_in_bytes"))


def _limit(text: str) -> Iterator[int]:
    word = text.strip()
    if word.isdigit() and int(word) < UNLIMITED:
        yield int(word)


def _cgroup_cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, ""):
        yield from _quota(_read(folder / "cpu.max").split())
    for folder in _cgroup_folders(root, "cpu"):
        yield from _quota([*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()])


def _quota(words: list[str]) -> Iterator[float]:
    """From (quota, period) in microseconds; `max` and -1 mean no quota."""
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        yield int(words[0]) / int(words[1])


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The process's cgroup and its ancestors, in the hierarchy of a v1 controller or (empty name) in v2's.

    Inside a container the path may not exist below the mount, which then is the container's own cgroup.
    """
    mount = root / "sys/fs/cgroup" / controller
    path = _cgroup_path(root, controller)
    for folder in (path, *path.parents):
        yield mount / folder.relative_to("/")


def _cgroup_path(root: Path, controller: str) -> Path:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(",") and path.startswith("/"):
            return Path(path)
    return Path("/")


def _read(path: Path) -> str:
    """The file's text; empty if the kernel does not have that file or does not show it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
