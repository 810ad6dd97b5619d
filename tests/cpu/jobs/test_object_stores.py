"""A job whose checkpoints are in an object store alone."""

from __future__ import annotations

import shutil

import pytest

from tests.support.buckets import make_bucket, s3_server, use_s3
from tests.support.jobs import comparable, metrics, run_job

pytestmark = pytest.mark.slow


def test_a_job_continues_from_the_store_on_another_machine(tmp_path, monkeypatch):
    """Its last step is that of a job that was never interrupted."""
    base = ["trainer.ray_address=processes", "rollout=transformers", "trainer.num_workers=2", "logger.plot=false"]
    outputs = tmp_path / "outputs"
    with s3_server() as url:
        use_s3(monkeypatch, url)
        stored = [f"trainer.ckpt_path={make_bucket('jobs')}/run", "trainer.resume_mode=latest"]
        first = run_job(*base, *stored, "trainer.run_name=first", "trainer.total_steps=1", cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        shutil.rmtree(outputs / "first")
        second = run_job(*base, *stored, "trainer.run_name=second", cwd=tmp_path)
        assert second.returncode == 0, second.stderr
    whole = run_job(*base, "trainer.run_name=whole", "trainer.ckpt_interval=-1", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    rows = comparable(metrics(outputs / "second"))
    assert rows[-1] == comparable(metrics(outputs / "whole"))[-1]
    assert [row["step"] for row in metrics(outputs / "second")] == [0, 1, 2]
