"""What a task does where its kind of training says nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runs import configured
from trainer.run.stopping import StopRequest
from trainer.tasks import Task


def test_without_weights_of_its_own_a_task_starts_from_model_path_or_random_ones(tmp_path):
    nothing: Any = None
    cfg = configured(tmp_path / "run", {"model.tiny.hidden_size": 32, "model.tiny.intermediate_size": 32})
    task = Task(cfg, source=lambda given: nothing)
    path = task.initial_weights(nothing, StopRequest(None))
    assert path == str(tmp_path / "run/start") and (Path(path) / "config.json").exists()
    task.check_inputs(True)
    assert not task.is_enough(nothing, nothing, 5) and task.data is None and not task.exports_last
    cfg.model.path = "a/model"
    assert task.initial_weights(nothing, StopRequest(None)) == "a/model"
