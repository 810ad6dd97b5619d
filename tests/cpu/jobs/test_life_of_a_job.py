"""A whole job that is asked to stop, and resumes although its newest checkpoint is damaged."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

import pytest

from tests.support.jobs import comparable, metrics, run_forked_job, start_forked_job
from tests.support.ports import reserved_port

pytestmark = [pytest.mark.early, pytest.mark.slow, pytest.mark.timeout(900)]


def read_page(port: int, name: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=300) as answer:
        return answer.read().decode()


def test_a_job_stops_on_request_and_resumes_from_the_last_good_checkpoint(tmp_path):
    """SIGTERM while the job serves its metrics over HTTP; then one bit of the newest checkpoint is flipped."""
    base = ["trainer.resume_mode=latest", "trainer.val_interval=-1", "rollout.max_response_tokens=8"]
    base.append("trainer.policy.optimizer.scheduler=constant")  # `cosine` would see how many steps there are
    run, output = tmp_path / "outputs/default", ""
    with reserved_port() as port:
        endless = ["trainer.total_steps=100000", f"logger.prometheus={port}"]
        job = start_forked_job(*base, *endless, cwd=tmp_path)
        for line in job.stdout:
            output += line
            if " ".join(line.split()).startswith("step 2/100000 "):
                pages = [read_page(port, page) for page in ("health", "metrics")]
                job.send_signal(signal.SIGTERM)
                break
        output += job.communicate(timeout=300)[0]
    assert job.returncode == 75, output
    assert "SIGTERM: finishing this step" in output and "stopped after step" in output
    before = comparable(metrics(run))
    done = before[-1]["step"]
    health = json.loads(pages[0])
    assert health["status"] == "training" and health["step"] >= 1 and health["limit_s"] > health["progress_age_s"]
    served = set(re.findall(r'metric="([^"]+)",run="default"', pages[1]))
    assert served >= metrics(run)[0].keys() - {"step"}, "each metric of a line is served"

    shard = run / f"checkpoints/global_step_{done}/policy/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    again = run_forked_job(*base, f"trainer.total_steps={done + 1}", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "skipped a damaged checkpoint" in again.stdout and "policy/__0_0.distcp" in again.stdout
    assert "resume verified: 1 replayed step identical" in again.stdout
    rows = comparable(metrics(run))
    assert rows[:-1] == before and rows[-1]["step"] == done + 1
