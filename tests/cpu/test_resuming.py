"""What surrounds a resume: what is on disk, forks, lineage, failed saves."""

from __future__ import annotations

import json
import os

import pytest

from trainer.checkpoint.parts import json_part
from trainer.config import Config
from trainer.errors import UserError
from trainer.run_directory import RunDirectory


def settings(root, **trainer) -> Config:
    cfg = Config()
    t = cfg.trainer
    t.run_dir, t.ckpt_path = str(root), str(root / "checkpoints")
    for name, value in trainer.items():
        setattr(t, name, value)
    return cfg


def directory(cfg: Config, state: dict) -> RunDirectory:
    run = RunDirectory(cfg).open()
    run.parts.append(run.config_part())
    run.parts.append(json_part("trainer_state", lambda: state, state.update))
    run.parts.append(json_part("data", lambda: {"position": state["step"]}, lambda _: None))
    return run


def a_run(root, steps=(1, 2), **trainer) -> None:
    state: dict = {}
    with directory(settings(root, resume_mode="latest", **trainer), state) as run:
        for step in steps:
            state["step"] = step
            with open(root / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "reward/mean": step / 2}) + "\n")
            run.save(step, {}, [])
            run.finish(print)


def test_a_directory_with_a_run_is_not_overwritten(tmp_path):
    a_run(tmp_path)
    for mode in (None, "none"):
        with pytest.raises(UserError, match="already holds a run.*resume_mode=latest.*trainer.run_name"):
            RunDirectory(settings(tmp_path, resume_mode=mode)).open()
    with RunDirectory(settings(tmp_path, resume_mode="latest")).open() as run:
        assert run.resume.step == 2 and not run.resume.fork


def test_latest_starts_anew_where_there_is_nothing_and_refuses_where_nothing_is_valid(tmp_path):
    with RunDirectory(settings(tmp_path / "new", resume_mode="latest")).open() as run:
        assert run.resume is None
    a_run(tmp_path)
    for step in (1, 2):
        (tmp_path / f"checkpoints/global_step_{step}/manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is valid"):
        RunDirectory(settings(tmp_path, resume_mode="latest")).open()
    with RunDirectory(settings(tmp_path / "new", resume_mode="latest")).open():
        pass  # the refusal gave the lock back


def test_from_path_never_falls_back_and_never_goes_back_in_its_own_run(tmp_path):
    a_run(tmp_path / "parent")
    newest = tmp_path / "parent/checkpoints/global_step_2"
    with pytest.raises(UserError, match="must be a global_step_N directory"):
        RunDirectory(settings(tmp_path / "x", resume_mode="from_path", resume_path=str(tmp_path))).open()
    own = settings(tmp_path / "parent", resume_mode="from_path", resume_path=str(newest.parent / "global_step_1"))
    with pytest.raises(UserError, match="newer checkpoint, global_step_2.*rollback"):
        RunDirectory(own).open()
    (newest / "data.json").write_text("{}")
    with pytest.raises(UserError, match="data.json"):
        RunDirectory(settings(tmp_path / "x", resume_mode="from_path", resume_path=str(newest))).open()


def test_a_fork_is_of_one_parent_and_comes_back_as_itself(tmp_path):
    a_run(tmp_path / "parent")
    a_run(tmp_path / "other")
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    cfg = settings(tmp_path / "fork", resume_mode="from_path", resume_path=parent)
    state: dict = {}
    with directory(cfg, state) as run:
        assert run.resume.fork and run.load() is None and state["step"] == 2
        state["step"] = 3
        run.save(3, {}, [])
        run.finish(print)
    with RunDirectory(cfg).open() as run:
        assert not run.resume.fork and run.resume.step == 3
    cfg.trainer.resume_path = str(tmp_path / "other/checkpoints/global_step_2")
    with pytest.raises(UserError, match="holds a fork of .*parent"):
        RunDirectory(cfg).open()
    into_a_run = settings(tmp_path / "other", resume_mode="from_path", resume_path=parent)
    with pytest.raises(UserError, match="holds a run that is no fork"):
        RunDirectory(into_a_run).open()


