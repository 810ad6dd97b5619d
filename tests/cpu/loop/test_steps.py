"""What the trainer saves, restores, compares with the log and refuses, over a learner that holds one number."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.jobs import comparable, metrics
from tests.support.toy import toy_config, toy_run, toy_trainer, uninterrupted_run
from trainer.algorithms import AdaptiveKL
from trainer.checkpoint.__main__ import main as checkpoint_command
from trainer.checkpoint.manifest import verify
from trainer.errors import (
    DivergedError,
    FailureSource,
    NonFiniteError,
    NonRetryableError,
    NotSavedError,
    UserError,
    WorkerError,
    set_failure_source,
)
from trainer.metrics.tracker import Tracker
from trainer.process.failures import INFRASTRUCTURE, JOB, read_incidents
from trainer.process.signals import Stopped
from trainer.run.directory import RunDirectory
from trainer.run.state import StopRequest
from trainer.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy") / "model"


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nothing disturbs: its metrics and its last number."""
    return uninterrupted_run(tmp_path_factory.mktemp("whole"), model)


class Killed(Exception):
    pass


def run_until(root: Path, model: Path, step: int, **settings) -> None:
    """Run, and end without a word after the episodes of `step` were drawn."""
    with RunDirectory(toy_config(root, **settings)).open() as directory:
        trainer = toy_trainer(toy_config(root, **settings), directory, model)
        update = trainer.learner.update

        def die(experience, at):
            if at == step:
                raise Killed
            return update(experience, at)

        trainer.learner.update = die
        with pytest.raises(Killed), directory.checkpoints.ended():
            trainer.run()


@pytest.mark.parametrize(("interval", "step"), [(1, 5), (2, 4), (3, 2)])
def test_a_run_that_died_ends_as_if_it_had_not(tmp_path, model, whole, step, interval):
    run_until(tmp_path, model, step, ckpt_interval=interval)
    trainer = toy_run(toy_config(tmp_path, ckpt_interval=interval), model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_run_can_be_extended(tmp_path, model, whole):
    toy_run(toy_config(tmp_path, total_steps=2), model)
    trainer = toy_run(toy_config(tmp_path), model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_resume_reads_the_place_in_the_data_once_and_a_restart_of_ranks_again(tmp_path, model, whole):
    """A job reads it before it loads models, so that other data is refused early."""
    run_until(tmp_path, model, 4)
    for deaths in (0, 1):
        loaded: list[int] = []
        with RunDirectory(toy_config(tmp_path)).open() as directory:
            trainer = toy_trainer(toy_config(tmp_path), directory, model)
            load, update = trainer.source.load_state_dict, trainer.learner.update
            trainer.source.load_state_dict = lambda state, load=load, seen=loaded: (load(state), seen.append(1))
            left = [lost()] * deaths

            def die(experience, step, update=update, left=left):
                if left:
                    raise left.pop()
                return update(experience, step)

            trainer.learner.update, trainer.recovery.wait = die, lambda: None
            trainer.load_data()
            if not deaths:
                stop_after = trainer.cfg.trainer.total_steps
                trainer.cfg.trainer.total_steps = 4
                trainer.run()
                trainer.cfg.trainer.total_steps = stop_after
            else:
                trainer.run()
        assert len(loaded) == 1 + 2 * deaths, "a restart goes back to the beginning, and loads the last commit"
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_resumed_run_advises_about_what_began_before_it_and_not_again(tmp_path, model, caplog):
    caplog.set_level("INFO")

    def notes(total_steps: int) -> list[str]:
        caplog.clear()
        cfg = toy_config(tmp_path, total_steps=total_steps)
        with RunDirectory(cfg).open() as directory:
            trainer = toy_trainer(cfg, directory, model)
            update = trainer.learner.update
            trainer.learner.update = lambda *step: update(*step) | {"response_length/clip_ratio": 0.9}
            trainer.run()
        return [r.getMessage() for r in caplog.records if "is cut off" in r.getMessage()]

    assert notes(2) == []
    (text,) = notes(4)
    assert text.startswith("NOTE: since step 1, response_length/clip_ratio is above 0.5: ")
    assert notes(8) == []


def test_a_start_says_what_checkpoints_will_take_and_that_adapters_learn_faster(tmp_path, model):
    cfg = toy_config(tmp_path, total_steps=40)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        trainer.learner.ranks.num_parameters = (10**9, 10**9)
        trainer.cfg.trainer.ckpt_interval = 10
        assert list(trainer._notes_of_start()) == [
            "all 4 checkpoints are kept, 48.00 GB in the end; trainer.max_ckpts_to_keep=3 keeps the last three"
        ]
        trainer.cfg.trainer.max_ckpts_to_keep = 3
        assert list(trainer._notes_of_start()) == []
        trainer.cfg.trainer.policy.lora.rank = 8
        trainer.cfg.trainer.policy.optimizer.lr = trainer.cfg.sft.optimizer.lr = 1e-6
        (note,) = trainer._notes_of_start()
        assert "optimizer.lr=1e-06 is a learning rate for whole weights" in note


@pytest.mark.parametrize("reason", [None, "SIGTERM"])
def test_the_last_save_is_tried_again_until_it_is_committed(tmp_path, model, caplog, reason):
    caplog.set_level("INFO")
    # Regular saves that fail in a row would end the run: the last one is tried again nevertheless.
    cfg = toy_config(tmp_path, ckpt_interval=100)
    stop = StopRequest(None)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)
        trainer.learner.ranks.fail_saves = [OSError("No space left on device"), OSError("Stale file handle")]
        if reason is None:
            trainer.run()
        else:
            stop.ask(reason)
            with pytest.raises(Stopped, match="stopped after step 1 of 5 .SIGTERM"):
                trainer.run()
    assert (tmp_path / f"checkpoints/global_step_{trainer.state.step}/manifest.json").exists()
    told = [line for line in caplog.messages if "FAILED" in line or line.startswith("saved")]
    assert [("FAILED" in line, "saved" in line) for line in told] == [(True, False), (True, False), (False, True)]


@pytest.mark.parametrize("reason", [None, "SIGTERM"])
def test_a_run_whose_last_save_fails_does_not_end_well(tmp_path, model, reason):
    toy_run(toy_config(tmp_path, total_steps=1), model)
    cfg, stop = toy_config(tmp_path, ckpt_interval=100), StopRequest(None)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)
        trainer.learner.ranks.fail_saves = [OSError("No space left on device")] * 9
        if reason is not None:
            stop.ask(reason)
        step = 5 if reason is None else 2
        match = f"step {step} is trained but not saved: trainer.ckpt_path={tmp_path}.*No space.*good.*global_step_1"
        with pytest.raises(NotSavedError, match=match):
            trainer.run()


