"""Processes whose clock is wrong. A library that is built here and loaded before libc moves the time of day."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t offset(void) { return atol(getenv("CLOCK_OFFSET_S")); }

int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += offset();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


def wrong_clock(directory: Path, offset_s: int) -> dict[str, str]:
    """The environment variables of a process whose clock is off by so many seconds.

    Args:
        directory: where the library is built.
    """
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(offset_s)}
