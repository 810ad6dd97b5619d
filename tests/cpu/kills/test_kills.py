"""Kill a job anywhere and restart it with the same command: the result is that of an uninterrupted job.

The job is the real one: trainer, run directory, source, ranks and engine, with a tiny model. All its processes are
killed immediately, inside every phase of a step and of a save, until it finishes. Its metrics and the bytes of its
final weights must be those of an uninterrupted run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.support.buckets import make_bucket, s3_server, use_s3
from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import STEPS, assert_trained_once, run_until
from trainer.models.tiny import TinyShape, build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow]


@dataclass
class Job:
    """One command, and the directory in which it is given."""

    directory: Path
    overrides: tuple[str, ...]

    def run(self, overrides: tuple[str, ...] = (), **options) -> bool:
        self.directory.mkdir(exist_ok=True)
        words = (f"trainer.run_dir={self.directory}/run", *self.overrides, *overrides)
        return run_until(self.directory / "log", *words, **options)

    def outcome(self, steps: int = STEPS) -> tuple[list[dict], bytes]:
        rows = metrics(self.directory / "run")
        assert [row["step"] for row in rows] == list(range(steps + 1)), "a line is missing, or there twice"
        weights = self.directory / f"run/exports/global_step_{steps}/policy/model.safetensors"
        return comparable(rows), weights.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(
        TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16), path
    )
    return path


AHEAD = ("trainer.num_workers=2", "rollout.ahead=1")
TURNS = ("environment.name=tests.support.environments:Hashed", "environment.max_turns=3",
         "environment.max_tokens=72", "rollout.max_prompt_tokens=64")  # fmt: skip
REMEMBERED = ("algorithm.kl_coef=0.01", "+algorithm.options.kl_target=0.05", "+algorithm.options.kl_horizon=64",
              "algorithm.ref_sync_interval=2", "algorithm.rollout_correction=tis",
              "data.curriculum=tests.support.curriculum:hardest_first")  # fmt: skip
EVERYTHING = (*AHEAD, *TURNS, "algorithm=ppo", *REMEMBERED)
"""PPO: policy, critic and reference on two ranks, with rollouts ahead and episodes of several turns.

A coefficient, a reference and a curriculum remember earlier steps.
"""


def with_uploads(directory: Path, model: str) -> Job:
    """A job of `EVERYTHING` that uploads its checkpoints from a disk of its own to a bucket of its own."""
    uploads = (f"trainer.ckpt_path={make_bucket(directory.name)}/run", f"trainer.ckpt_cache_dir={directory}/disk")
    return Job(directory, (f"model.path={model}", *EVERYTHING, *uploads))


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    """A server of object storage, for all jobs of this file."""
    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        use_s3(patch, url)
        patch.setenv("TRAINER_TIME_LIMITS", "LOCK_LEASE_S=3")  # a shorter one is renewed all the time
        yield


# Each start is killed in one phase of its first steps or saves, and leaves what the next start finds. Policy and critic
# are staged and written one after the other; a step is logged before it is saved.
PHASES = [
    ("ahead:begun", 1),
    ("ahead:generated", 1),
    ("sampled", 1),
    ("scored", 1),
    ("updating", 3),
    ("save:begin", 1),
    ("save:staging", 2),
    ("save:staged", 2),
    ("save:shards_written", 1),
    ("save:parts_written", 1),
    ("save:manifest_written", 1),
    ("save:published", 1),
    ("upload:copied", 1),  # at the start: what the kill before has left
    ("upload:published", 1),
    ("trained", 2),
    ("logged", 2),
    ("save:hinted", 1),
]


def test_a_job_killed_in_every_phase_ends_like_an_uninterrupted_one(model, tmp_path):
    """Behind its upload it loses its machine: it continues from the object store alone."""
    uninterrupted, job = with_uploads(tmp_path / "uninterrupted", model), with_uploads(tmp_path / "job", model)
    assert uninterrupted.run()
    for number, (place, nth) in enumerate(PHASES):
        reached = tmp_path / f"reached {number}"
        env = {"TRAINER_FAILPOINT": f"{place},{nth},{reached}"}
        assert not job.run(env=env, kill_when=lambda _, reached=reached: reached.exists()), place
        if place == "upload:published":
            shutil.rmtree(job.directory / "run")
            shutil.rmtree(job.directory / "disk")
    assert job.run()
    assert job.outcome() == uninterrupted.outcome()
    assert "resumed from s3://" in (job.directory / "log").read_text()
    left = [
        path.name for path in (tmp_path / "job/disk").iterdir() if path.name.startswith((".writing-", ".deleting-"))
    ]
    assert left == []


IN_FLIGHT = [("in_flight:finished", 5), ("in_flight:taken", 1), ("in_flight:published", 1)]
IN_FLIGHT += [("save:published", 1), ("in_flight:taken", 2)]
"""Before the first commit, in a save, and behind a commit."""


def test_a_job_in_flight_killed_in_every_phase_trains_every_prompt_once(model, tmp_path):
    """Ten prompts, and 24 that are trained: the third epoch is under way."""
    engine = (
        "rollout.engine=tests.support.token_engine:ENGINE",
        "rollout.max_logprob_diff=null",
        "rollout.in_flight_updates=true",
    )
    common = ("logger.save_rollouts=true", "rollout.max_response_tokens=24", "trainer.num_workers=2")
    job = Job(tmp_path / "job", (f"model.path={model}", *engine, *common))
    for place, nth in IN_FLIGHT:
        reached = tmp_path / f"reached {place} {nth}"
        env = {"TRAINER_FAILPOINT": f"{place},{nth},{reached}"}
        assert not job.run(env=env, kill_when=lambda _, reached=reached: reached.exists()), place
    assert job.run()
    assert_trained_once(job.directory / "run", job.directory / "log", batch=4, most_stale=2)


LAYOUTS = {"trainer.tensor_parallel_size=2": 1, "trainer.context_parallel_size=2": 2}


def test_a_job_killed_under_one_layout_ends_under_others_as_if_never_killed(tmp_path):
    """Killed with its matrices split over two ranks, then its tokens, it ends on one rank as on two with split data."""
    model = str(tmp_path / "model")
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2), model)
    common = (f"model.path={model}", *AHEAD, "algorithm.policy_loss=clip", "trainer.ckpt_interval=1",
              "trainer.total_steps=3", "trainer.hf_save_interval=3")  # fmt: skip
    uninterrupted, job = Job(tmp_path / "uninterrupted", common), Job(tmp_path / "job", common)
    assert uninterrupted.run()
    for axis, step in LAYOUTS.items():
        reached = tmp_path / f"reached{step}"
        env = {"TRAINER_FAILPOINT": f"save:hinted,1,{reached}"}
        assert not job.run((axis,), env=env, kill_when=lambda _, reached=reached: reached.exists())
    assert job.run(("trainer.num_workers=1",))
    log = (job.directory / "log").read_text()
    assert all(f"global_step_{step}, step {step} of" in log for step in LAYOUTS.values())
    (found, weights), (expected, start) = job.outcome(steps=3), uninterrupted.outcome(steps=3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    ours, theirs = load(weights), load(start)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)
