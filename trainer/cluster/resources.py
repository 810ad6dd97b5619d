"""The number of processes and GPUs that a run needs."""

from __future__ import annotations

from trainer.config import Config
from trainer.errors import UserError


def rank_groups(cfg: Config) -> int:
    """Return the number of groups of ranks: one that hosts all roles, or one for each role."""
    roles = 1 + cfg.has_critic + cfg.has_reference
    return 1 if cfg.trainer.colocate_roles else roles


def check_gpus(cfg: Config, available: int) -> None:
    """Check that ranks and engines fit on `available` GPUs.

    Raises:
        UserError: they do not fit.
    """
    t, r = cfg.trainer, cfg.rollout
    ranks = t.num_workers * rank_groups(cfg)
    engines = r.num_engines * r.tensor_parallel_size
    if r.share_gpus and engines > t.num_workers:
        raise UserError(
            f"rollout.num_engines={r.num_engines}: with rollout.share_gpus the engines need {engines} "
            f"GPUs, but trainer.num_workers={t.num_workers}"
        )
    needed = ranks + (0 if r.share_gpus else engines)
    if needed > available:
        raise UserError(
            f"trainer.num_workers={t.num_workers}: ranks and engines need {needed} GPUs, there are "
            f"{available}; use fewer, or let them share with rollout.share_gpus=true"
        )
