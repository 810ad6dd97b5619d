"""The whole config: contradictions between keys, names of keys, and what follows from several keys."""

from __future__ import annotations

import pytest

from tests.support.config import config_of
from trainer.config import (
    OPEN_SECTIONS,
    Config,
    TrainerConfig,
    valid_keys,
)

BASE = config_of([])


def test_open_sections_are_those_with_keys_of_the_users_choice():
    assert OPEN_SECTIONS == (
        "trainer.divergence_limits",
        "trainer.policy.optimizer.options",
        "algorithm.options",
        "algorithm.teacher.path",
        "algorithm.teacher.url",
        "model.chat_template_kwargs",
        "data.synthetic_args",
        "data.val_sets.<name>.synthetic_args",
        "data.val_sets.<name>.environment.kwargs",
        "data.mix.<name>.synthetic_args",
        "data.mix.<name>.environment.kwargs",
        "environment.kwargs",
        "rollout.engine_args",
    )


def test_valid_keys_are_those_below_a_section():
    assert valid_keys()[:2] == ["trainer", "algorithm"]
    assert valid_keys("inference") == ["inference.host", "inference.port"]
    assert valid_keys("nothing") == []


@pytest.mark.parametrize(
    "overrides, adapter, base",
    [
        ([], False, False),
        (["trainer.policy.lora.rank=8"], True, True),
        (["trainer.policy.lora.rank=8", "rollout=transformers"], False, True),
        (["trainer.policy.lora.rank=8", "rollout.lora_sync=merged"], False, True),
        (["trainer.policy.lora.rank=600", "algorithm.ref_sync_interval=2"], False, False),
    ],
)
def test_who_gets_adapters_and_who_is_the_reference(overrides, adapter, base):
    config = config_of(overrides)
    assert (config.syncs_adapter, any(role.is_policy_base for role in config.roles)) == (adapter, base)


def test_validation_is_due_at_the_start_at_multiples_and_at_the_end():
    config = Config(trainer=TrainerConfig(total_steps=7))
    assert [step for step in range(8) if config.is_due(3, step)] == [0, 3, 6, 7]
    assert not any(config.is_due(-1, step) for step in range(8))
