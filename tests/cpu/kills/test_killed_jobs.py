"""Whole jobs that are killed and come back: with vLLM on a cluster of Ray, and supervised ones."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs import (
    comparable,
    family,
    is_engine,
    kill_all,
    left_running,
    members,
    metrics,
    run_forked_job,
    start_forked_job,
    start_job,
    wait_until,
)
from tests.support.timelines import assert_fits_metrics, assert_nested, spans_of
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.process.failures import read_incidents

pytestmark = pytest.mark.early

STEPS = 3


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


def reached_at(cwd: Path, place: str) -> Path:
    return cwd / f"reached {place.partition(',')[0]}"


def start_and_reach(job: list[str], cwd: Path, place: str) -> Any:
    """Start the job, and wait until it is at the place `name,n`."""
    reached, log = reached_at(cwd, place), cwd / f"log {place}"
    process = start_job(*job, cwd=cwd, env={"TRAINER_FAILPOINT": f"{place},{reached}"}, log=log)
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


def run_bereaved(job: list[str], cwd: Path, place: str) -> str:
    """Run the job to its end, but kill a rank and the engine at the place `name,n`; returns its output."""
    process = start_and_reach(job, cwd, place)
    hosts = members(os.getpid())  # the cluster has started them, which is a child of this process
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
    """The timeline has the processes of both starts, and fits the metrics. Ranks have profiled two steps."""
    spans = spans_of(run)
    processes = {"driver", "rank 0", "rank 1", "engine 0", "environment 0"}
    assert processes <= {span.process for span in spans}, "reward processes have no work here"
    assert {f"save {STEPS}", "loading the checkpoint", "validation", "export"} <= {span.name for span in spans}
    assert_nested(spans)
    assert_fits_metrics(spans, metrics(run))
    for number in (1, STEPS):
        names = {path.name for path in (run / f"profile/step_{number}").iterdir()}
        assert names == {"rank_0.json.gz", "rank_1.json.gz"}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_job_that_is_killed_and_loses_a_rank_and_its_engine_ends_as_if_never_disturbed(tmp_path, marker, ray_address):
    """On a cluster of Ray that outlives the job, with adapters that the engine serves, and episodes whose environments
    take times that differ from start to start. The process of the loop is killed first; the second start outlives a
    rank and the engine. The timeline and the profiles of the killed run change no number.
    """
    settings = ("rollout=vllm", "trainer.policy.lora.rank=4", "trainer.num_workers=2",
                "environment.name=tests.support.environments:Dawdling",
                "environment.max_turns=3", "environment.max_tokens=96")  # fmt: skip
    rows, job = whole_and_killed(*settings, cwd=tmp_path)
    assert any(row.get("episode/turns/mean", 1) > 1 for row in rows)
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows[1:])
    job += [f"trainer.ray_address={ray_address}", "logger.trace=true", f"trainer.profile=[1,{STEPS}]"]
    killed(job, tmp_path, "save:manifest_written,2", marker)
    output = run_bereaved(job, tmp_path, "logged,1")
    run = tmp_path / "outputs/killed"
    assert {("rank", "restarted the ranks"), ("engine", "replaced the engine")} <= {
        (one.role, one.action) for one in read_incidents(str(run)) if one.cause == "killed process"
    }
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2, "the driver stays"
    assert_as_if_never_killed(tmp_path, output)
    assert_traced_and_profiled(run)
    assert left_running(marker) == []
    # Adapters are merged into the weights they were trained on, and no others.
    checkpoint, other = run / f"checkpoints/global_step_{STEPS}", tmp_path / "other"
    to = [str(other), "--base", str(tmp_path / "from-checkpoint")]
    assert checkpoint_tool(["export", str(checkpoint), *to]) == 2 and not other.exists()


def checkpoint_files(run: Path, step: int) -> dict[str, str]:
    """Hashes of what a checkpoint holds, but for what names the run or the save."""
    manifest = json.loads((run / f"checkpoints/global_step_{step}/manifest.json").read_text())
    own = ("config.yaml", "trainer_state.json", "policy/.metadata")
    return {entry["path"]: entry["hash"] for entry in manifest["files"] if entry["path"] not in own}


@pytest.mark.timeout(900)
def test_supervised_training_made_longer_and_killed_ends_as_one_long_run(tmp_path):
    """Two files of whole chats, several times over. A run of two steps is continued to eight, and killed in a save."""
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
            "data.messages_key=messages", "sft.batch_size=2", "sft.max_length=64",
            "sft.optimizer.scheduler=cosine", "sft.optimizer.schedule_steps=9", "trainer.val_interval=2",
            "data.train_size=-1", "trainer.num_workers=2", "trainer.ckpt_interval=2", "logger.plot=false",
            "trainer.resume_mode=latest"]  # fmt: skip
    for name, steps in {"whole": 8, "killed": 2}.items():
        done = run_forked_job(*base, f"trainer.run_name={name}", f"sft.steps={steps}", job="sft", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    job = [*base, "trainer.run_name=killed", "sft.steps=8"]
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
    assert checkpoint_files(runs[0], 8) == checkpoint_files(runs[1], 8)
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
