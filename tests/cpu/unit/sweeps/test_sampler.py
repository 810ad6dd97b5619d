"""Suggestions of Optuna depend on the study and the seed, and not on the process that makes them."""

from __future__ import annotations

import optuna
from optuna.distributions import FloatDistribution

from trainer.sweeps.sampler import KeyedTPESampler

SPACE = {"lr": FloatDistribution(0.1, 0.9), "beta": FloatDistribution(0.1, 0.9)}
Values = list[dict[str, float]]


def study_of(finished: Values, seed: int = 1) -> optuna.Study:
    study = optuna.create_study(direction="maximize", sampler=KeyedTPESampler(seed, n_startup_trials=2))
    for values in finished:
        value = -((values["lr"] - 0.3) ** 2)
        study.add_trial(optuna.trial.create_trial(params=values, distributions=SPACE, value=value))
    return study


def suggest(study: optuna.Study, *names: str) -> dict[str, float]:
    trial = study.ask()
    return {name: trial.suggest_float(name, 0.1, 0.9) for name in names or SPACE}


def run(study: optuna.Study, count: int) -> Values:
    found = []
    for _ in range(count):
        trial = study.ask()
        found.append({name: trial.suggest_float(name, 0.1, 0.9) for name in SPACE})
        study.tell(trial, -((found[-1]["lr"] - 0.3) ** 2))
    return found


def test_a_study_that_continues_in_another_process_suggests_the_same():
    whole = run(study_of([]), 6)
    assert run(study_of(whole[:3]), 3) == whole[3:]


def test_each_parameter_has_draws_of_its_own():
    """The order in which a job asks, and what else it asks, change nothing."""
    both = suggest(study_of([]))
    assert suggest(study_of([]), "beta", "lr") == both and suggest(study_of([]), "beta") == {"beta": both["beta"]}
    assert both["lr"] != both["beta"]


def test_seeds_and_trials_differ():
    values = run(study_of([]), 2)
    assert values[0] != values[1] and suggest(study_of([], seed=2)) != values[0]


def test_suggestions_follow_what_was_good():
    """After the trials at random it is TPE, which looks where the best ones were."""
    finished = [{"lr": lr, "beta": 0.5} for lr in (0.1, 0.28, 0.3, 0.32, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)]
    found = [suggest(study_of(finished, seed))["lr"] for seed in range(8)]
    assert sum(abs(lr - 0.3) < 0.2 for lr in found) >= 6
