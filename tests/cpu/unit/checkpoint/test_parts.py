"""The parts of a checkpoint."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import manager, save
from trainer.checkpoint.manifest import Checkpoint, verify
from trainer.checkpoint.parts import Restore, is_allowed, json_part, models_part
from trainer.config import RESUME_LOAD
from trainer.errors import UserError


def test_a_change_is_allowed_by_its_key_or_section_and_not_by_a_prefix_of_its_name():
    assert is_allowed("algorithm.kl_coef", ["algorithm.kl_coef"]) and is_allowed("algorithm.kl_coef", ["algorithm"])
    for near in ("algorithm.kl", "algo", "algorithm.kl_coef.x", "kl_coef"):
        assert not is_allowed("algorithm.kl_coef", [near]), near


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    parts = [json_part(name, dict, lambda _: None) for name in NAMES]
    run = {"roles": ["policy"], "ranks": 1, "replicas": 1, "config_digest": "0", "score": None, "parent": None}
    return verify(save(manager(tmp_path), 1, parts, **run))


NAMES = ("config", "start_weights", "trainer_state", "data", "models", "huggingface")


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (RESUME_LOAD, {"start_weights", "trainer_state", "data", "models"}),
        (("weights",), {"start_weights", "models"}),
        (("optimizer", "rng"), {"models"}),
        (("data", "state"), {"trainer_state", "data"}),
    ],
)
def test_the_parts_that_hold_the_restored_kinds_are_chosen(checkpoint, kinds, names):
    parts = [json_part(name, dict, lambda _: None) for name in NAMES]
    chosen = Restore(frozenset(kinds)).chosen(parts, checkpoint)
    assert {part.name for part in chosen} == names | {"config"}


class Ranks:
    """Records what is loaded."""

    saved_roles = ["policy", "critic"]

    def __init__(self) -> None:
        self.loaded: list[tuple] = []

    def load(self, role, files, what, steps_added=0) -> None:
        self.loaded.append((role, files.directory, what, steps_added))


def test_models_are_restored_by_role(checkpoint, caplog):
    caplog.set_level("INFO")
    restore = Restore(frozenset({"weights", "data"}), fork=True, added_steps={"policy": 3})
    ranks = Ranks()
    models_part(ranks).load(checkpoint, restore)
    assert ranks.loaded == [("policy", checkpoint.path, {"weights"}, 3)]
    assert caplog.messages[-1] == "the checkpoint holds no critic: it starts from scratch"


def test_a_checkpoint_without_a_part_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="the checkpoint has no ledger; it holds config, start_weights"):
        manager(tmp_path).load(checkpoint, [json_part("ledger", dict, lambda _: None)])
