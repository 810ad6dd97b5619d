"""What of a job's processes starts before the cluster: Ray, or the process that forks ranks and engines."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import TypeVar

from trainer.cluster.fork_server import ForkServer
from trainer.cluster.ray_head import RayHead
from trainer.cluster.resources import rank_environment
from trainer.config import Config
from trainer.config.trainer import PROCESSES
from trainer.process.signals import SIGNALS
from trainer.process.startup import DISPLAY_THREAD, importing

Early = ForkServer | RayHead | None  # what has been started: the process that forks the ranks, or Ray
_Early = TypeVar("_Early", ForkServer, RayHead)


def early_ray(cfg: Config) -> AbstractContextManager[RayHead | None]:
    """Begin to start Ray for a job on CPUs of this machine, while the driver imports torch. End it after the block."""
    t = cfg.trainer
    may_use_gpus = t.device == "cuda" or t.device == "auto" and os.path.exists("/proc/driver/nvidia/version")
    return nullcontext() if may_use_gpus or t.ray_address is not None else _ended(lambda: RayHead.of_job(cfg, "cpu"))


def early_fork(cfg: Config, device: str, modules: Sequence[str]) -> AbstractContextManager[ForkServer | None]:
    """Start the process that forks the ranks of a job without Ray, and end it after the block.

    It is a fork of this process, which imports `modules` and those of the engine first: they are imported once, and are
    in memory once. If this process has threads of others, it is a new interpreter. On GPUs there is none: each rank
    imports by itself, with the environment variables that name its GPU.
    """
    if device != "cpu" or cfg.trainer.ray_address != PROCESSES:
        return nullcontext()
    modules = (*modules, *cfg.engine.preload)
    forks_this = {thread.name for thread in threading.enumerate()} <= {"MainThread", DISPLAY_THREAD}
    with importing(), suppress(Exception):  # a worker will raise it again, in its own words
        for module in modules if forks_this else ():
            import_module(module)
    deterministic = cfg.trainer.deterministic
    return _ended(lambda: ForkServer(modules, rank_environment(device, os.environ, deterministic), forks_this))


@contextmanager
def _ended(start: Callable[[], _Early]) -> Iterator[_Early]:
    early = None
    try:
        with SIGNALS.deferred():  # its end raises, so what is to be ended is known
            early = start()
        yield early
    finally:
        if early is not None:
            with SIGNALS.deferred():
                early.close()
