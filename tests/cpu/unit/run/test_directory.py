"""Which checkpoint a run continues from, what it must find again, and what it must not share."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import run_job
from tests.support.runs import OpenRun, a_run, configured, save_steps
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.checkpoint.components import config_component, json_component, start_weights_component
from trainer.errors import UserError
from trainer.run.directory import RunDirectory

PROVEN_KEYS = {"model.path", "trainer.critic.path"}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""


def test_a_directory_with_a_run_is_not_overwritten(tmp_path):
    a_run(tmp_path)
    for mode in (None, "none"):
        with pytest.raises(UserError, match="already holds a run.*resume_mode=latest.*trainer.run_name"):
            RunDirectory(configured(tmp_path, resume_mode=mode)).open()
    with OpenRun(configured(tmp_path, resume_mode="latest")) as run:
        assert run.resume.checkpoint.step == 2 and not run.resume.restore.fork


def test_a_directory_in_which_no_step_was_logged_holds_no_run(tmp_path):
    """A job may have ended in the evaluation before its first step."""
    (tmp_path / "metrics.jsonl").write_text("")
    with OpenRun(configured(tmp_path)) as run:
        assert run.resume is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory(configured(tmp_path)).open()


def test_latest_starts_a_new_run_or_refuses_if_no_checkpoint_is_valid(tmp_path):
    with OpenRun(configured(tmp_path / "new", resume_mode="latest")) as run:
        assert run.resume is None
    a_run(tmp_path)
    for step in (1, 2):
        (tmp_path / f"checkpoints/global_step_{step}/manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is valid"):
        RunDirectory(configured(tmp_path, resume_mode="latest")).open()
    with OpenRun(configured(tmp_path / "new", resume_mode="latest")):
        pass  # the refusal gave the lock back


@pytest.mark.parametrize("wait, messages", [(False, 1), (True, 0)])
def test_only_a_run_that_a_user_starts_says_that_there_is_no_checkpoint(tmp_path, caplog, wait, messages):
    """The warm start of the built-in model opens its directory with `wait`. No user has asked it to continue a run."""
    caplog.set_level("INFO")
    with RunDirectory(configured(tmp_path, resume_mode="latest")).open(wait):
        assert sum("holds no checkpoint" in record.message for record in caplog.records) == messages


def test_from_path_never_uses_another_checkpoint_and_refuses_one_of_its_run(tmp_path):
    a_run(tmp_path / "parent")
    newest = tmp_path / "parent/checkpoints/global_step_2"
    with pytest.raises(UserError, match="must be a global_step_N directory"):
        RunDirectory(configured(tmp_path / "x", resume_mode="from_path", resume_path=str(tmp_path))).open()
    own = configured(tmp_path / "parent", resume_mode="from_path", resume_path=str(newest.parent / "global_step_1"))
    with pytest.raises(UserError, match="is a checkpoint of this run; .*rollback .* --to 1"):
        RunDirectory(own).open()
    (newest / "data.json").write_text("{}")
    with pytest.raises(UserError, match="data.json"):
        RunDirectory(configured(tmp_path / "x", resume_mode="from_path", resume_path=str(newest))).open()


def test_a_fork_has_one_parent_and_resumes_from_its_own_checkpoints(tmp_path):
    a_run(tmp_path / "parent")
    a_run(tmp_path / "other")
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    cfg = configured(tmp_path / "fork", resume_mode="from_path", resume_path=parent)
    state: dict = {}
    with OpenRun(cfg, state) as run:
        run.load()
        assert run.resume.restore.fork and state["step"] == 2
        state["step"] = 3
        run.save(3)
    with OpenRun(cfg) as run:
        assert not run.resume.restore.fork and run.resume.checkpoint.step == 3
    cfg.trainer.resume_path = str(tmp_path / "other/checkpoints/global_step_2")
    with pytest.raises(UserError, match="holds a fork of .*parent"):
        RunDirectory(cfg).open()
    into_a_run = configured(tmp_path / "other", resume_mode="from_path", resume_path=parent)
    with pytest.raises(UserError, match="holds a run that is no fork"):
        RunDirectory(into_a_run).open()


def test_a_fork_can_restore_the_weights_alone(tmp_path):
    a_run(tmp_path / "parent")
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    cfg = configured(tmp_path / "fork", resume_mode="from_path", resume_path=parent, load_components=["weights"])
    with OpenRun(cfg, {"step": 0}) as run:
        run.load()
        assert run.state == {"step": 0} and run.resume.restore.kinds == {"weights"}


def test_a_fork_that_was_refused_leaves_the_directory_free(tmp_path):
    a_run(tmp_path / "parent")
    cfg = configured(tmp_path / "fork", resume_mode="from_path", seed=2)
    for step, seed in ((1, 2), (2, 1)):
        cfg.trainer.resume_path, cfg.trainer.seed = str(tmp_path / f"parent/checkpoints/global_step_{step}"), seed
        if seed == 2:
            with pytest.raises(UserError, match="trainer.seed=2"):
                RunDirectory(cfg).open()
        else:
            with OpenRun(cfg) as run:
                assert run.directory.lineage["step"] == 2


def test_a_fork_without_a_checkpoint_does_not_start_from_scratch(tmp_path):
    a_run(tmp_path / "parent")
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    cfg = configured(tmp_path / "fork", resume_mode="from_path", resume_path=parent)
    for _ in range(2):
        with OpenRun(cfg) as run:
            assert run.resume.restore.fork
    with pytest.raises(UserError, match=f"no checkpoint yet; .*resume_mode=from_path trainer.resume_path={parent}"):
        RunDirectory(configured(tmp_path / "fork", resume_mode="latest")).open()


def test_what_parts_of_a_checkpoint_refuse_is_listed_together(tmp_path):
    a_run(tmp_path)
    loaded: list[str] = []

    def refuse(problem: str):
        def load(*_) -> None:
            raise UserError(problem)

        return load

    with OpenRun(configured(tmp_path, resume_mode="latest")) as run:
        _, state, data = run.components
        run.components[1:] = [
            replace(data, name="trainer_state", load=lambda *_: loaded.append("models"), is_large=True),
            replace(data, load=refuse("data: other rows")),
            replace(state, name="config", load=refuse("model.path=a: other weights")),
        ]
        with pytest.raises(UserError) as refused:
            run.load()
    assert str(refused.value).splitlines()[1:] == ["  data: other rows", "  model.path=a: other weights"]
    assert loaded == []


@pytest.mark.parametrize("estimators", [("gae", "grpo"), ("grpo", "gae")])
def test_policy_weights_restore_into_a_run_with_or_without_a_critic(tmp_path, estimators):
    parent, fork = (configured(tmp_path / name) for name in ("parent", "fork"))
    for cfg, estimator in zip((parent, fork), estimators, strict=True):
        cfg.algorithm.advantage_estimator = estimator
    state = {"step": 2}
    with OpenRun(parent, state) as run:
        run.save(2)
    fork.trainer.resume_mode, fork.trainer.load_components = "from_path", ["weights"]
    fork.trainer.resume_path = str(tmp_path / "parent/checkpoints/global_step_2")
    with OpenRun(fork) as run:
        assert run.resume.restore.fork


def weights_file(path, content: bytes) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(content)
    return str(path)


@pytest.mark.parametrize("change", ["lora", "reference", "embedded", "neither"])
def test_a_resume_refuses_changed_start_weights(tmp_path, change):
    model = weights_file(tmp_path / "model", b"a" * 1000)

    def start(**trainer) -> OpenRun:
        cfg = configured(tmp_path / "run", resume_mode="latest", **trainer)
        cfg.model.path = None if change == "embedded" else model
        cfg.algorithm.kl_coef = 0.1 if change in ("reference", "embedded") else 0.0
        cfg.trainer.policy.lora.rank = 4 if change == "lora" else None
        run = OpenRun(cfg)
        run.components = [config_component(cfg), start_weights_component(cfg, model)]
        run.components += [json_component(name, dict, lambda _: None) for name in ("models", "data", "trainer_state")]
        return run

    with start() as run:
        run.save(1)
    with start() as run:
        run.load()
    weights_file(tmp_path / "model", b"a" * 999 + b"b")
    with start() as run:
        if change == "neither":
            run.load()
        else:
            with pytest.raises(UserError, match="model.path=.*not those that the run began with") as refused:
                run.load()
            assert ("model.tiny.start_accuracy" in str(refused.value)) == (change == "embedded")
    for allowed in (["model.path"], ["model"]):
        with start(allow_config_change=allowed) as run:
            run.load()


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
def test_latest_does_not_start_over_when_committed_checkpoints_are_missing(tmp_path, how):
    a_run(tmp_path)
    logged = (tmp_path / "metrics.jsonl").read_bytes()
    lose(tmp_path / "checkpoints", how)
    for mode in ("latest", "none"):
        with pytest.raises(UserError, match="global_step_2 in .*; mount or restore it|already holds a run"):
            RunDirectory(configured(tmp_path, resume_mode=mode)).open()
    assert (tmp_path / "metrics.jsonl").read_bytes() == logged
    assert (tmp_path / "checkpoints").is_dir() == (how == "empty"), "it is not made on the wrong disk"
    if how == "empty":
        (tmp_path / "checkpoints").rmdir()
    else:
        (tmp_path / "checkpoints").unlink(missing_ok=True)
    shutil.move(tmp_path / "elsewhere", tmp_path / "checkpoints")
    with OpenRun(configured(tmp_path, resume_mode="latest")) as run:
        assert run.resume.checkpoint.step == 2


def test_a_damaged_record_still_proves_a_commit(tmp_path, caplog):
    caplog.set_level("INFO")
    a_run(tmp_path)
    lose(tmp_path / "checkpoints", "gone")
    for content in ("", "[]", "{}", '{"step": "2", "ckpt_path": 3}', '{"a":' * 100_000):
        (tmp_path / "committed.json").write_text(content)
        with pytest.raises(UserError, match="has committed a checkpoint; mount or restore it"):
            RunDirectory(configured(tmp_path, resume_mode="latest")).open()
    (tmp_path / "committed.json").unlink()  # as the message says: the user wants to start over
    with OpenRun(configured(tmp_path, resume_mode="latest")) as run:
        assert run.resume is None and "training starts again" in caplog.messages[-1]


def test_a_commit_that_was_not_recorded_is_recorded_at_the_next_start(tmp_path):
    """The process died between the two."""
    a_run(tmp_path)
    (tmp_path / "committed.json").unlink()
    with OpenRun(configured(tmp_path, resume_mode="latest")) as run:
        assert run.resume.checkpoint.step == 2
    lose(tmp_path / "checkpoints", "gone")
    with pytest.raises(UserError, match="global_step_2 in .*/checkpoints; mount or restore it"):
        RunDirectory(configured(tmp_path, resume_mode="latest")).open()


def test_a_fork_does_not_start_over_when_its_checkpoints_are_missing(tmp_path):
    a_run(tmp_path / "parent")
    cfg = configured(tmp_path / "fork", resume_mode="from_path")
    cfg.trainer.resume_path = str(tmp_path / "parent/checkpoints/global_step_2")
    with OpenRun(cfg, {"step": 3}) as run:
        assert run.resume.restore.fork
        run.save(3)
    lose(tmp_path / "fork/checkpoints", "gone")
    with pytest.raises(UserError, match="global_step_3 in .*fork/checkpoints; mount or restore it"):
        RunDirectory(cfg).open()


@pytest.mark.processes
def test_a_job_names_the_key_of_a_checkpoint_directory_that_is_not_there(tmp_path):
    (tmp_path / "file").write_text("")
    job = run_job(f"trainer.ckpt_path={tmp_path}/file", cwd=tmp_path)
    assert job.returncode == 2, job.stdout + job.stderr
    assert job.stderr.splitlines()[-1].startswith(f"error: trainer.ckpt_path={tmp_path}/file: checkpoints cannot")


def test_the_best_checkpoints_are_those_by_the_metric_of_now(tmp_path):
    keep = {"trainer.max_ckpts_to_keep": 1, "trainer.keep_best": 1}
    for step, value in ((1, 0.9), (2, 0.1)):
        save_steps(configured(tmp_path, keep), step, metrics={"val/accuracy": value, "val/reward/mean": 0.1})
    other = {"trainer.best_metric": "val/reward/mean"}
    for step, value in ((3, 0.5), (4, 0.2), (5, 0.1)):
        save_steps(configured(tmp_path, keep, other), step, metrics={"val/reward/mean": value})
    kept = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("global_step_")}
    assert kept == {"global_step_3", "global_step_5"}
    lower = {"trainer.best_metric": "-val/reward/mean"}
    save_steps(configured(tmp_path, keep, lower), 6, metrics={"val/reward/mean": 0.9})
    kept = {name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("global_step_")}
    assert kept == {"global_step_5", "global_step_6"}


# ----------------------------------------------------------------------------------------------------------
# One job to a checkpoint directory


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_checkpoint_tool_changes_nothing_while_a_job_runs(tmp_path, capsys, elsewhere):
    checkpoints = str(tmp_path / "elsewhere") if elsewhere else str(tmp_path / "run/checkpoints")
    a_run(tmp_path / "run", ckpt_path=checkpoints)
    change = ["rollback", checkpoints, "--to", "1"]
    with OpenRun(configured(tmp_path / "run", ckpt_path=checkpoints, resume_mode="latest")):
        assert checkpoint_tool(change) == 2
        assert "in use by process" in capsys.readouterr().err
        assert checkpoint_tool(["ls", checkpoints]) == 0
        assert ".lock" not in capsys.readouterr().out
    assert checkpoint_tool(change) == 0
    (aside, *others) = sorted(os.listdir(checkpoints))
    assert aside.startswith(".aside-global_step_2") and others == ["global_step_1", "latest_ckpt_global_step.txt"]


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
def test_missing_or_repeated_metric_lines_are_refused(tmp_path, lines, problem, begin=7):
    file = tmp_path / "metrics.jsonl"

    def write(steps) -> None:
        file.write_text("".join(json.dumps({"step": begin + step, "reward/mean": 0.5}) + "\n" for step in steps))

    step = begin + 3
    with OpenRun(configured(tmp_path), {"step": step}) as run:
        write([0, 1, 2, 3])
        run.save(step)
    if lines is None:
        file.unlink()
    else:
        write(lines)
    cfg = configured(tmp_path, resume_mode="latest")
    if problem is None:
        with OpenRun(cfg) as run:
            assert run.resume.checkpoint.step == step
    else:
        words = problem.split()
        problem = " ".join([*words[:-1], str(begin + int(words[-1]))])
        with pytest.raises(UserError, match=f"metrics.jsonl: has {problem},.*restore the file"):
            RunDirectory(cfg).open()


def test_the_oldest_start_is_the_last_commit_but_one(tmp_path):
    """A resume begins there if the last commit is damaged; what lies before it is not needed."""
    oldest = []
    cfg = configured(tmp_path, max_ckpts_to_keep=3)
    with OpenRun(cfg, {"step": 0}) as run:
        run.directory.on_commit = lambda: oldest.append(run.directory.oldest_start())
        assert run.directory.oldest_start() == 0
        for step in (2, 4, 6):
            run.state["step"] = step
            run.save(step)
    assert oldest == [2, 2, 4]


def test_a_file_of_the_run_without_room_makes_the_journal_free_space_wherever_checkpoints_are(tmp_path):
    cfg = configured(tmp_path / "run")
    with RunDirectory(cfg).open() as directory:
        given: list[str] = []
        directory.on_full_disk = lambda: given.append("room")
        cfg.trainer.ckpt_path = "s3://bucket/run"
        full = OSError(errno.ENOSPC, "No space left on device")
        for path in ("/elsewhere/shard", f"{cfg.trainer.run_dir}/metrics.jsonl"):
            full.filename = path
            directory._free_space(full)
        assert given == ["room"]
        cfg.trainer.ckpt_path = str(tmp_path)
