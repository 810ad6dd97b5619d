"""The class of a failure, and the file of incidents."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from trainer.errors import DivergedError, FailureSource, NonFiniteError, UserError, WorkerError, set_failure_source
from trainer.process.failure_log import (
    INCIDENTS,
    INCIDENTS_FILE,
    INFRASTRUCTURE,
    JOB,
    PREEMPTION,
    classify,
    describe,
    read_incidents,
)
from trainer.process.signals import Stopped

XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4711, name=python, GPU has fallen off the bus"


@pytest.mark.parametrize(
    "error, kind, cause",
    [
        (WorkerError("rank 1 died", cause="killed"), INFRASTRUCTURE, "killed process"),
        (WorkerError("rank 1 is silent", cause="heartbeat_timeout"), INFRASTRUCTURE, "heartbeat timeout"),
        (WorkerError("rank 1 is late", cause="rpc_timeout"), INFRASTRUCTURE, "RPC timeout"),
        (WorkerError("Ray's raylet died", cause="cluster"), INFRASTRUCTURE, "Ray died"),
        (WorkerError("rank 1 has no memory left", cause="memory"), JOB, "out of memory"),
        (WorkerError("others hold the memory", cause="gpu_memory_in_use"), INFRASTRUCTURE, "GPU memory in use"),
        (WorkerError("the processes of reward.name die"), INFRASTRUCTURE, "process"),
        (torch.OutOfMemoryError("CUDA out of memory"), JOB, "out of memory"),
        (MemoryError(), JOB, "out of memory"),
        (NonFiniteError("the policy's loss is nan"), JOB, "non-finite number"),
        (DivergedError("the run has diverged"), JOB, "divergence"),
        (UserError("choose another"), JOB, "refused"),
        (ValueError("a bug"), JOB, "exception"),
        (TimeoutError("the user's function timed out"), JOB, "exception"),
        (ValueError("timed out"), JOB, "exception"),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242"), INFRASTRUCTURE, "network"),
        (RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 1800000ms"), INFRASTRUCTURE, "collective timeout"),
        (
            RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
            INFRASTRUCTURE,
            "collective timeout",
        ),
        (RuntimeError("NCCL error: unhandled system error"), INFRASTRUCTURE, "network"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), INFRASTRUCTURE, "GPU error"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), JOB, "CUDA error"),
        (RuntimeError(XID.format(79)), INFRASTRUCTURE, "GPU error (Xid 79)"),
        (RuntimeError(XID.format(48)), INFRASTRUCTURE, "GPU error (Xid 48)"),
        (RuntimeError(XID.format(13)), JOB, "GPU error (Xid 13)"),
        (OSError(28, "No space left on device"), INFRASTRUCTURE, "storage"),
        (RuntimeError("Stale file handle"), INFRASTRUCTURE, "storage"),
        *((OSError(number, os.strerror(number)), INFRASTRUCTURE, "storage") for number in (errno.EIO, errno.ESTALE)),
        (ConnectionRefusedError(111, "Connection refused"), INFRASTRUCTURE, "network"),
        *(
            (OSError(number, os.strerror(number), "gloo/tables.json"), JOB, "exception")
            for number in (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
        ),
        (KeyError("Connection refused"), JOB, "exception"),
        (Stopped("stopped after step 3"), PREEMPTION, "stop request"),
        (KeyboardInterrupt(), PREEMPTION, "stop request"),
    ],
)
def test_each_failure_has_a_class_and_a_cause(error, kind, cause):
    assert classify(error) == (kind, cause)


def test_incidents_survive_writing_and_reading(tmp_path):
    error = WorkerError("rank 1 died:\nits process was killed", "restart the job", "killed")
    set_failure_source(error, FailureSource("critic rank 1", "10.0.0.7"))
    outer = INCIDENTS.open(str(tmp_path))
    try:
        INCIDENTS.record(describe(error, 7, "restarted the ranks", 12.3456))
        INCIDENTS.record(describe(ValueError("a bug"), 8, "ended the run", 0.0))
        (tmp_path / "inner").mkdir()
        before = INCIDENTS.open(str(tmp_path / "inner"))
        INCIDENTS.record(describe(Stopped("stopped"), 1, "stopped", 0.0))
        INCIDENTS.close(before)
        INCIDENTS.record(describe(Stopped("stopped"), 9, "stopped", 0.0))
    finally:
        INCIDENTS.close(outer)
    INCIDENTS.record(describe(error, 10, "dropped", 0.0))
    with (tmp_path / INCIDENTS_FILE).open("a") as file:
        file.write('{"torn')
    first, second, third = read_incidents(str(tmp_path))
    assert (first.name, first.role, first.node) == ("critic rank 1", "critic rank", "10.0.0.7")
    assert (first.step, first.cost_s, first.action) == (7, 12.346, "restarted the ranks")
    assert first.text == "rank 1 died: its process was killed" and first.time[:2] == "20"
    assert (second.role, second.kind, second.text) == ("driver", JOB, "ValueError: a bug")
    assert (third.kind, third.step) == (PREEMPTION, 9)
    line = json.loads((tmp_path / INCIDENTS_FILE).read_text().splitlines()[0])
    assert line["class"] == INFRASTRUCTURE and "kind" not in line
    assert [one.step for one in read_incidents(str(tmp_path / "inner"))] == [1]


def test_an_unwritable_incident_file_does_not_disturb_training(tmp_path):
    before = INCIDENTS.open(str(tmp_path / "missing"))
    INCIDENTS.record(describe(ValueError(), 1, "ended the run", 0.0))
    INCIDENTS.close(before)
    assert read_incidents(str(tmp_path / "missing")) == []


def test_incidents_with_the_causes_of_earlier_versions_are_read(tmp_path):
    line = {"time": "2026-01-01T00:00:00+0000", "step": 4, "role": "rank", "name": "rank 1", "node": "10.0.0.7"}
    line |= {"class": INFRASTRUCTURE, "cause": "silent process", "action": "restarted the ranks", "cost_s": 1.5}
    (tmp_path / INCIDENTS_FILE).write_text(json.dumps({**line, "text": "rank 1 has not answered"}) + "\n")
    (incident,) = read_incidents(str(tmp_path))
    assert (incident.cause, incident.kind, incident.step) == ("silent process", INFRASTRUCTURE, 4)
