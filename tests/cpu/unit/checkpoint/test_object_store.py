"""Checkpoints in object stores: servers of S3 and of Google Cloud Storage on this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.another_store import use_another_store
from tests.support.buckets import make_bucket, use_s3
from tests.support.checkpoints import parts_of, save
from tests.support.gcs import gcs_server, use_gcs
from tests.support.ranks import run_ranks
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.buckets import ObjectStorage
from trainer.checkpoint.components import Component
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.manifest import CorruptCheckpointError, FileEntry
from trainer.checkpoint.sharded import HELD, ShardCheck, ShardedFiles
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.store import open_store
from trainer.config import compose
from trainer.files.atomic_io import digest_bytes
from trainer.run.directory import RunDirectory


@pytest.fixture
def s3_root(s3_url, monkeypatch) -> str:
    """An empty prefix in S3."""
    use_s3(monkeypatch, s3_url)
    return make_bucket(f"bucket-{secrets.token_hex(4)}") + "/some/run"


@pytest.fixture(params=["s3", "gs"])
def root(request, monkeypatch) -> Iterator[str]:
    """An empty prefix in each kind of store."""
    if request.param == "s3":
        yield request.getfixturevalue("s3_root")
        return
    with gcs_server() as url:
        use_gcs(monkeypatch, url)
        yield "gs://bucket/some/run"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


def test_a_checkpoint_is_committed_by_its_manifest_alone(root):
    store = open_store(root)
    staging = store.begin(3)
    staging.write("folder/file", b"abc")
    assert store.steps() == [] and list(open_store(root).orphans().values()) == ["an interrupted save or deletion"]
    seen = []
    store.commit(staging, 3, {"files": []}, lambda: seen.append(store.steps()))
    assert seen == [[]], "asked when all is written and nothing is committed"
    assert store.steps() == [3] and store.orphans() == {}


def test_a_run_of_saves_is_listed_verified_pruned_and_rolled_back(root):
    open_store(root).probe()
    checkpoints = CheckpointManager(open_store(root), Retention(newest=2))
    state = {"n": 0, "bytes": b""}
    for step in (1, 2, 3):
        state |= {"n": step, "bytes": bytes([step]) * 100}
        save(checkpoints, step, parts_of(state))
    assert checkpoints.store.steps() == [2, 3], "retention has deleted the oldest"
    checkpoints.load(checkpoints.latest(), parts_of(state))
    assert state["n"] == 3 and state["bytes"] == b"\3" * 100
    (aside,) = checkpoints.archive(after=2)
    assert checkpoints.store.steps() == [2] and checkpoints.store.archived(3) == [aside]
    checkpoints.clean_up()
    state["n"] = 30
    save(checkpoints, 3, parts_of(state))
    assert checkpoints.store.steps() == [2, 3] and checkpoints.store.archived(3) == [], "the old step 3 is deleted"
    checkpoints.clean_up()
    assert manifests.verify(checkpoints.store.path(3)).step == 3


def test_damage_in_the_store_is_noticed(root):
    checkpoints = CheckpointManager(open_store(root))
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = manifests.read(checkpoints.store.path(2))
    newest.files.write("weights/shard", b"abd")
    with pytest.raises(CorruptCheckpointError, match="weights/shard does not have the content"):
        manifests.verify(newest.path)
    assert checkpoints.latest().step == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> float:
    """The number of a run on a disk at its end."""
    return toy_run(toy_config(tmp_path_factory.mktemp("whole"), total_steps=5), model).learner.ranks.number


def test_pieces_that_no_checkpoint_names_are_deleted_and_a_run_continues_on_an_empty_disk(
    s3_root, tmp_path, model, whole
):
    """A killed save leaves such pieces."""
    cfg = toy_config(tmp_path / "first", ckpt_path=s3_root)
    toy_run(cfg, model, stop_after=3)
    store, orphan = open_store(s3_root), digest_bytes(b"lost")
    named = set(store.pieces())
    store.keep_piece(orphan, b"lost")
    store.delete(1)
    aside = store.archive(2)
    with RunDirectory(cfg).open():
        assert set(store.pieces()) == {*named, orphan}, "an archived checkpoint may name any piece"
    store.remove(aside)
    with RunDirectory(cfg).open():
        assert set(store.pieces()) == named
    lines = (tmp_path / "first" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "first")
    continued = toy_run(toy_config(tmp_path / "second", ckpt_path=s3_root), model)
    assert continued.learner.ranks.number == whole
    found = (tmp_path / "second/metrics.jsonl").read_bytes()
    assert found.startswith(lines), "byte for byte"
    assert [json.loads(line)["step"] for line in found.splitlines()] == [1, 2, 3, 4, 5]


def test_ranks_write_and_read_their_own_parts_with_any_sharding(s3_root, s3_url, monkeypatch):
    environment = use_s3(monkeypatch, s3_url)
    checkpoints = CheckpointManager(open_store(s3_root))

    def write(staging: Storage) -> Callable[[], list[FileEntry]]:
        written = run_ranks(2, write_sharded, staging.root, environment)
        return lambda: [FileEntry(**entry) for entries in written for entry in entries]

    checkpoint = manifests.verify(save(checkpoints, 1, [Component("models", write)]), "unsharded")
    shards = [entry.path for entry in checkpoint.entries if entry.path.endswith(".distcp")]
    assert shards == ["policy/__0_0.distcp", "policy/__1_0.distcp"]
    state = {"w": torch.zeros(1000), "lr": 0.0}
    ShardedFiles(checkpoint.files.root).read("policy", state)
    assert (state["w"].tolist(), state["lr"]) == (list(range(1000)), 0.5)
    size = sum(entry.bytes for entry in checkpoint.shards)
    for count in (1, 3):
        downloaded = run_ranks(count, check_and_read, checkpoint, environment)
        assert sum(downloaded) == size, "each byte once, by one of the ranks of a machine"


def write_sharded(rank, directory: str, environment: dict[str, str]) -> list[dict]:
    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)]), "lr": 0.5}
    return ShardedFiles(directory).write("policy", state, {"extra.json": "{}"}, dist.group.WORLD)


def check_and_read(rank, checkpoint: manifests.Checkpoint, environment: dict[str, str]) -> int:
    """Return the bytes of shards that this rank has downloaded."""
    os.environ.update(environment)
    downloaded, get_range = [], ObjectStorage.get_range

    def counting(storage, key: str, start: int, end: int) -> bytes:
        downloaded.append(end - start)
        return get_range(storage, key, start, end)

    ObjectStorage.get_range = counting
    try:
        check, found = ShardCheck(checkpoint), [None] * dist.get_world_size()
        dist.all_gather_object(found, check.run())
        for problem, places in found:
            assert problem is None
            check.share(places)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"w": distribute_tensor(torch.zeros(1000), mesh, [Shard(0)]), "lr": 0.0}
        ShardedFiles(checkpoint.files.root).read("policy", state)
        assert state["w"].full_tensor().tolist() == list(range(1000)) and state["lr"] == 0.5
        check.release()
        assert HELD == {}
    finally:
        ObjectStorage.get_range = get_range
    return sum(downloaded)


def test_a_run_in_another_kind_of_store_needs_one_class_and_one_entry(monkeypatch, tmp_path, model, whole):
    """Commits, the lock, retention, carried files, two tiers and exports know nothing of the kind."""
    use_another_store(monkeypatch, tmp_path / "packages")
    assert compose(["trainer.ckpt_path=mem://bucket/run"]).trainer.ckpt_path == "mem://bucket/run"
    root, disk = "mem://bucket/run", tmp_path / "disk"
    settings = {"ckpt_path": root, "max_ckpts_to_keep": 2, "export_path": "mem://bucket/exports"}
    toy_run(toy_config(tmp_path / "first", **settings), model, stop_after=2)
    toy_run(toy_config(tmp_path / "second", **settings, ckpt_cache_dir=str(disk)), model, stop_after=4)
    shutil.rmtree(disk)
    continued = toy_run(toy_config(tmp_path / "third", **settings), model)
    assert continued.learner.ranks.number == whole
    assert open_store(root).steps()[-1] == 5 and open_store(root).orphans() == {}
