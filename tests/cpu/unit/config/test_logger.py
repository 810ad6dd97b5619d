"""Keys of `logger.*`: names of runs in W&B, and that none of them changes a run."""

from __future__ import annotations

from trainer.config import LoggerConfig, compose
from trainer.config.fields import walk_keys


def test_a_run_has_its_name_in_wandb_and_no_group_outside_of_a_sweep():
    wandb = compose(["trainer.run_name=mine"]).logger.wandb
    assert (wandb.name, wandb.group, wandb.mode) == ("mine", None, "off")
    assert compose(["trainer.run_name=mine", "logger.wandb.name=other"]).logger.wandb.name == "other"


def test_a_resume_may_change_what_is_shown():
    keys = [key for key, *_ in walk_keys(LoggerConfig())]
    assert len(keys) == 14, "each key of the section"
