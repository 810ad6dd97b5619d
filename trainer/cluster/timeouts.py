"""How long the driver waits for its processes, and a check that the cluster still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.config import TrainerConfig
from trainer.errors import WorkerError
from trainer.process import time_limits


@dataclass(frozen=True)
class Timeouts:
    """How long the driver waits for processes."""

    heartbeat_s: float
    """Age of a heartbeat, in seconds, after which a process counts as dead."""
    rpc_s: float
    """Longest duration of one call, in seconds."""
    failed_process: Callable[[], str | None] = lambda: None
    """Returns the name of a process of the cluster that has died, or None if all run."""
    failed_nodes: Callable[[], Mapping[str, str]] = dict
    """Returns the addresses of failed nodes, each with the reason."""

    def heartbeat_limit_s(self, is_starting: bool) -> float:
        """Return the age of a heartbeat, in seconds, after which a process counts as dead.

        Args:
            is_starting: the object of the process is not built yet.
        """
        return max(self.heartbeat_s, time_limits.IMPORTS_S) if is_starting else self.heartbeat_s

    def check_cluster(self) -> None:
        """Check that all processes of the cluster run. Otherwise a call of Ray could hang or end this process.

        Raises:
            WorkerError: a process of the cluster has died.
        """
        if process := self.failed_process():
            raise WorkerError(f"{process} died, and the job with it", "restart it with the same command", "cluster")


def timeouts_of(
    t: TrainerConfig, failed_process: Callable[[], str | None], failed_nodes: Callable[[], Mapping[str, str]] = dict
) -> Timeouts:
    """Return the timeouts of a run."""
    return Timeouts(t.heartbeat_timeout_s, t.rpc_timeout_s, failed_process, failed_nodes)
