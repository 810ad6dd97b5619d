"""Whole jobs that are killed many times: the real job on processes of a `LocalCluster`, started in a moment.

`python -m tests.support.killed_jobs` imports once and then forks a job for each line of JSON on its stdin. The job,
its ranks, its engine and the launcher of both share a process group, which one signal ends. The server answers with
the id of the job's process and, when nothing of that group is left, with its status.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 6
CONFIG = (
    "algorithm=ppo",
    "rollout=transformers",
    "logger.plot=false",
    "logger.progress=false",
    "trainer.device=cpu",
    f"trainer.total_steps={STEPS}",
    "trainer.train_batch_size=4",
    "trainer.mini_batch_size=2",
    "trainer.ckpt_interval=2",
    "trainer.max_ckpts_to_keep=2",
    "trainer.val_interval=3",
    f"trainer.hf_save_interval={STEPS}",
    "trainer.resume_mode=latest",
    "trainer.policy.optimizer.lr=1e-3",
    "trainer.policy.optimizer.scheduler=cosine",
    "trainer.critic.optimizer.lr=1e-3",
    "algorithm.policy_loss=tests.support.noisy_loss:noisy_clip",
    "reward.name=tests.support.hashed_reward:hashed",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    "data.train_size=10",
    "data.val_size=4",
)

# ----------------------------------------------------------------------------------------------------------
# Inside the server and the job


@functools.cache
def config(*overrides: str) -> Any:
    from trainer.config import compose

    return compose([*CONFIG, *overrides])


def run(spec: dict[str, Any]) -> int:
    """Run the job of `spec` in a process group of its own; returns its exit status."""
    os.setsid()
    output = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(spec["env"])

    from trainer.cluster.launcher import ForkedLauncher
    from trainer.cluster.local import LocalCluster
    from trainer.jobs import train_with_rollouts

    cfg = config(*spec["overrides"])
    try:
        with ForkedLauncher() as launcher:
            train_with_rollouts(cfg, "cpu", LocalCluster(cfg, "cpu", launcher))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def serve() -> None:

    import trainer.generation.transformers_engine
    import trainer.jobs
    import trainer.models.tiny
    import trainer.workers.rank  # noqa: F401
    from trainer.cluster.supervisor import adopt_orphans
    from trainer.output import show_messages

    adopt_orphans()
    show_messages()
    print("ready", flush=True)
    for line in sys.stdin:
        spec = json.loads(line)
        config(*spec["overrides"])  # the job finds it composed
        job = os.fork()
        if job == 0:
            status = run(spec)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(job, flush=True)
        _, status = os.waitpid(job, 0)
        _wait_for_group(job)
        print(status, flush=True)


def _wait_for_group(group: int) -> None:
    """Wait until no process of the group is left; this process adopts those whose parent has died."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.001)


# ----------------------------------------------------------------------------------------------------------
# Outside


class KilledJobs:
    """Starts jobs and kills them."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed_jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def run(
        self,
        log: Path,
        *overrides: str,
        env: dict[str, str] | None = None,
        kill_when: Callable[[float], bool] | None = None,
    ) -> bool:
        """Run a job to its end, or until `kill_when(seconds)`, which is asked all the time. Returns whether it ended.

        Raises:
            AssertionError: it failed by itself.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps({"log": str(log), "overrides": overrides, "env": env or {}}) + "\n")
        self._server.stdin.flush()
        job = int(self._server.stdout.readline())
        started, killed = time.monotonic(), False
        while not select.select([self._server.stdout], [], [], 0.002)[0]:
            if kill_when is not None and not killed and kill_when(time.monotonic() - started):
                os.killpg(job, signal.SIGKILL)
                killed = True
        status = int(self._server.stdout.readline())
        assert killed or status == 0, log.read_text()[-3000:]
        return not killed

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(10)


if __name__ == "__main__":
    serve()
