"""Whether a GPU is behind a failure, and the node that is drained for it."""

from __future__ import annotations

import time

import pytest

from tests.cpu.unit.cluster.hosted import Host
from trainer.cluster.fork_server import HOST
from trainer.cluster.gpu_health import GpuHealthCheck
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config
from trainer.errors import FailureSource, UserError, WorkerError, failure_source_of, set_failure_source
from trainer.process import xid
from trainer.process.failure_log import INFRASTRUCTURE, classify

OFF_THE_BUS = "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
CONTAINED = "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error"
PAGE_FAULT = "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault"


def failed(error: Exception, node: str = "10.0.0.1") -> Exception:
    set_failure_source(error, FailureSource("rank 0", node))
    return error


def examined(error: Exception, lines: dict[str, list[str]] | None = None) -> tuple[Exception, dict[str, str]]:
    """What is found behind `error`, and the nodes that were drained."""
    drained: dict[str, str] = {}
    examination = GpuHealthCheck(lambda seconds: lines or {}, drained.__setitem__)
    return examination.examine(error), drained


def test_the_kernel_of_another_node_explains_the_failure_of_a_rank():
    error = failed(RuntimeError("[gloo] Connection closed by peer"))
    lines = {"10.0.0.1": ["NVRM: loading"], "10.0.0.2": [CONTAINED, OFF_THE_BUS]}
    found, drained = examined(error, lines)
    assert str(found).startswith(
        f"rank 0 failed, and the kernel of node 10.0.0.2 logged: {OFF_THE_BUS}; repair or drain"
    )
    assert classify(found) == (INFRASTRUCTURE, "GPU error (Xid 79)") and found.__cause__ is error
    assert failure_source_of(found) == FailureSource("rank 0", "10.0.0.2") and drained == {
        "10.0.0.2": "GPU error (Xid 79)"
    }


def test_an_error_that_names_a_broken_gpu_drains_the_node_of_its_rank():
    error = failed(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert examined(error) == (error, {"10.0.0.1": "GPU error"})


def test_a_gpu_that_works_again_explains_a_failure_and_its_node_stays():
    found, drained = examined(failed(WorkerError("rank 0 died", cause="killed")), {"10.0.0.2": [CONTAINED]})
    assert classify(found) == (INFRASTRUCTURE, "GPU error (Xid 94)") and drained == {}


@pytest.mark.parametrize("error", [failed(UserError("choose another")), KeyError("a bug of the driver")])
def test_a_failure_that_is_not_of_a_member_stays_as_it_is(error):
    assert examined(error, {"10.0.0.2": [OFF_THE_BUS]}) == (error, {})


def test_the_fault_of_a_program_and_a_cluster_that_cannot_be_asked_explain_nothing():
    error = failed(WorkerError("rank 0 died", cause="killed"))
    assert examined(error, {"10.0.0.1": [PAGE_FAULT]}) == (error, {})

    def fail(seconds: float) -> dict[str, list[str]]:
        raise ConnectionError

    assert GpuHealthCheck(fail, lambda node, cause: None).examine(error) is error


def test_a_line_of_the_kernel_counts_for_one_failure(tmp_path, monkeypatch):
    """The log is a file that says what the kernel would say."""
    log = tmp_path / "kern.log"
    log.write_text("")
    monkeypatch.setattr(xid, "KERNEL_LOGS", [str(log)])
    with ProcessCluster(Config(), "cpu") as cluster:
        with pytest.raises(WorkerError) as died:
            cluster.launch_ranks("rank", Host, {}).call("is_killed")
        assert cluster.examine(died.value) is died.value
        log.write_text(f"host kernel: [{time.clock_gettime(time.CLOCK_MONOTONIC):.6f}] {OFF_THE_BUS}\n")
        found = cluster.examine(died.value)
        assert classify(found) == (INFRASTRUCTURE, "GPU error (Xid 79)") and failure_source_of(found).node == HOST
