"""Checkpoints in Google Cloud Storage: gcsfs against a server on this machine."""

from __future__ import annotations

import shutil

import pytest

from tests.support.checkpoints import parts_of, save
from tests.support.gcs import gcs_server, use_gcs
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.store import open_store


@pytest.fixture
def gs(monkeypatch):
    with gcs_server() as url:
        use_gcs(monkeypatch, url)
        yield


def test_saves_locks_and_retention_work(gs):
    store = open_store("gs://bucket/run")
    store.probe()
    with store.locks(10, "checkpoint directory", "end it")[0] as lock:
        assert lock.acquire() is None
        checkpoints, state = CheckpointManager(store, Retention(newest=1), fence=lock.check), {}
        for step in (1, 2):
            state |= {"n": step, "bytes": bytes([step])}
            save(checkpoints, step, parts_of(state))
    assert checkpoints.store.steps() == [2] and checkpoints.latest().step == 2 and store.orphans() == {}


def test_a_run_continues_on_a_machine_with_an_empty_disk(gs, tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("start")
    whole = toy_run(toy_config(tmp_path / "whole"), model)
    toy_run(toy_config(tmp_path / "first", ckpt_path="gs://bucket/two"), model, stop_after=3)
    shutil.rmtree(tmp_path / "first")
    continued = toy_run(toy_config(tmp_path / "second", ckpt_path="gs://bucket/two"), model)
    assert continued.learner.ranks.number == whole.learner.ranks.number
