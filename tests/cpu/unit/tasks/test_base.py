"""What a task does where its kind of training says nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import local_cluster
from tests.support.runs import configured
from trainer.errors import UserError
from trainer.run.directory import RunDirectory
from trainer.sources.sampling import SamplingSource
from trainer.sources.supervised import SupervisedSource
from trainer.tasks import Task
from trainer.tasks.base import Ingredients, check_ahead, make_trainer


def test_without_weights_of_its_own_a_task_starts_from_model_path_or_random_ones(tmp_path):
    nothing: Any = None
    cfg = configured(tmp_path / "run", {"model.tiny.hidden_size": 32})
    task = Task(cfg, source=lambda given: nothing)
    path = task.initial_weights()
    assert path == str(tmp_path / "run/start") and (Path(path) / "config.json").exists()
    task.check_inputs(asks_servers=True)
    assert not task.is_enough(nothing, nothing, 5) and not task.exports_last
    cfg.model.path = "a/model"
    assert task.initial_weights() == "a/model"


def test_a_source_that_does_not_sample_ahead_is_refused_where_the_task_reads_the_key(tmp_path):
    source = object.__new__(SupervisedSource)
    cfg = configured(tmp_path / "run", {"rollout.ahead": 1})
    with pytest.raises(UserError, match="^rollout.ahead=1: the source of trainer.task=rl does not sample ahead; cho"):
        check_ahead(cfg, source)
    cfg.rollout.ahead, cfg.rollout.in_flight_updates = 0, True
    for kind in (SupervisedSource, SamplingSource):
        with pytest.raises(UserError, match="^rollout.in_flight_updates=True: the source .* not sample in flight; cho"):
            check_ahead(cfg, object.__new__(kind))
    cfg.rollout.ahead, cfg.trainer.task = 1, "sft"
    check_ahead(cfg, source)


def test_ranks_build_their_models_while_the_driver_reads_the_data(tmp_path):
    """A rank makes its calls in turn, so one that needs the model shows that it was to be built before.

    What the source has begun is undone: the training does not begin.
    """
    nothing: Any = None
    cfg = configured(tmp_path / "run", {"model.tiny.hidden_size": 32})
    found, undone = [], []

    def source(given: Ingredients) -> Any:
        given.with_config(cfg).undo.callback(undone.append, "engines")
        found.append(given.learner.ranks.num_parameters)
        raise UserError("the data cannot be read")

    task = Task(cfg, source=source)
    with local_cluster(2, cfg) as cluster, RunDirectory(cfg).open() as directory:
        path = task.initial_weights()
        with pytest.raises(UserError, match="the data cannot be read"):
            make_trainer(task, cluster, directory, path, nothing)
        ((parameters, trained),) = found
        assert parameters == trained > 0 and undone == ["engines"]
