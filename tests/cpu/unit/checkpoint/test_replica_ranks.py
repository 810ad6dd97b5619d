"""Local checkpoints of ranks on several nodes: real ranks, each with a directory that stands for its node's disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import manager, save
from tests.support.disks import DISK, Process, ranks_on
from tests.support.fault_proxy import ERROR, PASS
from tests.support.namespaces import small_disk
from tests.support.odd_files import config
from tests.support.runs import OpenRun
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import models_part
from trainer.checkpoint.local_tier import is_shard
from trainer.checkpoint.store import open_store
from trainer.checkpoint.tensors import NamedFiles, compare
from trainer.config import Config, TinyConfig
from trainer.errors import UserError
from trainer.learner.train_workers import TrainWorkers
from trainer.models.tiny import build_tiny
from trainer.process.failure_log import read_incidents

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Directories with different weights."""
    root = tmp_path_factory.mktemp("models")
    for seed in range(3):
        build_tiny(TinyConfig(hidden_size=32, intermediate_size=64, seed=seed), str(root / str(seed)))
    return [root / str(seed) for seed in range(3)]


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Path:
    """The node of the driver, which has no ranks."""
    path = tmp_path / "driver"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def cfg(bucket_behind_proxy, driver, tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr("trainer.checkpoint.object_storage._MAX_ATTEMPTS", 2)
    settings = {"ckpt_path": f"{bucket_behind_proxy}/run", "ckpt_cache_dir": DISK, "ckpt_replicas": 1}
    return config(tmp_path / "run", **settings, ckpt_upload_timeout_s=0)


@pytest.fixture
def nodes(tmp_path) -> list[Path]:
    return [tmp_path / f"node{number}" for number in range(3)]


def no_uploads(method: str, path: str) -> str:
    """No checkpoint reaches the object store, but the lock does."""
    return ERROR if method in ("PUT", "POST") and "global_step" in path else PASS


def load(ranks: TrainWorkers, model: Path) -> None:
    """Load the weights in `model` into ranks that are connected."""
    ranks.policy.call("build", list(ranks.roles.values()), str(model))


class Run(OpenRun):
    """A run on `ranks`, with a line of metrics for each step, which checkpoints carry."""

    def __init__(self, cfg: Config, ranks: TrainWorkers):
        super().__init__(cfg, {"step": 0})
        self.ranks = ranks
        self.parts += [models_part(ranks), self.directory.run_files.part()]

    def __enter__(self) -> Run:
        super().__enter__()
        self.directory.find_readable(self.ranks)
        return self

    def commit(self, step: int, model: Path) -> None:
        """Let a step lead to the weights in `model`, and save it."""
        outcome = self.try_to_commit(step, model)
        assert outcome.error is None, outcome.error

    def try_to_commit(self, step: int, model: Path):
        load(self.ranks, model)
        lines = [json.dumps({"step": number + 1}) + "\n" for number in range(step)]
        Path(self.directory.metrics_file).write_text("".join(lines))
        self.state["step"] = step
        self.save(step, roles=["policy"])
        (outcome,) = self.directory.checkpoints.results()
        return outcome

    def held(self, step: int) -> dict[str, list[str]]:
        """The nodes that have each shard, as the manifest says."""
        found: dict[str, list[str]] = {}
        for name, paths in manifests.read(f"{DISK}/global_step_{step}").nodes.items():
            for path in paths:
                found.setdefault(path, []).append(name)
        return found


def same_tensors(ranks: TrainWorkers, model: Path, tmp_path: Path) -> bool:
    """Whether the ranks hold the weights in `model`, to the last bit."""
    found, expected = (manager(tmp_path / name) for name in ("found", "expected"))
    for store in (found, expected):
        shutil.rmtree(store.store.root, ignore_errors=True)
    save(found, 1, [models_part(ranks)])
    load(ranks, model)
    save(expected, 1, [models_part(ranks)])
    a, b = (NamedFiles(manifests.read(store.store.path(1))) for store in (found, expected))
    rows = [row for row in compare(a, b) if row["name"].startswith("policy/model.")]
    assert rows and not any(row["note"] for row in rows)
    return all(row["largest"] == 0 for row in rows)


def on_disk(node: Path, step: int) -> set[str]:
    return {path.name for path in (node / "disk" / f"global_step_{step}").rglob("*.distcp")}


def test_a_lost_node_costs_nothing_that_is_committed(cfg, nodes, models, faults, driver, tmp_path, monkeypatch):
    """A node loses its disk; fewer ranks read its shards on its neighbour. Then the driver's node is lost too, and the
    same command is given on a node of ranks."""
    faults.plan = no_uploads
    with ranks_on(nodes, cfg, models[0]) as ranks, Run(cfg, ranks) as run:
        for step in (1, 2):
            run.commit(step, models[step])
        names = [(node / "disk" / ".node").read_text() for node in nodes]
        assert {path: set(holders) for path, holders in run.held(2).items()} == {
            f"policy/__{rank}_0.distcp": {names[rank], names[(rank + 1) % 3]} for rank in range(3)
        }
    assert [on_disk(node, 2) for node in nodes] == [{f"__{r}_0.distcp", f"__{(r - 1) % 3}_0.distcp"} for r in range(3)]
    with pytest.raises(UserError, match=r"on the disk of another node \(.*node|on the disk of another node"):
        manifests.verify(f"{driver}/disk/global_step_2")

    shutil.rmtree(nodes[1])
    with ranks_on([nodes[0], nodes[2]], cfg, models[0]) as ranks:
        with Run(cfg, ranks) as run:
            assert run.resume.checkpoint.step == 2
            run.load()
            assert run.state == {"step": 2} and same_tensors(ranks, models[2], tmp_path)
        shutil.rmtree(driver)
        shutil.rmtree(cfg.trainer.run_dir)
        monkeypatch.chdir(nodes[2])
        faults.plan = lambda method, path: PASS
        cfg.trainer.ckpt_upload_timeout_s = 60
        with Run(cfg, ranks) as run, run.directory.settling():
            assert run.resume.checkpoint.path == f"{DISK}/global_step_2"
            assert Path(run.directory.metrics_file).read_text().count("step") == 2
            run.load()
            assert same_tensors(ranks, models[2], tmp_path)
    uploaded = manifests.verify(f"{cfg.trainer.ckpt_path}/global_step_2")
    assert uploaded.nodes == {} and sum(is_shard(entry.path) for entry in uploaded.entries) == 3


def test_a_lost_shard_without_a_copy_costs_what_was_not_uploaded(cfg, nodes, models, faults, tmp_path):
    """Two neighbours are lost. A shard that is damaged counts as lost, and a damaged one with a good copy does not."""
    with ranks_on(nodes, cfg, models[0]) as ranks:
        cfg.trainer.ckpt_upload_timeout_s = 60
        with Run(cfg, ranks) as run, run.directory.settling():
            run.commit(1, models[1])
        cfg.trainer.ckpt_upload_timeout_s = 0
        faults.plan = no_uploads
        with Run(cfg, ranks) as run:
            run.commit(2, models[2])
        flip_a_bit(nodes[0] / "disk/global_step_2/policy/__0_0.distcp")
        with Run(cfg, ranks) as run:
            run.load()
            assert run.resume.checkpoint.step == 2 and same_tensors(ranks, models[2], tmp_path)
        flip_a_bit(nodes[1] / "disk/global_step_2/policy/__0_0.distcp")
        for node in nodes[:2]:
            shutil.rmtree(node / "disk/global_step_1")
        with Run(cfg, ranks) as run:
            assert run.resume.checkpoint.path == f"{cfg.trainer.ckpt_path}/global_step_1"
            run.load()
            assert same_tensors(ranks, models[1], tmp_path)
            run.directory.checkpoints.archive(after=1)
            run.commit(2, models[0])
        assert [list((node / "disk").glob(".aside*")) for node in nodes] == [[], [], []]
    incidents = read_incidents(cfg.trainer.run_dir)
    assert [incident.cause for incident in incidents] == ["lost disk", "lost disk"]
    assert all("no running node has policy/__0_0.distcp" in incident.text for incident in incidents)


def test_a_damaged_shard_on_the_disk_of_the_driver_is_read_from_its_neighbour(
    cfg, nodes, models, faults, driver, tmp_path
):
    """Rank 0 is on the node of the driver. Without its neighbour, the damaged shard is noticed, too."""
    faults.plan = no_uploads
    shard = driver / "disk/global_step_2/policy/__0_0.distcp"
    with ranks_on([driver, nodes[1]], cfg, models[0]) as ranks:
        with Run(cfg, ranks) as run:
            run.commit(1, models[1])
            run.commit(2, models[2])
        flip_a_bit(shard)
        with Run(cfg, ranks) as run:
            run.load()
            assert run.resume.checkpoint.step == 2 and same_tensors(ranks, models[2], tmp_path)
            run.commit(3, models[0])
    for step in (2, 3):
        flip_a_bit(driver / f"disk/global_step_{step}/policy/__1_0.distcp")
    with ranks_on([driver], cfg, models[0]) as ranks, Run(cfg, ranks) as run:
        run.load()
        assert run.resume.checkpoint.step == 1 and same_tensors(ranks, models[1], tmp_path)


def test_a_kill_in_the_middle_leaves_the_older_or_the_newer_state(cfg, nodes, models, faults, tmp_path):
    """A rank is killed while it receives a copy. The driver is killed when the other nodes have committed, not it."""
    faults.plan = no_uploads
    reached = tmp_path / "reached"
    with ranks_on(nodes, cfg, models[0]) as ranks, Run(cfg, ranks) as run:
        run.commit(1, models[1])
        ranks.ask([2], Process(), "set", "TRAINER_FAILPOINT", f"copy:received,1,{reached}")
        pid = ranks.ask([2], Process(), "pid")[2]
        killer = threading.Thread(target=kill_when, args=(reached, pid))
        killer.start()
        outcome = run.try_to_commit(2, models[2])
        killer.join()
        assert outcome.error is not None
    assert list((nodes[2] / "disk").glob(".writing-*/policy/*.copying"))
    with ranks_on(nodes, cfg, models[0]) as ranks:
        with Run(cfg, ranks) as run:
            assert not list(tmp_path.glob("node*/disk/.writing-*"))
            run.load()
            assert run.state == {"step": 1} and same_tensors(ranks, models[1], tmp_path)
            fails_at_commit(run)
            assert "killed" in run.try_to_commit(2, models[2]).error
        assert all((node / "disk/global_step_2").exists() for node in nodes)
        with Run(cfg, ranks) as run:
            assert run.resume.checkpoint.step == 1
            run.commit(2, models[0])
        with Run(cfg, ranks) as run:
            run.load()
            assert run.state == {"step": 2} and same_tensors(ranks, models[0], tmp_path)


def test_retention_deletes_copies_and_a_full_disk_of_a_neighbour_does_not_stop_a_save(
    cfg, nodes, models, faults, caplog
):
    cfg.trainer.max_ckpts_to_keep = 1
    cfg.trainer.ckpt_upload_timeout_s = 60
    with small_disk("4m") as small:
        nodes[2], ballast = Path(small), Path(small, "ballast")
        ballast.write_bytes(bytes(3_450_000))  # there is room for the node's own shards, and not for another's
        with ranks_on(nodes, cfg, models[0]) as ranks, Run(cfg, ranks) as run:
            run.commit(1, models[1])
            too_few = [path for path, holders in run.held(1).items() if len(holders) == 1]
            assert too_few == ["policy/__1_0.distcp"], run.held(1)
            assert "policy/__1_0.distcp could not be copied to another node: No space left" in caplog.text
            ballast.unlink()
            store = run.directory.checkpoints.store
            while store.uploads.lag_s():
                threading.Event().wait(0.1)
            run.commit(2, models[2])
            while store.uploads.lag_s():
                threading.Event().wait(0.1)
            run.commit(3, models[1])
            assert [path.name for node in nodes for path in sorted((node / "disk").glob("*global_step*"))] == [
                f"global_step_{step}" for _ in nodes for step in (2, 3)
            ]
    incident = read_incidents(cfg.trainer.run_dir)[0]
    assert (incident.cause, incident.action) == ("missing copies", "continued without copies")
    assert open_store(cfg.trainer.ckpt_path).steps()[-1] >= 2


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def kill_when(reached: Path, pid: int) -> None:
    while not reached.exists():
        threading.Event().wait(0.02)
    os.kill(pid, signal.SIGKILL)


def fails_at_commit(run: Run) -> None:
    """Let the next commit of the driver fail after the other nodes have committed."""

    def fail() -> Iterator[None]:
        yield
        raise OSError("killed")

    calls = fail()
    run.directory.checkpoints._fence = lambda: next(calls)
