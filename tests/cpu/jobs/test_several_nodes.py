"""Whole jobs over several nodes, which are network namespaces of this machine. No variable names an interface."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cpu.jobs.test_closed_jobs import reach
from tests.support.jobs import command, comparable, environment, kill_all, metrics, run_forked_job, run_job
from tests.support.nodes import Node, Nodes
from trainer.incidents import read_incidents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = ["trainer.num_workers=2", "logger.plot=false", "trainer.val_interval=-1", "trainer.resume_mode=latest"]


def start(node: Node, head: Node, run_dir: Path, *overrides: str) -> subprocess.Popen:
    """Start a job whose driver is on `node`, in the Ray cluster of `head`."""
    where = [f"trainer.ray_address={head.ray_address}", f"trainer.run_dir={run_dir}"]
    return subprocess.Popen(
        node.command(*command(*overrides, *where)),
        cwd=run_dir.parent, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_job_over_several_nodes_whose_driver_is_lost_is_the_job_of_one_machine(tmp_path, monkeypatch):
    """Two ranks and an engine on a node each, one of them behind a slow link. The driver's own node loses its power,
    and the same command is given on another one.
    """
    job = [*JOB, "rollout=transformers", "trainer.total_steps=3", "trainer.lock_timeout_s=5"]
    alone = run_forked_job(*job, f"trainer.run_dir={tmp_path}/alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")  # a lost driver holds its places until Ray notices
    with Nodes() as nodes:
        head, slow, _, own = nodes.cluster(4, cpus=[1, 1, 1, 0])
        slow.slow_down(mbit=20)
        first = start(own, head, tmp_path / "several", *job)
        reach(first, "global_step_1 (")
        own.lose()
        second = start(head, head, tmp_path / "several", *job)
        output, _ = second.communicate()
        assert second.returncode == 0, output
    assert f"on {own.name}" in output and "no heartbeat for 5 s" in output and "resumed from" in output, output
    assert comparable(metrics(tmp_path / "several")) == comparable(metrics(tmp_path / "alone"))


def driver(job: subprocess.Popen) -> psutil.Process:
    """The process of the job below `nsenter`."""
    return psutil.Process(job.pid).children()[0]


def column(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in metrics(run_dir) if name in row]


def hosts(node: Node, kind: str) -> list[psutil.Process]:
    """The ranks, or the engines, that run on a node."""
    members = [process for process in node.processes() if "ray::_Host" in " ".join(process.cmdline())]
    return [member for member in members if ("VLLM_LOGGING_LEVEL" in member.environ()) == (kind == "engine")]


def test_a_job_goes_on_without_lost_nodes_and_takes_new_ones_in(tmp_path):
    """A link is cut, a spare node takes over; it loses its power, one rank is left; a node with a new address joins."""
    settings = ["rollout=vllm", "trainer.node_timeout_s=5", "trainer.min_workers=1", "trainer.max_restarts=5"]
    where = ["trainer.ray_address=processes", f"trainer.run_dir={tmp_path}/alone"]
    alone = run_job(*JOB, *settings, *where, "trainer.total_steps=4", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    with Nodes() as nodes:
        cluster = nodes.cluster(4)
        head, *others = cluster
        job = start(head, head, tmp_path / "several", *JOB, *settings, "trainer.total_steps=1000")
        output = reach(job, "step 1/1000")
        cut = next(node for node in others if hosts(node, "rank"))
        cut.cut()
        output += reach(job, "step 2/1000")
        lost = next(node for node in others if node is not cut and hosts(node, "rank"))
        lost.lose()
        output += reach(job, "room for 1 of 2 ranks")
        added = nodes.add()
        added.start_ray(head)
        output += reach(job, "step 4/1000")
        kill_all([rank for node in cluster if node not in (cut, lost) for rank in hosts(node, "rank")])
        output += reach(job, "2 rank(s)")
        assert hosts(added, "rank")
        output += reach(job, "step 5/1000")
        driver(job).send_signal(signal.SIGTERM)
        output += job.communicate()[0]
        assert job.returncode == 75, output
    rewards, expected = (column(tmp_path / run, "reward/mean") for run in ("several", "alone"))
    assert rewards[:4] == pytest.approx(expected, rel=1e-3)  # other numbers of ranks round sums in other ways
    assert "was not replayed as it had been logged" not in output
    lines = [(one.role, one.node) for one in read_incidents(str(tmp_path / "several")) if one.cause == "lost node"]
    assert ("node", cut.address) in lines and ("node", lost.address) in lines
