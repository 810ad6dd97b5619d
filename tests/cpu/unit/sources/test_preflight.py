"""What is refused of a source before anything starts."""

from __future__ import annotations

import pytest

from trainer.config import Config, EnvironmentConfig, RewardConfig
from trainer.config.data import SourceConfig
from trainer.errors import UserError
from trainer.sources.routes import check_source, find_refusals

AGENT = EnvironmentConfig(name="tests.support.agents:OneCall")


def test_an_agent_needs_an_engine_that_takes_requests_at_any_time():
    cfg = Config(environment=AGENT)
    check_source(cfg)
    cfg.rollout.colocate = True
    check_source(cfg)
    cfg.rollout.engine = "transformers"
    with pytest.raises(UserError, match="is an agent, and rollout.engine=transformers takes no request while it gen"):
        check_source(cfg)


def test_refusals_name_the_keys_that_a_source_has_set_itself():
    cfg = Config(reward=RewardConfig(name="absent:run"))
    cfg.rollout.engine = "transformers"
    cfg.data.mix = {
        "own": SourceConfig(reward=RewardConfig(name="absent:own")),
        "same": SourceConfig(reward=cfg.reward),
        "agent": SourceConfig(environment=AGENT),
        "good": SourceConfig(reward=RewardConfig(name="gsm8k")),
    }
    refused = find_refusals(cfg, [f"mix.{name}" for name in cfg.data.mix], check_source)
    assert [sentence.partition(":")[0] for sentence in refused] == [
        "data.mix.own.reward.name=absent",
        "reward.name=absent",
        "data.mix.agent.environment.name=tests.support.agents",
    ]
