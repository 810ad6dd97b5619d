"""Whole jobs that are killed many times: each is a fork of a process that has imported everything."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.forks import fork_clusters, fork_server
from tests.support.jobs import comparable, environment, metrics
from tests.support.runs import rollouts_of
from trainer.models.tiny import TinyShape, build_tiny

STEPS = 6
TRAIN_SIZE = 10
PPO = ("algorithm=ppo", "trainer.critic.optimizer.lr=1e-3")
"""The algorithm, unless a job chooses another."""
CONFIG = (
    "rollout=transformers",
    "logger.plot=false",
    "trainer.device=cpu",
    "trainer.ray_address=processes",
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
    "algorithm.policy_loss=tests.support.noisy_loss:noisy_clip",
    "reward.name=tests.support.hashed_reward:hashed",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    f"data.train_size={TRAIN_SIZE}",
    "data.val_size=4",
)


def build_smallest(path: Path) -> Path:
    """Build a model of one small layer in a directory, and return it."""
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, str(path))
    return path


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The metrics of a finished run, and the bytes of its final weights."""
    weights = run / f"exports/global_step_{STEPS}/policy/model.safetensors"
    return comparable(metrics(run)), weights.read_bytes()


PLACES = (
    "sampled",
    "scored",
    "updating",
    "trained",
    "logged",
    "save:begin",
    "save:staging",
    "save:staged",
    "save:shards_written",
    "save:parts_written",
    "save:manifest_written",
    "save:published",
    "save:hinted",
    "save:deleting",
)
"""The fail points of the steps and saves of every job."""


@functools.cache
def config(*overrides: str) -> Any:
    """Compose the config of a job. The server does it once, and its forks find it composed."""
    from trainer.config import compose

    algorithm = () if any(word.startswith("algorithm=") for word in overrides) else PPO
    return compose([*algorithm, *CONFIG, *overrides])


def run(*overrides: str) -> None:
    """Run the job to its end, in this process."""
    fork_clusters()
    from trainer.jobs import run_task
    from trainer.process import time_limits
    from trainer.process.log_setup import show_messages
    from trainer.tasks import build_task

    show_messages()
    time_limits.read_environment()
    cfg = config(*overrides)
    run_task(build_task(cfg), "cpu")


def run_until(
    log: Path,
    *overrides: str,
    env: dict[str, str] | None = None,
    kill_when: Callable[[float], bool] | None = None,
    disturb: Callable[[int], None] | None = None,
    status: int = 0,
) -> bool:
    """Run a job to its end, or until `kill_when(seconds)`, which is asked all the time. Returns whether it ended.

    Args:
        disturb: called all the time with the id of the job's process.
        status: with which it ends by itself.

    Raises:
        AssertionError: it failed by itself.
    """
    with log.open("a") as output:
        job = fork_server().start(
            "tests.support.killed_jobs:run",
            *overrides,
            cwd=log.parent,
            env={**environment(), **(env or {})},
            stdout=output,
            prepare="tests.support.killed_jobs:config",
        )
    started, killed = time.monotonic(), False
    while job.poll() is None:
        if kill_when is not None and not killed and kill_when(time.monotonic() - started):
            job.kill_group()
            killed = True
        if disturb is not None:
            disturb(job.pid)
        time.sleep(0.02)
    assert killed or job.returncode == status, log.read_text()[-3000:]
    return not killed


def run_killed(log: Path, *overrides: str) -> None:
    """Kill a job behind its first save, and in the next one; then run it to its end."""
    run_dir = next(word.removeprefix("trainer.run_dir=") for word in overrides if word.startswith("trainer.run_dir="))
    saved = Path(run_dir) / "checkpoints/global_step_2"  # the first kill is no resume without it
    for attempt, place in enumerate(["logged,3", "save:published,1"]):
        reached = log.parent / f"reached{attempt}"
        env = {"TRAINER_FAILPOINT": f"{place},{reached}"}
        assert not run_until(
            log, *overrides, env=env, kill_when=lambda _, reached=reached: reached.exists() and saved.exists()
        )
    assert run_until(log, *overrides)


def assert_trained_once(run_dir: Path, log: Path, batch: int, most_stale: int) -> None:
    """Check that a job in flight that was killed has trained each prompt once an epoch, and used its journal.

    Args:
        batch: prompts of a step, with two completions each.
        most_stale: versions by which episodes may be older than the weights that they train.
    """
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    uids = [row["uid"] for step in range(1, STEPS + 1) for row in rollouts_of(run_dir, step)]
    assert len(uids) == len(set(uids)) == 2 * batch * STEPS
    trained = Counter(uid.partition(":")[0] for uid in uids)
    epochs = batch * STEPS // TRAIN_SIZE
    assert all(trained[str(epoch)] == 2 * TRAIN_SIZE for epoch in range(epochs)), "a prompt was passed over"
    assert 0 < max(row["rollout/staleness_max"] for row in rows[1:]) <= most_stale
    found = re.findall(r"(\d+) groups came from the journal", log.read_text())
    assert any(int(count) > 0 for count in found)
