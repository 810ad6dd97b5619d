"""The transaction: only whole checkpoints count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.checkpoint.manager import CheckpointManager, Part, json_part, read_manifest
from trainer.errors import UserError


def manager(root: Path, state: dict, keep: int = -1) -> CheckpointManager:
    checkpoints = CheckpointManager(str(root), keep)

    def save(directory: str) -> None:
        os.makedirs(os.path.join(directory, "weights"))
        Path(directory, "weights", "shard").write_bytes(state["bytes"])

    def load(directory: str) -> None:
        state["bytes"] = Path(directory, "weights", "shard").read_bytes()

    checkpoints.register(json_part("counters", lambda: {"n": state["n"]}, lambda s: state.update(s)))
    checkpoints.register(Part("weights", save, load))
    return checkpoints


def test_what_is_saved_comes_back(tmp_path):
    state = {"n": 3, "bytes": b"abc"}
    path = manager(tmp_path, state).save(10, {"ranks": 2})
    assert path == str(tmp_path / "global_step_10")
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["ranks"], manifest["parent_step"]) == (10, 2, None)
    assert {f["path"]: f["bytes"] for f in manifest["files"]} == {"counters.json": 12, "weights/shard": 3}
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "10\n"
    fresh = {"n": 0, "bytes": b""}
    assert manager(tmp_path, fresh).load(path) == 10
    assert fresh == state


def test_latest_is_the_newest_valid_one_and_the_hint_is_not_asked(tmp_path):
    state = {"n": 1, "bytes": b"abc"}
    checkpoints = manager(tmp_path, state)
    assert checkpoints.latest() is None
    for step in (2, 10, 9):
        checkpoints.save(step, {})
    (tmp_path / "latest_ckpt_global_step.txt").write_text("2\n")
    assert checkpoints.latest().endswith("global_step_10")
    (tmp_path / "global_step_10/weights/shard").write_bytes(b"ab")
    assert checkpoints.latest().endswith("global_step_9")
    (tmp_path / "global_step_9/manifest.json").write_text('{"step": ')
    assert checkpoints.latest().endswith("global_step_2")
    (tmp_path / "global_step_2/weights/shard").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is valid.*shard"):
        checkpoints.latest()


def test_from_path_takes_a_valid_checkpoint_directory_or_nothing(tmp_path):
    checkpoints = manager(tmp_path, {"n": 1, "bytes": b"abc"})
    path = checkpoints.save(4, {})
    assert checkpoints.resolve("from_path", path + "/") == path
    with pytest.raises(UserError, match="must be a global_step_N directory"):
        checkpoints.resolve("from_path", str(tmp_path))
    (tmp_path / "global_step_5").mkdir()
    with pytest.raises(UserError, match="no manifest.json"):
        checkpoints.resolve("from_path", str(tmp_path / "global_step_5"))
    os.truncate(tmp_path / "global_step_4/weights/shard", 1)
    with pytest.raises(UserError, match="weights/shard is damaged: 1 bytes instead of 3"):
        checkpoints.resolve("from_path", path)
    assert checkpoints.resolve(None, None) is None and checkpoints.resolve("none", None) is None


def test_retention_keeps_the_newest(tmp_path):
    checkpoints = manager(tmp_path, {"n": 1, "bytes": b"abc"}, keep=2)
    for step in (1, 2, 3, 10):
        checkpoints.save(step, {})
    assert checkpoints.steps() == [3, 10]


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.cpu.test_checkpoint import manager
from trainer.checkpoint.storage import Storage
root, moment = Path(sys.argv[1]), sys.argv[2]
checkpoints = manager(root, {"n": 2, "bytes": b"new"})
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write = Storage.write
if moment == "part":
    checkpoints._parts[1] = type(checkpoints._parts[1])("weights", die, die)
elif moment == "sync":
    Storage.sync = die
elif moment == "manifest":
    Storage.write = lambda self, path, text: die() if path.endswith("manifest.json") else write(self, path, text)
elif moment == "rename":
    Storage.rename = die
checkpoints.save(2, {})
"""


@pytest.mark.parametrize("moment", ["part", "sync", "manifest", "rename"])
def test_a_save_killed_at_any_moment_is_not_a_checkpoint(tmp_path, moment):
    state = {"n": 1, "bytes": b"old"}
    checkpoints = manager(tmp_path, state)
    checkpoints.save(1, {})
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), moment])
    assert done.returncode == -signal.SIGKILL
    assert checkpoints.latest().endswith("global_step_1")
    leftovers = [name for name in os.listdir(tmp_path) if name.startswith(".writing")]
    assert leftovers
    checkpoints.save(3, {})
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".writing")]
    assert json.loads((tmp_path / "global_step_3/counters.json").read_text()) == {"n": 1}
