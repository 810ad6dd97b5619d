"""An objective of the user that cannot be used is refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.preferences import TASK, Preference
from tests.support.runs import configured
from tests.support.tables import table
from trainer.config import TASKS, Config, critic_role, policy_gradient_roles
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.main import prepare
from trainer.objectives import Experience, Objective, make_objective
from trainer.objectives.check import try_objective
from trainer.objectives.cross_entropy import CrossEntropy
from trainer.objectives.policy_gradient import PolicyGradient


class Misspelt(Preference):
    def loss(self, role, outputs, mb, totals, numbers):
        return super().loss(role, outputs, mb, totals, numbers)[0] * mb["sgin"].sum(), {}


class Detached(Preference):
    def loss(self, role, outputs, mb, totals, numbers):
        loss, metrics = super().loss(role, outputs, mb, totals, numbers)
        return loss.detach(), metrics


class OfAllRows(Preference):
    """Also of the row that stands for none."""

    def loss(self, role, outputs, mb, totals, numbers):
        loss, metrics = super().loss(role, outputs, mb, totals, numbers)
        return loss + outputs.logprobs.sum(), metrics


class Numbers(Preference):
    def loss(self, role, outputs, mb, totals, numbers):
        return super().loss(role, outputs, mb, totals, numbers)[0], {"accuracy": 0.5}


class Values(Preference):
    def loss(self, role, outputs, mb, totals, numbers):
        return outputs.values.sum(), {}


class OneNumber(Preference):
    def experience(self, episodes, batch):
        return Experience(batch | {"sign": np.ones(1)}, {})


class Batches(Preference):
    def experience(self, episodes, batch):
        return batch


class Names(Preference):
    def end_step(self, batch, metrics, logprobs):
        return {"margin": metrics["policy/margins"]}


class Interrupting(Preference):
    def totals(self, role, batch):
        raise KeyboardInterrupt


@table(
    "kind, problem",
    [
        (Misspelt, r"KeyError: 'the micro-batch has no sgin; it has .*lengths.*' \(.*/test_trial.py:\d+, in loss\)$"),
        (Detached, "TypeError: its loss does not depend on the outputs$"),
        (OfAllRows, "ValueError: its loss is -.* for a row whose float arrays, mask included, are 0; it must be 0, "),
        (Numbers, "TypeError: its metrics must be scalar tensors by their names"),
        (Values, r"AttributeError: .* \(.*/test_trial.py:\d+, in loss\)$"),
        (OneNumber, "TypeError: `experience` must return arrays with a row for each sample, and sign is none"),
        (Batches, "TypeError: `experience` must return an Experience, not a dict"),
        (Names, r"KeyError: 'policy/margins' \(.*/test_trial.py:\d+, in end_step\)$"),
        (Interrupting, r"KeyboardInterrupt \(.*/test_trial.py:\d+, in totals\)$"),
    ],
)
def test_a_wrong_objective_is_refused_in_one_sentence_with_the_line(kind, problem):
    cfg = Config()
    cfg.trainer.task = "tests.support.preferences:TASK"
    start = f"trainer.task={cfg.trainer.task}: the objective {kind.__name__}, tried on the episodes of its method"
    with pytest.raises(UserError, match=f"^{re.escape(start)} `examples`, ended in {problem}") as refused:
        try_objective(kind(cfg))
    assert "\n" not in str(refused.value)


class OfFour(Preference):
    """Compares four answers, so pairs are no examples of its episodes."""

    def experience(self, episodes, batch):
        assert (np.bincount(batch["group_ids"]) == 4).all()
        return Experience(batch | {"sign": np.tile(np.float32([1, -1, 0, 0]), len(episodes) // 4)}, {})

    def examples(self):
        sample = Sample(np.arange(5, dtype=np.int32), np.ones(5, np.float32))
        return [Episode(f"0:0:{i}", "0:0", [sample], reward=float(i)) for i in range(4)]


class Untried(Misspelt):
    def examples(self):
        return []


class Ours(PolicyGradient):
    pass


@table("kind", [Preference, OfFour, Untried])
def test_right_objectives_and_those_without_examples_are_accepted(kind):
    cfg = Config()
    cfg.trainer.task = "tests.support.preferences:TASK"
    try_objective(kind(cfg))


def with_critic(cfg: Config) -> tuple[Any, ...]:
    return *policy_gradient_roles(cfg), *([] if "values" in cfg.algorithm.reads else [critic_role(cfg)])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantage_estimator": "gae", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"advantage_estimator": "remax", "kl_coef": 0.1},
        {"rollout_correction": "tis", "entropy_coef": 0.1},
        {"old_logprobs": "rollout", "options": {"kl_target": 0.05}, "kl_coef": 0.1},
        {"policy_loss": "tests.support.distillation:distilled"},
    ],
)
def test_a_subclass_of_the_policy_gradient_is_tried_with_all_that_it_reads(tmp_path, settings, monkeypatch):
    task = "tests.support.distillation:TASK" if "policy_loss" in settings else "rl"
    changes = {f"algorithm.{name}": value for name, value in settings.items()}
    cfg = configured(tmp_path, {"model.path": "a/model", "rollout.n": 3, **changes}, task=task)
    tried = []
    monkeypatch.setattr(Ours, "end_step", lambda self, batch, metrics, logprobs: tried.append(metrics) or {})
    try_objective(Ours(cfg))
    assert {"policy/loss", "policy/kl"} <= tried[0].keys()
    assert ("critic/loss" in tried[0]) == (settings.get("advantage_estimator") == "gae")


def test_supervised_objectives_are_tried_without_a_sampler(tmp_path):
    class Mine(CrossEntropy):
        def loss(self, role, outputs, mb, totals, numbers):
            assert "rollout_logprobs" not in mb and outputs.entropy is None
            return super().loss(role, outputs, mb, totals, numbers)

    try_objective(Mine(configured(tmp_path, task="sft")))


def test_objectives_of_the_package_are_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(Objective, "examples", lambda self: pytest.fail("it is tried"))
    for task in TASKS:
        try_objective(make_objective(configured(tmp_path, task=task)))


WRONG = replace(TASK, objective=Misspelt)


def test_a_run_with_a_wrong_objective_is_refused_before_it_starts(tmp_path):
    cfg = configured(tmp_path / "run", task=f"{__name__}:WRONG")
    with pytest.raises(UserError, match="ended in KeyError: 'the micro-batch has no sgin; "):
        prepare(cfg)
