"""Environments: they answer the policy, so that an episode has several turns."""

from typing import Any

from trainer.environments.base import Environment, Message, StepResult
from trainer.environments.supervised import supervised_chat

__all__ = ["Environment", "Message", "StepResult", "supervised_chat"]


def __getattr__(name: str) -> Any:
    if name == "Step":
        raise ImportError("trainer.environments.Step is now called StepResult; import that instead")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
