"""What a run must find again, must not share, and must not leave without: checkpoints, metrics, the last save."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.cpu.test_resuming import a_run, directory, settings
from tests.support.jobs import metrics, run_job
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.parts import json_part
from trainer.config import LoggerConfig
from trainer.data.datasets import Prompt
from trainer.data.rollouts import write_rollouts
from trainer.data.source import DrawnPrompt
from trainer.errors import NotSavedError, UserError
from trainer.metrics.tracker import Tracker
from trainer.run.stopping import StopRequest
from trainer.run_directory import RunDirectory
from trainer.signals import Stopped

TOTAL = 5


def stop_request(reason: str | None) -> StopRequest:
    stop = StopRequest(None)
    stop.ask(reason)
    return stop


# ----------------------------------------------------------------------------------------------------------
# The last save


@pytest.mark.parametrize("step, reason", [(TOTAL, None), (2, "SIGTERM")])
def test_the_last_save_is_tried_again_until_it_is_committed(tmp_path, caplog, step, reason):
    caplog.set_level("INFO")
    failures = iter([OSError("No space left on device"), OSError("Stale file handle")])

    def flaky() -> dict:
        for error in failures:
            raise error
        return {}

    told: list[str] = []
    # Regular saves that fail in a row would end the run: the last one is tried again nevertheless.
    with directory(settings(tmp_path, ckpt_failures_allowed=0), {"step": step}) as run:
        run.parts.append(json_part("flaky", flaky, lambda _: None))
        save = partial(run.save, step, {}, [])
        if reason is None:
            run.end_of_step(step, TOTAL, 1.0, stop_request(reason), save, told.append)
        else:
            with pytest.raises(Stopped, match="stopped after step 2 of 5"):
                run.end_of_step(step, TOTAL, 1.0, stop_request(reason), save, told.append)
    assert (tmp_path / f"checkpoints/global_step_{step}/manifest.json").exists()
    assert ["FAILED" in line for line in told] == [True, True]
    assert [message.split()[0] for message in caplog.messages] == ["saved"]


@pytest.mark.parametrize("step, reason", [(TOTAL, None), (2, "SIGTERM")])
def test_a_run_whose_last_save_fails_does_not_end_well(tmp_path, step, reason):
    with directory(settings(tmp_path), {"step": step}) as run:
        run.save(1, {}, [])
        run.finish(print)
        shutil.move(tmp_path / "checkpoints", tmp_path / "moved")
        (tmp_path / "checkpoints").write_text("a file")
        with pytest.raises(NotSavedError, match=f"step {step} is trained but not saved.*good.*global_step_1") as error:
            save = partial(run.save, step, {}, [])
            run.end_of_step(step, TOTAL, 1.0, stop_request(reason), save, lambda _: None)
        assert f"trainer.ckpt_path={tmp_path}/checkpoints" in str(error.value)


def test_a_save_that_is_not_the_last_does_not_hold_training_up(tmp_path):
    with directory(settings(tmp_path, ckpt_interval=2), {"step": 2}) as run:
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").write_text("a file")
        told: list[str] = []
        run.end_of_step(2, TOTAL, 1.0, stop_request(None), partial(run.save, 2, {}, []), told.append)
        run.finish(told.append)
        assert "FAILED" in told[-1] and told[-1].endswith("training continues")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", ["trainer.main", "trainer.sft"])
def test_a_job_that_cannot_save_its_last_step_exits_with_1(tmp_path, module):
    """What a save writes has longer names than what tries the directory before: no save succeeds."""
    place = str(tmp_path)
    while len(place) < 4035:
        place += "/" + "x" * min(200, 4035 - len(place) - 1)
    job = run_job("rollout=transformers", "trainer.val_interval=-1", "logger.plot=false", "sft.steps=3",
                  "trainer.ckpt_failures_allowed=9", "trainer.hf_save_interval=2", f"trainer.ckpt_path={place}",
                  module=module, cwd=tmp_path)  # fmt: skip
    assert job.returncode == 1, job.stdout + job.stderr
    (sentence,) = [line for line in job.stderr.splitlines() if line.startswith("error: ")]
    assert "is trained but not saved: trainer.ckpt_path=" in sentence and "name too long" in sentence, sentence
    assert "finished" not in job.stdout and "Traceback" not in job.stderr
    assert len(metrics(tmp_path / "outputs/default")) == (2 if module == "trainer.main" else 3)


# ----------------------------------------------------------------------------------------------------------
# The checkpoint directory


def lose(checkpoints: Path, how: str) -> None:
    """Take the checkpoint directory away, as an unmounted disk does."""
    shutil.move(checkpoints, checkpoints.with_name("elsewhere"))
    if how == "a file":
        checkpoints.write_text("")
    elif how == "a dangling link":
        checkpoints.symlink_to(checkpoints.with_name("not mounted"))
    elif how == "empty":
        checkpoints.mkdir()


@pytest.mark.parametrize("how", ["gone", "empty", "a file", "a dangling link"])
def test_latest_does_not_start_over_where_committed_checkpoints_are_not_found(tmp_path, how):
    a_run(tmp_path)
    logged = (tmp_path / "metrics.jsonl").read_bytes()
    lose(tmp_path / "checkpoints", how)
    for mode in ("latest", "none"):
        with pytest.raises(UserError, match="global_step_2 in .*; mount or restore it|already holds a run"):
            RunDirectory(settings(tmp_path, resume_mode=mode)).open()
    assert (tmp_path / "metrics.jsonl").read_bytes() == logged
    assert (tmp_path / "checkpoints").is_dir() == (how == "empty"), "it is not made on the wrong disk"
    if how == "empty":
        (tmp_path / "checkpoints").rmdir()
    else:
        (tmp_path / "checkpoints").unlink(missing_ok=True)
    shutil.move(tmp_path / "elsewhere", tmp_path / "checkpoints")
    with RunDirectory(settings(tmp_path, resume_mode="latest")).open() as run:
        assert run.resume.step == 2


def test_a_damaged_record_still_says_that_something_was_committed(tmp_path):
    a_run(tmp_path)
    lose(tmp_path / "checkpoints", "gone")
    for content in ("", "[]", "{}", '{"step": "2", "ckpt_path": 3}', '{"a":' * 100_000):
        (tmp_path / "committed.json").write_text(content)
        with pytest.raises(UserError, match="has committed a checkpoint; mount or restore it"):
            RunDirectory(settings(tmp_path, resume_mode="latest")).open()
    (tmp_path / "committed.json").unlink()  # as the message says: the user wants to start over
    with RunDirectory(settings(tmp_path, resume_mode="latest")).open() as run:
        assert run.resume is None and "metrics.cut.jsonl" in run.notes[-1]


@pytest.mark.parametrize("resume_mode", ["latest", "from_path"])
def test_a_commit_that_was_not_recorded_is_recorded_at_the_next_start(tmp_path, resume_mode):
    """The process died between the two, or its version kept no record."""
    a_run(tmp_path)
    (tmp_path / "committed.json").unlink()
    cfg = settings(tmp_path, resume_mode=resume_mode)
    cfg.trainer.resume_path = str(tmp_path / "checkpoints/global_step_2") if resume_mode == "from_path" else None
    with RunDirectory(cfg).open() as run:
        assert run.resume.step == 2
    lose(tmp_path / "checkpoints", "gone")
    with pytest.raises(UserError, match="global_step_2 in .*/checkpoints; mount or restore it"):
        RunDirectory(settings(tmp_path, resume_mode="latest")).open()


def test_a_fork_does_not_start_over_either(tmp_path):
    a_run(tmp_path / "parent")
    cfg = settings(tmp_path / "fork", resume_mode="from_path")
    cfg.trainer.resume_path = str(tmp_path / "parent/checkpoints/global_step_2")
    with directory(cfg, {"step": 3}) as run:
        assert run.resume.fork
        run.save(3, {}, [])
        run.finish(print)
    lose(tmp_path / "fork/checkpoints", "gone")
    with pytest.raises(UserError, match="global_step_3 in .*fork/checkpoints; mount or restore it"):
        RunDirectory(cfg).open()


@pytest.mark.parametrize("how", ["a file", "a dangling link", "nowhere"])
def test_a_place_that_cannot_hold_checkpoints_is_refused_before_anything_starts(tmp_path, how):
    place = tmp_path / "checkpoints"
    place.mkdir()
    lose(place, how)
    if how == "nowhere":
        place = Path("/proc/nowhere/checkpoints")
    with pytest.raises(UserError, match="trainer.ckpt_path=.*cannot be written there .*choose another"):
        RunDirectory(settings(tmp_path / "run", ckpt_path=str(place))).open()
    assert os.listdir(tmp_path / "run") == [], "the refusal gave the lock back"


def test_trying_the_directory_leaves_nothing_there(tmp_path, caplog):
    caplog.set_level("INFO")
    with RunDirectory(settings(tmp_path)).open():
        (tmp_path / "checkpoints/.probe-of-a-killed-job").mkdir()
    with RunDirectory(settings(tmp_path)).open():
        assert caplog.messages == ["removed .probe-of-a-killed-job, an interrupted test"]
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_job_names_the_key_of_a_checkpoint_directory_that_is_not_there(tmp_path):
    (tmp_path / "file").write_text("")
    job = run_job(f"trainer.ckpt_path={tmp_path}/file", cwd=tmp_path)
    assert job.returncode == 2, job.stdout + job.stderr
    assert job.stderr.splitlines()[-1].startswith(f"error: trainer.ckpt_path={tmp_path}/file: checkpoints cannot")


# ----------------------------------------------------------------------------------------------------------
# One job to a checkpoint directory


def test_two_runs_cannot_save_to_one_place(tmp_path):
    shared = str(tmp_path / "shared")
    with RunDirectory(settings(tmp_path / "a", ckpt_path=shared)).open():
        (tmp_path / "link").symlink_to(shared)
        for place in (shared, str(tmp_path / "link")):
            with pytest.raises(UserError, match="in use by process .*choose another trainer.ckpt_path"):
                RunDirectory(settings(tmp_path / "b", ckpt_path=place)).open()
    with RunDirectory(settings(tmp_path / "b", ckpt_path=shared)).open():
        pass
    with RunDirectory(settings(tmp_path / "c", ckpt_path=str(tmp_path / "c"))).open():
        pass  # one directory for both


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_checkpoint_tool_changes_nothing_under_a_job_that_runs(tmp_path, capsys, elsewhere):
    place = str(tmp_path / "elsewhere") if elsewhere else str(tmp_path / "run/checkpoints")
    a_run(tmp_path / "run", ckpt_path=place)
    changes = (["prune", place, "--keep", "1"], ["rollback", place, "--to", "1"])
    with RunDirectory(settings(tmp_path / "run", ckpt_path=place, resume_mode="latest")).open():
        for change in changes:
            assert checkpoint_tool(change) == 2
            assert "in use by process" in capsys.readouterr().err
        assert checkpoint_tool(["prune", place, "--keep", "1", "--dry-run"]) == 0
        assert checkpoint_tool(["ls", place]) == 0
        assert ".lock" not in capsys.readouterr().out
    assert [checkpoint_tool(change) for change in changes] == [0, 1]
    assert sorted(os.listdir(place)) == ["global_step_2", "latest_ckpt_global_step.txt"]


def test_a_job_that_lost_its_checkpoint_directory_writes_nothing_there(tmp_path):
    with directory(settings(tmp_path / "a", ckpt_path=str(tmp_path / "shared")), {"step": 1}) as run:
        (tmp_path / "shared/.lock").unlink()
        with RunLock(str(tmp_path / "shared"), 60) as other:
            other.acquire()
            begun: list[str] = []
            run.parts.append(json_part("more", lambda: begun.append("more") or {}, lambda _: None))
            run.save(1, {}, [])
            told: list[str] = []
            run.finish(told.append)
            assert begun == []
            assert "lost the checkpoint directory to process" in told[-1]
            assert sorted(os.listdir(tmp_path / "shared")) == [".lock", ".lock.guard"]


# ----------------------------------------------------------------------------------------------------------
# What is written beside the checkpoints


@pytest.mark.parametrize(
    "lines, problem",
    [
        ([0, 1, 2, 3], None),
        ([0, 1, 2, 3, 4, 4], None),  # lines after the checkpoint are cut
        ([0, 1, 3], "no line for step 2"),
        ([1, 2, 3], "no line for step 0"),
        ([0, 1, 2], "no line for step 3"),
        ([], "no line for step 0"),
        ([0, 1, 1, 2, 3], "more than one line for step 1"),
        (None, "no line for step 0"),
    ],
)
@pytest.mark.parametrize("begin", [0, 7])  # a validation before training; a fork
def test_lines_that_are_missing_or_doubled_are_refused(tmp_path, lines, problem, begin):
    file = tmp_path / "metrics.jsonl"

    def write(steps) -> None:
        file.write_text("".join(json.dumps({"step": begin + step, "reward/mean": 0.5}) + "\n" for step in steps))

    step = begin + 3
    with directory(settings(tmp_path), {"step": step}) as run:
        write([0, 1, 2, 3])
        run.save(step, {}, [])
        run.finish(print)
    if lines is None:
        file.unlink()
    else:
        write(lines)
    cfg = settings(tmp_path, resume_mode="latest")
    if problem is None:
        with RunDirectory(cfg).open() as run:
            assert run.resume.step == step
    else:
        words = problem.split()
        problem = " ".join([*words[:-1], str(begin + int(words[-1]))])
        with pytest.raises(UserError, match=f"metrics.jsonl: has {problem},.*restore the file"):
            RunDirectory(cfg).open()


def test_lines_that_are_cut_are_kept_and_each_only_once(tmp_path):
    def start(cut: int, last: int, reward: float) -> None:
        tracker = Tracker(str(tmp_path), LoggerConfig(), "test", {})
        tracker.rewind(cut)
        for step in range(cut + 1, last + 1):
            tracker.log(step, {"reward/mean": reward, "time/step": os.urandom(1)[0]})
        tracker.close()

    start(-1, 4, 0.5)
    assert not (tmp_path / "metrics.cut.jsonl").exists()
    for _ in range(3):
        start(1, 4, 0.5)  # the same again: nothing more to keep
    start(-1, 2, 0.25)
    start(2, 2, 0.25)
    kept = [json.loads(line) for line in (tmp_path / "metrics.cut.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/mean"]) for row in kept] == [(2, 0.5), (3, 0.5), (4, 0.5), (0, 0.5), (1, 0.5)]
    assert [row["reward/mean"] for row in metrics(tmp_path)] == [0.25] * 3


def test_a_job_that_lost_its_run_directory_publishes_no_rollouts(tmp_path):
    with RunDirectory(settings(tmp_path)).open() as run:
        check = run.claim.run_dir.check
        drawn = [DrawnPrompt("0:0", Prompt(0, "a", (1,), "b"))]
        write_rollouts(str(tmp_path), 1, drawn, [], [], [], check)
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match="lost the run directory"):
            write_rollouts(str(tmp_path), 2, drawn, [], [], [], check)
    assert os.listdir(tmp_path / "rollouts") == ["step_1.jsonl"]
