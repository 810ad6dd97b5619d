"""Copies between a GPU and its host in a step: `trainer.offload`, engines that sleep, and `fsdp.cpu_offload`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.plan.engines import PlannedEngine
from trainer.plan.hardware import ADDED_BYTES, CLIPPED_BYTES, OPTIMIZER_BYTES, REACHED_BANDWIDTH, Device
from trainer.plan.ranks import PlannedRole
from trainer.plan.workload import Workload, scored_share


@dataclass(frozen=True)
class HostCopies:
    """Bytes that one GPU exchanges with its host in a step."""

    to_host: float = 0.0
    to_gpu: float = 0.0

    def seconds(self, device: Device) -> float:
        """Return the seconds in which the GPU copies them, and computes nothing meanwhile."""
        return (self.to_host + self.to_gpu) / device.pcie


def copies_of_ranks(cfg: Config, roles: Sequence[PlannedRole], workload: Workload) -> HostCopies:
    """Return what `trainer.offload` copies on each GPU, if it is that of a rank with these roles.

    Ranks leave the GPU twice in a step: before engines take new weights, and before they generate. Each role returns to
    score and to train, with the optimizer's states, and the policy to send its weights, without them. A role leaves the
    GPU while another trains, so the policy returns once more if others train between its scores and its update. What
    has not changed since it was copied to the host is not copied there again (`OffloadBuffer`).
    """
    mode = cfg.trainer.offload
    to_host = to_gpu = 0.0
    if mode == "none" or not cfg.rollout.colocate:
        return HostCopies()
    several = sum(role.spec.trained for role in roles) > 1
    scored = any(
        scored_share(cfg, role.spec, workload) > 0
        for role in roles
        if role.spec.name == "policy" or role.spec.is_policy_base
    )
    for role in roles:
        if role.is_on_host:
            continue
        weights, optimizer = role.state
        weights, spec = weights if mode == "all" else 0, role.spec
        to_gpu += weights + optimizer
        if spec.name == "policy":
            to_gpu += weights * (1 + (several and scored))
        if spec.trained:
            to_host += weights + optimizer
        elif spec.sync_interval is not None:
            to_host += weights / spec.sync_interval
            to_gpu += weights / spec.sync_interval
    return HostCopies(to_host, to_gpu)


def copies_of_engine(cfg: Config, engine: PlannedEngine | None) -> HostCopies:
    """Return what an engine that shares GPUs copies on each of them.

    vLLM copies its weights to the host when it falls asleep (level 1), and back before it takes new ones. transformers
    takes new weights on the host, and returns afterwards; its host memory is not pinned, so the copies take longer than
    planned.
    """
    if engine is None or not engine.gpus or not cfg.rollout.colocate:
        return HostCopies()
    return HostCopies(engine.weights * (1 if cfg.engine.streaming else 2), engine.weights)


@dataclass(frozen=True)
class OffloadedRole:
    """What `fsdp.cpu_offload` costs a role, in seconds of a rank."""

    device: Device
    weights: int
    """Bytes of the weights that wait on the host."""
    numbers: int
    """Of these weights."""
    trained: int
    """Those of them that are trained."""

    def gather(self) -> float:
        """Return the seconds in which all weights of the rank reach the GPU, in the precision of the host."""
        return self.weights / self.device.pcie

    def reduce(self) -> float:
        """Return the seconds in which the gradients reach the host, in float32."""
        return 4 * self.trained / self.device.pcie

    def add(self) -> float:
        """Return the seconds in which gradients reach the host and are added to those of micro-batches before.

        The thread that queues kernels waits for both, so the GPU computes nothing meanwhile.
        """
        return self.reduce() + self._on_host(ADDED_BYTES * self.trained)

    def optimizer_step(self) -> float:
        """Return the seconds in which the host clips the gradients and updates the weights."""
        return self._on_host((CLIPPED_BYTES + OPTIMIZER_BYTES) * self.trained)

    def send(self, itemsize: float) -> float:
        """Return the seconds in which the host casts the weights and copies them to the GPU, to send them to engines.

        Args:
            itemsize: bytes of a number of the engines.
        """
        cast = itemsize * self.numbers
        return self._on_host(self.weights + cast) + cast / self.device.pcie

    def _on_host(self, size: float) -> float:
        return size / (REACHED_BANDWIDTH * self.device.host_bandwidth)


def offloaded(role: PlannedRole, device: Device) -> OffloadedRole | None:
    """Return what `fsdp.cpu_offload` costs a role; None: its state is on the GPU."""
    if not role.is_on_host:
        return None
    model = role.model
    return OffloadedRole(device, role.state[0], model.shard(role.shards), model.shard(role.shards, trained=True))
