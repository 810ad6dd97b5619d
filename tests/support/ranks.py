"""Real process groups for tests: run a function on every rank of a group of processes."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.forks import fork_server
from trainer.cluster.fork_server import ForkServer, run_fork_server
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.worker_groups import WorkerGroup
from trainer.config import Config
from trainer.process import time_limits
from trainer.workers.rank import Rank

_ROOT = Path(__file__).resolve().parents[2]

# What ranks import, sooner or later, and test modules with them.
_MODULES = (
    "pytest",
    "trainer.checkpoint.sharded",
    "trainer.objectives.policy_gradient",
    "trainer.workers.rank",
    "transformers.models.qwen3.modeling_qwen3",
)


@functools.lru_cache(maxsize=2)
def launcher(module: str = "") -> ForkServer:
    """Start processes that have imported what ranks need, and that are warm on CPUs. It ends with this process.

    Args:
        module: a test module whose functions the ranks run. It is imported once, and not by each rank.
    """
    return ForkServer(_MODULES) if torch.cuda.is_available() else _WarmForkServer([module] if module else [])


class _WarmForkServer(ForkServer):
    """A fork server that is a fork of the one of the commands, which has imported everything."""

    def _start(self, remote: Connection, preload: Sequence[str], env: Mapping[str, str]) -> psutil.Process:
        self._command = fork_server().start(
            f"{__name__}:serve_ranks",
            *preload,
            cwd=_ROOT,  # where the test modules are
            env=env,
            stdout=remote,  # the only descriptors that a command gets are those of its output
            stderr=2,
        )
        return psutil.Process(self._command.pid)


def serve_ranks(*preload: str) -> None:
    """Be the fork server whose connection is the descriptor of stdout."""
    connection = os.dup(1)
    os.dup2(2, 1)
    run_fork_server(connection, preload)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    cfg: Config | None = None,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """`function(rank: Rank, *args)` on `world_size` connected ranks; their results in rank order.

    `function` must be importable. An exception on any rank is raised here.

    Args:
        device: `cuda` or `cpu`; None: CUDA if there is a GPU.
        env: further variables of the processes.
    """
    module = "" if function.__module__.startswith("tests.support.") else function.__module__
    with local_cluster(world_size, cfg or Config(), device, module) as cluster:
        group = start_ranks(cluster, env)
        return group.call("run", cluster.rendezvous_address(group), function, args)


def start_ranks(cluster: ProcessCluster, env: Mapping[str, str] | None = None) -> WorkerGroup:
    """Start the processes of `cluster.cfg.trainer.num_workers` ranks, which host a `ConnectedRank` each."""
    factory = functools.partial(ConnectedRank, cluster.cfg)
    return cluster.launch_ranks("rank", factory, {"OMP_NUM_THREADS": "1", **(env or {})})


def local_cluster(world_size: int, cfg: Config, device: str | None = None, module: str = "") -> ProcessCluster:
    """A cluster for `world_size` ranks, which use GPUs where there are some. See `launcher` for `module`."""
    time_limits.COLLECTIVE_S = 60.0  # a rank whose peer has failed waits for it no longer than this
    trainer = dataclasses.replace(cfg.trainer, num_workers=world_size)
    cfg = dataclasses.replace(cfg, trainer=trainer, rollout=dataclasses.replace(cfg.rollout, colocate=True))
    return ProcessCluster(cfg, device or ("cuda" if torch.cuda.is_available() else "cpu"), launcher(module))


class ConnectedRank:
    """Hosts a rank, for functions of tests."""

    def __init__(self, cfg: Config, rank: int, world_size: int, device: str):
        self._rank = Rank(cfg, rank, world_size, device)

    def run(self, address: str, function: Callable[..., Any], args: tuple) -> Any:
        self._rank.connect(address)
        return function(self._rank, *args)
