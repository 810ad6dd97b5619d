"""Values that no run can use are refused by key, before anything starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest

from tests.support.config import KEYS, refusal_of, refusal_of_value
from trainer.config import OPEN_SECTIONS, Config, compose
from trainer.config.fields import (
    LARGEST_INTEGER,
    Constraint,
    ResumeRule,
    Section,
    changed_keys,
    choice,
    choices,
    config_error,
    number,
    option,
    resume_rules,
    subsection,
    walk_keys,
    walk_sections,
)
from trainer.errors import UserError

BASE = compose([])
RULES = {key: rule for key, _, rule in walk_keys(Config())}


def keys_of_type(kind: str) -> list[str]:
    return [key for key, declared in KEYS.items() if re.search(rf"\b{kind}\b", declared) and key not in OPEN_SECTIONS]


def keys_with(bound: str) -> list[str]:
    found = [key for key, rule in RULES.items() if getattr(rule, bound) is not None]
    assert found
    return found


def test_walking_the_schema_finds_every_key():
    assert sorted(RULES) == sorted(KEYS)


@pytest.mark.parametrize("key", keys_of_type("float"))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinite_numbers_and_nan_are_refused(key, value):
    as_list = key.endswith((".betas", ".weights"))
    said = refusal_of_value(BASE, key, [value, 0.5] if as_list else value)
    assert re.fullmatch(rf"{key}=\[?{value}(, 0.5\])?: must be a finite number", said)


def test_floats_in_open_sections_must_be_finite():
    said = refusal_of_value(BASE, "algorithm.options", {"x": [math.nan]})
    assert said == "algorithm.options={'x': [nan]}: must be a finite number"


@pytest.mark.parametrize("key", keys_of_type("int"))
@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_whole_numbers_beyond_what_libraries_take_are_refused(key, value):
    assert re.match(rf"{key}={value}: must be at (most|least)", refusal_of_value(BASE, key, value))


def test_the_largest_whole_number_is_accepted():
    assert compose([f"trainer.total_steps={LARGEST_INTEGER}"])


@pytest.mark.parametrize("key", keys_of_type("str"))
@pytest.mark.parametrize("value, problem", [("", "is empty"), (" ", "is empty"), ("a\0b", "a character that no file")])
def test_empty_and_unusable_texts_are_refused(key, value, problem):
    assert problem in refusal_of_value(BASE, key, [value] if KEYS[key].startswith("list") else value)


def test_half_of_a_surrogate_pair_is_shown_in_ascii():
    said = refusal_of_value(BASE, "data.system_prompt", "\ud800")
    assert said.startswith(r"data.system_prompt='\ud800': holds a character")


def below(key: str, bound: float) -> float:
    return bound - (1 if "int" in KEYS[key] else 1e-9 + abs(bound) * 1e-6)


@pytest.mark.parametrize("key", keys_with("at_least"))
def test_values_below_the_least_are_refused(key):
    least = RULES[key].at_least
    off = "" if RULES[key].off is None else rf" \(or {RULES[key].off:g}\)"
    said = refusal_of_value(BASE, key, below(key, least))
    assert re.fullmatch(rf"{key}=.*: must be at least {re.escape(f'{least:g}')}{off}", said)
    assert RULES[key].problem(least) is None


@pytest.mark.parametrize("key", keys_with("above"))
def test_values_at_an_open_bound_are_refused(key):
    low = RULES[key].above
    assert re.fullmatch(rf"{key}={low}: must be above {low:g}", refusal_of_value(BASE, key, low))
    assert RULES[key].problem(low + 1e-9) is None


@pytest.mark.parametrize("key", keys_with("at_most"))
def test_values_above_the_greatest_are_refused(key):
    most = RULES[key].at_most
    above = most + (1 if "int" in KEYS[key] else 1e-3)
    assert refusal_of_value(BASE, key, above).endswith(f": must be at most {most}")
    assert RULES[key].problem(most) is None


@pytest.mark.parametrize("key", keys_with("off"))
def test_the_value_that_turns_a_key_off_is_accepted(key):
    assert RULES[key].problem(RULES[key].off) is None


@pytest.mark.parametrize("key", [key for key, rule in RULES.items() if rule.choices])
def test_texts_that_are_no_choice_are_refused(key):
    if KEYS[key].startswith("list"):
        said = refusal_of_value(BASE, key, [RULES[key].choices[0], "sometimes"])
    else:
        said = refusal_of_value(BASE, key, "sometimes")
    listed = ", ".join("null" if name is None else name for name in RULES[key].choices)
    assert said.endswith((f"=sometimes: choose one of {listed}", f"'sometimes']: may name {listed}"))


def test_every_whole_number_has_a_lower_bound():
    """-1, and 0, are values that somebody will try."""
    unbounded = [key for key in keys_of_type("int") if RULES[key].at_least is None]
    assert unbounded == []


@pytest.mark.parametrize("key", ["trainer.seed", "model.tiny.seed"])
def test_seeds_have_32_bits(key):
    assert "must be at most 4294967295" in refusal_of_value(BASE, key, 2**32)
    assert compose([f"{key}={2**32 - 1}"])


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["trainer.total_steps=0"], "trainer.total_steps=0: must be at least 1"),
        (["trainer.seed=-1"], "trainer.seed=-1: must be at least 0"),
        (["trainer.master_port=70000"], "trainer.master_port=70000: must be at most 65535"),
        (["trainer.resume_mode=sometimes"], "trainer.resume_mode.*null, none, latest, from_path"),
        (["trainer.collective_timeout_s=1e15"], "trainer.collective_timeout_s=.*: must be at most 1000000"),
        (["trainer.lock_lease_s=1e15"], "trainer.lock_lease_s=.*: must be at most 1000000"),
        (["trainer.resume_tolerance=2"], "trainer.resume_tolerance=2.0: must be at most 1"),
        (["trainer.policy.lora.rank=0"], "trainer.policy.lora.rank=0: must be at least 1"),
        (["algorithm=ppo", "trainer.critic.lora.rank=-1"], "trainer.critic.lora.rank=-1: must be at least 1"),
        (["trainer.policy.lora.rank=4", "trainer.policy.lora.alpha=0"], "trainer.policy.lora.alpha=0.0: must be above"),
        (["algorithm.ref_sync_interval=0"], r"algorithm.ref_sync_interval=0: must be at least 1 \(or -1\)"),
        (["algorithm.rollout_correction=is"], "algorithm.rollout_correction=is: choose one of auto, off, tis, mis"),
        (["algorithm=ppo", "algorithm.gamma=nan"], "algorithm.gamma=nan"),
        (["algorithm.dual_clip=1"], "algorithm.dual_clip=1.0: must be above 1"),
        (["rollout.engine=sglang"], "rollout.engine=sglang: choose one of vllm, transformers"),
        (["rollout.top_p=1.5"], "rollout.top_p=1.5: must be at most 1"),
        (["rollout.top_p=0"], "rollout.top_p=0.0: must be above 0"),
        (["rollout.temperature=0.005"], r"rollout.temperature=0.005: must be at least 0.01 \(or 0\)"),
        (["rollout.temperature=1e9"], "rollout.temperature=1000000000.0: must be at most 100"),
        (["rollout.gpu_memory_utilization=0"], "rollout.gpu_memory_utilization=0.0: must be above 0"),
        (["reward.timeout_s=-1"], "reward.timeout_s=-1.0: must be at least 0.001"),
        (["reward.timeout_s=1e12"], "reward.timeout_s=.*: must be at most 1000000"),
        (["sft.optimizer.min_lr_ratio=5"], "sft.optimizer.min_lr_ratio=5.0: must be at most 1"),
        (["sft.optimizer.eps=0"], "sft.optimizer.eps=0.0: must be above 0"),
        (["model.tiny.max_position_embeddings=0"], "model.tiny.max_position_embeddings=0: must be at least 1"),
    ],
)
def test_bounds_are_those_that_runs_need(overrides, sentence):
    """Written out, so that a bound that is lost or moved in the schema fails here."""
    assert re.search(sentence, refusal_of(overrides))


@dataclass
class Inner(Section):
    names: list[str] = choices(("a", "b"), resume="harmless")
    mode: str | None = choice(None, (None, "a"), resume="rollouts")


@dataclass
class Outer(Section):
    inner: Inner = subsection(Inner, resume="update")
    share: float | None = option("policy_loss", above=0, at_most=1)
    every: int = number(3, at_least=2, off=-1, resume=ResumeRule("never", "it is fixed"))


def test_metadata_holds_the_rule_of_each_helper():
    outer = Outer(inner=Inner())
    rules = {key: rule for key, _, rule in walk_keys(outer, "x")}
    assert rules == {
        "x.share": Constraint(above=0, at_most=1, option_of="policy_loss"),
        "x.every": Constraint(at_least=2, off=-1),
        "x.inner.names": Constraint(choices=("a", "b")),
        "x.inner.mode": Constraint(choices=(None, "a")),
    }
    assert [name for name, _ in walk_sections(outer)] == ["", "inner"]
    assert (outer.share, outer.every, outer.inner.names, outer.inner.mode) == (None, 3, [], None)
    assert [rule.bounds() for rule in rules.values()] == ["above 0 and at most 1", "at least 2, or -1", "", ""]


def test_a_section_may_replace_rules_about_rollouts():
    assert {key: rule.change for key, rule in resume_rules(Outer()).items()} == {
        "share": "update",
        "every": "never",
        "inner.names": "harmless",
        "inner.mode": "update",
    }


def test_changed_keys_are_named_in_full():
    changed = Outer(inner=Inner(names=["a"]), every=5)
    assert sorted(changed_keys(changed, Outer(inner=Inner()), "x")) == ["x.every", "x.inner.names"]


def test_a_refusal_shows_key_and_value():
    with pytest.raises(UserError, match=r"^rollout.n=8: is too many$"):
        raise config_error(Config(), "rollout.n", "is too many")
