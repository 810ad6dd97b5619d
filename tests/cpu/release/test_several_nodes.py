"""Whole jobs over several nodes, which are network namespaces of this machine. No variable names an interface."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.cpu.jobs.test_closed_jobs import reach
from tests.support.buckets import s3_variables
from tests.support.jobs import (
    command,
    command_of,
    comparable,
    environment,
    is_engine,
    kill_all,
    metrics,
    run_forked_job,
)
from tests.support.nodes import Node, Nodes
from trainer.config.engines import ENGINES
from trainer.process.failures import read_incidents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = dataclasses.replace(ENGINES["transformers"], environment=ENGINES["vllm"].environment)
"""`is_engine` knows its processes by their environment."""
TRANSFORMERS = ["rollout=transformers", f"rollout.engine={__name__}:ENGINE"]
JOB = ["trainer.num_workers=2", "logger.plot=false", "trainer.val_interval=-1", "trainer.resume_mode=latest"]


def start(
    node: Node, head: Node, run_dir: Path, *overrides: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start a job whose driver is on `node`, in the Ray cluster of `head`."""
    where = [f"trainer.ray_address={head.ray_address}", f"trainer.run_dir={run_dir}"]
    return subprocess.Popen(
        node.command(*command(*overrides, *where)),
        cwd=run_dir.parent, env={**environment(), **(env or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def start_object_store(node: Node) -> dict[str, str]:
    """Run an object store with the bucket `runs` on a node, until that is lost; returns the variables for its users."""
    server = [sys.executable, "-m", "moto.server", "--host=0.0.0.0", "--port=9000"]
    subprocess.Popen(node.command(*server), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    variables = s3_variables(f"http://{node.address}:9000")
    make = (
        "import time, tests.support.buckets as b\n"
        "for _ in range(600):\n"
        "    try: b.make_bucket('runs'); break\n"
        "    except OSError: time.sleep(0.1)\n"
    )
    subprocess.run(
        node.command(sys.executable, "-c", make), env={**environment(), **variables}, check=True, capture_output=True
    )
    return variables


def test_a_job_loses_the_node_of_a_rank_and_that_of_its_driver_and_is_the_job_of_one_machine(tmp_path, monkeypatch):
    """Two ranks and an engine are on a node each, one of them behind a slow link. The node of a rank loses its power.
    Then the driver's own node is lost, and the same command is given on the node of a rank.
    """
    job = [*JOB, *TRANSFORMERS, "trainer.total_steps=4"]
    alone = run_forked_job(*job, f"trainer.run_dir={tmp_path}/alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    monkeypatch.setenv("TRAINER_TIME_LIMITS", "LOCK_LEASE_S=5 NODE_ANSWER_S=5")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")  # a lost driver holds its CPUs until Ray notices
    with Nodes() as nodes:
        cluster = nodes.cluster(5, cpus=[1, 1, 1, 1, 0])
        head, own = cluster[0], cluster[-1]
        cluster[1].slow_down(mbit=20)
        variables = start_object_store(nodes.add())
        job += ["trainer.ckpt_path=s3://runs/run", "trainer.max_restarts=3"]
        first = start(own, head, tmp_path / "several", *job, env=variables)
        output = reach(first, "global_step_2 (")
        lost = next(node for node in cluster[1:] if hosts(node, "rank"))
        lost.lose()
        output = reach(first, "global_step_3 (", output)
        left = next(node for node in cluster[:-1] if node is not lost and hosts(node, "rank"))
        own.lose()
        second = start(left, head, tmp_path / "several", *job, env=variables)
        later, _ = second.communicate()
        assert second.returncode == 0, output + later
    assert "resumed from s3://runs/run/global_step_2" in output, output
    assert f"on {own.name}" in later and "no heartbeat for 5 s" in later, later
    assert "resumed from s3://runs/run/global_step_3" in later, later
    assert comparable(metrics(tmp_path / "several")) == comparable(metrics(tmp_path / "alone"))


def driver(job: subprocess.Popen) -> psutil.Process:
    """The process of the job below `nsenter`."""
    return psutil.Process(job.pid).children()[0]


def column(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in metrics(run_dir) if name in row]


def hosts(node: Node, kind: str) -> list[psutil.Process]:
    """The ranks, or the engines, that run on a node."""
    members = [process for process in node.processes() if "ray::Host" in command_of(process)]
    return [member for member in members if is_engine(member) == (kind == "engine")]


def test_a_job_continues_without_failed_nodes_and_uses_new_ones(tmp_path, monkeypatch):
    """The engine's node is cut off, and a spare one takes over. A rank's node loses its power: one rank is left. A node
    with a new address joins.
    """
    monkeypatch.setenv("TRAINER_TIME_LIMITS", "NODE_ANSWER_S=5")
    settings = ["rollout=vllm", "trainer.min_world_size=1", "trainer.max_restarts=5"]
    alone = run_forked_job(*JOB, *settings, f"trainer.run_dir={tmp_path}/alone", "trainer.total_steps=4", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    with Nodes() as nodes:
        cluster = nodes.cluster(5, cpus=[0, 1, 1, 1, 1])
        head, *others = cluster
        job = start(head, head, tmp_path / "several", *JOB, *settings, "trainer.total_steps=1000")
        output = reach(job, "step 1/1000")
        cut = next(node for node in others if hosts(node, "engine"))
        cut.cut()
        output = reach(job, "a new one starts", output)
        output = reach(job, "step 3/1000", output)
        lost = next(node for node in others if node is not cut and hosts(node, "rank"))
        lost.lose()
        output = reach(job, "capacity for 1 of 2 ranks", output)
        added = nodes.add()
        added.start_ray(head)
        output = reach(job, "step 4/1000", output)
        kill_all([rank for node in (*cluster, added) if node not in (cut, lost) for rank in hosts(node, "rank")])
        output = reach(job, "2 rank(s)", output)
        assert hosts(added, "rank")
        output = reach(job, "step 5/1000", output)
        driver(job).send_signal(signal.SIGTERM)
        output += job.communicate()[0]
        assert job.returncode == 75, output
    rewards, expected = (column(tmp_path / run, "reward/mean") for run in ("several", "alone"))
    assert rewards[:4] == pytest.approx(expected, rel=1e-3)  # other numbers of ranks round sums in other ways
    assert "was not replayed as it had been logged" not in output
    lines = [(one.role, one.node) for one in read_incidents(str(tmp_path / "several")) if one.cause == "failed node"]
    assert {("engine", cut.address), ("node", cut.address), ("node", lost.address)} <= set(lines)
