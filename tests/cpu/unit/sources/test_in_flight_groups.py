"""Groups in flight: sampled together, recorded together, and judged together."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.data.test_records import bits
from tests.cpu.unit.sources.test_failures import WORLD
from tests.cpu.unit.sources.test_recorded import journal_in
from tests.support.replies import Replies, source_of
from trainer.config import Config, EnvironmentConfig
from trainer.errors import UserError
from trainer.generation.engine import Sampling
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.sources.in_flight import GroupThread


def in_flight(cfg: Config) -> None:
    cfg.rollout.engine, cfg.rollout.in_flight_updates = "vllm", True
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 4


def test_groups_are_in_the_engines_together(tmp_path: Path, model: str):
    """Also where the engines could repeat their tokens to the last bit, one group at a time: in flight nothing does."""
    together = threading.Barrier(4)

    def reply(prompt: str, number: int, sampling: Sampling) -> str:
        if number == 0:
            together.wait(30)
        return "x"

    with source_of(tmp_path, model, reply, edit=in_flight) as source:
        assert source.runner.engines.repeats
        source.start(1, is_initial=True)
        assert len(source.next(1)) == 8


def longer(prompt: str, number: int, sampling: Sampling) -> str:
    """One of the two completions of a group fails with a broken reward."""
    return "x" if number else "xy"


@pytest.mark.parametrize("baselines", [False, True])
def test_failures_count_for_all_groups_that_a_step_takes(tmp_path, model, monkeypatch, caplog, baselines):
    """A step whose failures are too many ends the run, and nothing of them is in the journal; else it accepts them."""

    def run(broken: bool, most: float) -> tuple[Any, int]:
        monkeypatch.setenv("BROKEN_LENGTH", "1" if broken else "")
        journal = journal_in(tmp_path)
        with source_of(
            tmp_path, model, longer, 0, baselines, journal, "length_unless_broken", edit=in_flight
        ) as source:
            source.cfg.reward.max_error_rate = most
            source.start(1, is_initial=True)
            try:
                episodes = source.next(1)
                source._cancel()
                return bits(episodes), len(source.runner.engines.seeds)
            finally:
                journal.close()

    with pytest.raises(UserError, match=r"max_error_rate=0.4: 4 of 8 rewards of step 1 \(50.0%\) failed"):
        run(broken=True, most=0.4)
    accepted, generated = run(broken=True, most=0.5)
    assert generated >= 8 and "4 of 8 rewards of step 1 (50.0%) failed and are left out" in caplog.text
    again, _ = run(broken=False, most=0.0)
    assert again == accepted, "what the step has accepted"


def test_groups_that_end_soon_after_each_other_are_in_one_file(tmp_path, model, monkeypatch):
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", 30.0)
    journal = journal_in(tmp_path)
    with source_of(tmp_path, model, longer, journal=journal, edit=in_flight) as source:
        source.cfg.trainer.total_steps = 1
        source.start(1, is_initial=True)
        source.next(1)
        journal.wait()
        assert len(list((tmp_path / "run/.journal").glob("*.arrow"))) == 1
        journal.close()


def test_environments_that_fail_count_for_all_groups_that_a_step_takes(tmp_path, model, monkeypatch):
    (tmp_path / "failing_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))

    def edit(cfg: Config) -> None:
        in_flight(cfg)
        cfg.environment = EnvironmentConfig(name="failing_world:World", kwargs={"fails": [1]}, max_error_rate=0.4)

    with source_of(tmp_path, model, lambda prompt, number, sampling: str(number), edit=edit) as source:
        source.start(1, is_initial=True)
        with pytest.raises(UserError, match=r"environment.max_error_rate=0.4: 4 of 8 episodes of step 1 \(50.0%\)"):
            source.next(1)


def test_engines_drop_what_they_generate_once_the_run_has_gone_back(tmp_path, model, monkeypatch):
    """Its groups are cancelled. Weights that come later leave the requests that are under way."""
    given: list[str] = []
    with source_of(tmp_path, model, longer, edit=in_flight) as source:
        monkeypatch.setattr(Replies, "sync_weights", lambda _, version, running: given.append(running), raising=False)
        monkeypatch.setattr(Replies, "synced_bytes", 0, raising=False)
        source.start(1, is_initial=True)
        source.publish(2)
        source.load_state_dict(source.state_dict())
        source.publish(1)
        source.publish(2)
        source.load_state_dict(source.state_dict())
        source.start(1, is_initial=False)  # gives all engines the weights anew
        source.publish(2)
    assert given == ["keep", "abort", "keep", "keep"]


def test_a_step_that_waits_for_a_group_that_hangs_makes_no_progress(tmp_path, model, monkeypatch):
    """So the watchdog sees it, as it does with batches."""
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.01)
    release, points = threading.Event(), []

    def hang(prompt: str, number: int, sampling: Sampling) -> str:
        release.wait()
        return "x"

    def watch() -> None:
        for _ in range(2):
            threading.Event().wait(1.0)
            points.append(SIGNALS.safe_points)
        release.set()

    with source_of(tmp_path, model, hang, edit=in_flight) as source:
        source.start(1, is_initial=True)
        watcher = threading.Thread(target=watch)
        watcher.start()
        source.next(1)
        watcher.join()
    assert points[0] == points[1]


def test_a_record_stays_until_the_last_step_that_a_larger_window_allows(tmp_path, model, monkeypatch):
    """Other groups pass those of before the resume, because they are found later."""
    journal = journal_in(tmp_path)
    with source_of(tmp_path, model, longer, journal=journal, edit=in_flight) as source:
        source.start(1, is_initial=True)
        for thread in source._threads.values():
            thread.result()
        journal.wait()
        source._cancel()
    journal.close()
    (name,) = {path.name for path in (tmp_path / "run/.journal").iterdir()}
    assert name.startswith("step_2-"), "the last step for which it is needed, with a window of 1"

    may_find, find, oldest, late = threading.Event(), GroupThread.find, [], []

    def find_late(thread: GroupThread, journal: Any, key: str) -> Any:
        if thread.row in oldest:
            late.append(key)
            may_find.wait(30)
        return find(thread, journal, key)

    def edit(cfg: Config) -> None:
        in_flight(cfg)
        cfg.rollout.window = 16

    monkeypatch.setattr(GroupThread, "find", find_late)
    monkeypatch.setattr(Replies, "sync_weights", lambda *_: None, raising=False)
    monkeypatch.setattr(Replies, "synced_bytes", 0, raising=False)
    journal = journal_in(tmp_path)
    with source_of(tmp_path, model, longer, journal=journal, edit=edit) as source:
        oldest += source.ledger.peek(4)
        source.start(1, is_initial=True)
        for step in (1, 2):
            journal.trained(source.next(step))
            source.publish(step + 1)
            if step == 2:
                may_find.set()
                for thread in source._threads.values():
                    thread.result()
            source.commit(step)
        journal.wait()
        journal.remove_until(lambda: 2)
        assert journal.settled(30)
        source._cancel()
    journal.close()
    journal = journal_in(tmp_path)
    journal.start(2, "any")
    assert len(late) == 4 and all(journal.candidates(key) == [(1, "start")] for key in late)
    journal.close()
