"""Exports: a directory is published whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest
import torch

from trainer.checkpoint.lock import RunLock
from trainer.errors import UserError
from trainer.models.export import PolicyExporter, atomic_directory, model_assets, write_files
from trainer.models.export_weights import plan_layout
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.tokenizer import load_tokenizer


def test_a_directory_is_published_when_it_is_complete(tmp_path):
    with atomic_directory(str(tmp_path / "a/out")) as writing:
        with open(os.path.join(writing, "file"), "w") as file:
            file.write("content")
        assert not (tmp_path / "a/out").exists()
    assert (tmp_path / "a/out/file").read_text() == "content" and os.listdir(tmp_path / "a") == ["out"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_directory_whose_block_fails_is_deleted(tmp_path, error):
    with pytest.raises(type(error)), atomic_directory(str(tmp_path / "out")) as writing:
        with open(os.path.join(writing, "file"), "w"):
            pass
        raise error
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, path)
    return path


class TrainWorkers:
    """Stands in for the ranks: copies the weights of the model, and then calls `meanwhile`."""

    def __init__(self, model: str, meanwhile=lambda: None):
        self.model, self.meanwhile = model, meanwhile

    def call(self, role: str, method: str, directory: str, dtype: str) -> str:
        assert (role, method) == ("policy", "write_weights")
        shutil.copy(f"{self.model}/model.safetensors", directory)
        self.meanwhile()
        return "bfloat16"


def exporter(ranks: TrainWorkers, fence=lambda: None) -> PolicyExporter:
    return PolicyExporter(ranks, ranks.model, model_assets(ranks.model, load_tokenizer(ranks.model)), False, fence)


def test_an_export_replaces_an_older_one_and_removes_orphans(model, tmp_path):
    target = tmp_path / "global_step_1/policy"
    for name in ("policy", "policy.writing-of-a-killed-job"):
        target.with_name(name).mkdir(parents=True)
        (target.with_name(name) / "old").touch()
    (target / "config.json").touch()
    exporter(TrainWorkers(model)).export(str(target), "float32")
    assert os.listdir(target.parent) == ["policy"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(target))
    assert not (target / "old").exists()
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16", "as the ranks have written them"


@pytest.mark.parametrize("kind", ["a checkpoint", "other files", "a file", "a link"])
def test_an_export_replaces_nothing_but_an_export(model, tmp_path, kind):
    target, kept = tmp_path / "global_step_1/policy", tmp_path / "kept"
    kept.mkdir()
    place = kept if kind == "a link" else target
    if kind == "a file":
        target.parent.mkdir()
        target.write_text("text")
    else:
        place.mkdir(parents=True, exist_ok=True)
        (place / "__0_0.distcp").write_text("shard")
    if kind == "a checkpoint":
        (target / "config.json").touch()
        (target.parent / "manifest.json").touch()
    elif kind == "a link":
        target.parent.mkdir()
        target.symlink_to(kept)
    with pytest.raises(UserError, match=f"^trainer.export_path={tmp_path}: .*global_step_1.* is (a|not an)"):
        exporter(TrainWorkers(model)).export(str(target), "float32")
    assert target.read_text() == "text" if kind == "a file" else (place / "__0_0.distcp").exists()
    assert not [name for name in os.listdir(target.parent) if "writing" in name]


def test_an_export_replaces_an_empty_directory(model, tmp_path):
    (tmp_path / "global_step_1/policy").mkdir(parents=True)
    exporter(TrainWorkers(model)).export(str(tmp_path / "global_step_1/policy"), "float32")
    assert (tmp_path / "global_step_1/policy/config.json").exists()


def test_a_job_that_lost_its_run_directory_while_it_exports_publishes_nothing(model, tmp_path):
    target = tmp_path / "exports/global_step_1/policy"

    def lose() -> None:
        (tmp_path / ".lock").unlink()
        target.mkdir(parents=True)
        (target / "of another job").touch()

    with RunLock(str(tmp_path), 60) as lock:
        lock.acquire()
        with pytest.raises(UserError, match="lost the run directory"):
            exporter(TrainWorkers(model, lose), lock.check).export(str(target), "float32")
    assert os.listdir(target) == ["of another job"] and os.listdir(target.parent) == ["policy"]


def test_an_export_makes_its_files_durable_before_it_is_published(model, tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(handle: int) -> None:
        fsync(handle)
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))

    def record_rename(source: str, target: str) -> None:
        rename(source, target)
        done.append("rename")

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    exporter(TrainWorkers(model)).export(str(tmp_path / "policy"), "float32")
    assert "model.safetensors" in done[: done.index("rename")] and done[-1] == tmp_path.name


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_who_reads_an_export(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        with atomic_directory(str(tmp_path / "out")) as writing:
            plan_layout({"w": torch.zeros(2)}).create(writing)
            write_files(writing, {"config.json": b"{}"})
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.stat(tmp_path / "out" / name).st_mode) for name in os.listdir(tmp_path / "out")}
    assert modes == {"model.safetensors": mode, "config.json": mode}
