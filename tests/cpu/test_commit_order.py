"""The order in which a commit makes files durable and names them, watched while the real calls run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.support.checkpoints import manager, save
from trainer.checkpoint.manifest import FileEntry, verify
from trainer.checkpoint.parts import Part, json_part
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.store import CheckpointFiles
from trainer.durable import digest_bytes


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What is made durable and renamed, in order, while the real calls run: `(fsync, path)`, `(rename, new path)`."""
    recorded: list[tuple[str, str]] = []

    def record(name: str, path_of) -> None:
        real = getattr(os, name)

        def call(*args, **kwargs):
            path = path_of(*args)
            result = real(*args, **kwargs)
            recorded.append(("fsync" if name == "fsync" else "rename", path))
            return result

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    record("rename", lambda source, target: os.fspath(target))
    record("replace", lambda source, target: os.fspath(target))
    return recorded


def test_a_commit_syncs_then_writes_the_manifest_then_asks_then_renames_then_hints(tmp_path, calls):
    root = tmp_path / "checkpoints"
    checkpoints = manager(root, fence=lambda: calls.append(("fence", "")))

    def begin(draft: CheckpointFiles):
        def write() -> list[FileEntry]:
            for folder in ("a/b", "a/c"):
                os.makedirs(f"{draft.path}/{folder}", exist_ok=True)
                Path(draft.path, folder, "file").write_bytes(b"abc")
            digest = digest_bytes(b"abc")
            return [FileEntry(f"{folder}/file", 3, digest) for folder in ("a/b", "a/c")]

        return write

    path = save(checkpoints, 3, [Part("plain", begin), json_part("counters", lambda: {"n": 1}, lambda _: None)])
    verify(path)
    commit = calls.index(("rename", path))
    (writing,) = {Path(name).parent for kind, name in calls if kind == "rename" and name.endswith("manifest.json")}
    manifest = calls.index(("rename", f"{writing}/manifest.json"))
    hint = calls.index(("rename", f"{root}/latest_ckpt_global_step.txt"))
    # Every file and every directory is durable before the manifest says so.
    written = [writing / name for name in ("a/b/file", "a/c/file", "counters.json", "a/b", "a/c", "a", "")]
    for each in written:
        assert ("fsync", str(each)) in calls[:manifest], each
    # The manifest is durable, and its name too, before the fence is asked; then comes the rename, at once.
    assert ("fsync", f"{writing}/manifest.json.tmp") in calls[:manifest]
    assert calls[manifest + 1 : commit + 2] == [
        ("fsync", str(writing)), ("fence", ""), ("rename", path), ("fsync", str(root)),
    ]  # fmt: skip
    assert calls[commit + 2 :] == [
        ("fsync", f"{root}/latest_ckpt_global_step.txt.tmp"),
        ("rename", f"{root}/latest_ckpt_global_step.txt"),
        ("fsync", str(root)),
    ]
    assert hint > commit


def test_shards_are_durable_before_they_are_named(tmp_path):
    names = run_ranks(1, write_shards_and_record, str(tmp_path))[0]
    assert {"__0_0.distcp", ".metadata", "extra.json", "policy"} <= set(names)
    assert names[-1] == "policy", "the directory comes last"


def write_shards_and_record(rank, directory: str) -> list[str]:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))

    os.fsync = fsync
    try:
        ShardedFiles(directory).write("policy", {"w": torch.zeros(8)}, {"extra.json": "{}"}, dist.group.WORLD)
    finally:
        os.fsync = real
    return synced
