"""The number, GPUs and environment variables of the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import Config
from trainer.config.engines import DETERMINISTIC_CUDA, STABLE_KERNELS
from trainer.errors import UserError

FindGpus = Callable[[int], Sequence[Mapping[str, Any]]]
"""Returns the placements of the ranks whose GPUs an engine shares, by the index of the engine."""


def rank_groups(cfg: Config) -> int:
    return int(cfg.task.trains)


def gpus_per_engine(cfg: Config, device: str) -> int:
    """Return the GPUs of the job that each engine takes; 0 on `cpu`, and for engines that need none."""
    return cfg.rollout.tensor_parallel_size if device == "cuda" and cfg.engine.gpus else 0


def slots_needed(cfg: Config) -> int:
    """Return how many ranks and engines a job has, each of which needs a GPU or a logical CPU."""
    return cfg.trainer.num_workers * rank_groups(cfg) + cfg.num_engines


def check_gpus(cfg: Config, available: int) -> None:
    """Raise a `UserError` if ranks and engines need more than the `available` GPUs."""
    t, r = cfg.trainer, cfg.rollout
    ranks = t.num_workers * rank_groups(cfg)
    engines = cfg.num_engines * gpus_per_engine(cfg, "cuda") if cfg.num_engines else 0
    if r.colocate and engines > t.num_workers:
        raise UserError(
            f"rollout.num_engines={r.num_engines}: with rollout.colocate the engines need {engines} "
            f"GPUs, but trainer.num_workers={t.num_workers}"
        )
    needed = ranks + (0 if r.colocate else engines)
    if needed > available:
        raise UserError(
            f"trainer.num_workers={t.num_workers}: ranks and engines need {needed} GPUs, and there are "
            f"{available}; use fewer, or set rollout.colocate=true"
        )


def by_node(nodes: Mapping[int, str]) -> list[int]:
    """Return the bundle indices, sorted so that those of one node (`nodes` has that of each) follow one another: ranks
    that shard together, and the GPUs of one engine, must be neighbours, and Ray does not promise any order."""
    first: dict[str, int] = {}
    for index in sorted(nodes):
        first.setdefault(nodes[index], index)
    return sorted(nodes, key=lambda index: (first[nodes[index]], index))


def max_world_size(cfg: Config, device: str, free: Sequence[Mapping[str, float]], engines: int) -> int:
    """Return the largest number of ranks that the cluster has capacity for, at most `trainer.num_workers`: a multiple
    of what the layout needs, or 0.

    Args:
        free: for each node, the CPUs and GPUs that no job holds.
        engines: number of engines that are not placed yet.
    """
    t, on_gpus = cfg.trainer, device == "cuda"
    size = gpus_per_engine(cfg, device) if on_gpus else 1
    if on_gpus and (cfg.rollout.colocate or not size):
        engines, size = 0, 1
    slots = [int(min(node.get("CPU", 0), node.get("GPU", 0)) if on_gpus else node.get("CPU", 0)) for node in free]
    if sum(count // size for count in slots) < engines:
        return 0
    ranks = min(t.num_workers, (sum(slots) - engines * size) // rank_groups(cfg))
    return ranks - ranks % t.layout_size


_FORWARDED = ("CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's variables to set for ranks and engines on an existing cluster.

    Processes of such a cluster have the environment of `ray start`. Secrets are excluded, because Ray shows the
    environment of an actor to everybody who can reach the cluster.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED) and not any(word in name for word in _SECRET)
    }


def rank_environment(device: str, environment: Mapping[str, str], deterministic: bool = False) -> dict[str, str]:
    """Return the variables of ranks that follow from the device (`cuda` or `cpu`) and the driver's `environment`."""
    if device == "cpu":
        return {**STABLE_KERNELS, "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
    return {
        **STABLE_KERNELS,
        **(DETERMINISTIC_CUDA if deterministic else {}),
        # Micro-batches of many sizes would fragment GPU memory.
        "PYTORCH_ALLOC_CONF": environment.get("PYTORCH_ALLOC_CONF")
        or environment.get("PYTORCH_CUDA_ALLOC_CONF")  # its former name, which the new name would override
        or "expandable_segments:True",
        # With 1, which other frameworks set, all ranks of a node would use its first GPU.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    }
