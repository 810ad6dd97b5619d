"""What surrounds a resume: changed configs, replayed steps, when to save, when to leave, lineage."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import pytest

from trainer.checkpoint.parts import json_part
from trainer.config import Config, compose
from trainer.errors import UserError
from trainer.run import compatibility
from trainer.run.replay import ResumeAudit, first_difference, jumps
from trainer.run.schedule import SaveSchedule
from trainer.run_directory import RunDirectory

# ----------------------------------------------------------------------------------------------------------
# Config


def changed(*overrides: str) -> list[compatibility.Change]:
    now = dataclasses.asdict(compose([*overrides]))
    return compatibility.changes(dataclasses.asdict(compose([])), now, dataclasses.asdict(Config()))


def test_harmless_changes_pass():
    found = changed("trainer.num_workers=4", "trainer.ckpt_interval=5", "logger.samples=0", "rollout.num_engines=2",
                    "trainer.policy.fsdp.cpu_offload=true", "trainer.run_name=x")  # fmt: skip
    assert {"trainer.num_workers", "trainer.run_dir", "rollout.num_engines"} <= {change.key for change in found}
    compatibility.check(found, [])


@pytest.mark.parametrize(
    "override, allow, sentence",
    [
        ("model.tiny.num_layers=3", ["model"], "model.tiny.num_layers=3.*saved with 2.*another model"),
        ("trainer.seed=2", ["trainer"], "trainer.seed=2.*every random draw"),
        ("algorithm=ppo", ["algorithm"], "algorithm.advantage_estimator=gae.*critic"),
        ("rollout.n=4", [], r"rollout.n=4.*allow_config_change=\[rollout.n\]"),
        (
            "trainer.policy.optimizer.schedule_steps=9",
            [],
            r"schedule_steps=9: .*saved with 140, and the learning rate.*change=\[trainer.policy.optimizer",
        ),
        ("sft.steps=9", [], r"sft.steps=9.*allow_config_change"),
        ("algorithm.ref_update_interval=5", ["algorithm"], "ref_update_interval=5.*whether the checkpoint holds"),
        ("trainer.policy.lora.rank=5", ["trainer"], "trainer.policy.lora.rank=5.*another shape"),
    ],
)
def test_other_changes_are_refused_by_name(override, allow, sentence):
    with pytest.raises(UserError, match=sentence):
        compatibility.check(changed(override), allow)


@pytest.mark.parametrize("allow", [["rollout.n"], ["rollout"]])
def test_a_key_or_its_section_can_be_allowed(allow):
    compatibility.check(changed("rollout.n=4"), allow)
    with pytest.raises(UserError, match="trainer.update_epochs=2"):
        compatibility.check(changed("rollout.n=4", "trainer.update_epochs=2"), allow)


def test_a_key_that_the_older_version_did_not_have_counts_as_its_default():
    saved = dataclasses.asdict(compose([]))
    del saved["algorithm"]["value_clip"]
    now = dataclasses.asdict(compose([]))
    assert compatibility.changes(saved, now, dataclasses.asdict(Config())) == []
    now["algorithm"]["value_clip"] = 0.5
    (change,) = compatibility.changes(saved, now, dataclasses.asdict(Config()))
    assert str(change) == "algorithm.value_clip: 0.2 -> 0.5"


def test_an_option_of_the_users_own_that_is_gone_is_a_change():
    saved, now = dataclasses.asdict(Config()), dataclasses.asdict(Config())
    saved["algorithm"]["options"] = {"beta": 5}
    (change,) = compatibility.changes(saved, now, dataclasses.asdict(Config()))
    assert str(change) == "algorithm.options: {'beta': 5} -> {}"


# ----------------------------------------------------------------------------------------------------------
# The run directory


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


# ----------------------------------------------------------------------------------------------------------
# Replayed steps


def logged(tmp_path, rows: list[dict]) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_replayed_steps_are_verified_and_survive_another_kill(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "reward/mean": n / 3, "time/step": n} for n in (1, 2, 3, 4)]
    run_dir = logged(tmp_path, rows)
    ResumeAudit(run_dir, 2, 0.0, same_layout=True)
    logged(tmp_path, rows[:2])  # the tracker has rewound the file, and the run was killed again
    audit = ResumeAudit(run_dir, 2, 0.0, same_layout=True)
    assert audit.check(3, {"reward/mean": 1.0, "time/step": 9.0}) is None and not caplog.messages
    assert audit.check(4, {"reward/mean": 4 / 3}) is None
    assert caplog.messages == ["resume verified: 2 replayed steps identical"]
    assert not os.path.exists(tmp_path / "metrics.replay.jsonl")


def test_the_first_metric_that_differs_is_named(tmp_path):
    run_dir = logged(tmp_path, [{"step": 1, "policy/kl": 0.5, "policy/loss": None, "reward/mean": 1.0}])
    audit = ResumeAudit(run_dir, 0, 0.0, same_layout=True)
    now = {"policy/kl": 0.5, "policy/loss": float("nan"), "reward/mean": 1.0000001}
    assert "step 1 was not replayed as it had been logged: reward/mean is 1.0000001 and was 1.0" in audit.check(1, now)
    assert first_difference({"x": 1.0}, {"x": 1.0000001}, 1e-6) is None
    assert first_difference({"x": 1.0}, {"x": float("nan")}, 1e-6) == "x is nan and was 1.0"


def test_on_other_ranks_the_first_step_is_compared_to_rounding(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"step": n, "policy/loss": 1.0} for n in (1, 2, 3)]
    audit = ResumeAudit(logged(tmp_path, rows), 1, 0.0, same_layout=False)
    assert audit.check(2, {"policy/loss": 1.0001}) is None
    (message,) = caplog.messages
    assert "1 replayed steps equal to 0.001" in message and "number of ranks" in message
    assert audit.check(3, {"policy/loss": 7.0}) is None


def test_without_replayed_steps_a_jump_is_noticed(tmp_path, caplog):
    rows = [{"step": n, "policy/loss": 0.1 + n / 100, "policy/kl": 0.2} for n in range(1, 11)]
    assert jumps({"policy/loss": 0.2, "policy/kl": 0.21}, rows) == []
    audit = ResumeAudit(logged(tmp_path, rows), 10, 0.0, same_layout=True)
    assert audit.check(11, {"policy/loss": 5.0, "policy/kl": 0.2}) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "policy/loss jumped to 5" in record.getMessage()
    assert jumps({"policy/loss": float("nan")}, rows)


# ----------------------------------------------------------------------------------------------------------
# When to save, when to leave


def test_saves_are_due_by_steps_and_by_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    steps = SaveSchedule(3, -1, 240)
    assert [step for step in range(1, 8) if steps.due(step)] == [3, 6]
    minutes = SaveSchedule(-1, 2.0, 240)
    now[0] = 119.0
    assert not minutes.due(1)
    now[0] = 120.0
    assert minutes.due(1)
    minutes.saved()
    assert not minutes.due(2)


def test_auto_follows_young(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = SaveSchedule("auto", -1, mean_time_between_failures=50)
    assert schedule.due(1), "the first checkpoint is worth most"
    schedule.saved()
    schedule.measured(blocked_s=6.0, duration_s=20.0)
    assert schedule.best_interval_s() == pytest.approx((2 * 6 * 3000) ** 0.5)
    schedule.measured(blocked_s=0.0, duration_s=400.0)
    assert schedule.best_interval_s() == 800, "saves that cost nothing still take their time"
    now[0] = 799.0
    assert not schedule.due(2)
    now[0] = 800.0
    assert schedule.due(2)
