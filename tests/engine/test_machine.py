"""Limits of memory and CPUs, read from made-up /proc and /sys trees."""

import os

import pytest

from yeoul.engine import machine

MIB = 1 << 20


def write(root, files):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16384000 kB\nMemAvailable:   8192000 kB\n"}
V2 = {**MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
V1 = {**MEMINFO, "proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 8192000 * 1024),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": f"{512 * MIB}\n"}, 512 * MIB),
        ({**V2, "sys/fs/cgroup/memory.max": f"{64 * MIB}"}, 64 * MIB),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": str(1 << 50)}, 8192000 * 1024),
        ({**V1, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{256 * MIB}"}, 256 * MIB),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{128 * MIB}"}, 128 * MIB),
        ({**V1, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712"}, 8192000 * 1024),
        ({**V2, "sys/fs/cgroup/memory.max": "nonsense"}, 8192000 * 1024),
    ],
)
def test_memory_is_the_least_of_all_limits(tmp_path, files, expected):
    assert machine.available_memory(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 8),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_cpus_are_the_least_of_affinity_and_quota(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.available_cpus(write(tmp_path, files)) == expected


def test_a_system_without_proc_has_defaults(tmp_path):
    assert machine.available_memory(tmp_path) > 0
    assert machine.available_cpus(tmp_path) >= 1


def test_this_machine_can_be_described():
    described = machine.describe_machine()
    assert described["cpus"] >= 1 and described["memory"] > MIB
    assert described["cpu"] and described["python"]
