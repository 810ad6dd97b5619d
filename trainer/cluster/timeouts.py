"""How long the driver waits for its processes, and whether the cluster still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.config import TrainerConfig
from trainer.errors import WorkerError

_IMPORTS_S = 60.0  # imports may keep a process from answering for so long


@dataclass(frozen=True)
class Patience:
    """How long the driver waits for processes."""

    silence_s: float
    """Seconds without an answer to a pulse after which a process counts as dead."""
    call_s: float
    """Longest time that one call may take, in seconds."""
    lost: Callable[[], str | None] = lambda: None
    """Returns the name of a part of the cluster that has died; None: all parts run."""
    lost_nodes: Callable[[], Mapping[str, str]] = dict
    """Returns the addresses of lost nodes, each with the reason."""
    hang_s: float = float("inf")
    """A call that was made before hangs if it takes this long, and ten times as long as the longest one before."""
    run_dir: str | None = None
    """Directory of the run, for the stacks of processes that hang."""

    def limit_s(self, starts: bool) -> float:
        """Return the seconds of silence after which a process counts as dead.

        Args:
            starts: its object is not built yet.
        """
        return max(self.silence_s, _IMPORTS_S) if starts else self.silence_s

    def check_cluster(self) -> None:
        """Check that all parts of the cluster run. Otherwise a call of Ray could hang or end this process.

        Raises:
            WorkerError: a part has died.
        """
        if part := self.lost():
            raise WorkerError(f"{part} died, and the job with it", "restart it with the same command", "cluster")


def patience_of(
    t: TrainerConfig, lost: Callable[[], str | None], lost_nodes: Callable[[], Mapping[str, str]] = dict
) -> Patience:
    """Return how long the driver of a run waits."""
    return Patience(t.heartbeat_timeout_s, t.rpc_timeout_s, lost, lost_nodes, t.hang_timeout_s, t.run_dir)
