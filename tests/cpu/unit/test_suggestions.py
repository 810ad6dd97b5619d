"""Names that the user may have meant."""

from __future__ import annotations

import pytest

from trainer.config import Config
from trainer.config.fields import walk_keys
from trainer.suggestions import did_you_mean

KEYS = [key for key, *_ in walk_keys(Config())]


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("trainer.total_step", ["trainer.total_steps"]),
        ("total_step", ["trainer.total_steps"]),
        ("algorithm.total_steps", ["trainer.total_steps"]),
        ("model_path", ["model.path"]),
        ("TRAINER.SEED", ["trainer.seed", "model.tiny.seed"]),
        ("lr", ["trainer.policy.optimizer.lr", "trainer.critic.optimizer.lr", "sft.optimizer.lr"]),
        ("batch_size", ["sft.batch_size", "trainer.train_batch_size", "trainer.mini_batch_size"]),
        ("clip", ["algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"]),
        ("lora_rank", ["trainer.policy.lora.rank", "trainer.critic.lora.rank"]),
        ("trainer.critic.lora.rnk", ["trainer.critic.lora.rank", "trainer.policy.lora.rank"]),
    ],
)
def test_the_names_most_like_the_wrong_one_come_first(wrong, meant):
    assert did_you_mean(wrong, KEYS) == f"did you mean {', or '.join(meant)}?"


@pytest.mark.parametrize("wrong", ["nothing", "trainer.zzzz", "", ".", "*", "trainer."])
def test_nothing_is_suggested_where_no_name_is_alike(wrong):
    assert did_you_mean(wrong, KEYS) == ""
    assert did_you_mean(wrong, []) == ""
