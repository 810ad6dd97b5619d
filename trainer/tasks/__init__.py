"""Kinds of training: what each trains on, from which weights, and how far. A kind of your own is a `TaskSpec`."""

from trainer.config import Metric, TaskSpec
from trainer.tasks.base import Ingredients, Task, build_task

__all__ = ["Ingredients", "Metric", "Task", "TaskSpec", "build_task"]
