"""Weights in shared memory, which every user of the machine can reach."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.namespaces import with_mounts
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from trainer.config import RolloutConfig
from trainer.errors import UserError
from trainer.files.shared_memory import SHARED_MEMORY, SharedDirectory, check_free_space, check_owner, clear_abandoned
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import SharedMemory
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank

HOLD = """
import sys, time
from trainer.files.shared_memory import SharedDirectory
directory = SharedDirectory(sys.argv[1])
open(directory.path + "/model.safetensors", "w").write("weights")
print(directory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(tmp_path) -> Path:
    """A directory that everybody can write to, like /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def holder(base):
    """A process that holds a directory with weights, and that directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(base)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_directory_is_new_and_private_and_deleted_on_close(base):
    with SharedDirectory(str(base)) as one, SharedDirectory(str(base)) as two:
        assert one.path != two.path
        assert [Path(one.path).stat().st_mode & 0o777, Path(one.path).stat().st_uid] == [0o700, os.geteuid()]
        (Path(one.path) / "model.safetensors").write_text("weights")
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("plant", ["link", "directory", "file"])
def test_an_existing_entry_with_the_random_name_is_refused(base, tmp_path, monkeypatch, plant):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 32)
    with SharedDirectory(str(base)) as own:
        planted = Path(own.path)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "model.safetensors").write_text("precious")
    if plant == "link":
        planted.symlink_to(victim)
    elif plant == "directory":
        victim.rename(planted)
        os.chown(planted, 65534, 65534) if os.geteuid() == 0 else pytest.skip("needs root to give a directory away")
    else:
        planted.write_text("precious")
    with pytest.raises(FileExistsError):
        SharedDirectory(str(base))
    kept = planted if plant == "file" else planted / "model.safetensors"
    assert kept.read_text() == "precious"


def test_a_killed_process_leaves_a_directory_that_the_next_start_deletes(base, holder):
    process, directory = holder
    assert clear_abandoned(str(base)) == [], "its process lives"
    process.send_signal(signal.SIGSTOP)
    assert clear_abandoned(str(base)) == [], "its process is frozen, not dead"
    assert (directory / "model.safetensors").read_text() == "weights"
    process.kill()
    process.wait()
    assert clear_abandoned(str(base)) == [str(directory)] and list(base.iterdir()) == []


def test_a_new_directory_clears_the_abandoned_ones(base, holder):
    process, directory = holder
    process.kill()
    process.wait()
    with SharedDirectory(str(base)) as own:
        assert [str(path) for path in base.iterdir()] == [own.path]


def test_clear_abandoned_keeps_links_files_and_other_users_entries(base, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "data").write_text("precious")
    (base / "trainer-weights-link").symlink_to(victim)
    (base / "trainer-weights-file").write_text("precious")
    (base / "somebody-elses").mkdir()
    spared = {"trainer-weights-link", "trainer-weights-file", "somebody-elses"}
    if os.geteuid() == 0:  # else this user can make nothing that another user owns
        (base / "trainer-weights-other").mkdir(mode=0o777)
        os.chown(base / "trainer-weights-other", 65534, 65534)
        spared.add("trainer-weights-other")
        with pytest.raises(UserError, match="belongs to another user"):
            check_owner(str(base / "trainer-weights-other"))
    assert clear_abandoned(str(base)) == []
    assert {path.name for path in base.iterdir()} == spared and (victim / "data").read_text() == "precious"
    with pytest.raises(UserError, match="is a link"):
        check_owner(str(base / "trainer-weights-link"))
    with pytest.raises(UserError, match="does not see"):
        check_owner(str(base / "trainer-weights-gone"))


CHURN = """
import os, sys
from trainer.files.shared_memory import SharedDirectory
for _ in range(400):
    with SharedDirectory(sys.argv[1]) as own:
        path = os.path.join(own.path, "model.safetensors")
        open(path, "w").write("weights")
        for other in os.listdir(sys.argv[1]):
            assert open(path).read() == "weights"
"""


