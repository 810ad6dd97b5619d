"""Which config keys may change when a run resumes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest

from tests.support.config_keys import ALLOWED, HARMLESS, PROOFS, REFUSED
from trainer.config import OPEN_SECTIONS, Config, compose
from trainer.errors import UserError
from trainer.run import compatibility
from trainer.run.compatibility import Change


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
        ("algorithm.ref_sync_interval=5", ["algorithm"], "ref_sync_interval=5.*whether the checkpoint holds"),
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


def test_all_refusals_are_listed_together():
    found = changed("rollout.n=4", "trainer.seed=2", "trainer.update_epochs=2", "trainer.num_workers=2")
    with pytest.raises(UserError) as refused:
        compatibility.check(found, ["algorithm"])
    headline, *lines = str(refused.value).splitlines()
    assert "cannot be used" in headline
    assert [line.split(":")[0] for line in lines] == [
        "  rollout.n=4",
        "  trainer.seed=2",
        "  trainer.update_epochs=2",
        "  to allow all that can be allowed",
    ]
    assert lines[1].endswith("restore the value, or start a new run")
    assert lines[-1].endswith("trainer.allow_config_change=[algorithm,rollout.n,trainer.update_epochs]")


ALL_STATE = ("weights", "optimizer", "rng", "data", "state")


@pytest.mark.parametrize("key", sorted(ALLOWED))
def test_a_fork_changes_what_a_resume_changes_with_permission(key):
    change = [Change(key, "before", "after")]
    if key == "model.path":
        with pytest.raises(UserError, match=r"belong to that model; .*allow_config_change=\[model.path\]"):
            compatibility.check(change, [], forked=ALL_STATE)
        change = compatibility.check(change, ["model.path"], forked=ALL_STATE)
    assert compatibility.check(change, [], forked=("rng", "data", "state")) == change


@pytest.mark.parametrize(
    "key, restored, remedy",
    [
        ("trainer.seed", ALL_STATE, "leave data out of trainer.load_components"),
        ("trainer.seed", ("weights", "optimizer", "rng", "state"), None),
        ("model.tiny.num_layers", ("weights",), "leave weights and optimizer out"),
        ("model.tiny.num_layers", ("data", "state"), None),
        ("trainer.policy.lora.rank", ("optimizer",), "leave weights and optimizer out"),
        ("trainer.policy.lora.target_modules", ("rng",), None),
        ("algorithm.ref_sync_interval", ALL_STATE, None),  # the reference starts from the start weights
        ("algorithm.advantage_estimator", ALL_STATE, None),  # the critic starts from its start weights
    ],
)
def test_a_fork_refuses_what_makes_the_restored_state_meaningless(key, restored, remedy):
    change = [Change(key, "before", "after")]
    if remedy is None:
        assert compatibility.check(change, [], forked=restored) == change
    else:
        with pytest.raises(
            UserError, match=f"{key}=after: .*saved with before, and .*; restore the value, or {remedy}"
        ):
            compatibility.check(change, [key], forked=restored)


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


def saved_by_an_earlier_version(**options: object) -> dict:
    """The default config as versions saved it that left null where the default of a function held."""
    saved = dataclasses.asdict(compose([]))
    for name in ("normalize_std", "clip_low", "clip_high"):
        saved["algorithm"][name] = None
    saved["algorithm"] |= options
    return saved


@pytest.mark.parametrize(
    "options, overrides, found",
    [
        ({}, [], []),
        ({}, ["algorithm.clip_high=0.2", "algorithm.normalize_std=true"], []),
        ({}, ["algorithm.clip_high=0.3"], ["algorithm.clip_high: 0.2 -> 0.3"]),
        ({"clip_high": 0.28}, [], ["algorithm.clip_high: 0.28 -> 0.2"]),
        ({"clip_high": 0.28}, ["algorithm.clip_high=0.28"], []),
        ({"aggregation": "token_mean"}, ["algorithm.aggregation=token_mean"], []),
        ({"policy_loss": "gspo"}, ["algorithm.policy_loss=gspo"], []),
        (
            {"policy_loss": "gspo", "clip_high": 0.28},
            ["algorithm.policy_loss=gspo"],
            ["algorithm.clip_high: 0.28 -> 0.0004"],
        ),
        ({"policy_loss": "own_loss:plain", "aggregation": "token_mean"}, ["algorithm.policy_loss=own_loss:plain"], []),
        (
            {"policy_loss": "own_loss:summed", "aggregation": "token_mean"},
            ["algorithm.policy_loss=own_loss:summed"],
            ["algorithm.aggregation: token_mean -> seq_mean_token_sum"],
        ),
        (
            {"policy_loss": "gone:loss"},
            ["algorithm.policy_loss=gone:loss", "algorithm.aggregation=token_mean"],
            ["algorithm.aggregation: seq_mean_token_mean -> token_mean"],
        ),
    ],
)
def test_values_are_compared_not_whether_they_are_defaults(options, overrides, found, tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text(
        "def plain(logprobs, old, advantages, mask, *, aggregation, totals, clip_high=0.5): ...\n"
        "def summed(logprobs, old, advantages, mask, *, totals, aggregation='seq_mean_token_sum'): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_loss", None)
    saved, now = saved_by_an_earlier_version(**options), dataclasses.asdict(compose(overrides))
    changes = compatibility.find_changes(saved, now, dataclasses.asdict(Config()))
    assert [str(change) for change in changes] == found


def test_options_that_change_with_their_function_need_no_permission_of_their_own():
    saved = dataclasses.asdict(compose(["algorithm=cispo"]))
    now = dataclasses.asdict(compose(["algorithm=cispo", "algorithm.policy_loss=sapo", "algorithm.tau_neg=2"]))
    changes = compatibility.find_changes(saved, now, dataclasses.asdict(Config()))
    assert list(map(str, changes)) == [
        "algorithm.policy_loss: cispo -> sapo",
        "algorithm.tau_neg: None -> 2.0",
    ]


# ----------------------------------------------------------------------------------------------------------
# Every key has a decision


def keys_of(section: Any, prefix: str = "") -> list[str]:
    """Every key of the schema."""
    keys = []
    for f in dataclasses.fields(section):
        value, key = getattr(section, f.name), f"{prefix}{f.name}"
        keys += keys_of(value, f"{key}.") if dataclasses.is_dataclass(value) else [key]
    return keys


def passes(key: str, allowed: list[str]) -> bool:
    try:
        compatibility.check([Change(key, "before", "after")], allowed)
    except UserError:
        return False
    return True


def test_every_key_has_one_decision():
    decided = [*HARMLESS, *ALLOWED, *REFUSED]
    assert sorted(decided) == sorted(keys_of(Config())), "decide in config_keys.py what a resume may change"


@pytest.mark.parametrize("key", keys_of(Config()))
def test_a_resume_may_change_what_the_written_list_says(key):
    assert passes(key, []) == (key in HARMLESS)
    assert passes(key, [key]) == passes(key, [key.partition(".")[0]]) == (key not in REFUSED)


@pytest.mark.parametrize("proof", PROOFS)
def test_the_proof_of_an_allowed_change_is_a_test(proof):
    file, _, name = PROOFS[proof].partition("::")
    assert callable(getattr(importlib.import_module(f"tests.cpu.{file.removesuffix('.py').replace('/', '.')}"), name))
    assert proof in ALLOWED.values()


def test_the_lists_name_real_keys():
    keys = keys_of(Config())
    for patterns in (
        compatibility.HARMLESS,
        compatibility.IMPOSSIBLE,
        compatibility.ROUNDING,
        compatibility.VALIDATION,
        compatibility.UPDATE,
        compatibility.SAMPLING,
        compatibility.FORK_NEEDS_PERMISSION,
    ):
        for pattern in patterns:
            assert any(compatibility.matches(key, (pattern,)) for key in keys), pattern
    assert all(any(compatibility.matches(key, (pattern,)) for key in ALLOWED) for pattern in compatibility.REASONS)
    assert set(OPEN_SECTIONS) <= set(keys)
