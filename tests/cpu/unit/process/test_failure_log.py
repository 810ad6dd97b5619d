"""The class of a failure, and the file of incidents."""

from __future__ import annotations

import json

from trainer.errors import FailureSource, WorkerError, set_failure_source
from trainer.process.failures import (
    INCIDENTS,
    INCIDENTS_FILE,
    INFRASTRUCTURE,
    JOB,
    PREEMPTION,
    describe,
    read_incidents,
)
from trainer.process.signals import Stopped


def test_incidents_survive_writing_and_reading(tmp_path):
    error = WorkerError("rank 1 died:\nits process was killed", "restart the job", "killed")
    set_failure_source(error, FailureSource("critic rank 1", "10.0.0.7"))
    INCIDENTS.open(str(tmp_path))
    try:
        INCIDENTS.record(describe(error, 7, "restarted the ranks", 12.3456))
        INCIDENTS.record(describe(ValueError("a bug"), 8, "ended the run", 0.0))
        INCIDENTS.record(describe(Stopped("stopped"), 9, "stopped", 0.0))
    finally:
        INCIDENTS.close()
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


def test_an_unwritable_incident_file_does_not_disturb_training(tmp_path):
    INCIDENTS.open(str(tmp_path / "missing"))
    INCIDENTS.record(describe(ValueError(), 1, "ended the run", 0.0))
    INCIDENTS.close()
    assert read_incidents(str(tmp_path / "missing")) == []
