"""How long many ranks take to meet at one TCP store: `python -m benchmarks.rendezvous [--ranks 1024 --processes 32]`.

The store is torch's, in this process, as rank 0 has it. Ranks are threads of other processes, each with a connection of
its own. They do what forming process groups asks of the store: each connects, reads the identity of a communicator that
rank 0 has written, and counts itself and waits until all have. The network and NCCL itself are not in it.

Prints the seconds from the moment that all processes may begin, until the last rank has done each part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

from torch.distributed import TCPStore

_HOST, _TIMEOUT = "127.0.0.1", timedelta(seconds=300)
_ID_BYTES = 128
"""Of an identity of a communicator of NCCL."""


def meet(port: int, ranks: list[int], world_size: int, groups: int, begin: Barrier, moments: Any) -> None:
    """Be these ranks. Put the moment at which each has done each part in `moments`."""

    def one(rank: int) -> list[float]:
        store = TCPStore(_HOST, port, world_size, False, _TIMEOUT, wait_for_workers=False)
        done = [time.monotonic()]
        for group in range(groups):
            assert len(store.get(f"id {group}")) == _ID_BYTES
        done.append(time.monotonic())
        if store.add("count", 1) == world_size:
            store.set("all", b"1")
        store.wait(["all"])
        return [*done, time.monotonic()]

    with ThreadPoolExecutor(len(ranks)) as threads:
        begin.wait()
        moments.put(list(threads.map(one, ranks)))


def measure(ranks: int, processes: int, groups: int) -> list[list[float]]:
    """Return for each rank the seconds after which it has done each part."""
    store = TCPStore(_HOST, 0, ranks, True, _TIMEOUT, wait_for_workers=False)
    for group in range(groups):
        store.set(f"id {group}", bytes(_ID_BYTES))
    context = multiprocessing.get_context("spawn")
    parts = [list(range(first, ranks, processes)) for first in range(min(processes, ranks))]
    begin, moments = context.Barrier(len(parts) + 1, timeout=_TIMEOUT.total_seconds()), context.Queue()
    children = [
        context.Process(target=meet, args=(store.port, part, ranks, groups, begin, moments), daemon=True)
        for part in parts
    ]
    for child in children:
        child.start()
    begin.wait()
    began = time.monotonic()
    found = [row for _ in children for row in moments.get(timeout=_TIMEOUT.total_seconds())]
    for child in children:
        child.join()
    return [[moment - began for moment in row] for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--groups", type=int, default=4, help="communicators of a rank")
    options = parser.parse_args()
    found = measure(options.ranks, options.processes, options.groups)
    names = ("connected", f"has read {options.groups} identities", "knows that all are there")
    for name, times in zip(names, zip(*found, strict=True), strict=True):
        print(f"the last of {len(found):,} ranks {name} after {max(times):.2f} s")


if __name__ == "__main__":
    main()
