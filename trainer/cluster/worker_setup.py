"""Preparation of a process that hosts a worker, and conversion of its failures for the driver."""

from __future__ import annotations

import os

from trainer.errors import RESTART_HINT, UserError, WorkerError, is_out_of_memory, one_line
from trainer.process.log_setup import guard_output, show_messages
from trainer.process.network import use_network_of


def prepare_process(address: str) -> None:
    """Prepare this process to host a worker.

    Failed writes to stdout or stderr do not end the process. Process groups use the network interface with `address`,
    unless the user has chosen another one.

    Args:
        address: address of this node.
    """
    guard_output()  # user functions print too
    show_messages()
    use_network_of(address, os.environ)


def failure_of(cause: BaseException, name: str, trace: str) -> Exception:
    """Return the exception that the driver raises for `cause`, which the worker `name` raised.

    Args:
        trace: traceback of the worker as text.
    """
    if isinstance(cause, UserError):
        return cause
    if not isinstance(cause, Exception):
        return WorkerError(f"{name} failed: {trace}")
    if is_out_of_memory(cause):
        return WorkerError(
            f"{name} has no memory left ({one_line(str(cause)) or 'MemoryError'})",
            "lower trainer.max_tokens_per_micro_batch, rollout.max_num_seqs or (on shared GPUs) "
            f"rollout.gpu_memory_utilization, or use more devices, and {RESTART_HINT}",
            "memory",
        )
    cause.add_note(f"in {name}; its own traceback:\n{trace}")
    return cause
