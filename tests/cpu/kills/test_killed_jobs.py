"""Whole jobs, with the vLLM engine, that are killed and come back."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs import (
    comparable,
    family,
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
from trainer.checkpoint.__main__ import main as checkpoint_tool
from trainer.process.failure_log import read_incidents

pytestmark = pytest.mark.early

STEPS = 5


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


def start_and_reach(job: list[str], cwd: Path, place: str, attempt: int) -> subprocess.Popen:
    """Start the job, and wait until it is at the place `name,n`."""
    reached, log = cwd / f"reached{attempt}", cwd / f"log{attempt}"
    process = start_job(*job, cwd=cwd, env={"TRAINER_FAILPOINT": f"{place},{reached}"}, log=log)
    while not reached.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    return process


def killed(job: list[str], cwd: Path, place: str, attempt: int, marker: str) -> None:
    """Start the job and kill all of it at the place `name,n`."""
    process = start_and_reach(job, cwd, place, attempt)
    kill_all(family(process.pid))
    process.wait()
    wait_until(lambda: left_running(marker) == [])


def run_bereaved(job: list[str], cwd: Path, place: str) -> str:
    """Run the job to its end, but kill a rank and the engine at the place `name,n`; returns its output."""
    process = start_and_reach(job, cwd, place, 9)
    hosts = members(process.pid)
    engines = [host for host in hosts if "VLLM_LOGGING_LEVEL" in host.environ()]
    kill_all([*engines, next(host for host in hosts if host not in engines)])
    (cwd / "reached9").unlink()
    status, output = process.wait(), (cwd / "log9").read_text()
    assert status == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "algorithm, settings, places, joins, loses_members",
    [
        ("grpo", ["trainer.num_workers=2"], ["save:manifest_written,2"], False, True),
        (  # adapters, served by vLLM, beside a critic that is trained whole
            "ppo",
            ["trainer.policy.lora.rank=4"],
            ["save:shards_written,3", "save:published,1"],
            False,
            False,
        ),
        (  # everything that remembers earlier steps, on a cluster that outlives the job
            "dapo",
            ["rollout=transformers", "data.curriculum=tests.support.curriculum:hardest_first", "data.train_size=24",
             "algorithm.kl_coef=0.01", "algorithm.kl_controller=adaptive", "algorithm.kl_horizon=64",
             "algorithm.ref_sync_interval=2", "algorithm.rollout_correction=tis", "logger.save_rollouts=true"],
            ["logged,2", "save:manifest_written,2"],
            True,
            False,
        ),
    ],
    ids=["grpo", "ppo-lora", "dapo-curriculum"],
)  # fmt: skip
def test_a_job_killed_again_and_again_ends_as_if_never_killed(
    algorithm, settings, places, joins, loses_members, tmp_path, marker, request
):
    """SIGKILL to every process of it (on a cluster: to what runs the loop); then the same command again, immediately.

    The driver of the last start may outlive a rank and the engine.
    """
    base = [f"algorithm={algorithm}", *settings, f"trainer.total_steps={STEPS}",
            f"trainer.hf_save_interval={STEPS}", "trainer.max_ckpts_to_keep=2", "logger.plot=false",
            "trainer.resume_mode=latest"]  # fmt: skip
    if joins:
        base.append(f"trainer.ray_address={request.getfixturevalue('ray_address')}")
    whole = run_job(*base, "trainer.run_name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    job = [*base, "trainer.run_name=killed"]
    run = tmp_path / "outputs/killed"
    for attempt, place in enumerate(places):
        killed(job, tmp_path, place, attempt, marker)
    if loses_members:
        output = run_bereaved(job, tmp_path, "logged,2")
        assert {("rank", "restarted the ranks"), ("engine", "replaced the engine")} <= {
            (one.role, one.action) for one in read_incidents(str(run)) if one.cause == "killed process"
        }
        assert len((run / "starts.jsonl").read_text().splitlines()) == len(places) + 1, "the driver stays"
    else:
        last = run_job(*job, cwd=tmp_path)
        output = last.stdout + last.stderr
        assert last.returncode == 0, output
    assert comparable(metrics(run)) == comparable(metrics(tmp_path / "outputs/whole"))
    assert weights(run) == weights(tmp_path / "outputs/whole")
    logs = output + "".join((tmp_path / f"log{i}").read_text() for i in range(len(places)))
    assert "resume verified" in logs and "took over the run directory" in logs
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
    assert left_running(marker) == []
    if "logger.save_rollouts=true" in settings:
        for step in range(1, STEPS + 1):
            assert (run / f"rollouts/step_{step}.jsonl").read_bytes() == (
                tmp_path / f"outputs/whole/rollouts/step_{step}.jsonl"
            ).read_bytes()
    exported = tmp_path / "from-checkpoint"
    assert checkpoint_tool(["export", str(run / f"checkpoints/global_step_{STEPS}"), str(exported)]) == 0
    ours, theirs = (load_file(d / "model.safetensors") for d in (exported, run / f"exports/global_step_{STEPS}/policy"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if "lora" in "".join(settings):  # adapters are merged into the weights they were trained on, and no others
        to = ["export", str(run / f"checkpoints/global_step_{STEPS}"), str(tmp_path / "other"), "--base", str(exported)]
        assert checkpoint_tool(to) == 2 and not (tmp_path / "other").exists()


@pytest.mark.timeout(900)
def test_supervised_training_killed_twice_ends_as_if_never_killed(tmp_path):
    """Two weighted data sets of whole chats, each several times over."""
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
            "data.messages_key=messages", "sft.weights=[2,1]", "sft.batch_size=2", "sft.max_length=64", "sft.steps=8",
            "data.train_size=-1", "trainer.num_workers=2", "trainer.ckpt_interval=2", "logger.plot=false",
            "trainer.resume_mode=latest"]  # fmt: skip
    whole = run_forked_job(*base, "trainer.run_name=whole", module="trainer.sft", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    job = [*base, "trainer.run_name=killed"]
    for attempt, place in enumerate(["save:manifest_written,2", "save:staged,2"]):
        reached, log = tmp_path / f"reached{attempt}", tmp_path / f"log{attempt}"
        env = {"TRAINER_FAILPOINT": f"{place},{reached}"}
        process = start_forked_job(*job, module="trainer.sft", cwd=tmp_path, env=env, log=log)
        wait_until(lambda reached=reached, process=process: reached.exists() or process.poll() is not None)
        process.kill_group()
        assert process.wait() == -signal.SIGKILL, log.read_text()
    last = run_forked_job(*job, module="trainer.sft", cwd=tmp_path)
    assert last.returncode == 0, last.stdout + last.stderr
    runs = [tmp_path / "outputs" / name for name in ("whole", "killed")]
    rows = [comparable(metrics(run)) for run in runs]
    assert rows[0] == rows[1] and rows[0][-1]["progress/epoch"] > 1.5
    ours, theirs = ((run / "exports/global_step_8/policy/model.safetensors").read_bytes() for run in runs)
    assert ours == theirs
    assert "resume verified" in last.stdout + (tmp_path / "log1").read_text()
    # A finished run may be killed while it waits for an upload, with torn lines: they are mended all the same.
    appended = {name: (runs[1] / name).read_bytes() for name in ("metrics.jsonl", "starts.jsonl", "log.txt")}
    for name in appended:
        with (runs[1] / name).open("ab") as file:
            file.write(b'{"step": 9, "sft/lo')
    assert "nothing is left to do" in run_forked_job(*job, module="trainer.sft", cwd=tmp_path).stdout
    assert (runs[1] / "metrics.jsonl").read_bytes() == appended["metrics.jsonl"]
    starts = (runs[1] / "starts.jsonl").read_bytes()
    assert starts.startswith(appended["starts.jsonl"]) and all(map(json.loads, starts.splitlines()))
    assert b'{"step": 9, "sft/lo\n' in (runs[1] / "log.txt").read_bytes()

    # What was logged is not what the replay gives: the checkpoint before takes over.
    shutil.rmtree(runs[1] / "checkpoints/global_step_8")
    lines = metrics(runs[1])
    lines[6]["sft/loss"] += 1.0
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    back = run_forked_job(*job, "trainer.on_resume_mismatch=fallback", module="trainer.sft", cwd=tmp_path)
    assert back.returncode == 0 and "checkpoints/global_step_4, step 4" in back.stdout, back.stdout + back.stderr
    assert comparable(metrics(runs[1])) == rows[0]
