"""The file of a judge's answers. `test_remote.py` uses it."""

from __future__ import annotations

import json

import pytest

from trainer.errors import UserError
from trainer.rewards.cache import CACHE_FILE, RewardCache, key_of


def test_the_key_depends_on_the_address_and_the_content_and_on_no_credentials():
    given = {"completion": "a", "row": {"x": 1, "y": 2}}
    assert key_of("f", given) == key_of("f", {"row": {"y": 2, "x": 1}, "completion": "a"})
    assert len({key_of("f", given), key_of("g", given), key_of("f", {**given, "completion": "b"})}) == 3
    assert key_of("http://a@judge/score?v=1", {}) == key_of("http://b@judge/score?v=1", {})
    assert key_of("http://a@judge/score?v=1", {}) != key_of("http://a@judge/score?v=2", {})


def test_a_torn_last_line_is_dropped_and_damaged_lines_are_skipped(tmp_path):
    RewardCache(str(tmp_path)).add({"bad": ["raised"]})
    assert list(tmp_path.iterdir()) == [], "a failure is not stored"
    RewardCache(str(tmp_path)).add({"a": [{"": 1.0}], "b": [{"x": 0.5, "y": 2.0}], "bad": ["raised", {"": 1.0}]})
    file = tmp_path / CACHE_FILE
    whole = file.read_bytes()
    file.write_bytes(b'{"key": "c", "rewards": [7]}\nnonsense\n\xff\n' + whole + b'{"key": "d", "rewards": [{"": 2')
    again = RewardCache(str(tmp_path))
    assert again.find("abcd") == {"a": [{"": 1.0}], "b": [{"x": 0.5, "y": 2.0}]}
    again.add({"d": [{"": 3.0}]})
    assert RewardCache(str(tmp_path)).find(["d", "bad"]) == {"d": [{"": 3.0}]}
    assert [json.loads(line)["key"] for line in file.read_text(errors="replace").splitlines()[3:]] == ["a", "b", "d"]


def test_a_cache_changes_nothing_once_another_process_has_the_run_directory(tmp_path):
    def fence() -> None:
        if not held:
            raise UserError("another process holds it")

    held, file = [True], tmp_path / CACHE_FILE
    cache = RewardCache(str(tmp_path), fence)
    cache.add({"a": [{"": 1.0}]})
    file.write_bytes(file.read_bytes() + b'{"key": "b", "rew')  # the other process is writing it
    before = file.read_bytes()
    held.clear()
    with pytest.raises(UserError, match="another process"):
        RewardCache(str(tmp_path), fence).find("a")
    with pytest.raises(UserError, match="another process"):
        cache.add({"c": [{"": 1.0}]})
    assert file.read_bytes() == before
