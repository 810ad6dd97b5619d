"""Environments: they answer the policy, so that an episode has several turns. Agents ask the policy themselves."""

from trainer.environments.base import Agent, AgentResult, Endpoint, Environment, Message, StepResult
from trainer.environments.tools import supervised_chat

__all__ = ["Agent", "AgentResult", "Endpoint", "Environment", "Message", "StepResult", "supervised_chat"]
