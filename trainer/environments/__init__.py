"""Environments: worlds that answer the policy, so that an episode has several turns."""

from trainer.environments.base import Environment, Message, Step

__all__ = ["Environment", "Message", "Step"]
