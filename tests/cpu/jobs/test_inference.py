"""Jobs that use inference servers: the same numbers as with engines of their own, whatever happens to the servers."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.evaluations import evaluate, validation_of
from tests.support.forks import fork_server
from tests.support.inference import Server, free_port
from tests.support.jobs import (
    SMALL,
    command,
    comparable,
    environment,
    metrics,
    run_forked_job,
    start_forked_job,
    wait_until,
)
from tests.support.killed_jobs import STEPS, assert_trained_once, run_until
from tests.support.nodes import Nodes
from tests.support.recipes import compose_words
from tests.support.runs import rollouts_of
from trainer.config.rollout import TOKEN
from trainer.data.records import decode_groups
from trainer.models.tiny import TinyShape, build_tiny

SETTINGS = ["rollout.max_num_seqs=20", "trainer.total_steps=4"]
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(900)  # the first test of a kind waits for three engines of vLLM


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Server]]:
    logs, words = tmp_path_factory.mktemp("vllm"), ["rollout.kv_cache_mb=32", "rollout.max_num_seqs=20"]
    words += ["rollout.max_response_tokens=512"]
    limits = "SERVER_LEASE_S=10"
    with Server(logs / "1", *words, limits=limits) as first, Server(logs / "2", *words, limits=limits) as second:
        yield [first.wait(), second.wait()]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> Path:
    """A run with an engine of its own."""
    directory = tmp_path_factory.mktemp("plain")
    done = run_forked_job("trainer.run_dir=run", "rollout=vllm", *SETTINGS, cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory / "run"


@pytest.fixture(scope="module")
def plain(plain_run) -> list[dict[str, Any]]:
    """The metrics of a run with an engine of its own."""
    return comparable(metrics(plain_run))


def test_a_server_evaluates_a_checkpoint_as_the_run_has_validated_it(servers, plain_run, tmp_path):
    found = evaluate(plain_run, "rollout.engine=server", f"rollout.urls=[{servers[0].url}]", cwd=tmp_path)
    assert found["metrics"] == validation_of(plain_run, 4)
    assert servers[0].status()["job"] is None and not list((tmp_path / "evaluated").glob(".weights-*"))


def run_served(servers: list[Server], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    urls = f"rollout.urls=[{','.join(server.url for server in servers)}]"
    return run_forked_job("trainer.run_dir=run", "rollout=server", urls, *SETTINGS, *words, cwd=cwd, timeout=600)


def at_step(run_dir: Path, step: int, action: Callable[[], None]) -> threading.Thread:
    """Do something once the run has logged a step."""

    def wait() -> None:
        path = run_dir / "metrics.jsonl"
        while not path.exists() or f'"step": {step},' not in path.read_text():
            time.sleep(0.005)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_job_that_is_stopped_leaves_its_server(servers, tmp_path):
    server = servers[0].wait()
    words = ["trainer.run_dir=run", "rollout=server", f"rollout.urls=[{server.url}]", *SETTINGS]
    process = start_forked_job(*words, "trainer.total_steps=1000", cwd=tmp_path, log=tmp_path / "output")
    at_step(tmp_path / "run", 1, lambda: process.send_signal(signal.SIGTERM))
    assert process.wait(120) == 75, (tmp_path / "output").read_text()
    assert server.status()["job"] is None


def test_a_signal_ends_the_wait_for_a_server_that_is_gone(servers, plain, tmp_path):
    """The run continues with the numbers of one that was not stopped."""
    server, log, reached = servers[0].wait(), tmp_path / "run/log.txt", tmp_path / "reached"
    words = ["rollout=server", f"rollout.urls=[{server.url}]", *SETTINGS, "trainer.ckpt_interval=-1"]
    env = {"TRAINER_FAILPOINT": f"logged,1,{reached}"}
    process = start_forked_job("trainer.run_dir=run", *words, cwd=tmp_path, env=env, log=tmp_path / "output")
    wait_until(reached.exists)
    server.kill()
    reached.unlink()
    wait_until(lambda: "waits for the server" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, (tmp_path / "output").read_text()
    server.start()
    assert "while no inference server answered" in log.read_text().splitlines()[-1]
    server.wait()
    done = run_served([server], tmp_path, "trainer.resume_mode=latest", "trainer.ckpt_interval=-1")
    assert done.returncode == 0, done.stderr
    assert comparable(metrics(tmp_path / "run")) == plain


def test_a_signal_ends_the_wait_for_a_server_whose_machine_has_vanished(servers, tmp_path):
    """It closes no connection, so the job would wait for signs of life."""
    server, log, reached = servers[0].wait(), tmp_path / "run/log.txt", tmp_path / "reached"
    words = ["rollout=server", f"rollout.urls=[{server.url}]", *SETTINGS, "trainer.ckpt_interval=-1"]
    env = {"TRAINER_FAILPOINT": f"trained,1,{reached}"}
    process = start_forked_job("trainer.run_dir=run", *words, cwd=tmp_path, env=env, log=tmp_path / "output")
    wait_until(reached.exists)
    server.process.send_signal(signal.SIGSTOP)
    try:
        reached.unlink()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, (tmp_path / "output").read_text()
    finally:
        server.process.send_signal(signal.SIGCONT)
    told = log.read_text()
    assert f"after SIGTERM the inference server {server.url} has not answered for 4 s" in told
    assert "no sign of life" not in told


AHEAD = ["rollout.ahead=1", "trainer.ckpt_interval=2", "trainer.max_restarts=0"]


@pytest.fixture(scope="module")
def vllm_ahead(tmp_path_factory) -> list[dict[str, Any]]:
    """The metrics of a run that samples ahead, with a vLLM of its own."""
    directory = tmp_path_factory.mktemp("own")
    own = run_forked_job("trainer.run_dir=run", "rollout=vllm", *SETTINGS, *AHEAD, cwd=directory)
    assert own.returncode == 0, own.stderr
    return comparable(metrics(directory / "run"))


@pytest.mark.slow
def test_the_api_server_of_vllm_dies_under_a_job_that_samples_ahead(servers, vllm_ahead, tmp_path):
    """Then its engine does. The numbers are those of vLLM in the job, also where a batch ahead was cut off."""
    server = servers[0]
    faults = [lambda: server.engine()[1].kill(), lambda: server.engine()[-1].kill()]
    threads = [at_step(tmp_path / "run", step, fail) for step, fail in enumerate(faults, start=1)]
    done = run_served([server], tmp_path, *AHEAD)
    for thread in threads:
        thread.join(60)
    assert done.returncode == 0, done.stderr
    assert "inference server" in (tmp_path / "run/log.txt").read_text()
    assert comparable(metrics(tmp_path / "run")) == vllm_ahead


@pytest.mark.slow
def test_what_a_vllm_that_is_gone_for_good_had_to_do_is_done_by_the_other_to_the_last_bit(
    servers, vllm_ahead, tmp_path, monkeypatch
):
    first, second = (server.wait() for server in servers)
    thread = at_step(tmp_path / "run", 1, second.kill)
    monkeypatch.setenv("TRAINER_TIME_LIMITS", "SERVER_ABSENCE_S=5")
    done = run_served([first, second], tmp_path, *AHEAD)
    thread.join(10)
    assert done.returncode == 0, done.stderr
    assert second.url in (tmp_path / "run/log.txt").read_text()
    assert comparable(metrics(tmp_path / "run")) == vllm_ahead


def vllm_metric(server: Server, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}\{{.*\}} (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return float(value)


@pytest.mark.slow
def test_a_killed_job_on_a_server_of_vllm_generates_only_the_episodes_that_are_missing(servers, tmp_path):
    """20 requests run at a time, and all completions are as long, so three quarters of them are still to come when
    the first ones end. That takes far longer than the journal needs to write those."""
    server, requests, longest = servers[0].wait(), 80, 512
    build_tiny(TinyShape(), str(tmp_path / "model"))  # as the server's; so cold, it never stops
    words = (f"model.path={tmp_path}/model", "rollout.engine=server", f"rollout.urls=[{server.url}]",
             f"rollout.max_response_tokens={longest}", "rollout.temperature=0.01", "trainer.train_batch_size=40",
             "trainer.total_steps=1", "algorithm=grpo", "trainer.val_interval=-1")  # fmt: skip

    def generated(run: str, **options: Any) -> tuple[bool, float]:
        wait_until(lambda: vllm_metric(server, "num_requests_running") == 0)  # those of a job that was killed
        before = vllm_metric(server, "generation_tokens_total")
        ended = run_until(tmp_path / "log", *words, f"trainer.run_dir={tmp_path}/{run}", **options)
        return ended, vllm_metric(server, "generation_tokens_total") - before

    ended, whole = generated("whole")
    assert ended and whole >= requests * longest
    assert not generated("killed", kill_when=lambda _: any(tmp_path.glob("killed/.journal/step_1-*.arrow")))[0]
    pieces = [decode_groups(path.read_bytes())[0] for path in tmp_path.glob("killed/.journal/step_1-*.arrow")]
    recorded = sum(len(episodes) for piece in pieces for episodes in piece.values())
    ended, rest = generated("killed")
    assert ended and 0 < recorded < requests
    assert rest <= (requests - recorded + 1) * longest, "one more sequence runs beside those of the job"
    rows = [metrics(tmp_path / run) for run in ("whole", "killed")]
    assert comparable(rows[1]) == comparable(rows[0])


@pytest.mark.slow
def test_a_job_in_flight_on_a_server_that_is_killed_trains_every_prompt_once(servers, tmp_path):
    """The server and its engine outlive each kill. Ten prompts, and 12 that are trained."""
    server, run, log = servers[0].wait(), tmp_path / "run", tmp_path / "log"
    build_tiny(TinyShape(), str(tmp_path / "model"))  # as the server's; so cold, it never stops
    words = (f"model.path={tmp_path}/model", f"trainer.run_dir={run}", "rollout.engine=server",
             f"rollout.urls=[{server.url}]", "rollout.in_flight_updates=true", "rollout.max_staleness=2",
             "rollout.max_response_tokens=512", "rollout.temperature=0.01", "trainer.train_batch_size=2",
             "algorithm=grpo", "logger.save_rollouts=true")  # fmt: skip
    processes, under_way = server.engine(), []
    for number, place in enumerate(["finished,1", "published,2", "taken,3"]):
        reached = tmp_path / f"reached {number}"

        def is_reached(_: float, reached: Path = reached) -> bool:
            if reached.exists():
                under_way.append(vllm_metric(server, "num_requests_running"))
            return reached.exists()

        env = {"TRAINER_FAILPOINT": f"in_flight:{place},{reached}"}
        assert not run_until(log, *words, env=env, kill_when=is_reached), place
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
    assert max(under_way) > 0, "no kill came while the engine generated"
    assert server.engine() == processes
    assert_trained_once(run, log, batch=2, most_stale=2)
    samples = [sample for step in range(1, STEPS + 1) for row in rollouts_of(run, step) for sample in row["samples"]]
    assert any(len(sample["version_spans"]) > 1 for sample in samples), "no completion has got new weights"
    for sample in samples:
        if spans := sample["version_spans"]:
            versions = [version for version, _ in spans]
            assert versions == sorted(set(versions)) and sample["weight_versions"] == [versions[0], versions[-1]]
            assert sum(count for _, count in spans) == sum(sample["mask"])


@pytest.mark.slow
def test_a_server_on_another_machine_gets_the_weights_over_the_network(plain, tmp_path):
    token = {TOKEN: "a token for two machines"}
    with Nodes() as nodes:
        here, there = nodes.add(), nodes.add()
        here.path("/dev/shm/here").touch()
        assert not there.path("/dev/shm/here").exists()
        words = ["rollout.kv_cache_mb=32", "inference.host=0.0.0.0", "rollout.max_num_seqs=20"]
        with open(tmp_path / "log", "w") as log:
            subprocess.Popen(
                there.command(sys.executable, "-m", "trainer.inference", *words),
                env=environment() | token, stdout=log, stderr=log,
            )  # fmt: skip
        urls = f"rollout.urls=[http://{there.address}:8000]"
        job = ["rollout=server", urls, "trainer.ray_address=processes", f"trainer.run_dir={tmp_path}/run"]
        done = subprocess.run(
            here.command(*command(*job, *SETTINGS)), env=environment() | token, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
    assert comparable(metrics(tmp_path / "run")) == plain


@pytest.mark.slow
def test_two_jobs_of_the_example_end_as_one_job_with_its_own_engine_does(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "programs"
    programs.mkdir()
    fork_server().write_python(programs)
    env = environment() | {"PATH": f"{programs}:{os.environ['PATH']}", "PORT": str(free_port())}
    words = [*SMALL, "trainer.ray_address=processes", "logger.plot=false", "trainer.hf_save_interval=20"]
    words = [word for word in words if not word.startswith(("trainer.total_steps", "trainer.val", "trainer.ckpt"))]
    apart = subprocess.run(
        ["bash", "examples/inference_server.sh", *words], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert apart.returncode == 0, apart.stdout + apart.stderr
    one = run_forked_job(
        "data=reverse_text", "rollout=vllm", "trainer.run_dir=one", "trainer.hf_save_interval=20",
        "trainer.total_steps=20", "trainer.val_interval=10", "trainer.ckpt_interval=10", cwd=tmp_path,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    runs = [tmp_path / "outputs/inference_server", tmp_path / "one"]
    assert len((runs[0] / "starts.jsonl").read_text().splitlines()) == 2
    first, second = (comparable(metrics(run)) for run in runs)
    assert first == second and len(first) > 20
    weights = [(run / "exports/global_step_20/policy/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_services_of_compose_continue_a_killed_run_on_an_empty_machine(tmp_path, monkeypatch, s3_url):
    """The trainer dies when it has saved step 2. The store and the server stay, and have the addresses of this test."""
    use_s3(monkeypatch, s3_url)
    make_bucket("runs")
    served = ["rollout.kv_cache_mb=32", "rollout.max_num_seqs=20"]
    with Server(tmp_path / "server", *served, limits="SERVER_LEASE_S=10") as server:
        server.wait()

        def job(run: str) -> list[str]:
            words = compose_words("trainer", RUN=run, OVERRIDES="trainer.total_steps=3")
            words = [word.replace("http://inference:8000", server.url) for word in words[1:]]
            return [*words, "rollout=server", "rollout.max_num_seqs=20", "logger.plot=false"]

        lost, new, spared = (tmp_path / name for name in ("lost", "new", "spared"))
        for machine in (lost, new, spared):
            machine.mkdir()
        whole = run_forked_job(*job("whole"), cwd=spared)  # first: it makes the model
        assert whole.returncode == 0, whole.stdout + whole.stderr
        reached = tmp_path / "reached"
        killed = start_forked_job(
            *job("composed"), cwd=lost, log=lost / "log", env={"TRAINER_FAILPOINT": f"save:published,2,{reached}"}
        )
        wait_until(lambda: reached.exists() or killed.poll() is not None)
        assert reached.exists(), (lost / "log").read_text()
        killed.kill_group()
        assert killed.wait() == -signal.SIGKILL
        continued = run_forked_job(*job("composed"), cwd=new)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert "resumed from s3://runs/composed/global_step_2" in continued.stdout
    rows = comparable(metrics(new / "outputs/composed"))
    assert rows == comparable(metrics(spared / "outputs/whole")) and [row["step"] for row in rows] == [0, 1, 2, 3]
