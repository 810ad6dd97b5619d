"""Jobs that lose processes and continue: the result is that of an uninterrupted job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.jobs import left_in_shared_memory, members, shared_memory, wait_until
from tests.support.killed_jobs import build_smallest, outcome, run_until
from trainer.process.failures import read_incidents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_TIME_LIMITS", "HEARTBEAT_S=4")
        yield


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> tuple[str, ...]:
    return (
        f"model.path={build_smallest(tmp_path_factory.mktemp('model'))}",
        "trainer.num_workers=2",
        "rollout.ahead=1",
        "trainer.max_restarts=5",
        "reward.timeout_s=300",
        "algorithm.policy_loss=tests.support.faults:faulty_clip",
    )


def test_a_job_whose_ranks_die_hang_and_run_out_of_memory_ends_like_an_uninterrupted_one(
    overrides, uninterrupted, tmp_path
):
    """A step calls the loss twice. The first two faults come before the first commit, the last one after it. A
    completion that was recorded is not judged again in a step that is trained again.
    """
    faults = tmp_path / "faults"
    faults.mkdir()
    for name in ("memory,2,1", "kill,3,1", "stop,7,0"):
        (faults / name).touch()
    run, log, calls = tmp_path / "run", tmp_path / "log", tmp_path / "calls"
    env = {"TEST_FAULTS": str(faults), "TEST_CALLS": str(calls)}
    assert run_until(log, f"trainer.run_dir={run}", *overrides, env=env)
    text = log.read_text()
    assert os.listdir(faults) == [], text
    assert outcome(run) == uninterrupted
    causes = ["out of memory", "killed process", "heartbeat timeout"]
    assert [one.cause for one in read_incidents(str(run))] == causes
    judged = [line for line in calls.read_text().splitlines() if len(set(json.loads(line))) == 2]  # not the trial
    assert 0 < len(judged) <= len(set(judged)) + 3 * 8  # a fault costs at most the answers of the step under way
    assert "resume verified" in text and "WARNING: resumed from" not in text
    assert text.count("finished step") == 1 and len((run / "starts.jsonl").read_text().splitlines()) == 1


def test_a_job_whose_driver_hangs_and_whose_only_engine_dies_and_hangs_ends_like_an_uninterrupted_one(
    overrides, uninterrupted, tmp_path
):
    """The driver ends itself with 75. The same command continues, and outlives the engines."""
    run, log, reached = tmp_path / "run", tmp_path / "log", tmp_path / "reached"
    command = [f"trainer.run_dir={run}", *overrides]
    env = {"TRAINER_FAILPOINT": f"logged,1,{reached}", "TRAINER_TIME_LIMITS": "HEARTBEAT_S=4 HANG_S=3"}
    run_until(log, *command, env=env, status=75)
    assert "the driver has made no progress for" in log.read_text() and reached.exists()
    assert "in failpoint" in log.read_text()
    faults = [(3, signal.SIGKILL), (5, signal.SIGSTOP)]  # once so many lines are logged

    def disturb(job: int) -> None:
        if faults and len((run / "metrics.jsonl").read_text().splitlines()) >= faults[0][0]:
            members(job)[-1].send_signal(faults.pop(0)[1])

    assert run_until(log, *command, disturb=disturb)
    text = log.read_text()
    assert faults == [] and outcome(run) == uninterrupted, text
    assert "the ranks start again" not in text, text
    hang, start, *engines = read_incidents(str(run))
    assert (hang.cause, hang.kind, hang.step) == ("hanging driver", "infrastructure", 1)
    assert start.action == "started again with the same command"
    assert [(one.role, one.cause) for one in engines] == [("engine", "killed process"), ("engine", "heartbeat timeout")]


def test_weights_sent_by_difference_train_as_those_by_broadcast_also_after_a_killed_engine(overrides, tmp_path):
    """The new engine gets the weights of the rollouts under way from the ranks, which train meanwhile."""
    job = [*overrides, "rollout.dtype=bfloat16", "rollout.num_engines=2", "trainer.policy.optimizer.lr=1e-5"]
    before, faults, rows = shared_memory(), [3], tmp_path / "delta/metrics.jsonl"

    def disturb(pid: int) -> None:
        if faults and rows.exists() and len(rows.read_text().splitlines()) >= faults[0]:
            members(pid)[-1].send_signal(signal.SIGKILL)
            faults.clear()

    for way in ("broadcast", "delta"):
        settings = [f"rollout.weight_sync={way}", f"trainer.run_dir={tmp_path / way}"]
        assert run_until(tmp_path / f"{way}.log", *job, *settings, disturb=disturb if way == "delta" else None)
    (incident,) = read_incidents(str(tmp_path / "delta"))
    assert (incident.role, incident.cause, incident.action) == ("engine", "killed process", "replaced the engine")
    assert outcome(tmp_path / "delta") == outcome(tmp_path / "broadcast")
    wait_until(lambda: left_in_shared_memory(before) == set())
