"""What an evaluation reads of a config."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.support.config import KEYS
from trainer.cluster.resources import check_gpus, rank_groups
from trainer.config import compose
from trainer.config.command_line import refuse_unread
from trainer.errors import UserError
from trainer.evaluate.subject import PATH, READ
from trainer.tasks import build_task


def test_no_pattern_is_without_a_key():
    for pattern in READ:
        assert any(fnmatchcase(key, pattern) for key in KEYS), pattern


def test_an_evaluation_takes_gpus_for_its_engines_alone():
    cfg = compose(["data=arithmetic", f'trainer.task="{PATH}"', "rollout.num_engines=2", "trainer.num_workers=8"])
    assert rank_groups(cfg) == 0
    check_gpus(cfg, 2)
    with pytest.raises(UserError, match="need 2 GPUs, and there are 1"):
        check_gpus(cfg, 1)


def test_keys_of_training_are_refused():
    cfg = compose(["data=arithmetic", f'trainer.task="{PATH}"'])
    with pytest.raises(UserError, match="algorithm.kl_coef, trainer.total_steps: trainer.task=.* does not read them"):
        refuse_unread(["algorithm.kl_coef=0.1", "trainer.total_steps=3", "rollout.val_n=2"], cfg)


def test_training_with_this_task_is_refused():
    cfg = compose(["data=arithmetic", f'trainer.task="{PATH}"'])
    with pytest.raises(UserError, match="give the command trainer evaluate$"):
        build_task(cfg)
