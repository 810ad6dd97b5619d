"""A policy gradient whose loss reads the log-probs of a frozen teacher, which has weights of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.algorithms import aggregate
from trainer.algorithms.losses import Loss, clip
from trainer.config import TASKS, Config, RoleSpec, policy_gradient_roles


def distilled(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    teacher_logprobs: Tensor,
    *,
    totals: Any,
    aggregation: str = "token_mean",
    weight: float = 0.5,
) -> Loss:
    """The clipped surrogate, and half the squared distance of the log-probs to those of the teacher."""
    loss, metrics = clip(logprobs, old_logprobs, advantages, mask, aggregation=aggregation, totals=totals)
    distance = aggregate((logprobs - teacher_logprobs).square() / 2, mask, aggregation, totals)
    return loss + weight * distance, {**metrics, "teacher_distance": distance.detach()}


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    path = str(Path(cfg.model.path or "").with_name("teacher"))
    return *policy_gradient_roles(cfg), RoleSpec("teacher", path=path, path_key="teacher", computes="teacher_logprobs")


TASK = dataclasses.replace(TASKS["rl"], roles=roles)
