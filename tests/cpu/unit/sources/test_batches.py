"""Batches of steps ahead, and how a checkpoint holds them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.unit.data.test_records import bits, episodes
from tests.support.checkpoints import manager, save
from trainer.checkpoint.components import Restore, json_component
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, verify
from trainer.data.ledger import SampleIndex
from trainer.data.records import encode
from trainer.process.signals import Stopped
from trainer.sources.batches import StepBatch, UsedRow, ahead_component, decode_batch, encode_batch

SETTINGS = {"rollout.n": "2", "rollout.top_p": "1"}
counts = st.integers(0, 2**40)
rows = st.builds(UsedRow, st.builds(SampleIndex, counts, counts, counts), st.none() | st.floats(allow_nan=False))


@settings(deadline=None, max_examples=30)
@given(
    found=st.lists(episodes, min_size=1, max_size=4),
    used=st.lists(rows, max_size=4),
    metrics=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False) | st.integers()),
)
def test_a_batch_comes_back_bit_for_bit(found, used, metrics):
    batch = StepBatch(found, used, metrics)
    data = encode_batch(3, batch, SETTINGS)
    assert bits(decode_batch(data)) == bits((batch, SETTINGS)) and encode_batch(3, batch, SETTINGS) == data


@pytest.mark.parametrize("about", ["", "{}", '{"used": [{}], "metrics": {}, "settings": {}}', "[[["])
def test_a_record_of_the_journal_is_no_batch(about):
    with pytest.raises(ValueError):
        decode_batch(encode(1, [], about={"batch": about}))


def saved(root: Path, batches: dict[int, StepBatch], settings: dict[str, str] = SETTINGS) -> Checkpoint:
    encoders = {step: lambda b=batch: b for step, batch in batches.items()}
    ahead = ahead_component(settings, lambda: encoders, lambda _: None)
    run = {"roles": ["policy"], "ranks": 1, "replicas": 1, "config_digest": "0", "score": None, "parent": None}
    return verify(save(manager(root), 1, [ahead], **run))


BATCHES = {step: StepBatch([], [UsedRow(SampleIndex(0, 0, step), 0.5)], {"reward/a/mean": 0.5}) for step in (2, 10)}


@pytest.mark.parametrize(
    ("now", "left_out", "reason"),
    [
        ({}, (), ""),
        ({"baselines": "1"}, (), "other baselines"),  # the run that has made them needed none
        ({"rollout.n": "3"}, (), "other rollout.n"),
        ({"rollout.n": "3", "rollout.top_p": "2"}, (), "other rollout.n, rollout.top_p"),
        ({}, ("weights",), "other weights"),
    ],
)
def test_batches_of_other_settings_or_weights_are_dropped_with_a_warning(tmp_path, caplog, now, left_out, reason):
    caplog.set_level(logging.WARNING)
    checkpoint = saved(tmp_path, BATCHES, {**SETTINGS, "unread": "0"})
    held: dict[int, StepBatch] = {}
    restore = Restore(Restore().kinds - set(left_out), fork=True)
    ahead_component(SETTINGS | now, dict, held.update).load(checkpoint, restore)
    assert held == ({} if reason else BATCHES) and [*held] == sorted(held)
    told = [line for line in caplog.messages if "its rollouts of" in line]
    assert told == ([f"{checkpoint.path}: its rollouts of steps 2 to 10 are of {reason}, and are generated again"]
                    if reason else [])  # fmt: skip


@pytest.mark.parametrize("works_ahead", [False, True])
def test_only_a_run_that_works_ahead_misses_batches(tmp_path, caplog, works_ahead):
    caplog.set_level(logging.INFO)
    run = {"roles": ["policy"], "ranks": 1, "replicas": 1, "config_digest": "0", "score": None, "parent": None}
    checkpoint = verify(save(manager(tmp_path), 1, [json_component("another", dict, lambda _: None)], **run))
    caplog.clear()
    ahead = ahead_component(SETTINGS, dict, lambda _: None, works_ahead)
    assert Restore().chosen([ahead], checkpoint) == []
    assert [line for line in caplog.messages if "holds no rollouts" in line] == (
        [f"{checkpoint.path} holds no rollouts of steps ahead"] if works_ahead else []
    )


def test_a_damaged_batch_is_refused(tmp_path):
    checkpoint = saved(tmp_path, BATCHES)
    (Path(checkpoint.path) / "ahead/step_2.arrow").write_bytes(b"ARROW1")
    with pytest.raises(CorruptCheckpointError, match="ahead/step_2.arrow is damaged"):
        ahead_component(SETTINGS, dict, lambda _: None).load(checkpoint, Restore())


@pytest.mark.parametrize("kind", [ValueError, Stopped, KeyboardInterrupt])
def test_a_batch_that_fails_or_is_stopped_fails_the_save(tmp_path, kind):
    def fail() -> StepBatch:
        raise kind("a judge is gone")

    checkpoints = manager(tmp_path)
    checkpoints.save(1, [ahead_component(SETTINGS, lambda: {2: fail}, lambda _: None)], {})
    checkpoints.wait()
    (result,) = checkpoints.results()
    assert result.error == "a judge is gone" and checkpoints.store.steps() == []
