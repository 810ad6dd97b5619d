"""Optuna's TPE with keyed randomness: what it suggests depends on the study, not on the process that asks."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from trainer.seeding import derive_seed


class KeyedTPESampler(BaseSampler):
    """TPE (Bergstra et al., 2011), with a random state of its own for each parameter of each trial.

    So a sweep that was killed and continued suggests what an undisturbed one would have suggested.

    Args:
        options: of `optuna.samplers.TPESampler`, such as `n_startup_trials`.
    """

    def __init__(self, seed: int, **options: Any):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._seed = seed
        self._options = options

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters: each is sampled on its own."""
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """Return nothing, as `search_space` is empty."""
        return {}

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return TPE's value for the parameter `name`."""
        seed = derive_seed(f"{self._seed}:{trial.number}:{name}") % 2**32
        return TPESampler(seed=seed, **self._options).sample_independent(study, trial, name, distribution)
