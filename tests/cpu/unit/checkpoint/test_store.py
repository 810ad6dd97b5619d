"""The local store: a staging area is published by a rename, and files are read where no link leads out."""

from __future__ import annotations

import os

import pytest

from tests.support.checkpoints import hidden
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import open_store

EMPTY: manifests.Fields = {"files": []}


def nothing() -> None:
    pass


def test_a_staging_area_is_no_checkpoint_until_it_is_published(tmp_path):
    store = open_store(str(tmp_path / "checkpoints"))
    staging = store.begin(3)
    staging.write("folder/file", b"abc")
    assert store.steps() == [] and list(store.orphans().values()) == ["an interrupted save"]
    seen = []
    store.commit(staging, 3, EMPTY, lambda: seen.append((store.steps(), staging.get("manifest.json"))))
    assert seen == [([], manifests.dump(EMPTY))], "asked when all is written and nothing is committed"
    assert store.steps() == [3] and store.orphans() == {}
    assert open_storage(store.path(3)).list() == {"folder/file": 3, "manifest.json": len(manifests.dump(EMPTY))}


def test_a_commit_that_is_refused_publishes_nothing(tmp_path):
    store = open_store(str(tmp_path))
    staging = store.begin(1)

    def refuse() -> None:
        raise PermissionError("another job holds the directory")

    with pytest.raises(PermissionError):
        store.commit(staging, 1, EMPTY, refuse)
    assert store.steps() == []
    store.abort(staging)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_withdrawn_atomically_and_then_removed(tmp_path):
    store = open_store(str(tmp_path))
    for step in (1, 2):
        store.commit(store.begin(step), step, EMPTY, nothing)
    left, aside = store.tombstone(1), store.archive(2)
    assert store.steps() == [] and hidden(tmp_path) == [".aside-", ".deleting-"]
    assert store.orphans() == {left: "an interrupted deletion"}, "archived ones are kept"
    assert store.archived(2) == [aside] and store.archived(1) == []
    store.remove(left)
    store.remove(aside)
    assert os.listdir(tmp_path) == []


def test_a_probe_leaves_no_files(tmp_path):
    open_store(str(tmp_path / "new")).probe()
    assert os.listdir(tmp_path / "new") == []
