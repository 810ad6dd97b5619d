"""Environments: worlds that answer the policy, so that an episode has several turns."""

from trainer.environments.base import Environment, Message, Step
from trainer.environments.supervised import supervised_chat

__all__ = ["Environment", "Message", "Step", "supervised_chat"]
