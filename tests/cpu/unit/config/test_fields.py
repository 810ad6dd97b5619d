"""Values that no run can use are refused by key, before anything starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest

from tests.support.config import KEYS, config_of, refusal_of, refusal_of_value
from trainer.config import OPEN_SECTIONS, Config
from trainer.config.fields import (
    LARGEST_INTEGER,
    Constraint,
    ResumeRule,
    Section,
    changed_keys,
    config_error,
    resume_rules,
    setting,
    subsection,
    walk_keys,
    walk_sections,
)
from trainer.errors import UserError

BASE = config_of([])
RULES = {key: rule for key, _, rule in walk_keys(Config())}


def keys_of_type(kind: str) -> list[str]:
    return [key for key, declared in KEYS.items() if re.search(rf"\b{kind}\b", declared) and key not in OPEN_SECTIONS]


def problem(key: str, value: object) -> str | None:
    return RULES[key].problem([value] if KEYS[key].startswith("list") else value)


def test_walking_the_schema_finds_every_key():
    assert sorted(RULES) == sorted(KEYS)


def test_numbers_that_no_library_takes_are_refused():
    for key in keys_of_type("float"):
        for value in (math.inf, -math.inf, math.nan):
            assert problem(key, value) == "must be a finite number", key
    for key in keys_of_type("int"):
        for value in (10**30, -(10**30)):
            assert re.match("must be at (most|least)", problem(key, value) or ""), key
        assert RULES[key].at_least is not None, f"{key}: somebody will try 0 and -1"
    assert RULES["algorithm.options"].problem({"x": [math.nan]}) == "must be a finite number"
    assert config_of([f"trainer.total_steps={LARGEST_INTEGER}"])


def test_empty_and_unusable_texts_are_refused():
    for key in keys_of_type("str"):
        for value, said in (("", "is empty"), (" ", "is empty"), ("a\0b", "a character that no file")):
            assert said in (problem(key, value) or ""), key
    said = refusal_of_value(BASE, "data.system_prompt", "\ud800")
    assert said.startswith(r"data.system_prompt='\ud800': holds a character")


def test_each_bound_is_kept():
    """The value at a bound is accepted, and the next one is refused."""
    for key, rule in RULES.items():
        step = 1 if "int" in KEYS[key] else 1e-3
        off = "" if rule.off is None else f" (or {rule.off:g})"
        if (least := rule.at_least) is not None:
            below = least - (1 if "int" in KEYS[key] else 1e-9 + abs(least) * 1e-6)
            assert problem(key, least) is None and problem(key, below) == f"must be at least {least:g}{off}", key
        if (low := rule.above) is not None:
            assert problem(key, low + 1e-9) is None and problem(key, low) == f"must be above {low:g}{off}", key
        if (most := rule.at_most) is not None:
            assert problem(key, most) is None and problem(key, most + step) == f"must be at most {most}", key
        assert rule.off is None or problem(key, rule.off) is None, key


def test_texts_that_are_no_choice_are_refused():
    with_choices = [key for key, rule in RULES.items() if rule.choices]
    assert with_choices
    for key in with_choices:
        listed = ", ".join("null" if name is None else name for name in RULES[key].choices)
        expected = f"may name {listed}" if KEYS[key].startswith("list") else f"choose one of {listed}"
        assert problem(key, "sometimes") == expected, key


BOUNDS = {
    "trainer.total_steps=0": "trainer.total_steps=0: must be at least 1",
    "trainer.seed=-1": "trainer.seed=-1: must be at least 0",
    f"trainer.seed={2**32}": "must be at most 4294967295",
    "trainer.resume_mode=sometimes": "trainer.resume_mode.*null, none, latest, from_path",
    "trainer.policy.lora.rank=0": "trainer.policy.lora.rank=0: must be at least 1",
    "algorithm.ref_sync_interval=0": r"algorithm.ref_sync_interval=0: must be at least 1 \(or -1\)",
    "algorithm.rollout_correction=is": "algorithm.rollout_correction=is: choose one of auto, off, tis, mis",
    "rollout.engine=sglang": "rollout.engine=sglang: choose one of vllm, transformers",
    "rollout.top_p=1.5": "rollout.top_p=1.5: must be at most 1",
    "rollout.top_p=0": "rollout.top_p=0.0: must be above 0",
    "rollout.temperature=0.005": r"rollout.temperature=0.005: must be at least 0.01 \(or 0\)",
    "rollout.temperature=1e9": "rollout.temperature=1000000000.0: must be at most 100",
    "rollout.gpu_memory_utilization=0": "rollout.gpu_memory_utilization=0.0: must be above 0",
    "reward.timeout_s=-1": "reward.timeout_s=-1.0: must be at least 0.001",
    "reward.timeout_s=1e12": "reward.timeout_s=.*: must be at most 1000000",
    "trainer.policy.optimizer.min_lr_ratio=5": "min_lr_ratio=5.0: must be at most 1",
}
"""Written out, so that a bound that is lost or moved in the schema fails here."""


def test_bounds_are_those_that_runs_need():
    for override, sentence in BOUNDS.items():
        assert re.search(sentence, refusal_of([override])), override
    assert config_of([f"trainer.seed={2**32 - 1}"])


@dataclass
class Inner(Section):
    names: list[str] = setting(default_factory=list, choices=("a", "b"), resume="harmless")
    mode: str | None = setting(None, choices=(None, "a"), resume="rollouts")


@dataclass
class Outer(Section):
    inner: Inner = subsection(Inner, resume="update")
    share: float | None = setting(None, above=0, at_most=1, resume="update")
    every: int = setting(3, at_least=2, off=-1, resume=ResumeRule("never", "it is fixed"))


def test_metadata_holds_the_rule_of_each_helper():
    outer = Outer(inner=Inner())
    rules = {key: rule for key, _, rule in walk_keys(outer, "x")}
    assert rules == {
        "x.share": Constraint(above=0, at_most=1),
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
