"""From a config to the `Task` that it describes."""

from __future__ import annotations

from trainer.config import Config
from trainer.import_utils import import_function
from trainer.tasks.base import Task

_PAIRS = {"dpo": "trainer.tasks.pairs:build_dpo", "rm": "trainer.tasks.pairs:build_rm"}
_BUILT_IN = {"rl": "trainer.tasks.rl:build", "sft": "trainer.tasks.sft:build", **_PAIRS}
"""Imported when they are needed: each takes a moment."""


def build_task(cfg: Config) -> Task:
    """Return the task that the config describes.

    Raises:
        UserError: the function of a task of the user cannot be imported, or refuses the config.
    """
    build = cfg.task.build
    build = _BUILT_IN.get(build, build) if isinstance(build, str) else build
    return (import_function(build, "trainer.task") if isinstance(build, str) else build)(cfg)
