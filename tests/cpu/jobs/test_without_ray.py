"""A job on plain processes of this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.jobs import left_in_shared_memory, left_running, metrics, shared_memory, start_job, wait_until

pytestmark = pytest.mark.slow
UNUSED = ("matplotlib", "ray", "scipy", "sklearn", "torchvision", "vllm")
"""Packages that no process of such a job needs. A process that has imported one has mapped its compiled modules."""


@pytest.mark.release
def test_a_job_needs_no_ray(tmp_path, marker, monkeypatch):
    """On a machine where Ray cannot be imported. That the numbers are the same with Ray is seen on several nodes.

    Nor has it imported other packages that it does not use when its first step is finished.
    """
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('ray')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))  # no other test has made the warm start there
    before = shared_memory()
    job = ["rollout=transformers", "trainer.total_steps=1", "trainer.resume_mode=latest"]
    job += ["trainer.deterministic=true"]  # on CPU, too, ranks and engines then take deterministic kernels
    logged = tmp_path / "logged"
    env = {"TRAINER_FAILPOINT": f"logged,31,{logged}"}  # after the warm start
    running = start_job(*job, "trainer.ray_address=processes", cwd=tmp_path, env=env)
    wait_until(lambda: logged.exists() or running.poll() is not None)
    processes = [one := psutil.Process(running.pid), *one.children(recursive=True)]
    assert not {
        name for one in processes for name in UNUSED if f"/{name}/" in Path(f"/proc/{one.pid}/maps").read_text()
    }
    forks = [one for one in processes if one.name() in ("rank 0", "engine 0")]
    assert [one.parent().parent().pid for one in forks] == [running.pid] * 2, "they share the driver's imports"
    logged.unlink()
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 0, output
    assert left_running(marker) == []
    wait_until(lambda: left_in_shared_memory(before) == set())
    assert [row["step"] for row in metrics(tmp_path / "outputs/default")] == [0, 1]
    assert "outputs/default holds no checkpoint to continue: training starts from the beginning" in output
    assert "it/s" not in output, "progress bars of libraries would fill log files"
