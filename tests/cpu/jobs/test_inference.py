"""Jobs that use inference servers, whatever happens to the job and to the servers."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.evaluations import evaluate, validation_of
from tests.support.forks import ForkedCommand
from tests.support.inference import Server, http_client
from tests.support.jobs import metrics, run_forked_job, start_forked_job, wait_until
from tests.support.killed_jobs import STEPS, assert_trained_once, run_until
from tests.support.runs import rollouts_of
from trainer.data.records import decode_groups
from trainer.models.tiny import TinyShape, build_tiny

SETTINGS = ["rollout.max_num_seqs=20", "trainer.total_steps=4"]
QUIET = ["trainer.ckpt_interval=-1", "trainer.val_interval=-1"]
AHEAD = ["rollout.ahead=1", "trainer.ckpt_interval=2", "trainer.max_restarts=0"]

# The first test waits for two engines of vLLM.
pytestmark = [pytest.mark.release, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ready(tmp_path_factory) -> Iterator[Server]:
    words = ["rollout.max_num_seqs=20", "rollout.max_response_tokens=1024"]
    with Server(tmp_path_factory.mktemp("vllm") / "log", *words, limits="SERVER_LEASE_S=10") as server:
        yield server


@pytest.fixture
def server(ready) -> Server:
    """The server of this file, when it has its engine again."""
    return ready.wait()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A run that samples ahead, with a vLLM of its own."""
    directory = tmp_path_factory.mktemp("own")
    done = run_forked_job("trainer.run_dir=run", "rollout=vllm", *SETTINGS, *AHEAD, cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory / "run"


def test_a_server_evaluates_a_checkpoint_as_the_run_has_validated_it(server, own, tmp_path):
    found = evaluate(own, "rollout.engine=server", f"rollout.urls=[{server.url}]", cwd=tmp_path)
    assert found["metrics"] == validation_of(own, 4)
    assert server.status()["job"] is None and not list((tmp_path / "evaluated").glob(".weights-*"))


def start_until(place: str, reached: Path, server: Server) -> ForkedCommand:
    """Start a job that uses the server; returns when it waits at a failpoint. It goes on when `reached` is deleted."""
    words = ["rollout=server", f"rollout.urls=[{server.url}]", *SETTINGS, *QUIET]
    env = {"TRAINER_FAILPOINT": f"{place},{reached}"}
    directory = reached.parent
    process = start_forked_job("trainer.run_dir=run", *words, cwd=directory, env=env, log=directory / "output")
    wait_until(reached.exists)
    return process


@pytest.mark.usefixtures("own")  # it has made the built-in model, whose warm start has the same failpoints
def test_a_signal_ends_the_wait_for_a_server_whose_machine_has_vanished(server, tmp_path):
    """It closes no connection: the job waits for a sign of life, and saves when none has come."""
    log, reached = tmp_path / "run/log.txt", tmp_path / "reached"
    process = start_until("trained,1", reached, server)
    server.process.send_signal(signal.SIGSTOP)
    try:
        reached.unlink()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, (tmp_path / "output").read_text()
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert "no sign of life for 30 s" in log.read_text()


def vllm_metric(server: Server, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}\{{.*\}} (\S+)", http_client().get(f"{server.url}/metrics").text, re.MULTILINE)
    return float(value)


def tokens_at_rest(server: Server) -> float:
    """Wait until the engine has generated nothing for 3 s; return how many tokens it has generated since its start.

    No request may run for a moment while others wait.
    """
    count, since = -1.0, 0.0
    while time.monotonic() < since + 3 or count < 0:
        if (now := vllm_metric(server, "generation_tokens_total")) != count:
            count, since = now, time.monotonic()
        time.sleep(0.2)
    return count


def test_a_killed_job_on_a_server_of_vllm_generates_only_the_episodes_that_are_missing(server, tmp_path):
    """20 requests run at a time, and all completions are as long, so most of them are still to come when the first ones
    end. That takes far longer than the journal needs to write those."""
    requests, longest, env = 160, 512, {"TRAINER_TIME_LIMITS": "JOURNAL_FLUSH_S=0.05"}
    build_tiny(TinyShape(), str(tmp_path / "model"))  # as the server's; so cold, it never stops
    words = (f"model.path={tmp_path}/model", "rollout.engine=server", f"rollout.urls=[{server.url}]",
             f"rollout.max_response_tokens={longest}", "rollout.temperature=0.01", "trainer.train_batch_size=80",
             "trainer.total_steps=1", "algorithm=grpo", "trainer.val_interval=-1",
             f"trainer.run_dir={tmp_path}/run")  # fmt: skip
    pieces = tmp_path / "run/.journal"
    assert not run_until(tmp_path / "log", *words, env=env, kill_when=lambda _: any(pieces.glob("step_1-*.arrow")))
    found = [decode_groups(path.read_bytes())[0] for path in pieces.glob("step_1-*.arrow")]
    recorded = sum(len(episodes) for piece in found for episodes in piece.values())
    assert recorded < requests
    before = tokens_at_rest(server)  # without those of the job that was killed
    assert run_until(tmp_path / "log", *words)
    generated = vllm_metric(server, "generation_tokens_total") - before
    (row,) = metrics(tmp_path / "run")
    sampled, taken = row["journal/replies_sampled"], row["journal/replies_recorded"]
    assert sampled + taken == requests and taken >= max(recorded, 1)  # some had no reward yet
    assert 0 <= generated - sampled * longest <= longest, "one more sequence runs beside those of the job"


def test_a_job_in_flight_on_a_server_that_is_killed_trains_every_prompt_once(server, tmp_path):
    """The server and its engine outlive the kill. Ten prompts, and 12 that are trained."""
    run, log = tmp_path / "run", tmp_path / "log"
    build_tiny(TinyShape(), str(tmp_path / "model"))  # as the server's; so cold, it never stops
    words = (f"model.path={tmp_path}/model", f"trainer.run_dir={run}", "rollout.engine=server",
             f"rollout.urls=[{server.url}]", "rollout.in_flight_updates=true", "rollout.max_staleness=2",
             "rollout.max_response_tokens=1024", "rollout.temperature=0.01", "trainer.train_batch_size=2",
             "algorithm=grpo", "logger.save_rollouts=true")  # fmt: skip
    processes, reached = server.engine(), tmp_path / "reached"
    # On a quiet machine the engine generates at this moment.
    env = {"TRAINER_FAILPOINT": f"in_flight:taken,3,{reached}"}
    assert not run_until(log, *words, env=env, kill_when=lambda _: reached.exists())
    taken, trained = tmp_path / "taken", tmp_path / "trained"
    resume_at = math.inf

    def suspend_until_weights_come(_: int) -> None:
        """Stop the engine in the middle of completions while the ranks train, until new weights wait for it."""
        nonlocal resume_at
        if taken.exists():
            before, until = vllm_metric(server, "generation_tokens_total"), time.monotonic() + 1
            while vllm_metric(server, "generation_tokens_total") == before and time.monotonic() < until:
                time.sleep(0.002)
            processes[-1].suspend()
            taken.unlink()
        if trained.exists():
            trained.unlink()
            resume_at = time.monotonic() + 2
        if time.monotonic() >= resume_at:
            processes[-1].resume()
            resume_at = math.inf

    points = [f"in_flight:taken,{step},{taken};trained,{step},{trained}" for step in range(1, STEPS + 1)]
    assert run_until(log, *words, env={"TRAINER_FAILPOINT": ";".join(points)}, disturb=suspend_until_weights_come)
    assert server.engine() == processes
    assert_trained_once(run, log, batch=2, most_stale=2)
    samples = [sample for step in range(1, STEPS + 1) for row in rollouts_of(run, step) for sample in row["samples"]]
    assert any(len(sample["version_spans"]) > 1 for sample in samples), "no completion has got new weights"
    for sample in samples:
        if spans := sample["version_spans"]:
            versions = [version for version, _ in spans]
            assert versions == sorted(set(versions)) and sample["weight_versions"] == [versions[0], versions[-1]]
            assert sum(count for _, count in spans) == sum(sample["mask"])


@pytest.mark.usefixtures("own")  # it has made the built-in model, whose warm start has the same failpoints
def test_a_signal_ends_the_wait_for_a_server_that_is_gone(server, tmp_path):
    """The last test of this file: the server stays away."""
    log, reached = tmp_path / "run/log.txt", tmp_path / "reached"
    process = start_until("logged,1", reached, server)
    server.kill()
    reached.unlink()
    wait_until(lambda: "waits for the server" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, (tmp_path / "output").read_text()
    assert "while no inference server answered" in log.read_text().splitlines()[-1]