def test_a_fork_may_take_the_weights_and_leave_the_rest(tmp_path):
    a_run(tmp_path / "parent")
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    cfg = settings(tmp_path / "fork", resume_mode="from_path", resume_path=parent, resume_load=["data"])
    cfg.rollout.n = 2
    with pytest.raises(UserError, match="rollout.n=2"):
        RunDirectory(cfg).open()
    cfg.trainer.resume_load = ["weights"]
    state = {"step": 0}
    with RunDirectory(cfg).open() as run:  # what else is done with weights is free
        run.parts.append(json_part("trainer_state", lambda: state, state.update))
        run.load()
        assert state == {"step": 0} and run.restored == {"weights"}


@pytest.mark.parametrize("estimators", [("gae", "grpo"), ("grpo", "gae")])
def test_the_weights_of_a_policy_go_where_there_is_no_such_critic(tmp_path, estimators):
    parent, fork = (settings(tmp_path / name) for name in ("parent", "fork"))
    for cfg, estimator in zip((parent, fork), estimators, strict=True):
        cfg.algorithm.advantage_estimator = estimator
        cfg.trainer.critic.lora.rank = 4 if estimator == "gae" else None
    state = {"step": 2}
    with directory(parent, state) as run:
        run.save(2, {}, [])
        run.finish(print)
    fork.trainer.resume_mode, fork.trainer.resume_load = "from_path", ["weights"]
    fork.trainer.resume_path = str(tmp_path / "parent/checkpoints/global_step_2")
    with RunDirectory(fork).open() as run:
        assert run.resume.fork


def weights_file(path, content: bytes) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(content)
    return str(path)


@pytest.mark.parametrize("change", ["lora", "reference", "neither"])
def test_weights_that_a_checkpoint_builds_on_must_be_those_of_the_beginning(tmp_path, change):
    model = weights_file(tmp_path / "model", b"a" * 1000)

    def start(**trainer) -> RunDirectory:
        cfg = settings(tmp_path / "run", resume_mode="latest", **trainer)
        cfg.model.path = model
        cfg.algorithm.kl_coef = 0.1 if change == "reference" else 0.0
        cfg.trainer.policy.lora.rank = 4 if change == "lora" else None
        run = RunDirectory(cfg).open()
        run.parts.append(run.start_weights_part(model))
        for name in ("config", "models", "data", "trainer_state"):
            run.parts.append(json_part(name, dict, lambda _: None) if name != "config" else run.config_part())
        return run

    with start() as run:
        run.save(1, {}, [])
        run.finish(print)
    with start() as run:
        run.load()
    weights_file(tmp_path / "model", b"a" * 999 + b"b")
    with start() as run:
        if change == "neither":
            run.load()
        else:
            with pytest.raises(UserError, match="model.path=.*not those that the run began with"):
                run.load()
    for allowed in (["model.path"], ["model"]):
        with start(allow_config_change=allowed) as run:
            run.load()


def test_a_checkpoint_that_does_not_name_its_start_weights_is_taken_with_a_note(tmp_path, caplog):
    caplog.set_level("INFO")
    a_run(tmp_path)
    state: dict = {}
    cfg = settings(tmp_path, resume_mode="latest")
    with directory(cfg, state) as run:
        run.parts.append(json_part("models", dict, lambda _: None))
        run.parts.append(run.start_weights_part(weights_file(tmp_path / "model", b"a")))
        with pytest.raises(UserError, match="the checkpoint has no models"):
            run.load()
        assert state["step"] == 2 and "does not say which weights" in caplog.text


def test_failed_saves_are_told_and_bounded(tmp_path):
    run = RunDirectory(settings(tmp_path, ckpt_failures_allowed=1)).open()

    def broken() -> dict:
        raise OSError("No space left on device")

    told: list[str] = []
    with run:
        run.parts.append(json_part("data", dict, lambda _: None))
        run.save(1, {}, [])
        run.finish(told.append)
        good = run.last_checkpoint
        run.parts.append(json_part("state", broken, lambda _: None))
        run.save(2, {}, [])
        run.finish(told.append)
        assert "FAILED (No space left on device)" in told[-1] and good in told[-1] and "training continues" in told[-1]
        run.save(3, {}, [])
        with pytest.raises(UserError, match="trainer.ckpt_path.*No space.*2 failed in a row"):
            run.finish(told.append)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["global_step_1", "latest_ckpt_global_step.txt"]
