"""Whole jobs that are asked to stop, and jobs that resume from something that has changed meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import urllib.request
from datetime import datetime, timedelta

import pytest

from tests.support.jobs import comparable, metrics, run_forked_job, start_forked_job
from tests.support.ports import reserved_port
from trainer.checkpoint.lock import RunLock

pytestmark = pytest.mark.early


def read_page(port: int, name: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=300) as answer:
        return answer.read().decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_stops_on_request_and_checks_what_it_resumes_from(tmp_path):
    """One run through its life: SIGTERM, a deadline, a changed config, a mismatch, a damaged checkpoint, more steps.

    Its first start serves its metrics over HTTP.
    """
    base = [
        "trainer.resume_mode=latest",
        "trainer.val_interval=-1",
        "logger.plot=false",
    ]
    run = tmp_path / "outputs/default"
    output = ""
    with reserved_port() as port:
        endless = ["trainer.ckpt_interval=100000", "trainer.total_steps=100000", f"logger.prometheus_port={port}"]
        job = start_forked_job(*base, *endless, cwd=tmp_path)
        for line in job.stdout:
            output += line
            if " ".join(line.split()).startswith("step 1/100000 "):
                pages = [read_page(port, page) for page in ("health", "metrics")]
                job.send_signal(signal.SIGTERM)
                break
        output += job.communicate(timeout=300)[0]
    assert job.returncode == 75, output
    assert "SIGTERM: finishing this step" in output and "stopped after step" in output
    done = metrics(run)[-1]["step"]
    health = json.loads(pages[0])
    assert health["status"] == "training" and health["step"] >= 1 and health["limit_s"] > health["progress_age_s"]
    first = metrics(run)[0]
    served = set(re.findall(r'metric="([^"]+)",run="default"', pages[1]))
    assert served >= first.keys() - {"step"}, "each metric of a line is served"
    steps = done + 6
    base.append(f"trainer.total_steps={steps}")
    assert (run / f"checkpoints/global_step_{done}/manifest.json").exists()

    with RunLock(str(run), 60) as lock:
        lock.acquire()
        second = run_forked_job(*base, cwd=tmp_path)
        assert second.returncode == 2 and f"in use by process {os.getpid()}" in second.stderr, second.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = run_forked_job(*base, f"logger.prometheus_port={port}", cwd=tmp_path)
    sentence = f"logger.prometheus_host=127.0.0.1 logger.prometheus_port={port}: cannot listen there"
    assert second.returncode == 2 and second.stderr.splitlines()[-1].startswith(f"error: {sentence}"), second.stderr

    soon = (datetime.now() + timedelta(seconds=1)).isoformat()
    stopped = run_forked_job(*base, f"trainer.deadline={soon}", "trainer.val_interval=-1", cwd=tmp_path)
    assert stopped.returncode == 75 and "trainer.deadline" in stopped.stdout, stopped.stdout + stopped.stderr
    assert metrics(run)[-1]["step"] == done + 1

    refused = run_forked_job(*base, "trainer.policy.optimizer.lr=1e-5", cwd=tmp_path)
    assert refused.returncode == 2
    assert "trainer.allow_config_change=[trainer.policy.optimizer.lr]" in refused.stderr.splitlines()[-1]
    refused = run_forked_job(*base, "model.tiny.hidden_size=64", cwd=tmp_path)
    assert refused.returncode == 2 and "another model" in refused.stderr.splitlines()[-1]

    # What was logged after the checkpoint is not what the replay gives: somebody changed the machine, say.
    row = {**metrics(run)[-1], "step": done + 2}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    refused = run_forked_job(*base, "trainer.on_resume_mismatch=stop", cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"step {done + 2} was not replayed as it had been logged: " in refused.stderr.splitlines()[-1]
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    back = run_forked_job(*base, cwd=tmp_path)
    assert back.returncode == 0, back.stdout + back.stderr
    assert "WARNING: resumed from" in back.stdout + back.stderr, back.stdout
    assert [r["step"] for r in metrics(run)] == list(range(1, steps + 1))

    # The newest checkpoint rots: the one before it takes its place, and the run ends where it had ended.
    before = comparable(metrics(run))
    shard = run / f"checkpoints/global_step_{steps}/policy/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    again = run_forked_job(*base, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "skipped a damaged checkpoint" in again.stdout and "policy/__0_0.distcp" in again.stdout
    assert "resume verified" in again.stdout
    assert comparable(metrics(run)) == before

    # A longer schedule is allowed. The logged step that is trained again cannot agree, and that is no mismatch.
    shutil.rmtree(run / f"checkpoints/global_step_{steps}")
    schedule = "trainer.policy.optimizer.schedule_steps"
    longer = [*base[:-1], f"trainer.total_steps={steps + 1}", f"{schedule}=300"]
    longer += [f"trainer.allow_config_change=[{schedule}]", "trainer.on_resume_mismatch=stop"]
    extended = run_forked_job(*longer, cwd=tmp_path)
    assert extended.returncode == 0, extended.stdout + extended.stderr
    assert "replayed steps are not compared with what was logged" in extended.stdout
    assert f"because {schedule} changed" in extended.stdout and "WARNING" not in extended.stdout
    after = comparable(metrics(run))
    assert len(after) == steps + 1 and after[steps - 1]["policy/lr"] > before[-1]["policy/lr"]

    limits = "+trainer.divergence_limits={policy/grad_norm:0}"
    diverged = run_forked_job(*longer, limits, f"trainer.total_steps={steps + 2}", cwd=tmp_path)
    assert diverged.returncode == 3
    assert "Traceback" not in diverged.stderr
    assert diverged.stderr.splitlines()[-1].startswith(
        "error: the run has diverged: policy/grad_norm has been above 0 since step 1, "
    )