def test_runs_that_start_together_never_lose_a_directory(base):
    """Each makes its directories, and clears what it takes for abandoned, while the others do the same."""
    runs = [subprocess.Popen([sys.executable, "-c", CHURN, str(base)]) for _ in range(4)]
    assert [run.wait(120) for run in runs] == [0, 0, 0, 0]
    assert list(base.iterdir()) == []


def test_shared_memory_in_which_others_can_rename_is_refused(base):
    base.chmod(0o777)
    with pytest.raises(UserError, match="chmod \\+t"):
        SharedDirectory(str(base))
    with pytest.raises(UserError, match="there is no"):
        SharedDirectory(str(base / "none"))


ROOM = """
import sys
from trainer.errors import UserError
from trainer.files.shared_memory import check_free_space
check_free_space(900_000, 0, sys.argv[1])
check_free_space(900_000, 2**29, sys.argv[1])  # Ray keeps its objects elsewhere
try:
    check_free_space(2_000_000, 2**29, sys.argv[1])
except UserError as error:
    print(error)
"""


def test_too_little_shared_memory_is_refused_in_one_line(tmp_path):
    """On a file system that is small indeed."""
    command = with_mounts([f"-t tmpfs -o size=1m tmpfs {tmp_path}"], [sys.executable, "-c", ROOM, str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    for part in ("has 1.0 MB free", "need 2.0 MB", "docker run --shm-size=1g", "rollout.weight_sync=broadcast"):
        assert part in done.stdout, done.stdout


def test_free_space_for_rays_objects_is_reserved(tmp_path):
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    check_free_space(free // 4, free // 2, str(tmp_path))
    with pytest.raises(UserError, match="for Ray's objects"):
        check_free_space(free // 2, 3 * free // 4, str(tmp_path))


def share(rank: Rank, model: str) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Write the weights as a job does; the engine's and rank 0's view of them."""
    rank.build(roles(rank.cfg, ["policy"]), model)
    path = [rank.call("policy", "open_shared", "float32", 0) if rank.rank == 0 else None]
    torch.distributed.broadcast_object_list(path)
    rank.call("policy", "write_weights", path[0], "float32")
    if rank.rank != 0:
        return None, {}
    check_owner(path[0])
    mode = os.stat(path[0]).st_mode & 0o777
    engine = TransformersEngine(
        model, dtype="float32", seed=1, rollout=RolloutConfig(engine="transformers"), device="cpu"
    )
    engine.sync_weights(SharedMemory(path[0]), 1)
    weights = load_file(os.path.join(path[0], "model.safetensors"))
    assert sum(t.nbytes for t in weights.values()) <= rank.roles["policy"].weight_bytes("float32")
    rank.call("policy", "close_shared")
    return f"{mode:o} {path[0]}", weights


def test_all_ranks_write_to_one_private_directory(tmp_path):
    model = str(tmp_path / "model")
    build_tiny(TinyShape(), model)
    (where, weights), _ = run_ranks(2, share, model)
    assert where is not None and where.startswith(f"700 {SHARED_MEMORY}/trainer-weights-")
    assert not os.path.exists(where.split()[1])
    start = load_file(os.path.join(model, "model.safetensors"))
    assert set(weights) == set(start) and all(torch.equal(weights[name], start[name]) for name in start)


def test_weights_are_not_written_through_a_link(tmp_path):
    model, out, victim = (str(tmp_path / name) for name in ("model", "out", "victim"))
    build_tiny(TinyShape(), model)
    os.mkdir(out)
    Path(victim).write_text("precious")
    os.symlink(victim, os.path.join(out, "model.safetensors"))
    with pytest.raises(OSError, match="symbolic links"):
        run_ranks(1, write, model, out)
    assert Path(victim).read_text() == "precious"


def write(rank: Rank, model: str, out: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), model)
    rank.call("policy", "write_weights", out, "float32")
