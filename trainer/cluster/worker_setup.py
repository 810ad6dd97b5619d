"""What a process does to host a member of a group, and what its failures mean to the driver."""

from __future__ import annotations

import os

import psutil

from trainer.cluster.stacks import allow_stacks
from trainer.errors import RESTART_HINT, UserError, WorkerError, memory_ran_out, one_line
from trainer.process.log_setup import guard_output, show_messages


def prepare_process(address: str) -> None:
    """Prepare this process to host a member.

    Output that cannot be written does not end the process. Its process groups use the network interface that has
    `address`, unless the user has set another one.

    Args:
        address: address of this node.
    """
    guard_output()  # user functions print too
    show_messages()
    allow_stacks()
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    os.environ.setdefault("VLLM_HOST_IP", address)


def failure_of(cause: BaseException, name: str, trace: str) -> Exception:
    """Return the exception to raise in the driver for `cause`, which the member `name` raised.

    Args:
        trace: traceback of the member as text.
    """
    if isinstance(cause, UserError):
        return cause
    if not isinstance(cause, Exception):
        return WorkerError(f"{name} failed: {trace}")
    if memory_ran_out(cause):
        return WorkerError(
            f"{name} has no memory left ({one_line(str(cause)) or 'MemoryError'})",
            "lower trainer.max_tokens_per_micro_batch, rollout.max_num_seqs or (on shared GPUs) "
            f"rollout.gpu_memory_utilization, or use more devices, and {RESTART_HINT}",
            "memory",
        )
    cause.add_note(f"in {name}; its own traceback:\n{trace}")
    return cause
