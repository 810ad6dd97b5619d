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


def test_limits_of_control_groups_count(tmp_path):
    step = {"a job/step/cpu.max": "max 100000", "a job/cpu.max": "150000 100000", "memory.max": "1000000"}
    for number, (groups, files, expected) in enumerate(
        [
            ("0::/", {"cpu.max": "100000 100000", "memory.max": "1000000"}, (1, 1_000_000)),  # a container's own root
            ("0::/a job/step", step, (1, 1_000_000)),
            ("0::/", {"cpu.max": "20000 100000"}, (1, MEMORY)),  # less than a core
            ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, (CORES, MEMORY)),
            ("0::/", {"cpu.max": "", "memory.max": ""}, (CORES, MEMORY)),
            ("", {}, (CORES, MEMORY)),
        ]
    ):
        root = machine(tmp_path / str(number), groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
        assert (usable_cores(root), usable_memory(root)) == expected, files


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_counts():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_container_leaves_less_memory_than_its_machine_has(tmp_path):
    step = {
        "job/memory.max": "1000000",
        "job/memory.current": "700000",
        "job/memory.stat": "anon 5\nfile 50000\ninactive_file 30000\nactive_file 10000",
        "job/step/memory.max": "2000000",
        "job/step/memory.current": "600000",
    }
    for number, (groups, files, expected) in enumerate(
        [
            ("0::/", {"memory.max": "max", "memory.current": "5000"}, 9000 * 1024),
            ("0::/job/step", step, 340_000),
            ("0::/", {"memory.max": "1000", "memory.current": "2000"}, 0),
        ]
    ):
        root = machine(tmp_path / str(number), groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
        Path(root, "proc/meminfo").write_text("MemTotal: 10000 kB\nMemAvailable: 9000 kB\n")
        assert available_bytes(root) == expected


def test_a_kernel_that_says_nothing_of_its_memory_limits_nothing(tmp_path):
    assert available_bytes(str(tmp_path)) is None
    assert available_bytes() > 0
