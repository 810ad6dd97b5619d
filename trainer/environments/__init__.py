"""Environments: they answer the policy, so that an episode has several turns."""

from trainer.environments.base import Environment, Message, StepResult
from trainer.environments.supervised import supervised_chat

__all__ = ["Environment", "Message", "StepResult", "supervised_chat"]
