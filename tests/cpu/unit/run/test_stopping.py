"""When a run stops early."""

from __future__ import annotations

from datetime import datetime, timedelta

from trainer.run.state import StopRequest


def test_a_deadline_leaves_room_for_a_step_and_a_save(monkeypatch):
    soon = datetime.now() + timedelta(seconds=60)
    for stop in (StopRequest(soon.isoformat()), None):
        if stop is None:
            monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(soon.timestamp())))
            stop = StopRequest(None)
        stop.consider({"step": 1}, 30)
        assert stop.reason is None
        stop.consider({"step": 1}, 90)
        assert stop.reason is not None
