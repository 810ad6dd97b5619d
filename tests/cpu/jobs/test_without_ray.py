"""A job on plain processes of this machine."""

from __future__ import annotations

import pytest

from tests.support.jobs import left_in_shared_memory, left_running, metrics, run_job, shared_memory, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.release
def test_a_job_needs_no_ray(tmp_path, marker, monkeypatch):
    """On a machine where Ray cannot be imported. That the numbers are the same with Ray is seen on several nodes."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('ray')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    before = shared_memory()
    job = ["rollout=transformers", "trainer.total_steps=1", "trainer.resume_mode=latest"]
    job += ["trainer.deterministic=true"]  # on CPU, too, ranks and engines then take deterministic kernels
    done = run_job(*job, "trainer.ray_address=processes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert left_running(marker) == []
    wait_until(lambda: left_in_shared_memory(before) == set())
    assert [row["step"] for row in metrics(tmp_path / "outputs/default")] == [0, 1]
    assert "outputs/default holds no checkpoint to continue: training starts from the beginning" in done.stdout
    assert "it/s" not in done.stdout + done.stderr, "progress bars of libraries would fill log files"
