"""Checkpoints in Google Cloud Storage: gcsfs against a server on this machine."""

from __future__ import annotations

import shutil

import pytest

from tests.support.checkpoints import parts_of, save
from tests.support.gcs import gcs_server, use_gcs
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint.bucket import bucket_of
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.store import open_store


@pytest.fixture
def gs(monkeypatch):
    with gcs_server() as url:
        use_gcs(monkeypatch, url)
        yield


def test_objects_are_written_on_conditions_and_in_parts(gs):
    bucket = bucket_of("gs")
    assert bucket.create("bucket/a", b"1") and bucket.create("bucket/a", b"1") and not bucket.create("bucket/a", b"2")
    data, tag = bucket.read_tagged("bucket/a")
    assert data == b"1" and bucket.replace("bucket/a", b"3", tag) and not bucket.replace("bucket/a", b"4", tag)
    with bucket.open_for_writing("bucket/folder/large") as stream:
        for letter in b"abc":
            stream.write(bytes([letter]) * (8 << 20))
    assert bucket.size("bucket/folder/large") == 24 << 20
    assert bucket.read("bucket/folder/large", (8 << 20) - 1, (8 << 20) + 1) == b"ab"
    assert bucket.names("bucket") == ["a", "folder"] and set(bucket.list("bucket/folder")) == {"bucket/folder/large"}
    bucket.delete("bucket/a")
    bucket.delete("bucket/a")
    assert not bucket.exists("bucket/a")


def test_saves_locks_and_retention_work(gs):
    store = open_store("gs://bucket/run")
    store.probe()
    with store.lock(10, "checkpoint directory", "end it") as lock:
        assert lock.acquire() is None
        checkpoints, state = CheckpointManager(store, Retention(newest=1), fence=lock.check), {}
        for step in (1, 2):
            state |= {"n": step, "bytes": bytes([step])}
            save(checkpoints, step, parts_of(state))
    assert checkpoints.steps() == [2] and checkpoints.latest().step == 2 and store.leftovers() == {}


def test_a_run_continues_on_a_machine_with_an_empty_disk(gs, tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("start")
    whole = toy_run(toy_config(tmp_path / "whole"), model)
    toy_run(toy_config(tmp_path / "first", ckpt_path="gs://bucket/two"), model, stop_after=3)
    shutil.rmtree(tmp_path / "first")
    continued = toy_run(toy_config(tmp_path / "second", ckpt_path="gs://bucket/two"), model)
    assert continued.learner.ranks.number == whole.learner.ranks.number
