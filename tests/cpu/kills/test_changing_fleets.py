"""Jobs whose engines join, leave and are killed all the time: the result is that of a fleet that does not change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fleets import LIMITS, TOKEN, Crew
from tests.support.jobs import (
    comparable,
    left_in_shared_memory,
    metrics,
    shared_memory,
    start_forked_job,
    wait_until,
)
from tests.support.killed_jobs import assert_trained_once, run_until
from trainer.models.tiny import TinyShape, build_tiny
from trainer.process.model_server import TOKEN as VARIABLE

pytestmark = [pytest.mark.early, pytest.mark.slow]

EXPORT = "exports/global_step_6/policy/model.safetensors"
FLEET = ("rollout.fleet=true", "rollout.num_engines=0")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns the words of a job, by the name of its run."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    monkeypatch.setenv("TRAINER_TIME_LIMITS", LIMITS)
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)
    build_tiny(size, str(tmp_path / "model"))

    def words(run: str, *more: str) -> tuple[str, ...]:
        return (f"trainer.run_dir={tmp_path}/{run}", f"model.path={tmp_path}/model", "algorithm=grpo", *more)

    return words


def test_a_fleet_that_changes_trains_what_a_fixed_one_does(job, tmp_path):
    own = ("rollout.max_num_seqs=5", "rollout.max_response_tokens=48", "rollout.n=4")
    before = shared_memory()
    assert run_until(tmp_path / "fixed.log", *job("fixed", *own))
    crew = Crew(tmp_path / "fleet", every_s=0.4)
    assert run_until(tmp_path / "fleet.log", *job("fleet", *own, *FLEET), disturb=crew.disturb)
    crew.wait()

    assert comparable(metrics(tmp_path / "fleet")) == comparable(metrics(tmp_path / "fixed"))
    assert (tmp_path / "fleet" / EXPORT).read_bytes() == (tmp_path / "fixed" / EXPORT).read_bytes()
    log = (tmp_path / "fleet.log").read_text()
    assert crew.killed >= 2 and len(crew.left) >= 2 and set(crew.left) == {0}
    assert log.count("has joined") >= 5 and log.count("has left") >= 2, log
    assert "does not serve" in log, "no kill has cost an engine a request"
    assert not [*(tmp_path / "fleet/.engines").iterdir()]
    assert not left_in_shared_memory(before)


def test_a_fleet_in_flight_loses_no_prompt_and_trains_none_twice(job, tmp_path):
    """The job is killed, too. Its engines serve the next start."""
    own = ("rollout.engine=tests.support.token_engine:JOINING", "rollout.max_logprob_diff=null",
           "rollout.in_flight_updates=true", "rollout.max_staleness=2", "rollout.max_response_tokens=128",
           "logger.save_rollouts=true")  # fmt: skip
    crew = Crew(tmp_path / "fleet", every_s=0.3)
    words, saved = job("fleet", *own, *FLEET), tmp_path / "fleet/checkpoints/global_step_2"
    log = tmp_path / "fleet.log"
    assert not run_until(log, *words, disturb=crew.disturb, kill_when=lambda _: saved.exists())
    assert run_until(log, *words, disturb=crew.disturb)
    crew.wait()
    assert_trained_once(tmp_path / "fleet", log, batch=4, most_stale=2)
    assert crew.killed >= 2 and set(crew.left) == {0}
    assert metrics(tmp_path / "fleet")[-1]["perf/continued_tokens"] > 0


@pytest.mark.release
@pytest.mark.timeout(900)
def test_engines_of_vllm_are_replaced_twice(job, tmp_path):
    """One is killed and one is ended while no other is there: the run waits for the next."""
    own = (
        "rollout=vllm",
        "trainer.num_workers=1",
        "rollout.max_num_seqs=16",
        "rollout.max_response_tokens=32",
        "trainer.total_steps=4",
    )
    words = {run: [*job(run, *own), "trainer.ckpt_interval=2"] for run in ("fixed", "fleet")}
    for run, more in (("fixed", ()), ("fleet", FLEET)):
        started = start_forked_job(*words[run], *more, cwd=tmp_path, log=tmp_path / f"{run}.log")
        if run == "fleet":
            wait_until((tmp_path / "fleet/.engines/job.json").exists)
            crew = Crew(tmp_path / "fleet", every_s=0.0)
            for step in (1, 2):
                engine = crew.join()
                wait_until(lambda step=step: is_logged(tmp_path / "fleet", step))
                engine.send_signal(signal.SIGKILL if step == 1 else signal.SIGTERM)
            last = crew.join()
        assert started.wait(600) == 0, (tmp_path / f"{run}.log").read_text()
    assert last.wait(60) == 0
    assert comparable(metrics(tmp_path / "fleet")) == comparable(metrics(tmp_path / "fixed"))
    assert "the run waits until one joins" in (tmp_path / "fleet.log").read_text()


def is_logged(run: Path, step: int) -> bool:
    return (run / "metrics.jsonl").exists() and any(row["step"] >= step for row in metrics(run))
