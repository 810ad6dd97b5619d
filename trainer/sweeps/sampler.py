"""Optuna's TPE with keyed randomness: its suggestions depend on the study, and not on the process."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from trainer.seeding import derive_seed


class KeyedTPESampler(BaseSampler):
    """TPE (Bergstra et al., 2011) with a separate random state for each parameter of each trial.

    So a sweep that was killed and continued suggests the same values as an uninterrupted one.

    Args:
        options: options of `optuna.samplers.TPESampler`, such as `n_startup_trials`.
    """

    def __init__(self, seed: int, **options: Any):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._seed = seed
        self._options = options

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return no parameters, because each is sampled independently."""
        return {}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """Return nothing, because `search_space` is empty."""
        return {}

    def sample_independent(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return TPE's value for the parameter `name`."""
        seed = derive_seed(f"{self._seed}:{trial.number}:{name}") % 2**32
        return TPESampler(seed=seed, **self._options).sample_independent(study, trial, name, distribution)
