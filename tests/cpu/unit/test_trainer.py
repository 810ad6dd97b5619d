"""What the trainer saves, restores, compares with the log and refuses, over a learner that holds one number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics
from tests.support.toy import toy_config, toy_run, toy_trainer
from trainer.errors import NonFiniteError, NotSavedError, UserError
from trainer.run.directory import RunDirectory
from trainer.run.stopping import StopRequest
from trainer.signals import Stopped


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("toy") / "model"


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nothing disturbs: its metrics and its last number."""
    root = tmp_path_factory.mktemp("whole")
    trainer = toy_run(toy_config(root), model)
    return comparable(metrics(root)), trainer.learner.ranks.number


class Killed(Exception):
    pass


def run_until(root: Path, model: Path, step: int, **settings) -> None:
    """Run, and end without a word after the episodes of `step` were drawn."""
    with RunDirectory(toy_config(root, **settings), supervised=True).open() as directory:
        trainer = toy_trainer(toy_config(root, **settings), directory, model)
        update = trainer.learner.update

        def die(experience, at):
            if at == step:
                raise Killed
            return update(experience, at)

        trainer.learner.update = die
        with pytest.raises(Killed), directory.settling():
            trainer.fit()


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_run_that_died_ends_as_if_it_had_not(tmp_path, model, whole, step, interval):
    run_until(tmp_path, model, step, ckpt_interval=interval)
    trainer = toy_run(toy_config(tmp_path, ckpt_interval=interval), model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_run_can_be_extended(tmp_path, model, whole):
    toy_run(toy_config(tmp_path, total_steps=2), model)
    trainer = toy_run(toy_config(tmp_path), model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole


def test_a_resumed_run_warns_of_what_began_before_it_and_not_again(tmp_path, model, caplog):
    def warnings(total_steps: int) -> list[str]:
        caplog.clear()
        cfg = toy_config(tmp_path, total_steps=total_steps)
        with RunDirectory(cfg, supervised=True).open() as directory:
            trainer = toy_trainer(cfg, directory, model)
            update = trainer.learner.update
            trainer.learner.update = lambda *step: update(*step) | {"response_length/clip_ratio": 0.9}
            trainer.fit()
        return [r.getMessage() for r in caplog.records if "have been cut off" in r.getMessage()]

    assert warnings(2) == []
    (text,) = warnings(4)
    assert text.startswith("since step 1, more than half of the completions have been cut off")
    assert warnings(8) == []


@pytest.mark.parametrize("reason", [None, "SIGTERM"])
def test_the_last_save_is_tried_again_until_it_is_committed(tmp_path, model, caplog, reason):
    caplog.set_level("INFO")
    # Regular saves that fail in a row would end the run: the last one is tried again nevertheless.
    cfg = toy_config(tmp_path, ckpt_failures_allowed=0, ckpt_interval=100)
    stop = StopRequest(None)
    with RunDirectory(cfg, supervised=True).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)
        trainer.learner.ranks.fail_saves = [OSError("No space left on device"), OSError("Stale file handle")]
        if reason is None:
            trainer.fit()
        else:
            stop.ask(reason)
            with pytest.raises(Stopped, match="stopped after step 1 of 5 .SIGTERM"):
                trainer.fit()
    assert (tmp_path / f"checkpoints/global_step_{trainer.state.step}/manifest.json").exists()
    told = [line for line in caplog.messages if "FAILED" in line or line.startswith("saved")]
    assert [("FAILED" in line, "saved" in line) for line in told] == [(True, False), (True, False), (False, True)]


@pytest.mark.parametrize("reason", [None, "SIGTERM"])
def test_a_run_whose_last_save_fails_does_not_end_well(tmp_path, model, reason):
    toy_run(toy_config(tmp_path, total_steps=1), model)
    cfg, stop = toy_config(tmp_path, ckpt_interval=100), StopRequest(None)
    with RunDirectory(cfg, supervised=True).open() as directory:
        trainer = toy_trainer(cfg, directory, model, stop)
        trainer.learner.ranks.fail_saves = [OSError("No space left on device")] * 9
        if reason is not None:
            stop.ask(reason)
        step = 5 if reason is None else 2
        match = f"step {step} is trained but not saved: trainer.ckpt_path={tmp_path}.*No space.*good.*global_step_1"
        with pytest.raises(NotSavedError, match=match):
            trainer.fit()


def test_failed_saves_are_told_and_bounded(tmp_path, model, caplog):
    cfg = toy_config(tmp_path, ckpt_failures_allowed=1, total_steps=9, ckpt_async=False)
    with RunDirectory(cfg, supervised=True).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        update = trainer.learner.update

        def fail_from_step_2(experience, step):
            if step == 2:
                trainer.checkpoints.wait()
                trainer.learner.ranks.fail_saves = [OSError("No space left on device")] * 9
            return update(experience, step)

        trainer.learner.update = fail_from_step_2
        with pytest.raises(UserError, match="trainer.ckpt_path=.*No space.*global_step_1; 2 failed in a row"):
            trainer.fit()
    (first,) = [line for line in caplog.messages if "FAILED" in line]
    assert "training continues" in first and "global_step_1" in first


def test_a_fork_takes_the_state_over_and_keeps_its_own_metrics(tmp_path, model, whole):
    losses = [row["sft/loss"] for row in whole[0]]
    assert min(losses[:3]) < min(losses[3:])
    compared = {"best_metric": "sft/loss", "best_mode": "min"}
    trainer = toy_run(toy_config(tmp_path / "parent", total_steps=3, **compared), model)
    assert trainer.state.best == {"sft/loss": min(losses[:3]), "step": 1}
    parent = str(tmp_path / "parent/checkpoints/global_step_3")
    cfg = toy_config(tmp_path / "fork", resume_mode="from_path", resume_path=parent, **compared)
    trainer = toy_run(cfg, model)
    assert trainer.state.best["sft/loss"] == min(losses[3:]), "the best of the parent is not that of the fork"
    assert comparable(metrics(tmp_path / "fork")) == whole[0][3:]
    assert trainer.learner.ranks.number == whole[1]
    manifest = json.loads((tmp_path / "fork/checkpoints/global_step_5/manifest.json").read_text())
    assert manifest["parent"]["forked_from"] == parent
    weights_alone = toy_config(tmp_path / "weights", resume_mode="from_path", resume_path=parent,
                               resume_load=["weights"], total_steps=1)  # fmt: skip
    trainer = toy_run(weights_alone, model)
    assert [row["step"] for row in metrics(tmp_path / "weights")] == [1]
    assert trainer.learner.ranks.number != whole[0][0]["sft/loss"], "the weights are those of the parent"


@pytest.mark.parametrize("choice", ["warn", "stop", "fallback"])
def test_a_replayed_step_that_differs_from_the_log(tmp_path, model, whole, caplog, choice):
    run_until(tmp_path, model, 5)
    shutil.rmtree(tmp_path / "checkpoints/global_step_4")
    lines = metrics(tmp_path)
    lines[3]["sft/loss"] += 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = toy_config(tmp_path, on_resume_mismatch=choice)
    if choice == "stop":
        with pytest.raises(
            UserError, match="global_step_3, but step 4 was not replayed as it had been logged: sft/loss"
        ):
            toy_run(cfg, model)
        return
    caplog.set_level("INFO")
    trainer = toy_run(cfg, model)
    assert (comparable(metrics(tmp_path)), trainer.learner.ranks.number) == whole
    went_back = any("going back to" in line and "global_step_2" in line for line in caplog.messages)
    assert went_back == (choice == "fallback")


def test_a_number_that_is_not_finite_ends_the_run_and_keeps_what_was_saved(tmp_path, model):
    cfg = toy_config(tmp_path)
    with RunDirectory(cfg, supervised=True).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        update = trainer.learner.update

        def overflow(experience, step):
            if step == 3:
                raise NonFiniteError("the policy's loss is nan")
            return update(experience, step)

        trainer.learner.update = overflow
        with pytest.raises(
            UserError, match="step 3: the policy's loss is nan; nothing was overwritten, .*global_step_2"
        ):
            trainer.fit()


def test_the_state_of_an_older_supervised_run_is_read(tmp_path, model):
    """Supervised runs once had a loop of their own, which counted less."""
    cfg = toy_config(tmp_path)
    with RunDirectory(cfg, supervised=True).open() as directory:
        trainer = toy_trainer(cfg, directory, model)
        trainer.load_state_dict({"step": 3, "tracker": {"wandb_run_id": None}})
        assert (trainer.state.step, trainer.state.tokens, trainer.state.best) == (3, 0, {})
