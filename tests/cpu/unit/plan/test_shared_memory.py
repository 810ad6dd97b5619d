"""What a run puts into shared memory."""

from __future__ import annotations

import math
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.checkpoints import save
from tests.support.namespaces import with_mounts
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.store import open_store
from trainer.checkpoint.tiers import open_tiers
from trainer.cluster.ray_head import CPU_OBJECT_STORE_BYTES
from trainer.config import Config, TinyConfig
from trainer.models.tiny import build_tiny
from trainer.plan.advice import find_changes
from trainer.plan.hardware import Cluster, parse_cluster
from trainer.plan.plan import make_plan
from trainer.plan.shared_memory import caches_in_memory, most_checkpoints
from trainer.workers.rank import Rank


@pytest.fixture
def on_cpu(cfg) -> Config:
    """A run of the built-in model on this machine."""
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    return cfg


def with_shared(cluster: Cluster, size: int) -> Cluster:
    return replace(cluster, device=replace(cluster.device, shared_memory=size))


def problems(cfg: Config, cluster: Cluster) -> list[str]:
    return [one for one in make_plan(cfg, cluster, traced=False).problems if one.startswith("shared memory: ")]


LIMITS = """
import subprocess, sys
from trainer.config import compose
from trainer.errors import UserError
from trainer.files.shared_memory import check_free_space
from trainer.plan.hardware import Cluster, Device, _free_shared_memory
from trainer.plan.plan import make_plan

needed = int(sys.argv[1])
for address, reserved, sizes in (("processes", 0, sys.argv[2:4]), ("null", 2**29, sys.argv[2:])):
    cfg = compose([f"trainer.ray_address={address}", "rollout.num_engines=1"])
    for size in map(int, sizes):
        subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
        device = Device("cpu", 24 * 10**9, 1e11, 3e11, 1e10, 1e9, 1e9, 1e10, 24 * 10**9)
        device = device.__class__(**{**vars(device), "shared_memory": _free_shared_memory()})
        plan = make_plan(cfg, Cluster(1, 2, device), traced=False)
        try:
            check_free_space(needed, reserved)
            passes = True
        except UserError:
            passes = False
        print(address, size, passes, not any(one.startswith("shared memory: ") for one in plan.problems))
"""


def size_of_weights(rank: Rank, model: str) -> int:
    rank.build(roles(rank.cfg, ["policy"]), model)
    return rank.roles["policy"].weight_bytes("float32")


def test_the_plan_fits_where_the_check_of_a_run_passes(tmp_path):
    """With the sizes that ranks compute, in a `/dev/shm` of these sizes: around the limits, with and without Ray."""
    build_tiny(TinyConfig(), str(tmp_path))
    (needed,) = run_ranks(1, size_of_weights, str(tmp_path), device="cpu")
    margin = 2**16
    limits = (needed, CPU_OBJECT_STORE_BYTES, CPU_OBJECT_STORE_BYTES + needed)
    sizes = [str(limit + sign * margin) for limit in limits for sign in (-1, 1)]
    command = [sys.executable, "-c", LIMITS, str(needed), *sizes]
    done = subprocess.run(with_mounts(["-t tmpfs -o size=1g tmpfs /dev/shm"], command), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 8
    assert all(passes == fits for _, _, passes, fits in found), done.stdout
    by_address = {name: [row[3] for row in found if row[0] == name] for name in ("processes", "null")}
    assert by_address["processes"] == ["False", "True"]
    # Ray's objects are on a disk until all of them have room. Then the weights lack some.
    assert by_address["null"] == ["False", "True", "True", "False", "False", "True"]


def test_weights_that_go_another_way_need_none(on_cpu, cpu):
    def weights() -> int:
        return make_plan(on_cpu, cpu, traced=False).shared.weights

    whole = weights()
    assert whole == 4 * make_plan(on_cpu, cpu, traced=False).roles[0].model.total
    on_cpu.rollout.dtype = "bfloat16"
    assert weights() == whole / 2
    on_cpu.trainer.policy.lora.rank = 8
    assert weights() == 0, "the engine serves the adapters"
    on_cpu.rollout.lora_sync = "merged"
    assert weights() > 0
    on_cpu.rollout.weight_sync = "broadcast"
    assert weights() == 0


def test_gpus_share_nothing_but_what_is_asked_for(cfg, node):
    plan = make_plan(cfg, node, traced=False)
    assert (plan.shared.weights, plan.shared.checkpoints) == (0, 0) and plan.fits
    cfg.rollout.weight_sync, cfg.rollout.colocate, cfg.trainer.offload = "shared_memory", False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    assert make_plan(cfg, node, traced=False).shared.weights == 2 * 596_049_920
    assert problems(cfg, with_shared(node, 10**9)) != []


def test_what_is_in_shared_memory_is_in_host_memory(on_cpu, cpu):
    before = make_plan(on_cpu, cpu, traced=False)
    cache_in_memory(on_cpu)
    after = make_plan(on_cpu, cpu, traced=False)
    held = after.shared.checkpoints * after.shared.checkpoint
    assert held == after.host - before.host == 3 * after.saves.checkpoint > 0
    assert after.shared.total - before.shared.total == held


def cache_in_memory(cfg: Config, keep: int = 1) -> None:
    cfg.trainer.ckpt_path, cfg.trainer.ckpt_cache_dir = "s3://bucket/run", "/dev/shm/run"
    cfg.trainer.max_ckpts_to_keep, cfg.trainer.ckpt_interval, cfg.trainer.total_steps = keep, 2, 21
    cfg.plan.storage_gb_s = 100.0


def test_a_sentence_names_the_key_to_change(on_cpu, cpu):
    cache_in_memory(on_cpu, keep=-1)
    plan = make_plan(on_cpu, cpu, traced=False)
    assert plan.shared.checkpoints == 11
    (sentence,) = problems(on_cpu, with_shared(cpu, plan.shared.total - 1))
    for part in ("MB of weights for the engines", "11 checkpoints of 5.22 MB", "536.87 MB of Ray's objects"):
        assert part in sentence
    assert sentence.endswith("; choose a smaller trainer.max_ckpts_to_keep, or a disk for trainer.ckpt_cache_dir")
    assert problems(on_cpu, with_shared(cpu, plan.shared.total)) == []
    (sentence,) = problems(on_cpu, with_shared(cpu, 1000))
    assert sentence.endswith("(in a container: --shm-size), or choose rollout.weight_sync=broadcast")


def test_changes_make_room_in_shared_memory(on_cpu, cpu):
    cache_in_memory(on_cpu, keep=-1)
    fewer = make_plan(on_cpu, cpu, traced=False).shared.total - 1
    assert find_changes(on_cpu, with_shared(cpu, fewer)) == {"trainer.max_ckpts_to_keep": 1}
    on_cpu.trainer.max_ckpts_to_keep = 1
    none = make_plan(on_cpu, cpu, traced=False).shared.total - 1
    assert find_changes(on_cpu, with_shared(cpu, none)) == {"trainer.ckpt_cache_dir": None}
    on_cpu.trainer.ckpt_cache_dir = None
    assert find_changes(on_cpu, with_shared(cpu, 10**6)) == {"rollout.weight_sync": "broadcast"}


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/dev/shm/run", True),
        ("/dev/shm", True),
        ("/dev/../dev/shm/a/b", True),
        ("/dev/shmem", False),
        ("/local", False),
    ],
)
def test_a_cache_in_memory_is_found_by_its_path(on_cpu, directory, found):
    assert not caches_in_memory(on_cpu)
    on_cpu.trainer.ckpt_cache_dir = directory
    assert caches_in_memory(on_cpu) == found


