"""Groups in flight: sampled together, recorded together, and judged together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.data.test_records import bits
from tests.cpu.unit.sources.test_failures import WORLD
from tests.support.replies import Replies, journal_in, source_of
from trainer.config import Config, EnvironmentConfig
from trainer.errors import UserError
from trainer.generation.engine import Sampling
from trainer.process import time_limits


def in_flight(cfg: Config) -> None:
    cfg.rollout.engine, cfg.rollout.in_flight_updates = "vllm", True
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 4


def test_groups_are_in_the_engines_together(tmp_path: Path, model: str, monkeypatch):
    together = asyncio.Event()
    complete, count = Replies.complete_together, []

    async def wait_for_others(engines: Replies, requests: Any) -> Any:
        count.append(1)
        if len(count) == 4:
            together.set()
        await together.wait()
        return await complete(engines, requests)

    monkeypatch.setattr(Replies, "complete_together", wait_for_others)
    with source_of(tmp_path, model, longer, edit=in_flight) as source:
        source.start(1, is_initial=True)
        assert len(source.next(1)) == 8


def longer(prompt: str, number: int, sampling: Sampling) -> str:
    """One of the two completions of a group fails with a broken reward."""
    return "x" if number else "xy"


@pytest.mark.parametrize("baselines", [False, True])
def test_failures_count_for_all_groups_that_a_step_takes(tmp_path, model, monkeypatch, caplog, baselines):
    """A step whose failures are too many ends the run, and their replies alone are recorded; else it accepts them."""

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
                return bits(episodes), len(source.rollouts.engines.seeds)
            finally:
                journal.close()

    with pytest.raises(UserError, match=r"max_error_rate=0.4: 4 of 8 rewards of step 1 \(50.0%\) failed"):
        run(broken=True, most=0.4)
    accepted, generated = run(broken=True, most=0.5)
    assert not generated and "4 of 8 rewards of step 1 (50.0%) failed and are left out" in caplog.text
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
        monkeypatch.setattr(Replies, "sync_weights", lambda _, version, running: given.append(running))
        source.start(1, is_initial=True)
        source.publish(2)
        source.load_state_dict(source.state_dict())
        source.publish(1)
        source.publish(2)
        source.load_state_dict(source.state_dict())
        source.start(1, is_initial=False)  # gives all engines the weights anew
        source.publish(2)
    assert given == ["keep", "abort", "keep", "keep"]
