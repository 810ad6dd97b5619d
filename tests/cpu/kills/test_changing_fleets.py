"""Jobs whose engines join, leave and are killed all the time: the result is that of a fleet that does not change."""

from __future__ import annotations

import pytest

from tests.support.fleets import LIMITS, TOKEN, Crew
from tests.support.jobs import comparable, left_in_shared_memory, metrics, shared_memory
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
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, str(tmp_path / "model"))

    def words(run: str, *more: str) -> tuple[str, ...]:
        return (f"trainer.run_dir={tmp_path}/{run}", f"model.path={tmp_path}/model", "algorithm=grpo", *more)

    return words


def test_a_fleet_that_changes_trains_what_a_fixed_one_does(job, tmp_path):
    own = ("rollout.max_num_seqs=2", "rollout.max_response_tokens=64", "rollout.n=4")
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
