"""A job on plain processes of this machine."""

from __future__ import annotations

import pytest

from tests.support.jobs import comparable, left_running, metrics, run_job, shared_memory, wait_until

pytestmark = pytest.mark.slow


def test_a_job_without_ray_trains_as_one_with_ray(tmp_path, marker, monkeypatch):
    """On a machine where Ray cannot be imported."""
    base = ["rollout=transformers", "trainer.num_workers=2", "logger.plot=false"]
    with_ray = run_job(*base, "trainer.run_name=ray", "trainer.resume_mode=latest", cwd=tmp_path)
    assert with_ray.returncode == 0, with_ray.stderr
    assert "/outputs/ray holds no checkpoint to continue: training starts from the beginning" in with_ray.stdout
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('ray')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    before = shared_memory()
    without = run_job(*base, "trainer.ray_address=processes", "trainer.run_name=processes", cwd=tmp_path)
    assert without.returncode == 0, without.stderr
    for done in (with_ray, without):
        assert "it/s" not in done.stdout + done.stderr, "progress bars of libraries would fill log files"
    assert left_running(marker) == []
    wait_until(lambda: shared_memory() <= before)  # other tests may have something there at this moment
    outputs = tmp_path / "outputs"
    assert comparable(metrics(outputs / "processes")) == comparable(metrics(outputs / "ray"))
