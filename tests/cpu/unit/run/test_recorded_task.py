"""The task that a run directory records."""

from __future__ import annotations

import json

import pytest

from tests.support.runs import configured, save_steps
from trainer.config import Config, Metric
from trainer.config.tasks import TASKS, TaskSpec, add_task, find_task
from trainer.errors import UserError
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import last_start, record_start, task_of


def test_a_start_names_its_task_for_those_who_cannot_import_it(tmp_path, monkeypatch):
    panel = Metric("A loss.", "nats", "min", "Pairs", watched=True)
    spec = TaskSpec(lambda cfg: None, total_steps="sft.steps", best="dpo/loss", metrics={"dpo/loss": panel})
    add_task("mine:TASK", lambda: spec)
    cfg = configured(tmp_path, {"sft.steps": 7}, task="mine:TASK")
    record_start(str(tmp_path), cfg)
    task = task_of(last_start(str(tmp_path)))
    assert (task.name, task.total_steps, task.best_metric, task.best_mode) == ("mine:TASK", 7, "dpo/loss", "min")
    assert task.metrics == {"dpo/loss": panel}
    assert json.loads((tmp_path / "starts.jsonl").read_text())["task"]["name"] == "mine:TASK"


@pytest.mark.parametrize("before, now", [("rl", "sft"), ("sft", "rl")])
def test_a_run_continues_with_no_other_task(tmp_path, before, now):
    save_steps(configured(tmp_path, task=before), 1)
    with pytest.raises(UserError, match=f"trainer.task={now}: the checkpoint was saved with {before}"):
        RunDirectory(configured(tmp_path, task=now, resume_mode="latest")).open()


def test_a_fork_of_another_task_leaves_its_data_behind(tmp_path):
    save_steps(configured(tmp_path, task="sft"), 1)
    fork = {"resume_mode": "from_path", "resume_path": str(tmp_path / "checkpoints/global_step_1")}
    with pytest.raises(UserError, match="leave data out of trainer.load_components"):
        RunDirectory(configured(tmp_path / "fork", **fork)).open()
    with RunDirectory(configured(tmp_path / "fork", load_components=["weights"], **fork)).open() as directory:
        assert directory.resume is not None and directory.resume.restore.fork


def test_a_task_that_contradicts_itself_is_refused(tmp_path, monkeypatch):
    (tmp_path / "wrong_tasks.py").write_text(
        "from trainer.config import Metric, TaskSpec\n"
        "A = TaskSpec(lambda cfg: None, best='my/loss')\n"
        "B = TaskSpec(lambda cfg: None, best='my/loss', metrics={'my/loss': Metric('A loss.', 'nats')})\n"
        "def C(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, problem in {
        "A": "its `best` is my/loss, which its `metrics` do not declare",
        "B": "its `metrics` do not say whether a high or a low my/loss is better",
        "C": "is a function; it must be a trainer.tasks.TaskSpec",
        "D": "wrong_tasks has no",
    }.items():
        with pytest.raises(UserError, match=f"^trainer.task=wrong_tasks:{name}: {problem}"):
            find_task(f"wrong_tasks:{name}")


def test_the_built_in_tasks_read_keys_that_there_are():
    cfg = Config()
    for name in TASKS:
        cfg.trainer.task = name
        assert cfg.total_steps > 0 and cfg.roles[0].name == "policy" and cfg.roles[0].optimizer is not None
