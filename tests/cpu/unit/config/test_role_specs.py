"""The models of a run follow from what its functions read."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.config import check_rules
from trainer.cluster.resources import rank_groups
from trainer.config import AlgorithmConfig, Config, OptimizerConfig, RoleSpec
from trainer.config.tasks import TASKS, check_roles, find_task, policy_role
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch) -> None:
    (tmp_path / "reading_functions.py").write_text(
        "def with_values(rewards, mask, group_ids, values): ...\n"
        "def without(rewards, mask, group_ids, scale=1.0): ...\n"
        "def with_reference(logprobs, old_logprobs, advantages, mask, ref_logprobs, *, totals): ...\n"
        "def with_values_and_groups(logprobs, old_logprobs, advantages, mask, *, values, group_ids): ...\n"
    )
    monkeypatch.chdir(tmp_path)


def config(**algorithm) -> Config:
    return Config(algorithm=AlgorithmConfig(**algorithm))


@pytest.mark.parametrize(
    "algorithm, names",
    [
        ({}, ["policy"]),
        ({"advantage_estimator": "gae"}, ["policy", "critic"]),
        ({"advantage_estimator": "reading_functions:with_values"}, ["policy", "critic"]),
        ({"advantage_estimator": "reading_functions:without"}, ["policy"]),
        ({"kl_coef": 0.1}, ["policy", "reference"]),
        ({"kl_coef": 0.1, "advantage_estimator": "gae"}, ["policy", "critic", "reference"]),
        ({"policy_loss": "reading_functions:with_reference"}, ["policy", "reference"]),
        ({"policy_loss": "reading_functions:with_values_and_groups"}, ["policy", "critic"]),
    ],
)
def test_a_role_exists_if_a_function_reads_what_it_computes(algorithm, names):
    cfg = config(**algorithm)
    assert [role.name for role in cfg.roles] == names
    assert rank_groups(cfg) == 1


def test_keys_of_the_critic_are_taken_with_an_estimator_of_the_user_s_that_reads_values():
    cfg = config(advantage_estimator="reading_functions:with_values")
    cfg.trainer.critic.optimizer.lr = 1e-3
    check_rules(cfg, "trainer.critic")
    cfg.algorithm.advantage_estimator = "reading_functions:without"
    with pytest.raises(UserError, match="trainer.critic.optimizer.lr=0.001: .*has no critic"):
        check_rules(cfg, "trainer.critic")


@pytest.mark.parametrize(
    "spec, needed",
    [
        (RoleSpec("policy", trained=True, saved=True, optimizer=OptimizerConfig()), False),
        (RoleSpec("reference"), True),
        (RoleSpec("reference", saved=True, sync_interval=2), False),
        (RoleSpec("teacher", path="/models/teacher", path_key="trainer.teacher.path"), True),
    ],
)
def test_a_resume_needs_the_initial_weights_of_what_the_checkpoint_does_not_hold(spec, needed):
    assert spec.needs_initial_weights == needed


def test_a_resume_needs_the_initial_weights_below_adapters():
    cfg = config()
    cfg.trainer.policy.lora.rank = 4
    assert cfg.roles[0].needs_initial_weights and cfg.roles[0].saved


def test_a_role_with_a_path_of_its_own_needs_a_key_of_its_own():
    with pytest.raises(UserError, match="the role teacher has a path of its own, so it needs a path_key"):
        RoleSpec("teacher", path="/models/teacher")


def test_a_change_of_the_weights_of_a_role_can_be_allowed_by_its_key():
    teacher = RoleSpec("teacher", path="/models/teacher", path_key="teacher")
    cfg = config()
    cfg.trainer.allow_config_change = ["teacher"]
    with pytest.raises(UserError, match="teacher: no such key"):
        check_rules(cfg, "trainer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "rl", dataclasses.replace(TASKS["rl"], roles=lambda cfg: (policy_role(cfg), teacher)))
        find_task.cache_clear()
        check_rules(cfg, "trainer")
    find_task.cache_clear()


TEACHER = RoleSpec("teacher", path="/a", path_key="teacher", computes="teacher_logprobs")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"name": "teacher"}, "two roles of the task have the name teacher"),
        ({"path": "/b"}, "the roles teacher and other have different paths, /a and /b, and one key, teacher"),
        ({"path": None}, "the roles teacher and other have different paths, /a and None, and one key, teacher"),
        ({"computes": "teacher_logprobs"}, "the roles teacher and other both compute teacher_logprobs"),
    ],
)
def test_roles_that_cannot_be_told_apart_are_refused(changes, problem):
    policy, other = policy_role(config()), dataclasses.replace(TEACHER, **{"name": "other", "computes": ""} | changes)
    check_roles((policy, TEACHER, dataclasses.replace(TEACHER, name="same weights", computes="")))
    with pytest.raises(UserError, match=f"^{problem}"):
        check_roles((policy, TEACHER, other))


@pytest.mark.parametrize("roles", [(), (TEACHER,)])
def test_the_first_role_is_the_policy(roles):
    spec = dataclasses.replace(TASKS["rl"], roles=lambda cfg: roles)
    with pytest.raises(UserError, match="the first must be the policy"):
        spec.roles_of(config())


def test_a_trained_role_needs_an_optimizer():
    with pytest.raises(UserError, match=r"the role second is trained, so it needs an optimizer: .*OptimizerConfig\(\)"):
        RoleSpec("second", trained=True)
    second = RoleSpec("second", trained=True, optimizer=OptimizerConfig())
    assert second.setting("lora") == "RoleSpec('second').lora"
    assert policy_role(config()).setting("sharding") == "trainer.policy.fsdp"
