"""Whole jobs, with the vLLM engine, that are killed and come back."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.cpu.jobs import comparable, family, kill_all, left_running, metrics, run_job, start_job

STEPS = 5


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


def killed(job: list[str], cwd: Path, place: str, attempt: int, marker: str) -> bool:
    """Start the job and kill all of it at the place `name,n` or, for a number, after so many seconds."""
    reached, log = cwd / f"reached{attempt}", cwd / f"log{attempt}"
    at_place = not place.replace(".", "").isdigit()
    env = {"TRAINER_FAILPOINT": f"{place},{reached}"} if at_place else {}
    process = start_job(*job, cwd=cwd, env=env, log=log)
    started = time.monotonic()
    while process.poll() is None:
        if reached.exists() if at_place else time.monotonic() - started > float(place):
            kill_all(family(process.pid))
            process.wait()
            deadline = time.monotonic() + 20
            while left_running(marker) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left_running(marker) == []
            return True
        assert time.monotonic() - started < 300, log.read_text()
        time.sleep(0.02)
    assert process.returncode == 0, log.read_text()
    return False


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "algorithm, ranks, places",
    [
        ("grpo", 1, ["save:staged,1", "save:manifest_written,2", "time"]),
        ("ppo", 2, ["save:shards_written,2", "save:published,1", "logged,2"]),
    ],
)
def test_a_job_killed_three_times_ends_as_if_never_killed(algorithm, ranks, places, tmp_path, marker):
    """With the vLLM engine. SIGKILL to every process of it; then the same command again."""
    base = [f"algorithm={algorithm}", f"trainer.num_workers={ranks}", f"trainer.total_steps={STEPS}",
            f"trainer.hf_save_interval={STEPS}", "trainer.max_ckpts_to_keep=2", "logger.plot=false",
            "trainer.resume_mode=latest"]  # fmt: skip
    whole = run_job(*base, "trainer.run_name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    job, kills = [*base, "trainer.run_name=killed"], 0
    moments, seconds = random.Random(algorithm), 0.0
    for attempt, place in enumerate(places):
        # At any moment before the first checkpoint of the first attempt: this one is resuming or in its first steps.
        at = f"{moments.uniform(0.5, 1.0) * seconds:.2f}" if place == "time" else place
        started = time.monotonic()
        kills += killed(job, tmp_path, at, attempt, marker)
        seconds = seconds or time.monotonic() - started
    last = run_job(*job, cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    assert kills == 3
    run = tmp_path / "outputs/killed"
    assert comparable(metrics(run)) == comparable(metrics(tmp_path / "outputs/whole"))
    assert weights(run) == weights(tmp_path / "outputs/whole")
    logs = last.stdout + "".join((tmp_path / f"log{i}").read_text() for i in range(len(places)))
    assert "resume verified" in logs and "took over the run directory" in logs
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
    assert left_running(marker) == []
