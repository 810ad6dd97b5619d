"""Rewards: `REWARDS[name](completion, answer) -> float`, and any function by import path."""

from trainer.rewards.functions import REWARDS, resolve

__all__ = ["REWARDS", "resolve"]