def test_a_link_to_shared_memory_is_one(on_cpu, tmp_path):
    (tmp_path / "link").symlink_to("/dev/shm")
    on_cpu.trainer.ckpt_cache_dir = str(tmp_path / "link" / "run")
    assert caches_in_memory(on_cpu)


def test_nodes_hold_their_shards_and_those_of_others(cfg, node):
    cache_in_memory(cfg)
    cfg.trainer.num_workers = cfg.rollout.num_engines = 16

    def on_nodes(count: int, replicas: int) -> int:
        cfg.trainer.ckpt_replicas = replicas
        return make_plan(cfg, Cluster(count, 8, node.device), traced=False).shared.checkpoint

    whole = 12 * 596_049_920
    assert on_nodes(2, 0) == whole // 2 and on_nodes(2, 1) == whole // 2 * 2
    assert on_nodes(2, 5) == whole // 2 * 2, "there is one other node"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 8
    assert on_nodes(2, 1) == whole, "all ranks are on one node"


@pytest.fixture
def root(s3_url, monkeypatch) -> str:
    use_s3(monkeypatch, s3_url)
    return f"{make_bucket(f'bucket-{secrets.token_hex(4)}')}/run"


@pytest.mark.parametrize(
    "rules", [{"newest": 1}, {"newest": 2}, {"newest": 3}, {"newest": 1, "every": 2}, {"newest": -1}], ids=str
)
def test_a_node_holds_as_many_checkpoints_as_retention_leaves(on_cpu, root, tmp_path, rules: dict[str, Any]):
    """Of a real run's retention: what is on the disk before each commit, and the one that is then written."""
    store = open_tiers(root, str(tmp_path))
    store.uploads.start(lambda: None)
    checkpoints, most, steps = CheckpointManager(store, Retention(**rules)), 0, 6
    for step in range(1, steps + 1):
        most = max(most, len(list(tmp_path.glob("global_step_*"))) + 1)
        save(checkpoints, step)
        while step not in open_store(root).steps():
            threading.Event().wait(0.02)
    store.uploads.finish(60)
    on_cpu.trainer.total_steps, on_cpu.trainer.max_ckpts_to_keep = steps, rules["newest"]
    on_cpu.trainer.keep_every = rules.get("every", -1)
    planned = most_checkpoints(on_cpu, 1, 0.1)
    # At the end those of all rules and the one that is written need not be there at the same time.
    assert most <= planned <= most + ("every" in rules)


@pytest.mark.parametrize("upload", [0.5, 1.5, 2.3, 4.0])
def test_checkpoints_wait_for_slow_uploads(on_cpu, upload):
    """An upload takes so many intervals. It takes the newest checkpoint; what is newer than the one before stays."""
    on_cpu.trainer.total_steps, on_cpu.trainer.max_ckpts_to_keep = 1000, 1
    held, uploaded, uploading, ends, most = [0], -1, 0, upload, 0
    for now in range(1, 60):
        while ends <= now:
            uploaded, uploading = uploading, held[-1]
            ends = max(ends, uploading) + upload if uploading > uploaded else math.inf
        most = max(most, len(held) + 1)  # with the one that is committed now
        held = [step for step in held if step >= uploaded] + [now]
        if ends == math.inf:
            uploading, ends = now, now + upload
    assert most <= most_checkpoints(on_cpu, 1, upload) <= most + 1


def test_half_of_the_host_is_shared_memory_unless_the_config_says_how_much():
    host = parse_cluster("8xH100")
    assert host.device.shared_limit == host.device.host_memory // 2
    assert parse_cluster("8xH100", 512).device.shared_limit == 256e9
    assert parse_cluster("8xH100", None, 0.064).device.shared_limit == 64e6
