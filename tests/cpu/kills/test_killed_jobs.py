"""Whole jobs that are killed and come back: with Ray and vLLM, on a cluster of Ray, and supervised ones."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.evaluations import evaluate, validation_of
from tests.support.jobs import (
    comparable,
    family,
    is_engine,
    kill_all,
    left_running,
    members,
    metrics,
    run_forked_job,
    run_job,
    start_forked_job,
    start_job,
    wait_until,
)
from tests.support.timelines import assert_fits_metrics, assert_nested, spans_of
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.process.failure_log import read_incidents
from trainer.reports.compare import read_run
from trainer.view.runs import describe_run

pytestmark = pytest.mark.early

STEPS = 5


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


def reached_at(cwd: Path, place: str) -> Path:
    return cwd / f"reached {place.partition(',')[0]}"


def start_and_reach(job: list[str], cwd: Path, place: str, start: Callable[..., Any] = start_job) -> Any:
    """Start the job, and wait until it is at the place `name,n`."""
    reached, log = reached_at(cwd, place), cwd / f"log {place}"
    process = start(*job, cwd=cwd, env={"TRAINER_FAILPOINT": f"{place},{reached}"}, log=log)
    while not reached.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    return process


def killed(job: list[str], cwd: Path, place: str, marker: str) -> None:
    """Start the job and kill all of it at the place `name,n`."""
    process = start_and_reach(job, cwd, place)
    kill_all(family(process.pid))
    process.wait()
    wait_until(lambda: left_running(marker) == [])


def killed_fork(job: list[str], cwd: Path, place: str) -> None:
    process = start_and_reach(job, cwd, place, start_forked_job)
    process.kill_group()
    assert process.wait() == -signal.SIGKILL


def run_bereaved(job: list[str], cwd: Path, place: str) -> str:
    """Run the job to its end, but kill a rank and the engine at the place `name,n`; returns its output."""
    process = start_and_reach(job, cwd, place)
    hosts = members(process.pid)
    engines = [host for host in hosts if is_engine(host)]
    kill_all([*engines, next(host for host in hosts if host not in engines)])
    reached_at(cwd, place).unlink()
    status, output = process.wait(), (cwd / f"log {place}").read_text()
    assert status == 0, output
    return output


def whole_and_killed(*settings: str, cwd: Path) -> tuple[list[dict], list[str]]:
    """Run a job of these settings to its end, on plain processes. Returns its metrics, and the job that is killed."""
    base = [*settings, f"trainer.total_steps={STEPS}", f"trainer.hf_save_interval={STEPS}", "logger.plot=false",
            "trainer.max_ckpts_to_keep=2", "trainer.resume_mode=latest"]  # fmt: skip
    whole = run_forked_job(*base, "trainer.run_name=whole", cwd=cwd)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    return metrics(cwd / "outputs/whole"), [*base, "trainer.run_name=killed"]


def assert_as_if_never_killed(cwd: Path, output: str) -> None:
    """Compare both runs, and what a tool exports. `output` is that of the last start."""
    whole, run = cwd / "outputs/whole", cwd / "outputs/killed"
    assert comparable(metrics(run)) == comparable(metrics(whole))
    assert weights(run) == weights(whole)
    logs = output + "".join(log.read_text() for log in cwd.glob("log *"))
    assert "resume verified" in logs and "took over the run directory" in logs
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
    exported = cwd / "from-checkpoint"
    assert checkpoint_tool(["export", str(run / f"checkpoints/global_step_{STEPS}"), str(exported)]) == 0
    ours, theirs = (load_file(d / "model.safetensors") for d in (exported, run / f"exports/global_step_{STEPS}/policy"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_traced_and_profiled(run: Path) -> None:
    """The timeline has the processes of both starts, and fits the metrics. Ranks and engine have profiled two steps."""
    spans = spans_of(run)
    processes = {"driver", "rank 0", "rank 1", "engine 0", "environment 0"}
    assert processes <= {span.process for span in spans}, "reward processes have no work here"
    assert {f"save {STEPS}", "loading the checkpoint", "validation", "export"} <= {span.name for span in spans}
    assert_nested(spans)
    assert_fits_metrics(spans, metrics(run))
    for number in (1, 5):
        names = {path.name for path in (run / f"profile/step_{number}").iterdir()}
        assert names == {"rank_0.json.gz", "rank_1.json.gz", "engine_0.json.gz"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_job_that_is_killed_and_loses_a_rank_and_its_engine_ends_as_if_never_disturbed(tmp_path, marker):
    """With Ray and vLLM, and a stream of episodes whose environments take times that differ from start to start. The
    first start is killed with all of its processes; the second one outlives a rank and the engine. The timeline and the
    profiles of the killed run change no number."""
    settings = ("rollout=vllm", "trainer.num_workers=2", "environment.name=tests.support.environments:Dawdling",
                "environment.max_turns=3", "environment.max_tokens=96")  # fmt: skip
    rows, job = whole_and_killed(*settings, cwd=tmp_path)
    assert any(row.get("episode/turns/mean", 1) > 1 for row in rows)
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    job += ["logger.trace=true", "trainer.profile=[1,5]"]
    killed(job, tmp_path, "save:manifest_written,2", marker)
    output = run_bereaved(job, tmp_path, "logged,2")
    run = tmp_path / "outputs/killed"
    assert {("rank", "restarted the ranks"), ("engine", "replaced the engine")} <= {
        (one.role, one.action) for one in read_incidents(str(run)) if one.cause == "killed process"
    }
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2, "the driver stays"
    assert_as_if_never_killed(tmp_path, output)
    assert_traced_and_profiled(run)
    assert left_running(marker) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_with_adapters_that_is_killed_ends_as_if_never_killed(tmp_path):
    """They are served by vLLM, beside a critic that is trained whole. One rank trains, and episodes are streamed."""
    settings = ("algorithm=ppo", "trainer.policy.lora.rank=4", "rollout=vllm", "rollout.ahead=1",
                "environment.name=tests.support.environments:Dawdling",
                "environment.max_turns=3", "environment.max_tokens=96")  # fmt: skip
    _, job = whole_and_killed(*settings, cwd=tmp_path)
    killed_fork(job, tmp_path, "save:shards_written,3")
    last = run_forked_job(*job, cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    assert_as_if_never_killed(tmp_path, last.stdout)
    # Adapters are merged into the weights they were trained on, and no others.
    checkpoint = tmp_path / f"outputs/killed/checkpoints/global_step_{STEPS}"
    to = [str(tmp_path / "other"), "--base", str(tmp_path / "from-checkpoint")]
    assert checkpoint_tool(["export", str(checkpoint), *to]) == 2 and not (tmp_path / "other").exists()
    run = tmp_path / "outputs/killed"
    assert evaluate(run, cwd=tmp_path)["metrics"] == validation_of(run, STEPS), "the adapters were served"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_killed_on_a_cluster_that_outlives_it_ends_as_if_never_killed(tmp_path, marker, ray_address):
    """With every state that remembers earlier steps. SIGKILL to the process of the loop, then the same command."""
    settings = ["algorithm=dapo", "data.curriculum=tests.support.curriculum:hardest_first", "data.train_size=24",
                "algorithm.kl_coef=0.01", "+algorithm.options.kl_target=0.05", "+algorithm.options.kl_horizon=64",
                "algorithm.ref_sync_interval=2", "algorithm.rollout_correction=tis", "rollout.ahead=2",
                "logger.save_rollouts=true"]  # fmt: skip
    _, job = whole_and_killed(*settings, cwd=tmp_path)
    job += ["rollout=transformers", f"trainer.ray_address={ray_address}"]
    killed(job, tmp_path, "save:manifest_written,2", marker)
    last = run_job(*job, cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    assert_as_if_never_killed(tmp_path, last.stdout)
    assert left_running(marker) == []
    for step in range(1, STEPS + 1):
        file = f"rollouts/step_{step}.arrow"
        assert (tmp_path / "outputs/killed" / file).read_bytes() == (tmp_path / "outputs/whole" / file).read_bytes()
    marks = {
        name: describe_run(read_run(str(tmp_path / "outputs" / name)), name)["marks"] for name in ("whole", "killed")
    }
    restarts = {name: sum(mark["kind"] == "restart" for mark in some) for name, some in marks.items()}
    assert restarts == {"whole": 0, "killed": 1}


@pytest.mark.timeout(900)
def test_supervised_training_that_is_killed_ends_as_if_never_killed(tmp_path):
    """Two files of whole chats, several times over."""
    files = []
    for name, count in (("a", 7), ("b", 20)):
        chats = [
            [{"role": "user", "content": f"{name}{i}"}, {"role": "assistant", "content": str(i)},
             {"role": "user", "content": "again"}, {"role": "assistant", "content": f"{i}, {i}"}]
            for i in range(count)
        ]  # fmt: skip
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    base = ["data.synthetic=null", f"data.train_files=[{files[0]},{files[1]}]", f"data.val_files=[{files[0]}]",
            "data.messages_key=messages", "sft.batch_size=2", "sft.max_length=64", "sft.steps=8",
            "data.train_size=-1", "trainer.num_workers=2", "trainer.ckpt_interval=2", "logger.plot=false",
            "trainer.resume_mode=latest"]  # fmt: skip
    whole = run_forked_job(*base, "trainer.run_name=whole", job="sft", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    job = [*base, "trainer.run_name=killed"]
    reached, log = tmp_path / "reached", tmp_path / "log"
    env = {"TRAINER_FAILPOINT": f"save:staged,2,{reached}"}
    process = start_forked_job(*job, job="sft", cwd=tmp_path, env=env, log=log)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    process.kill_group()
    assert process.wait() == -signal.SIGKILL, log.read_text()
    last = run_forked_job(*job, job="sft", cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    runs = [tmp_path / "outputs" / name for name in ("whole", "killed")]
    rows = [comparable(metrics(run)) for run in runs]
    assert rows[0] == rows[1] and rows[0][-1]["progress/epoch"] > 1.5
    ours, theirs = ((run / "exports/global_step_8/policy/model.safetensors").read_bytes() for run in runs)
    assert ours == theirs
    assert "resume verified" in last.stdout
    # A finished run may be killed while it waits for an upload, with torn lines: they are cut.
    appended = {name: (runs[1] / name).read_bytes() for name in ("metrics.jsonl", "starts.jsonl", "log.txt")}
    for name in appended:
        with (runs[1] / name).open("ab") as file:
            file.write(b'{"step": 9, "sft/lo')
    assert "nothing is left to do" in run_forked_job(*job, job="sft", cwd=tmp_path).stdout
    assert (runs[1] / "metrics.jsonl").read_bytes() == appended["metrics.jsonl"]
    starts = (runs[1] / "starts.jsonl").read_bytes()
    assert starts.startswith(appended["starts.jsonl"]) and all(map(json.loads, starts.splitlines()))
    assert (runs[1] / "log.txt").read_bytes().startswith(appended["log.txt"] + b"20"), "the torn line is cut"
