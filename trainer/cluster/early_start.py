"""What of a job's processes starts before the driver imports torch, so that both happen at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.cluster.fork_server import ForkServer
from trainer.cluster.ray_head import RayHead
from trainer.cluster.resources import rank_environment
from trainer.config import Config
from trainer.config.trainer import PROCESSES
from trainer.process.signals import SIGNALS

Early = ForkServer | RayHead | None
"""What has been started: the process that forks the ranks, or Ray."""


@contextmanager
def early_start(cfg: Config, modules: Sequence[str]) -> Iterator[Early]:
    """Begin to start the cluster of a job on CPUs of this machine; end it after the block.

    Where ranks are processes without Ray, this is the process that forks them. It imports `modules` for all of them. On
    GPUs, each rank imports by itself, with the environment variables that name its GPU.
    """
    t = cfg.trainer
    may_use_gpus = t.device == "cuda" or t.device == "auto" and os.path.exists("/proc/driver/nvidia/version")
    if may_use_gpus or t.ray_address not in (None, PROCESSES):
        yield None
        return
    early: Early = None
    try:
        with SIGNALS.deferred():  # its end raises, so what is to be ended is known
            if t.ray_address is None:
                early = RayHead.of_job(cfg, "cpu")
            else:
                early = ForkServer(modules, rank_environment("cpu", os.environ, t.deterministic))
        yield early
    finally:
        if early is not None:
            with SIGNALS.deferred():
                early.close()