def test_failed_saves_are_told_and_bounded(tmp_path, model, caplog):
    cfg = toy_config(tmp_path, total_steps=9, ckpt_interval=1)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        update = trainer.learner.update

        def fail_from_step_2(experience, step):
            if step == 2:
                trainer.checkpoints.wait()
                trainer.learner.ranks.fail_saves = [OSError("No space left on device")] * 9
            return update(experience, step)

        trainer.learner.update = fail_from_step_2
        with pytest.raises(UserError, match="trainer.ckpt_path=.*No space.*global_step_1; 4 failed in a row"):
            trainer.run()
    first, *_ = [line for line in caplog.messages if "FAILED" in line]
    assert "training continues" in first and "global_step_1" in first


def test_a_fork_takes_the_state_over_and_keeps_its_own_metrics(tmp_path, model, whole):
    losses = [row["policy/loss"] for row in whole[0]]
    assert min(losses[:3]) < min(losses[3:])
    compared = {"best_metric": "-policy/loss"}
    trainer = toy_run(toy_config(tmp_path / "parent", total_steps=3, **compared), model)
    assert trainer.state.best == {"policy/loss": min(losses[:3]), "step": 1}
    parent = str(tmp_path / "parent/checkpoints/global_step_3")
    cfg = toy_config(tmp_path / "fork", resume_mode="from_path", resume_path=parent, **compared)
    trainer = toy_run(cfg, model)
    assert trainer.state.best["policy/loss"] == min(losses[3:]), "the best of the parent is not that of the fork"
    assert comparable(metrics(tmp_path / "fork")) == whole[0][3:]
    assert trainer.learner.ranks.number == whole[1]
    manifest = json.loads((tmp_path / "fork/checkpoints/global_step_5/manifest.json").read_text())
    assert manifest["parent"]["forked_from"] == parent
    weights_alone = toy_config(tmp_path / "weights", resume_mode="from_path", resume_path=parent,
                               load_components=["weights"], total_steps=1)  # fmt: skip
    trainer = toy_run(weights_alone, model)
    assert [row["step"] for row in metrics(tmp_path / "weights")] == [1]
    assert trainer.learner.ranks.number != whole[0][0]["policy/loss"], "the weights are those of the parent"


