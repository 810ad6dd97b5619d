"""Roles by their names, for tests that build some of them alone."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config import Config, RoleSpec, critic_role, policy_role, reference_role

_SPECS = {"policy": policy_role, "critic": critic_role, "reference": reference_role}


def roles(cfg: Config, names: Sequence[str]) -> list[RoleSpec]:
    """The specs of these roles, whichever the objective of `cfg` needs."""
    return [_SPECS[name](cfg) for name in names]
