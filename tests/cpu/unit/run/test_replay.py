"""Replayed steps are compared with what was logged."""

from __future__ import annotations

import json
import os

from trainer.run.replay import ReplayAudit, first_difference, jumps


def logged(tmp_path, rows: list[dict]) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_replayed_steps_are_verified_and_survive_another_kill(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "reward/mean": n / 3, "time/step": n} for n in (1, 2, 3, 4)]
    run_dir = logged(tmp_path, rows)
    ReplayAudit(run_dir, 2, 0.0, same_layout=True)
    logged(tmp_path, rows[:2])  # the tracker has rewound the file, and the run was killed again
    audit = ReplayAudit(run_dir, 2, 0.0, same_layout=True)
    assert audit.check(3, {"reward/mean": 1.0, "time/step": 9.0}) is None and not caplog.messages
    assert audit.check(4, {"reward/mean": 4 / 3}) is None
    assert caplog.messages == ["resume verified: 2 replayed steps identical"]
    assert not os.path.exists(tmp_path / "metrics.replay.jsonl")


def test_the_first_metric_that_differs_is_named(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "policy/kl": 0.5, "policy/loss": None, "reward/mean": 1.0}])
    audit = ReplayAudit(run_dir, 0, 0.0, same_layout=True)
    now = {"policy/kl": 0.5, "policy/loss": float("nan"), "reward/mean": 1.0000001}
    assert "step 1 was not replayed as it had been logged: reward/mean is 1.0000001 and was 1.0" in audit.check(1, now)
    assert first_difference({"x": 1.0}, {"x": 1.0000001}, 1e-6) is None
    assert first_difference({"x": 1.0}, {"x": float("nan")}, 1e-6) == "x is nan and was 1.0"


def test_on_other_ranks_the_first_step_is_compared_to_rounding(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "policy/loss": 1.0} for n in (1, 2, 3)]
    audit = ReplayAudit(logged(tmp_path, rows), 1, 0.0, same_layout=False)
    assert audit.check(2, {"policy/loss": 1.0001}) is None
    (message,) = caplog.messages
    assert "1 replayed steps equal to 0.001" in message and "number of ranks" in message
    assert audit.check(3, {"policy/loss": 7.0}) is None


def test_without_replayed_steps_a_jump_is_reported(tmp_path, caplog):
    rows = [{"step": n, "policy/loss": 0.1 + n / 100, "policy/kl": 0.2} for n in range(1, 11)]
    assert jumps({"policy/loss": 0.2, "policy/kl": 0.21}, rows) == []
    audit = ReplayAudit(logged(tmp_path, rows), 10, 0.0, same_layout=True)
    assert audit.check(11, {"policy/loss": 5.0, "policy/kl": 0.2}) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "policy/loss jumped to 5" in record.getMessage()
    assert jumps({"policy/loss": float("nan")}, rows)
