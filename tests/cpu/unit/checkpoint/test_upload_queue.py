"""The queue of uploads. Here a directory stands for the remote store: the queue knows stores, not their kinds."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.support.checkpoints import save
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.store import open_store
from trainer.checkpoint.uploads import TieredStore
from trainer.process import time_limits
from trainer.process.tracing import TRACER


@pytest.fixture
def local(tmp_path):
    """A store with three checkpoints."""
    store = open_store(str(tmp_path / "local"))
    for step in (1, 2, 3):
        save(CheckpointManager(store), step)
    return store


@pytest.fixture
def remote(tmp_path):
    (tmp_path / "remote").mkdir()
    return open_store(str(tmp_path / "remote"))


def test_the_queue_is_derived_from_what_lies_in_both_stores(local, remote):
    shutil.copytree(local.path(2), remote.path(2))
    queue = TieredStore(local, remote)
    assert queue.uploaded() == {2} and queue.waiting() == [1, 3]
    assert queue.not_yet_uploaded() == {2, 3}, "1 is older than an uploaded one"


def test_uploads_go_on_after_a_disk_could_not_be_listed(local, remote, monkeypatch, caplog):
    """Also in the answer to a failed upload."""
    monkeypatch.setattr(time_limits, "UPLOAD_FIRST_BACKOFF_S", 0.01)
    queue, failures = TieredStore(local, remote), iter([False, True, True])
    queue.uploaded()
    steps = local.steps

    def list_steps() -> list[int]:
        if threading.current_thread().name == "uploader" and next(failures, False):
            raise OSError(errno.EIO, "Input/output error", local.root)
        return steps()

    monkeypatch.setattr(local, "steps", list_steps)
    queue.start_uploads(lambda: None)
    while queue.waiting():
        assert queue._thread.is_alive()
        threading.Event().wait(0.02)
    queue.finish_uploads(10)
    assert remote.steps() == [1, 2, 3]
    assert "is not uploaded yet: [Errno 5] Input/output error" in caplog.text


def test_the_newest_is_uploaded_first_and_all_of_them_in_the_end(local, remote, monkeypatch):
    queue, seen = TieredStore(local, remote), []
    commit = remote.commit
    monkeypatch.setattr(remote, "commit", lambda *arguments: (seen.append(arguments[1]), commit(*arguments)))
    monkeypatch.setattr(TRACER, "is_on", True)
    queue.start_uploads(lambda: None)
    while queue.waiting():
        threading.Event().wait(0.02)
    queue.finish_uploads(10)
    assert seen == [3, 2, 1]
    spans = [(span.name, span.row) for span in TRACER.take() if span.name.startswith("upload")]
    assert spans == [(f"upload {step}", "uploads") for step in (3, 2, 1)]
    for step in (1, 2, 3):
        verify(remote.path(step))
        assert Path(remote.path(step), "weights/shard").read_bytes() == b"abc"


def test_an_older_checkpoint_that_hangs_does_not_hold_the_end(local, remote, monkeypatch):
    queue, commit, held, released = TieredStore(local, remote), remote.commit, threading.Event(), threading.Event()

    def hold(staging, step, *arguments) -> None:
        if step == 2:
            held.set()
            assert released.wait(60)
        commit(staging, step, *arguments)

    monkeypatch.setattr(remote, "commit", hold)
    queue.start_uploads(lambda: None)
    assert held.wait(60)
    queue.finish_uploads(0.2)
    assert remote.steps() == [3]
    released.set()


def test_damage_on_the_disk_is_not_uploaded(local, remote, caplog):
    Path(local.path(3), "weights/shard").write_bytes(b"abd")
    queue = TieredStore(local, remote)
    queue.start_uploads(lambda: None)
    queue.finish_uploads(0.5)
    assert 3 not in remote.steps() and "does not have the content that was saved" in caplog.text
    assert f"global_step_3 is in {local.root} alone" in caplog.text
    assert remote.orphans() == {}


def test_nothing_is_written_by_a_job_that_has_lost_the_lock(local, remote):
    def refuse() -> None:
        raise PermissionError("lost the lock")

    queue = TieredStore(local, remote)
    queue.start_uploads(refuse)
    queue.finish_uploads(0.3)
    assert os.listdir(remote.root) == [] and queue.not_yet_uploaded() >= {1, 2, 3}
