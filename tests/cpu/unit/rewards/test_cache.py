"""The cache of a run's rewards: what it repeats, and what it keeps to itself. `test_remote.py` uses it."""

from __future__ import annotations

import json

import pytest

from trainer.errors import UserError
from trainer.rewards.cache import CACHE_FILE, RewardCache, key_of


def test_a_success_is_found_in_every_step_and_a_failure_in_its_own(tmp_path):
    cache = RewardCache(str(tmp_path))
    cache.add({"good": [{"": 1.0}], "bad": ["raised", {"": 2.0}]}, "step 1")
    for found in (cache, RewardCache(str(tmp_path))):
        assert found.find("good", "step 7") == [{"": 1.0}]
        assert found.find("bad", "step 1") == ["raised", {"": 2.0}] and found.find("bad", "step 2") is None
    cache.add({"bad": [{"": 3.0}]}, "step 2")
    assert cache.find("bad", "step 1")[0] == "raised", "a replay of step 1 gets what was logged"
    assert cache.find("bad", "step 3") == [{"": 3.0}]


def test_nothing_to_add_writes_nothing(tmp_path):
    RewardCache(str(tmp_path)).add({}, "step 1")
    assert list(tmp_path.iterdir()) == []


def test_the_key_depends_on_the_reward_and_on_its_arguments_alone():
    given = {"completion": "a", "row": {"x": 1, "y": 2}}
    assert key_of("f", given) == key_of("f", {"row": {"y": 2, "x": 1}, "completion": "a"})
    assert len({key_of("f", given), key_of("g", given), key_of("f", {**given, "completion": "b"})}) == 3


def test_cached_rewards_are_private(tmp_path):
    file = tmp_path / CACHE_FILE
    file.touch(0o644)
    for _ in range(2):
        RewardCache(str(tmp_path)).add({"a": [{"": 1.0}]}, "step 1")
        assert file.stat().st_mode & 0o777 == 0o600
        file.unlink()


def test_credentials_in_the_address_are_not_in_the_key_of_a_cached_reward():
    assert key_of("http://a@judge/score?v=1", {}) == key_of("http://b@judge/score?v=1", {})
    assert key_of("http://a@judge/score?v=1", {}) != key_of("http://a@judge/score?v=2", {})


def test_a_torn_last_line_is_dropped_and_damaged_lines_are_skipped(tmp_path):
    store = RewardCache(str(tmp_path))
    store.add({"a": [{"": 1.0}], "b": [{"x": 0.5, "y": 2.0}]}, "step 1")
    file = tmp_path / CACHE_FILE
    whole = file.read_bytes()
    file.write_bytes(b'{"key": "c", "rewards": [7]}\nnonsense\n\xff\n' + whole + b'{"key": "d", "rewards": [{"": 2')
    again = RewardCache(str(tmp_path))
    assert again.find("a", "") == [{"": 1.0}] and again.find("b", "") == [{"x": 0.5, "y": 2.0}]
    assert again.find("c", "") is again.find("d", "") is None
    again.add({"d": [{"": 3.0}]}, "step 2")
    assert RewardCache(str(tmp_path)).find("d", "") == [{"": 3.0}]
    assert [json.loads(line)["key"] for line in file.read_text(errors="replace").splitlines()[3:]] == ["a", "b", "d"]


def test_a_cache_changes_nothing_once_another_process_has_the_run_directory(tmp_path):
    def lost() -> None:
        raise UserError("another process holds it")

    RewardCache(str(tmp_path)).add({"a": [{"": 1.0}]}, "step 1")
    file = tmp_path / CACHE_FILE
    file.write_bytes(file.read_bytes() + b'{"key": "b", "rew')  # the other process is writing it
    before = file.read_bytes()
    with pytest.raises(UserError, match="another process"):
        RewardCache(str(tmp_path), lost).find("a", "step 1")
    held = [True]
    store = RewardCache(str(tmp_path / "other"), lambda: None if held else lost())
    (tmp_path / "other").mkdir()
    assert store.find("a", "step 1") is None
    held.clear()
    with pytest.raises(UserError, match="another process"):
        store.add({"c": [{"": 1.0}]}, "step 1")
    assert file.read_bytes() == before and not list((tmp_path / "other").iterdir())
