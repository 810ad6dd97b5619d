"""The cores and the memory of this machine that this process may use: in containers and batch jobs, a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: str = "/") -> int:
    """Return how many cores this process may use, by its affinity and the limits of its control groups.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [float(cores)]
    for group in _groups(root, "cpu"):
        quota, period = _words(group / "cpu.max")[:2] or ["max", "100000"]
        limits += _share(quota, period)
        for quota, period in zip(_words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us"), strict=False):
            limits += _share(quota, period)
    return max(1, int(min(limits)))


def usable_memory(root: str = "/") -> int:
    """Return how many bytes of memory this process may use, by the machine and the limits of its control groups.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(group / name)[:1] if word.isdigit()]
    return min(limits)


def available_bytes(root: str = "/") -> int | None:
    """Return how many more bytes of memory this process may take without swapping; None: the kernel does not say.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    available = _numbers(Path(root, "proc/meminfo")).get("MemAvailable:")
    free = [] if available is None else [1024 * available]
    for group in _groups(root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words = [*_words(group / limit)[:1], *_words(group / usage)[:1]]
            if len(words) == 2 and all(word.isdigit() for word in words):
                stat = _numbers(group / "memory.stat")
                lists = ("inactive_file", "active_file")  # files read once, and more often: the kernel frees both
                cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in lists)
                free.append(max(0, int(words[0]) - int(words[1]) + cache))
    return min(free, default=None)


def _share(quota: str, period: str) -> list[float]:
    """Return the cores of a limit as a list; of no limit, `max` or -1, an empty one."""
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() and int(period) else []


def _groups(root: str, controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups of this process, of version 2 and of version 1, and their parents.

    In a container, the directory of the root often stands for the group of the container.
    """
    mounted = Path(root, "sys/fs/cgroup")
    for line in _text(Path(root, "proc/self/cgroup")).splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for parent in (group, *group.parents):
            yield mounted / (controller if controllers else "") / parent


def _words(file: Path) -> list[str]:
    return _text(file).split()


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
