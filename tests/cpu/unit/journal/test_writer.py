"""The thread that writes records: what stops it, and when it writes again."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from tests.cpu.unit.journal.test_journal import group, opened, steps_on_disk, train
from tests.support.jobs import wait_until
from trainer.process import time_limits


@pytest.fixture(autouse=True)
def impatience(monkeypatch, caplog):
    monkeypatch.setattr(time_limits, "JOURNAL_RETRY_S", 0.0)
    caplog.set_level(logging.INFO)


def number_of_files(root: Path) -> int:
    return len([*root.glob(".journal/step_*.arrow")])


def of_writing(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "trainer.journal.journal"]


def test_after_a_stall_the_journal_writes_again_and_what_it_has_is_whole(tmp_path, monkeypatch, caplog):
    flows = threading.Event()
    flows.set()
    journal = opened(tmp_path, fence=lambda: flows.wait(60))
    train(journal, range(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(time_limits, "JOURNAL_WAIT_S", 0.2)
        flows.clear()
        train(journal, range(2, 5))  # steps 3 and 4 do not wait for the write that hangs
        flows.set()
    wait_until(journal.is_idle)
    train(journal, range(5, 8))
    journal.close()
    assert steps_on_disk(tmp_path) == {1, 2, 6, 7}, "the end of step 5 has tried again"
    stopped, again = of_writing(caplog)
    assert "nothing was written in 0.2 s" in stopped and "training continues" in stopped
    assert "recorded again, from step 6 on" in again
    assert train(opened(tmp_path), range(1, 4)) == {1: True, 2: True, 3: False}


def test_a_slow_disk_that_writes_all_the_time_does_not_stop_the_journal(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(time_limits, "JOURNAL_WAIT_S", 3.0)
    journal = opened(tmp_path, fence=lambda: threading.Event().wait(0.5))
    for step in range(1, 9):
        journal.add(step, {journal.key(step): group(str(step))})
    journal.wait()
    journal.close()
    assert steps_on_disk(tmp_path) == {*range(1, 9)} and not of_writing(caplog)


def test_an_error_that_lasts_is_said_once_and_so_is_its_end(tmp_path, caplog):
    (tmp_path / ".journal").write_text("a file is here")
    journal = opened(tmp_path)
    train(journal, range(1, 5))
    (tmp_path / ".journal").unlink()
    train(journal, range(5, 8))
    journal.close()
    stopped, again = of_writing(caplog)
    assert "not recorded until a later try succeeds" in stopped and "recorded again, from step 5 on" in again
    assert steps_on_disk(tmp_path) == {5, 6, 7}


def test_the_next_try_waits_for_some_time_or_for_ranks_that_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limits, "JOURNAL_RETRY_S", 3600.0)
    (tmp_path / ".journal").write_text("a file is here")
    journal = opened(tmp_path)
    train(journal, range(1, 2))
    (tmp_path / ".journal").unlink()
    train(journal, range(2, 4))
    assert not (tmp_path / ".journal").exists(), "an hour has not passed"
    journal.start(3, journal.history)
    train(journal, range(4, 5))
    assert steps_on_disk(tmp_path) == {4}, "ranks that start again are a new try"
    journal.close()


def test_an_error_of_any_kind_stops_the_journal_with_a_warning_and_not_its_thread(tmp_path, caplog):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    journal = opened(tmp_path)
    odd = [dataclasses.replace(one, messages=({"role": "user", "content": deep},)) for one in group("odd")]
    journal.add(1, {journal.key(1): odd})
    journal.wait()
    (stopped,) = of_writing(caplog)
    assert "not recorded" in stopped and "RecursionError" in stopped
    train(journal, range(1, 3))
    journal.close()
    assert steps_on_disk(tmp_path) == {2}


def test_a_batch_that_takes_long_is_written_in_fewer_files(tmp_path, monkeypatch):
    """A record waits for a hundredth of the time since the first one of its step, unless somebody needs it."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 0.0)
    journal = opened(tmp_path)
    journal.add(1, {"a": group("a")})
    wait_until(lambda: number_of_files(tmp_path) == 1)
    journal._begun[1] -= 3600
    for name in "bc":
        journal.add(1, {name: group(name)})
        assert journal._delay_s() >= 36
        time.sleep(0.2)
    assert number_of_files(tmp_path) == 1
    journal.wait()
    assert number_of_files(tmp_path) == 2
    journal.add(2, {"d": group("d")})
    wait_until(lambda: number_of_files(tmp_path) == 3)
    journal.close()


def test_steps_that_take_turns_are_written_in_a_file_each(tmp_path, monkeypatch):
    """One is evaluated while the next is sampled."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 3600.0)
    journal = opened(tmp_path)
    for number in range(6):
        journal.add(1 + number % 2, {f"k{number}": group(str(number))})
    journal.close()
    names = sorted(os.listdir(tmp_path / ".journal"), key=lambda name: int(name.split("-")[1]))
    kinds = [name.split("-")[0] + Path(name).suffix for name in names]
    assert kinds == ["step_1.arrow", "step_2.arrow"]
    found = opened(tmp_path).replay.find(2, ["k1", "k3", "k5"])
    assert len(found) == 3
