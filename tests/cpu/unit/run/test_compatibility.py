"""Which config keys may change when a run resumes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from trainer.config import OPEN_SECTIONS, Config, compose
from trainer.config.fields import RESUME, Section, setting, walk_keys
from trainer.config.rules import SavedRun, resume_rules
from trainer.config.schema import with_sections
from trainer.errors import UserError
from trainer.run import resume
from trainer.run.resume import Change

RULES = resume_rules(Config())
WITH_PERMISSION = sorted(key for key, rule in RULES.items() if rule.change in ("update", "rollouts"))
NEW_CRITIC = SavedRun({"algorithm": {"rollout_correction": "mis"}}, ["policy", "critic"])
"""A run with a critic and a correction, which the default config has not."""


def corrected(kind: str, **rollout: int) -> SavedRun:
    return SavedRun({"algorithm": {"rollout_correction": kind}, "rollout": rollout}, ["policy"])


def check(changes: Sequence[Change], allowed: Sequence[str], forked: Collection[str] | None = None) -> list[Change]:
    of_values = resume_rules(Config(), NEW_CRITIC)["algorithm.advantage_estimator"]
    return resume.check(changes, allowed, RULES | {"algorithm.advantage_estimator": of_values}, forked)


def changed(*overrides: str) -> list[resume.Change]:
    now = dataclasses.asdict(compose([*overrides]))
    return resume.find_changes(dataclasses.asdict(compose([])), now)


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
    check(found, [])


REFUSED = (
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
)


def test_other_changes_are_refused_by_name():
    for override, allow, sentence in REFUSED:
        with pytest.raises(UserError, match=sentence):
            check(changed(override), allow)


def test_a_key_or_its_section_can_be_allowed():
    for allow in (["rollout.n"], ["rollout"]):
        check(changed("rollout.n=4"), allow)
        with pytest.raises(UserError, match="trainer.update_epochs=2"):
            check(changed("rollout.n=4", "trainer.update_epochs=2"), allow)


def test_all_refusals_are_listed_together():
    found = changed("rollout.n=4", "trainer.seed=2", "trainer.update_epochs=2", "trainer.num_workers=2")
    with pytest.raises(UserError) as refused:
        check(found, ["algorithm"])
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


def test_a_fork_changes_what_a_resume_changes_with_permission():
    for key in WITH_PERMISSION:
        change = [Change(key, "before", "after")]
        if key == "model.path":
            with pytest.raises(UserError, match=r"belong to that model; .*allow_config_change=\[model.path\]"):
                check(change, [], forked=ALL_STATE)
            change = check(change, ["model.path"], forked=ALL_STATE)
        assert check(change, [], forked=("rng", "data", "state")) == change


OF_FORKS = (
    ("trainer.seed", ALL_STATE, "leave data out of trainer.load_components"),
    ("trainer.seed", ("weights", "optimizer", "rng", "state"), None),
    ("model.tiny.num_layers", ("weights",), "leave weights and optimizer out"),
    ("model.tiny.num_layers", ("data", "state"), None),
    ("trainer.policy.lora.rank", ("optimizer",), "leave weights and optimizer out"),
    ("trainer.policy.lora.target_modules", ("rng",), None),
    ("algorithm.ref_sync_interval", ALL_STATE, None),  # the reference starts from the initial weights
    ("algorithm.advantage_estimator", ALL_STATE, None),  # the critic starts from its initial weights
)


def test_a_fork_refuses_what_makes_the_restored_state_meaningless():
    for key, restored, remedy in OF_FORKS:
        change = [Change(key, "before", "after")]
        if remedy is None:
            assert check(change, [], forked=restored) == change
            continue
        sentence = f"{key}=after: .*saved with before, and .*; restore the value, or {remedy}"
        with pytest.raises(UserError, match=sentence):
            check(change, [key], forked=restored)


def test_a_key_missing_from_an_old_config_counts_as_its_default():
    saved = dataclasses.asdict(compose([]))
    del saved["algorithm"]["entropy_coef"]
    now = dataclasses.asdict(compose([]))
    assert resume.find_changes(saved, now) == []
    now["algorithm"]["entropy_coef"] = 0.5
    (change,) = resume.find_changes(saved, now)
    assert str(change) == "algorithm.entropy_coef: 0.0 -> 0.5"


def test_a_removed_custom_option_is_a_change():
    saved, now = dataclasses.asdict(Config()), dataclasses.asdict(Config())
    saved["algorithm"]["options"] = {"beta": 5}
    (change,) = resume.find_changes(saved, now)
    assert str(change) == "algorithm.options: {'beta': 5} -> {}"


def test_options_that_change_with_their_function_need_no_permission_of_their_own():
    words = ["algorithm=cispo", "trainer.policy.optimizer.lr=2e-4"]  # that of the built-in model depends on the loss
    saved = dataclasses.asdict(compose(words))
    now = dataclasses.asdict(compose([*words, "algorithm.policy_loss=sapo", "+algorithm.options.tau_neg=2"]))
    changes = resume.find_changes(saved, now)
    assert list(map(str, changes)) == [
        "algorithm.options: {} -> {'tau_neg': 2}",
        "algorithm.policy_loss: cispo -> sapo",
    ]


# ----------------------------------------------------------------------------------------------------------
# Every key has a rule


def passes(key: str, allowed: list[str]) -> bool:
    try:
        resume.check([Change(key, "before", "after")], allowed, RULES)
    except UserError:
        return False
    return True


def test_every_key_has_a_rule():
    assert set(RULES) == {key for key, *_ in walk_keys(Config())}
    assert {rule.change for rule in RULES.values()} == set(RESUME)
    assert set(OPEN_SECTIONS) <= set(resume_rules(with_sections()))


def test_a_resume_may_change_what_the_rule_of_the_key_says():
    for key, rule in RULES.items():
        assert passes(key, []) == (rule.change in ("harmless", "rounding", "validation")), key
        assert passes(key, [key]) == passes(key, [key.partition(".")[0]]) == (rule.change != "never"), key
        assert rule.change != "never" or rule.reason, key


def test_the_rules_decide_as_they_are_meant_to():
    """Some keys of each kind: a slip in a shared section would change many."""
    of = {
        "harmless": ["trainer.total_steps", "data.train_files", "logger.services", "model.tiny.start_accuracy"],
        "rounding": ["trainer.num_workers", "trainer.policy.fsdp.compile", "trainer.policy.fsdp.cpu_offload"],
        "validation": ["data.val_files", "rollout.val_n", "reward.success_threshold"],
        "update": ["trainer.critic.warmup_steps", "trainer.critic.optimizer.lr", "sft.optimizer.lr",
                   "algorithm.clip_low", "algorithm.kl_coef", "trainer.update_epochs"],
        "rollouts": ["trainer.policy.lora.alpha", "trainer.policy.fsdp.param_dtype", "algorithm.dynamic_sampling",
                     "trainer.train_batch_size", "rollout.n", "reward.name", "sft.batch_size", "model.path"],
        "never": ["trainer.seed", "trainer.policy.lora.rank", "algorithm.ref_sync_interval"],
    }  # fmt: skip
    assert {key: RULES[key].change for keys in of.values() for key in keys} == {
        key: change for change, keys in of.items() for key in keys
    }


def test_a_key_without_a_rule_is_an_error_at_import():
    with pytest.raises(TypeError, match="Careless.new: make the field with .* say what a resume may do with it"):

        class Careless(Section):
            new: int = 3

    with pytest.raises(TypeError, match="resume"):
        setting(3, at_least=0)  # type: ignore[call-arg]


OF_VALUES = (
    ([], NEW_CRITIC, "algorithm.advantage_estimator", "never"),
    ([], SavedRun({}, ["policy"]), "algorithm.advantage_estimator", "update"),
    (["algorithm=ppo"], SavedRun({}, ["policy"]), "algorithm.advantage_estimator", "never"),
    (["algorithm=ppo"], SavedRun({}, ["policy"]), "trainer.critic.optimizer.lr", "harmless"),
    (["algorithm=ppo"], NEW_CRITIC, "trainer.critic.warmup_steps", "update"),
    ([], NEW_CRITIC, "trainer.critic.warmup_steps", "harmless"),
    (["model.path=x"], NEW_CRITIC, "sft.batch_size", "harmless"),
    ([], NEW_CRITIC, "sft.batch_size", "rollouts"),
    ([], corrected("off"), "algorithm.rollout_correction", "harmless"),
    (["rollout.ahead=1"], corrected("off"), "algorithm.rollout_correction", "update"),
    (["rollout.ahead=1"], corrected("tis"), "algorithm.rollout_correction", "harmless"),
    ([], corrected("auto", ahead=1), "algorithm.rollout_correction", "update"),
    (["algorithm.rollout_correction=tis"], corrected("auto", ahead=1), "algorithm.rollout_correction", "harmless"),
    (["algorithm.old_logprobs=rollout"], corrected("auto"), "algorithm.rollout_correction", "harmless"),
)


def test_some_rules_follow_from_values():
    for now, saved, key, change in OF_VALUES:
        assert resume.resume_rules(compose(now), saved)[key].change == change, (now, key)


def test_a_weight_that_a_controller_has_steered_cannot_change():
    adaptive = compose(["algorithm.kl_coef=0.1", "+algorithm.options.kl_target=0.05"])
    for options, change in (({"kl_target": 0.1}, "never"), ({}, "update")):
        saved = SavedRun({"algorithm": {"options": options}}, ["policy"])
        assert resume.resume_rules(adaptive, saved)["algorithm.kl_coef"].change == change


ALTERED = (
    (["trainer.total_steps"], [], False),
    (["trainer.num_workers"], [], True),
    (["trainer.num_workers", "rollout.val_n"], ["rollout.val_n"], True),
    (["algorithm.clip_low", "rollout.n"], ["algorithm.clip_low", "rollout.n"], False),
)


def test_replayed_steps_are_compared_where_no_change_acts():
    for keys, by, rounded in ALTERED:
        changes = [Change(key, "before", "after") for key in keys]
        assert resume.altering(changes, RULES) == by
        assert resume.same_rounding(changes, RULES) == (not rounded)


def proofs() -> dict[str, list[str]]:
    """The keys of each `PROVEN_KEYS` in the tests."""
    root = Path(__file__).parents[4]
    files = [file for file in root.glob("tests/cpu/**/test_*.py") if "\nPROVEN_KEYS = " in file.read_text()]
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return {name: sorted(importlib.import_module(name).PROVEN_KEYS) for name in names}


def test_a_test_proves_that_each_change_with_permission_acts():
    proven = [key for keys in proofs().values() for key in keys]
    assert sorted(proven) == WITH_PERMISSION, "add a case to a test with PROVEN_KEYS: what a changed key does"


MIX = ["data.mix.math.files=[a.jsonl]", "data.mix.code.files=[b.jsonl]", "trainer.val_interval=-1"]


def changes_of_mix(before: list[str], now: list[str]) -> list[Change]:
    saved, new = (dataclasses.asdict(compose([*MIX, *words])) for words in (before, now))
    return resume.find_changes(saved, new)


def rules_of_mix(*words: str) -> dict[str, str]:
    return {key: rule.change for key, rule in resume_rules(compose([*MIX, *words])).items()}


def test_keys_of_a_source_are_compared_one_by_one():
    found = changes_of_mix([], ["data.mix.math.weight=2", "data.mix.code.environment.name=a:B"])
    assert found == [
        Change("data.mix.code.environment.name", None, "a:B"),
        Change("data.mix.math.weight", 1.0, 2.0),
    ]
    rules = rules_of_mix()
    assert (rules["data.mix.math.weight"], rules["data.mix.math.files"]) == ("rollouts", "harmless")
    assert (rules["data.mix.math.reward.name"], rules["data.mix.math.reward.timeout_s"]) == ("rollouts", "harmless")


def test_a_source_that_comes_or_goes_is_one_change():
    more = ["data.mix.words.files=[c.jsonl]", "data.mix.words.weight=3"]
    assert changes_of_mix([], more) == [Change("data.mix", ["code", "math"], ["code", "math", "words"])]
    assert changes_of_mix(more, []) == [Change("data.mix", ["code", "math", "words"], ["code", "math"])]
    assert rules_of_mix()["data.mix"] == "rollouts"


def test_a_source_that_follows_the_run_is_no_change_of_its_own():
    found = changes_of_mix([], ["environment.max_turns=3", "data.mix.code.environment.max_turns=5"])
    assert {change.key for change in found} == {"environment.max_turns", "data.mix.code.environment.max_turns"}
    assert [change.key for change in changes_of_mix([], ["environment.max_turns=3"])] == ["environment.max_turns"]


def test_the_settings_of_a_source_decide_its_rollouts():
    rollouts, _ = resume.deciding_settings(compose([*MIX, "data.mix.math.environment.kwargs.size=3"]))
    assert rollouts["data.mix"] == ["code", "math"] and rollouts["data.mix.math.weight"] == 1.0
    assert rollouts["data.mix.math.environment.kwargs"] == {"size": 3}
    assert "data.mix.math.files" not in rollouts
