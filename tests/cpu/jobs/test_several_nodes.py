"""Whole jobs over several nodes, which are network namespaces of this machine. No variable names an interface."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import command, comparable, environment, metrics, run_job
from tests.support.nodes import Node, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = ["rollout=vllm", "trainer.num_workers=2", "logger.plot=false", "trainer.val_interval=-1"]


def start(node: Node, head: Node, run_dir: Path, *overrides: str) -> subprocess.Popen:
    """Start a job whose driver is on `node`, in the Ray cluster of `head`."""
    where = [f"trainer.ray_address={head.ray_address}", f"trainer.run_dir={run_dir}"]
    return subprocess.Popen(
        node.command(*command(*JOB, *where, *overrides)),
        cwd=run_dir.parent, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_job_over_three_nodes_is_the_job_of_one_machine(tmp_path):
    """Two ranks and an engine on a node each, one of them behind a slow link."""
    alone = run_job(*JOB, "trainer.ray_address=processes", f"trainer.run_dir={tmp_path}/alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    with Nodes() as nodes:
        cluster = nodes.cluster(3)
        cluster[1].slow_down(mbit=20)
        job = start(cluster[0], cluster[0], tmp_path / "several")
        output, _ = job.communicate()
        assert job.returncode == 0, output
    assert comparable(metrics(tmp_path / "several")) == comparable(metrics(tmp_path / "alone"))
