"""Real process groups for tests: run a function on every rank of a group of processes."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from trainer.config import Config
from trainer.parallel.mesh import destroy_process_group
from trainer.workers.rank import Rank


@functools.cache
def _process(rank: int) -> ProcessPoolExecutor:
    """The process that plays `rank` in every call: it imports torch once and joins a new group each time.

    Always the same rank, because torch caches shard offsets by mesh, not by the rank that asked.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, cfg: Config | None = None) -> list[Any]:
    """`function(rank: Rank, *args)` on `world_size` connected ranks; their results in rank order.

    `function` must be importable. An exception on any rank is raised here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cfg = cfg or Config()
    # A rank whose peer has failed waits for it no longer than this.
    cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, worker_timeout_s=60.0))
    calls = [_process(rank).submit(_main, rank, world_size, address, cfg, function, args) for rank in range(world_size)]
    errors = [error for call in calls if (error := call.exception()) is not None]
    if errors:
        raise errors[0]
    return [call.result() for call in calls]


def _main(rank: int, world_size: int, address: str, cfg: Config, function: Callable, args: tuple) -> Any:
    torch.set_num_threads(1)
    host = Rank(cfg, rank, world_size, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        host.connect(address, local_rank=rank)
        return function(host, *args)
    finally:
        destroy_process_group()
