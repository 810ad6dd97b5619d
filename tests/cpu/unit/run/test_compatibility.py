"""Which config keys may change when a run resumes."""

from __future__ import annotations

import dataclasses

import pytest

from trainer.config import Config, compose
from trainer.errors import UserError
from trainer.run import compatibility


def changed(*overrides: str) -> list[compatibility.Change]:
    now = dataclasses.asdict(compose([*overrides]))
    return compatibility.find_changes(dataclasses.asdict(compose([])), now, dataclasses.asdict(Config()))


def test_harmless_changes_pass():
    found = changed(
        "trainer.num_workers=4",
        "trainer.ckpt_interval=5",
        "logger.samples=0",
        "rollout.num_engines=2",
        "trainer.policy.fsdp.cpu_offload=true",
        "trainer.run_name=x",
    )
    assert {"trainer.num_workers", "trainer.run_dir", "rollout.num_engines"} <= {change.key for change in found}
    compatibility.check(found, [])


@pytest.mark.parametrize(
    "override, allow, sentence",
    [
        ("model.tiny.num_layers=3", ["model"], "model.tiny.num_layers=3.*saved with 2.*another model"),
        ("trainer.seed=2", ["trainer"], "trainer.seed=2.*every random draw"),
        ("algorithm=ppo", ["algorithm"], "algorithm.advantage_estimator=gae.*critic"),
        ("rollout.n=4", [], r"rollout.n=4.*allow_config_change=\[rollout.n\]"),
        (
            "trainer.policy.optimizer.schedule_steps=9",
            [],
            r"schedule_steps=9: .*saved with 140, and the learning rate.*change=\[trainer.policy.optimizer",
        ),
        ("sft.steps=9", [], r"sft.steps=9.*allow_config_change"),
        ("algorithm.ref_update_interval=5", ["algorithm"], "ref_update_interval=5.*whether the checkpoint holds"),
        ("trainer.policy.lora.rank=5", ["trainer"], "trainer.policy.lora.rank=5.*another shape"),
    ],
)
def test_other_changes_are_refused_by_name(override, allow, sentence):
    with pytest.raises(UserError, match=sentence):
        compatibility.check(changed(override), allow)


@pytest.mark.parametrize("allow", [["rollout.n"], ["rollout"]])
def test_a_key_or_its_section_can_be_allowed(allow):
    compatibility.check(changed("rollout.n=4"), allow)
    with pytest.raises(UserError, match="trainer.update_epochs=2"):
        compatibility.check(changed("rollout.n=4", "trainer.update_epochs=2"), allow)


def test_a_key_missing_from_an_old_config_counts_as_its_default():
    saved = dataclasses.asdict(compose([]))
    del saved["algorithm"]["value_clip"]
    now = dataclasses.asdict(compose([]))
    assert compatibility.find_changes(saved, now, dataclasses.asdict(Config())) == []
    now["algorithm"]["value_clip"] = 0.5
    (change,) = compatibility.find_changes(saved, now, dataclasses.asdict(Config()))
    assert str(change) == "algorithm.value_clip: 0.2 -> 0.5"


def test_a_removed_custom_option_is_a_change():
    saved, now = dataclasses.asdict(Config()), dataclasses.asdict(Config())
    saved["algorithm"]["options"] = {"beta": 5}
    (change,) = compatibility.find_changes(saved, now, dataclasses.asdict(Config()))
    assert str(change) == "algorithm.options: {'beta': 5} -> {}"