@pytest.mark.parametrize("choice", ["warn", "stop"])
def test_a_replayed_step_that_differs_from_the_log(tmp_path, model, whole, caplog, choice):
    run_until(tmp_path, model, 5)
    shutil.rmtree(tmp_path / "checkpoints/global_step_4")
    lines = metrics(tmp_path)
    lines[3]["policy/loss"] += 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = toy_config(tmp_path, on_resume_mismatch=choice)
    if choice == "stop":
        for _ in range(2):  # the second start finds the logged lines, too
            with pytest.raises(
                UserError, match="global_step_3, but step 4 was not replayed as it had been logged: policy/loss"
            ):
                toy_run(cfg, model)
        return
    caplog.set_level("INFO")
    trainer = toy_run(cfg, model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


@contextmanager
def failing(root: Path, model: Path, failures: dict[int, list[Exception]], **settings: Any) -> Iterator[Trainer]:
    """A trainer whose updates raise the exceptions of `failures`, by step, one after another."""
    cfg = toy_config(root, **settings)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        update = trainer.learner.update

        def fail(experience, step):
            if failures.get(step):
                raise failures[step].pop(0)
            return update(experience, step)

        trainer.learner.update = fail
        yield trainer


def lost(cause: str = "killed", member: str = "policy rank 1") -> WorkerError:
    error = WorkerError(f"{member} died", "restart", cause)
    set_failure_source(error, FailureSource(member, "10.0.0.7"))
    return error


@pytest.mark.parametrize("interval", [2, 100])
def test_a_run_whose_ranks_die_ends_as_if_they_had_not(tmp_path, model, whole, caplog, interval):
    """Twice at one step, and at another: without a commit, the run starts again from its initial weights."""
    caplog.set_level("INFO")
    failures = {2: [lost()], 4: [lost("heartbeat_timeout"), lost("rpc_timeout")]}
    with failing(tmp_path, model, failures, ckpt_interval=interval) as trainer:
        trainer.recovery.wait = lambda: None
        trainer.run()
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole
    assert (tmp_path / "checkpoints/global_step_5/manifest.json").exists()
    incidents = read_incidents(str(tmp_path))
    assert [(one.step, one.cause, one.kind, one.action) for one in incidents] == [
        (2, "killed process", INFRASTRUCTURE, "restarted the ranks"),
        (4, "heartbeat timeout", INFRASTRUCTURE, "restarted the ranks"),
        (4, "RPC timeout", INFRASTRUCTURE, "restarted the ranks"),
    ]
    assert all((one.name, one.role, one.node) == ("policy rank 1", "policy rank", "10.0.0.7") for one in incidents)
    verified = [line for line in caplog.messages if line.startswith("resume verified")]
    assert len(verified) == {1: 0, 2: 2, 3: 0, 100: 0}[interval]


def test_a_step_whose_checkpoint_was_damaged_when_the_ranks_died_is_saved_again(tmp_path, model, whole):
    with failing(tmp_path, model, {3: [lost()]}) as trainer:
        close = trainer.learner.close

        def damage() -> None:
            (tmp_path / "checkpoints/global_step_2/policy/number.json").write_text("7")
            close()

        trainer.learner.close = damage
        trainer.run()
    assert verify(str(tmp_path / "checkpoints/global_step_2")).step == 2
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_restart_continues_a_fork_from_its_parent(tmp_path, model, whole):
    toy_run(toy_config(tmp_path / "parent", total_steps=2), model)
    parent = str(tmp_path / "parent/checkpoints/global_step_2")
    fork = {"resume_mode": "from_path", "resume_path": parent, "ckpt_interval": 100}
    with failing(tmp_path / "fork", model, {4: [lost()]}, **fork) as trainer:
        trainer.run()
    assert comparable(metrics(tmp_path / "fork")) == whole[0][2:]
    assert trainer.learner.ranks.number == whole[1]


def test_too_many_restarts_end_the_run(tmp_path, model, caplog):
    with failing(tmp_path, model, {3: [lost(), lost(), lost()]}, max_restarts=2) as trainer:
        trainer.recovery.wait = lambda: None
        with pytest.raises(WorkerError, match="policy rank 1 died; restart"):
            trainer.run()
    assert [one.action for one in read_incidents(str(tmp_path))] == ["restarted the ranks"] * 2 + ["ended the run"]
    assert "2 restarts within 60 minutes are the limit" in caplog.messages[-1]


def test_a_fault_of_the_job_is_tried_once_more_and_then_ends_the_run(tmp_path, model, whole):
    with failing(tmp_path, model, {2: [lost("memory")], 4: [lost("memory"), lost("memory")]}) as trainer:
        trainer.recovery.wait = lambda: None
        with pytest.raises(NonRetryableError, match="step 4 failed again in the same way when it was repeated: .*died"):
            trainer.run()
    assert [one.kind for one in read_incidents(str(tmp_path))] == [JOB] * 3
    trainer = toy_run(toy_config(tmp_path), model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


@pytest.mark.parametrize(
    "error", [UserError("choose another"), lost("restart_limit", "engine 0"), lost("cluster"), KeyError()]
)
def test_what_new_ranks_cannot_cure_ends_the_run(tmp_path, model, error):
    with failing(tmp_path, model, {2: [error]}) as trainer, pytest.raises(type(error)):
        trainer.run()
    assert [one.action for one in read_incidents(str(tmp_path))] == ["ended the run"]


def test_ranks_that_die_while_they_start_again_are_started_again(tmp_path, model, whole):
    with failing(tmp_path, model, {3: [lost()]}) as trainer:
        trainer.recovery.wait = lambda: None
        restart, deaths = trainer.learner.restart, [lost()]

        def die(*args):
            if deaths:
                raise deaths.pop()
            restart(*args)

        trainer.learner.restart = die
        trainer.run()
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole
    actions = [one.action for one in read_incidents(str(tmp_path))]
    assert actions == ["restarted the ranks without success", "restarted the ranks"]


def test_ranks_that_die_while_they_load_the_start_weights_are_started_again(tmp_path, model, whole):
    with failing(tmp_path, model, {}) as trainer:
        trainer.learner.build = raises(lost("heartbeat_timeout"))
        trainer.run()
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole
    assert [one.action for one in read_incidents(str(tmp_path))] == ["restarted the ranks"]


def test_a_model_that_cannot_be_loaded_ends_the_run_at_once(tmp_path, model):
    with failing(tmp_path, model, {}) as trainer:
        trainer.learner.build = raises(lost("memory"))
        with pytest.raises(WorkerError, match="policy rank 1 died"):
            trainer.run()


def raises(error: Exception) -> Callable[[str], None]:
    def build(path: str) -> None:
        raise error

    return build


def test_user_code_of_the_driver_draws_the_same_numbers_in_every_run(tmp_path, model):
    drawn = []
    for name in ("one", "another"):
        with failing(tmp_path / name, model, {}, total_steps=1) as trainer:
            trainer.learner.speed = lambda *_: drawn.append((random.random(), np.random.random(), torch.rand(1))) or {}
            trainer.run()
    assert drawn[0] == drawn[1]


def test_a_run_that_was_asked_to_stop_does_not_start_its_ranks_again(tmp_path, model):
    cfg, stop = toy_config(tmp_path), StopRequest(None)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)

        def die(experience, step):
            stop.ask("SIGTERM")
            raise lost()

        trainer.learner.update = die
        with pytest.raises(WorkerError):
            trainer.run()


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_number_that_is_not_finite_ends_the_run_and_keeps_what_was_saved(tmp_path, model, restarts):
    failures = {3: [NonFiniteError("the policy's loss is nan") for _ in range(2)]}
    with failing(tmp_path, model, failures, max_restarts=restarts) as trainer:
        trainer.recovery.wait = lambda: None
        with pytest.raises(
            NonRetryableError, match="step 3: the policy's loss is nan; nothing was overwritten, .*step_2"
        ):
            trainer.run()
    assert len(failures[3]) == (restarts == 0)


@pytest.mark.parametrize("interval", [2, 100])
def test_a_restart_takes_back_the_weight_of_the_kl_and_what_user_code_drew(tmp_path, model, interval):
    """From the last commit, and without one from the beginning."""

    def run(name: str, failures: dict[int, list[Exception]]) -> tuple[float, dict[int, float]]:
        drawn: dict[int, float] = {}
        with failing(tmp_path / name, model, failures, ckpt_interval=interval) as trainer:
            trainer.recovery.wait = lambda: None
            trainer.learner.kl = AdaptiveKL(1.0, target=1.0, horizon=2.0)
            update = trainer.learner.update

            def adapt(experience, step):
                drawn[step] = random.random()
                trainer.learner.kl.update(2.0, samples=1)
                return update(experience, step)

            trainer.learner.update = adapt
            trainer.run()
            return trainer.learner.kl.coef, drawn

    assert run("uninterrupted", {}) == run("disturbed", {4: [lost(), lost()]})


def test_a_run_stops_while_there_is_time_for_a_save_as_long_as_the_last(tmp_path, model):
    """Ten minutes are left. Steps take no time, and the last save took six minutes: twice that is too much."""
    cfg = toy_config(tmp_path, ckpt_interval=100)
    stop = StopRequest((datetime.now() + timedelta(minutes=10)).isoformat())
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)
        update = trainer.learner.update

        def set_duration(experience, step):
            trainer.saves.seconds = 360.0 if step == 3 else 1.0
            return update(experience, step)

        trainer.learner.update = set_duration
        with pytest.raises(Stopped, match="stopped after step 3 of 5 .trainer.deadline="):
            trainer.run()
    assert (tmp_path / "checkpoints/global_step_3/manifest.json").exists()


