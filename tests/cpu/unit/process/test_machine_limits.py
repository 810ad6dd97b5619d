"""The cores and memory that a container leaves of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.process.machine_limits import available_bytes, usable_cores, usable_memory

CORES = len(os.sched_getaffinity(0))
MEMORY = usable_memory("/nowhere")


def machine(root: Path, groups: str, files: dict[str, str]) -> str:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/", {"cpu.max": "100000 100000", "memory.max": "1000000"}),  # in a container with its own root
        (
            "0::/a job/step",
            {"a job/step/cpu.max": "max 100000", "a job/cpu.max": "150000 100000", "memory.max": "1000000"},
        ),
        (
            "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/",
            {
                "cpu/docker/a/cpu.cfs_quota_us": "100000",
                "cpu/docker/a/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1000000",
                "memory/docker/a/memory.limit_in_bytes": "9223372036854771712",
            },
        ),
    ],
)
def test_limits_of_control_groups_count(tmp_path, groups, files):
    root = machine(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert (usable_cores(root), usable_memory(root)) == (1, 1_000_000)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}),
        ("0::/", {"cpu.max": "", "memory.max": "", "cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}),
        ("1:cpu:/\n2:memory:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("", {}),
    ],
)
def test_no_limit_leaves_the_machine(tmp_path, groups, files):
    root = machine(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert (usable_cores(root), usable_memory(root)) == (CORES, MEMORY)


def test_less_than_a_core_counts_as_one(tmp_path):
    root = machine(tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": "20000 100000"})
    assert usable_cores(root) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_counts():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"memory.max": "max", "memory.current": "5000"}, 9000 * 1024),
        (
            "0::/job/step",
            {
                "job/memory.max": "1000000",
                "job/memory.current": "700000",
                "job/memory.stat": "anon 5\nfile 50000\ninactive_file 30000\nactive_file 10000",
                "job/step/memory.max": "2000000",
                "job/step/memory.current": "600000",
            },
            340_000,
        ),
        (
            "4:memory:/docker/a\n0::/",
            {
                "memory/memory.limit_in_bytes": "1000000",
                "memory/memory.usage_in_bytes": "700000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 40000\ntotal_active_file 10000",
            },
            350_000,
        ),
        ("0::/", {"memory.max": "1000", "memory.current": "2000"}, 0),
    ],
)
def test_a_container_leaves_less_memory_than_its_machine_has(tmp_path, groups, files, expected):
    root = machine(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 10000 kB\nMemAvailable: 9000 kB\n")
    assert available_bytes(root) == expected


def test_a_kernel_that_says_nothing_of_its_memory_limits_nothing(tmp_path):
    assert available_bytes(str(tmp_path)) is None
    assert available_bytes() > 0
