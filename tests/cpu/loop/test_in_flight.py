"""Runs with `rollout.in_flight_updates`, killed and continued: every prompt is trained exactly once."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.cpu.loop import test_ahead as ahead
from tests.cpu.loop.test_ahead import STEPS, kill_in_update, run, settings
from tests.support.jobs import metrics
from tests.support.runs import rollouts_of
from trainer.config import Config
from trainer.generation.engine import Completion, Request
from trainer.sources.in_flight import _FlyingGroup, _GroupInFlight, covered
from trainer.trainer import Trainer


class Engines(ahead.Engines):
    """Each token comes of the weights of its moment, after a wait that only chance knows."""

    def sync_weights(self, version: int, running: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.weights, self.version = self._learner.ranks.number, version

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        completions = []
        for request in requests:
            versions, tokens = [], []
            for position in range(1 + request.seed % 6):
                await asyncio.sleep(0.01 * (request.seed % 3))
                versions.append(self.version)
                text = f"{zlib.crc32(f'{request.seed} {position} {self.weights}'.encode()):08x}"
                tokens += self._tokenizer.encode(text, add_special_tokens=False)[:1]
            completions.append(Completion(tokens, [-1.0] * len(tokens), "stop", (versions[0], versions[-1])))
        return completions


@pytest.fixture(autouse=True)
def engines(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "Engines", Engines)


def in_flight(root: Path, **options: Any) -> Config:
    cfg = settings(root, 0, **options)
    cfg.rollout.in_flight_updates = True
    cfg.logger.save_rollouts = True
    return cfg


def trained(root: Path) -> list[list[str]]:
    """The uids of each step."""
    return [[row["uid"] for row in rollouts_of(root, step)] for step in range(1, STEPS + 1)]


def check(root: Path) -> None:
    """Each prompt is trained once an epoch, in the order of drawing, and not too late."""
    uids = [uid for step in trained(root) for uid in step]
    assert len(uids) == len(set(uids)) == 6 * STEPS
    epochs = [int(uid.split(":")[0]) for uid in uids]
    assert epochs == sorted(epochs) and epochs.count(0) == epochs.count(1) == 20
    assert max(row["rollout/staleness_max"] for row in metrics(root)[1:]) == 1


def test_groups_are_sampled_while_the_weights_change(tmp_path, model):
    run(in_flight(tmp_path / "run"), model)
    check(tmp_path / "run")
    assert any(row["rollout/versions_mean"] > 1 for row in metrics(tmp_path / "run")[1:])


@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_it_is_known_how_long_engines_generate_and_wait(tmp_path, model, dynamic_sampling):
    """Here the groups under way end, and the engines then wait for the rest of the update."""

    def slow_update(trainer: Trainer, engines: Engines) -> None:
        update = trainer.learner.update

        def update_later(experience: Any, step: int) -> dict[str, float]:
            while any(one.ended_at is None for one in trainer.source._flight.groups):  # type: ignore[attr-defined]
                time.sleep(0.01)
            time.sleep(0.2)
            return update(experience, step)

        trainer.learner.update = update_later  # type: ignore[method-assign]

    cfg = in_flight(tmp_path / "run", total_steps=5, val_interval=-1)
    cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = dynamic_sampling, 1
    run(cfg, model, slow_update)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows[:3]:
        assert row["time/generation"] > 0 and row["time/wait_weights"] >= 0.2, row
    for row in rows[3:]:
        assert dynamic_sampling or "time/wait_weights" not in row, "the groups of the last step were under way already"


@hypothesis.given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_time_in_which_several_groups_are_under_way_counts_once(spans):
    moments = {moment for begin, end in spans for moment in range(begin, end)}
    assert covered(spans) == len(moments)


@pytest.mark.parametrize("step", [1, 4, STEPS])
def test_a_run_that_died_trains_every_prompt_once(tmp_path, model, caplog, step):
    """The journal brings back what was finished: the steps after the checkpoint train on the same episodes again."""
    root = tmp_path / "run"
    run(in_flight(root), model, kill_in_update(step))
    before = {at: rollouts_of(root, at) for at in range(1, step)}
    with caplog.at_level(logging.INFO):
        trainer = run(in_flight(root), model)
    check(root)
    assert trainer.state.prompts == 3 * STEPS
    found = re.search(r"(\d+) groups came from the journal", caplog.text)
    assert found and int(found[1]) >= 3 * (1 + (step - 1) % 2), "those of the steps after the checkpoint, at least"
    assert {at: rollouts_of(root, at) for at in before} == before


def test_no_finished_group_is_sampled_again_however_many_versions_ago_it_began(tmp_path, model, monkeypatch):
    """Also after further kills: a checkpoint has the histories by which records of the dead run are valid."""
    again, find = [], _GroupInFlight.find

    async def find_and_note(record: _GroupInFlight) -> None:
        (key,) = record._members
        candidates = record.journal.replay.candidates(key)
        await find(record)
        if candidates and not record.found:
            again.append((key, candidates))

    monkeypatch.setattr(_GroupInFlight, "find", find_and_note)
    root = tmp_path / "run"
    for step in (5, 7, 9, 0):
        cfg = in_flight(root, ckpt_interval=1, total_steps=14)
        cfg.rollout.max_staleness = 4
        run(cfg, model, kill_in_update(step))
    assert not again


def test_no_group_begins_after_the_last_step(tmp_path, model, monkeypatch):
    """Dynamic sampling drops groups. So the run does not know beforehand how many it needs."""
    versions = []

    class Noted(_FlyingGroup):
        def __init__(self, row: Any, last_step: int, version: int):
            versions.append(version)
            super().__init__(row, last_step, version)

    monkeypatch.setattr("trainer.sources.in_flight._FlyingGroup", Noted)
    cfg = in_flight(tmp_path / "run")
    cfg.algorithm.dynamic_sampling, cfg.algorithm.options["max_gen_batches"] = True, 20
    cfg.reward.name = "tests.support.named_rewards:is_even"
    run(cfg, model)
    begun = len(versions)
    assert max(versions) == STEPS
    run(cfg, model)
    assert len(versions) == begun, "the run is finished"


def test_held_rollouts_of_steps_ahead_are_dropped_with_a_warning(tmp_path, model, caplog):
    root, changed = tmp_path / "run", ["rollout.in_flight_updates", "rollout.ahead"]
    run(settings(root, 2), model, kill_in_update(6))
    run(in_flight(root, allow_config_change=changed), model)
    (told,) = [message for message in caplog.messages if "generated again" in message]
    assert told.endswith("its rollouts of steps 5 to 6 are of other rollout.in_flight_updates, and are generated again")


def test_a_run_that_died_twice_without_a_journal_trains_every_prompt_once(tmp_path, model):
    for step in (4, 6, 0):
        cfg = in_flight(tmp_path / "run")
        cfg.rollout.journal = False
        run(cfg, model, kill_in_update(step))
    check(tmp_path / "run")


@hypothesis.settings(
    max_examples=3, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(kills=st.lists(st.integers(1, STEPS), min_size=1, max_size=3), journal=st.booleans())
def test_dynamic_sampling_uses_every_row_once_whatever_is_killed(tmp_path_factory, model, kills, journal):
    """A row is trained, or filtered out: it is neither lost nor used twice."""
    root = tmp_path_factory.mktemp("runs") / "run"
    for step in (*kills, 0):
        cfg = in_flight(root)
        cfg.rollout.journal, cfg.algorithm.dynamic_sampling = journal, True
        cfg.algorithm.options["max_gen_batches"] = 20
        cfg.reward.name = "tests.support.named_rewards:is_even"
        run(cfg, model, kill_in_update(step))
    uids = [uid for step in trained(root) for uid in step]
    assert len(uids) == len(set(uids)) == 6 * STEPS
    rows = metrics(root)[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    filtered = sum(row["sampling/filtered"] for row in rows)
    assert filtered > 0 and rows[-1]["progress/epoch"] == pytest.approx((3 * STEPS + filtered) / 10)
    epochs = [int(uid.split(":")[0]) for uid in uids]
    assert epochs == sorted(epochs), "in the order of drawing"


PROVEN_KEYS = {"rollout.in_flight_updates", "rollout.max_staleness"}


@pytest.mark.parametrize(
    ("before", "after", "oldest"),
    [({}, {"max_staleness": 3}, 3), ({"max_staleness": 4}, {}, 1), (None, {}, 1), ({}, None, 0)],
)
def test_a_changed_key_acts_after_a_resume(tmp_path, model, before, after, oldest):
    """None: without updates in flight. No prompt is lost or trained twice all the same.

    Groups that the journal has from before may be older than a smaller limit allows.
    """
    root, changed = tmp_path / "run", [f"rollout.{key}" for key in ("in_flight_updates", "max_staleness")]

    def settings_of(keys: dict[str, int] | None) -> Config:
        cfg = in_flight(root, allow_config_change=changed)
        cfg.rollout.in_flight_updates = keys is not None
        for key, value in (keys or {}).items():
            setattr(cfg.rollout, key, value)
        return cfg

    run(settings_of(before), model, kill_in_update(4))
    run(settings_of(after), model)
    uids = [uid for step in trained(root) for uid in step]
    assert len(uids) == len(set(uids)) == 6 * STEPS
    ages = [row.get("rollout/staleness_max", 0) for row in metrics(root)[4:]]
    assert oldest <= max(ages) <= max(oldest, (before or {}).get("max_staleness", -1) + 1)