def test_lines_are_on_the_disk_before_the_checkpoint_of_their_step_begins(tmp_path, model, monkeypatch):
    events: list[str] = []
    flush = Tracker.flush
    monkeypatch.setattr(Tracker, "flush", lambda tracker: (flush(tracker), events.append("flushed")))
    with failing(tmp_path, model, {}, ckpt_interval=2) as trainer:
        store = trainer.checkpoints.store
        begin = store.begin
        monkeypatch.setattr(store, "begin", lambda step: (events.append(f"save {step}"), begin(step))[1])
        trainer.run()
    assert events == ["flushed", "save 2", "flushed", "save 4", "flushed", "save 5"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_another_number_of_ranks_the_first_replayed_step_alone_is_compared(tmp_path, model, whole, caplog, ranks):
    run_until(tmp_path, model, 5, ckpt_interval=2)
    shutil.rmtree(tmp_path / "checkpoints/global_step_4")
    caplog.set_level("INFO")
    cfg = toy_config(tmp_path, ckpt_interval=2)
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        trainer.learner.ranks.count = ranks
        trainer.run()
    (line,) = [line for line in caplog.messages if line.startswith("resume verified")]
    shown = {1: "2 replayed steps identical", 2: "1 replayed step equal to 0.001 (the first step alone"}
    assert shown[ranks] in line


def diverge(trainer: Trainer, step: int) -> None:
    """Let the gradient norm be 100 from `step` on."""
    update = trainer.learner.update

    def run_away(experience, at):
        return update(experience, at) | ({"policy/grad_norm": 100.0} if at >= step else {})

    trainer.learner.update = run_away


def test_a_run_that_diverges_says_how_to_go_back_and_can(tmp_path, model, whole):
    cfg = toy_config(tmp_path, divergence_limits={"policy/grad_norm": 10.0, "policy/kl": 1.0})
    for _ in range(2):  # the second run resumes from step 4, and its history counts
        with RunDirectory(cfg).open() as directory:
            trainer = toy_trainer(cfg, directory, model)
            diverge(trainer, step=3)
            with pytest.raises(DivergedError) as diverged:
                trainer.run()
    said = str(diverged.value)
    assert "policy/grad_norm has been above 10 since step 3, and is 100 now (trainer.divergence_limits)" in said
    assert (
        "a lower trainer.policy.optimizer.lr, and add trainer.allow_config_change=[trainer.policy.optimizer.lr]" in said
    )
    incident = read_incidents(str(tmp_path))[-1]
    assert (incident.kind, incident.cause, incident.step, incident.action) == (JOB, "divergence", 5, "ended the run")
    command = shlex.split(said.split("`")[1])
    assert command[:2] == ["trainer", "checkpoint"] and checkpoint_command(command[2:]) == 0
    trainer = toy_run(cfg, model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_without_an_older_checkpoint_a_run_that_diverges_is_to_start_again(tmp_path, model):
    cfg = toy_config(tmp_path, divergence_limits={"policy/grad_norm": 10.0})
    with RunDirectory(cfg).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        diverge(trainer, step=1)
        with pytest.raises(DivergedError, match="no checkpoint is from before that, so start a new run"):
            trainer.run()
