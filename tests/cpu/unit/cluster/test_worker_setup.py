"""How a process that hosts a worker is prepared, and what the driver raises for its failures."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from trainer.cluster.worker_groups import failure_of, prepare_process
from trainer.errors import UserError, WorkerError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")


def prepared(monkeypatch, address: str) -> dict[str, str]:
    """The variables of a process that was prepared. It runs in a fork, because it changes the process for good."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare_process(address)
            found = [os.environ.get(name, "") for name in VARIABLES]
            os.write(writing, "\n".join(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return dict(zip(VARIABLES, text.split("\n"), strict=True))


def test_groups_use_the_interface_of_the_node_s_address(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in (entry.address for entry in found)
    )
    assert prepared(monkeypatch, "127.0.0.1") == dict(zip(VARIABLES, (loopback, loopback, "127.0.0.1"), strict=True))
    assert prepared(monkeypatch, "203.0.113.1")["GLOO_SOCKET_IFNAME"] == "", "no interface has this address"


def test_an_interface_that_the_user_has_chosen_stays(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "eth7")
    assert set(prepared(monkeypatch, "127.0.0.1").values()) == {"eth7"}


def test_a_user_s_mistake_is_raised_as_it_is():
    error = UserError("choose another")
    assert failure_of(error, "rank 0", "trace") is error


def test_an_exit_of_a_worker_is_its_failure():
    failure = failure_of(SystemExit(3), "rank 0", "the traceback")
    assert isinstance(failure, WorkerError) and str(failure).startswith("rank 0 failed: the traceback")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")]
)
def test_a_worker_without_memory_gets_the_keys_that_help(error):
    failure = failure_of(error, "engine 1", "trace")
    assert isinstance(failure, WorkerError) and failure.cause == "memory"
    assert str(failure).startswith("engine 1 has no memory left (") and "rollout.max_num_seqs" in str(failure)
    assert "\n" not in str(failure).partition(";")[0]


def test_other_errors_keep_their_type_and_get_the_worker_s_traceback():
    error = ValueError("odd")
    assert failure_of(error, "rank 2", "line 7") is error
    assert error.__notes__ == ["in rank 2; its own traceback:\nline 7"]
