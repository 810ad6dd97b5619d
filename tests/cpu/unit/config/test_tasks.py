"""The table of tasks, and how a task of the user is found and refused."""

from __future__ import annotations

import re

import pytest

from trainer.config import Config, compose
from trainer.config.fields import value_of
from trainer.config.tasks import ACCURACY, TASKS, Metric, TaskSpec, add_task, find_task
from trainer.errors import UserError
from trainer.objectives import make_objective
from trainer.tasks import build_task

LOSS = {"my/loss": Metric("A loss.", "nats", "min", watched=True), "my/speed": Metric("A speed.", "1/s")}
good = TaskSpec(lambda config: ("built", config), best="my/loss", metrics=LOSS)
unknown_best = TaskSpec(str, best="my/other", metrics=LOSS)
undirected = TaskSpec(str, best="my/speed", metrics=LOSS)


def path(name: str) -> str:
    return f"{__name__}:{name}"


@pytest.mark.parametrize("name", TASKS)
def test_the_keys_that_a_built_in_task_names_exist(name):
    task, config = find_task(name), Config()
    assert task is TASKS[name]
    assert isinstance(value_of(config, task.total_steps), int) and value_of(config, task.optimizer).lr > 0
    assert task.roles_of(config)[0].name == "policy"
    config.trainer.task = name
    assert make_objective(config) is not None


def test_a_task_by_import_path_is_found_and_builds():
    task = find_task(path("good"))
    config = Config()
    config.trainer.task = path("good")
    assert build_task(config) == ("built", config)
    assert task.watched == ("my/loss",)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_task", "no_such_task: "),
        (path("path"), "is a function; it must be a trainer.tasks.TaskSpec"),
        (path("unknown_best"), "its `best` is my/other, which its `metrics` do not declare"),
        (path("undirected"), "its `metrics` do not say whether a high or a low my/speed is better"),
    ],
)
def test_what_is_no_task_is_refused(name, problem):
    with pytest.raises(UserError, match=f"^trainer.task=.*{re.escape(problem)}"):
        find_task(name)


@pytest.mark.parametrize(
    ("task", "compared"),
    [(good, ("my/loss", "min")), (TaskSpec(str), (ACCURACY, "max")), (TASKS["sft"], ("val/loss", "min"))],
    ids=["own", "accuracy", "sft"],
)
def test_the_default_metric_stands_for_the_best_of_the_task(task, compared):
    assert task.compared_by(ACCURACY) == compared
    assert task.compared_by("reward/mean") == ("reward/mean", "max")


def test_a_task_whose_module_does_not_exist_yet_is_loaded_when_it_is_asked_for():
    def fails() -> TaskSpec:
        raise RuntimeError("not here")

    add_task("passed_functions.one:task", lambda: good)
    add_task("passed_functions.two:task", fails)
    assert find_task("passed_functions.one:task") is good
    with pytest.raises(UserError, match="^trainer.task=passed_functions.two:task: cannot be imported .*not here"):
        find_task("passed_functions.two:task")


def test_a_task_brings_defaults_that_give_way_to_whatever_the_user_sets(tmp_path, monkeypatch):
    """Also to the value that the schema has, and to a group with a value of its own."""
    key, files = "trainer.policy.optimizer.lr", ["data.train_files=[x]", "trainer.val_interval=-1"]
    own = ["trainer.task=rm", *files, "model.path=x"]
    (tmp_path / "mine.yaml").write_text("trainer: {policy: {optimizer: {lr: 1e-6}}}\n")
    (tmp_path / "other.yaml").write_text("defaults: [mine]\ntrainer: {seed: 3}\n")
    (tmp_path / "seed.yaml").write_text("trainer: {seed: 3}\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ntrainer: {policy: {optimizer: {lr: 1e-6}}}\n")
    found = [
        compose(own),
        compose(["trainer.task=dpo", *files, "model.path=x"]),
        compose([*own, f"{key}=1e-6"]),
        compose([*own, f"{key.removesuffix('.lr')}={{lr:1e-6}}"]),
        compose(own, str(tmp_path / "mine.yaml")),
        compose(own, str(tmp_path / "other.yaml")),  # which builds on an experiment beside it
        compose([*own, "experiment=mine"], str(tmp_path / "seed.yaml")),
        compose(own, str(tmp_path / "seed.yaml")),
        compose(own[:-1]),  # of the built-in model
    ]
    assert [value_of(config, key) for config in found] == [1e-5, *[1e-6] * 6, 1e-5, 4e-4]
    monkeypatch.setitem(TASKS, "wrong", TaskSpec(str, defaults={"trainer.policy.optimizer.rate": 1}))
    with pytest.raises(
        UserError, match="^trainer.task=wrong: sets a default of trainer.policy.optimizer.rate: no such key"
    ):
        compose(["trainer.task=wrong", *files])
