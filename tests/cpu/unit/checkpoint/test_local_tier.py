"""The directory of one node, as the driver asks for it through a rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.checkpoints import save
from trainer.checkpoint.local_tier import LocalTier, is_shard
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import read
from trainer.checkpoint.store import open_store


@pytest.fixture
def tier(tmp_path) -> LocalTier:
    """A disk with the checkpoints of the steps 1 and 2."""
    for step in (1, 2):
        save(CheckpointManager(open_store(str(tmp_path))), step)
    return LocalTier(str(tmp_path))


def test_all_who_see_one_directory_know_it_by_one_name(tmp_path):
    names = {LocalTier(str(tmp_path / "disk")).name() for _ in range(2)}
    assert len(names) == 1 and names != {LocalTier(str(tmp_path / "another")).name()}
    assert os.listdir(tmp_path / "disk") == [".node"]


def test_a_scrub_deletes_what_does_not_agree_with_the_manifest(tier):
    digest = read(f"{tier.root}/global_step_2").manifest["self"]
    Path(tier.root, "global_step_2/weights/shard").write_bytes(b"abd")
    assert tier.scrub(2, digest, "hash") == ["counters.json"]
    assert not Path(tier.root, "global_step_2/weights/shard").exists()
    assert tier.scrub(1, digest, "hash") == [] and open_store(tier.root).steps() == [2], "it is another checkpoint"
    assert tier.scrub(7, digest, "hash") == []


def test_a_disk_is_reconciled_with_that_of_the_driver(tier):
    tier.keep("global_step_2", {}, {"a" * 32: b"1", "b" * 32: b"2"})
    archived = open_store(tier.root).archive(1)
    tier.reconcile(["global_step_2", archived], ["b" * 32])
    assert open_store(tier.root).archived() == [archived] and open_store(tier.root).pieces() == ["b" * 32]
    tier.reconcile([], [])
    assert open_store(tier.root).steps() == [] == open_store(tier.root).archived()


def test_a_commit_replaces_what_was_never_committed_by_the_driver(tier):
    staging = open_store(tier.root).begin(2)
    folder = os.path.basename(staging.path)
    tier.keep(folder, {"small": b"new"}, {})
    tier.note_problems(folder, ["no space"])
    assert tier.problems(folder) == ["no space"] and tier.sizes(folder)["small"] == 3
    tier.commit(folder, 2, {"step": 2, "files": []})
    assert Path(tier.root, "global_step_2/small").read_bytes() == b"new"
    assert open_store(tier.root).orphans() == {}
    tier.remove(folder)


@pytest.mark.parametrize(("path", "expected"), [("policy/__0_0.distcp", True), ("policy/.metadata", False)])
def test_shards_are_told_from_small_files(path, expected):
    assert is_shard(path) is expected
