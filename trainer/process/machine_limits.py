"""The cores and the memory of this machine that this process may use: in containers and batch jobs, a part of it.

The limits are those of control groups of version 2. `root` is the directory that holds `proc` and `sys`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: str = "/") -> int:
    """Return how many cores this process may use, by its affinity and the limits of its control groups."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root):
        quota, period = _text(group / "cpu.max").split()[:2] or ["max", "100000"]
        limits += [int(quota) / int(period)] if quota.isdigit() else []
    return max(1, int(min(limits)))


def usable_memory(root: str = "/") -> int:
    """Return how many bytes of memory this process may use, by the machine and the limits of its control groups."""
    limits = [_text(group / "memory.max").strip() for group in _groups(root)]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *map(int, filter(str.isdigit, limits))])


def available_bytes(root: str = "/") -> int | None:
    """Return how many more bytes of memory this process may take without swapping; None: the kernel does not say."""
    available = _numbers(Path(root, "proc/meminfo")).get("MemAvailable:")
    free = [] if available is None else [1024 * available]
    for group in _groups(root):
        limit, usage = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
        if limit.isdigit() and usage.isdigit():
            stat = _numbers(group / "memory.stat")  # the kernel frees pages of files
            free.append(max(0, int(limit) - int(usage) + stat.get("inactive_file", 0) + stat.get("active_file", 0)))
    return min(free, default=None)


def _groups(root: str) -> Iterator[Path]:
    """Yield the directories of the control group of this process and of its parents.

    In a container, the directory of the root often stands for the group of the container.
    """
    for line in _text(Path(root, "proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            group = Path(line[3:].lstrip("/"))
            for parent in (group, *group.parents):
                yield Path(root, "sys/fs/cgroup", parent)


def _numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line by the word before it."""
    lines = [line.split() for line in _text(file).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(file: Path) -> str:
    """Return the text of a file; of a missing one, an empty text."""
    try:
        return file.read_text()
    except OSError:
        return ""
