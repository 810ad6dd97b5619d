"""Kill a job anywhere and restart it with the same command: the result is that of an uninterrupted job.

The job is the real one: trainer, run directory, source, ranks and engine, with a tiny model. All its processes are
killed immediately, inside every phase of a step and of a save, and at random moments, until it finishes. Its metrics
and the bytes of its final weights must be those of an uninterrupted run.
"""

from __future__ import annotations

import functools
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.support.jobs import comparable, metrics
from tests.support.killed_jobs import PLACES, STEPS, assert_trained_once, run_until
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny

pytestmark = [pytest.mark.early, pytest.mark.slow]


@dataclass
class Job:
    """One command, and the directory in which it is given."""

    directory: Path
    overrides: tuple[str, ...]

    def run(self, **options) -> bool:
        self.directory.mkdir(exist_ok=True)
        return run_until(self.directory / "log", f"trainer.run_dir={self.directory}/run", *self.overrides, **options)

    def outcome(self) -> tuple[list[dict], bytes]:
        rows = metrics(self.directory / "run")
        assert [row["step"] for row in rows] == list(range(STEPS + 1)), "a line is missing, or there twice"
        weights = self.directory / f"run/exports/global_step_{STEPS}/policy/model.safetensors"
        return comparable(rows), weights.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(
        TinyConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16), path
    )
    return path


ONE_RANK = ("trainer.num_workers=1",)
AHEAD = ("trainer.num_workers=2", "rollout.ahead=1")
GRPO = (*AHEAD, "algorithm=grpo", "algorithm.kl_coef=0.01")
DYNAMIC = (*AHEAD, "algorithm=dapo")
TURNS = (*AHEAD, "algorithm=grpo", "environment.name=tests.support.environments:Hashed", "environment.max_turns=3",
         "environment.max_tokens=72", "rollout.max_prompt_tokens=64")  # fmt: skip


@pytest.fixture
def overrides(request, model) -> tuple[str, ...]:
    """Of a job with these settings."""
    return f"model.path={model}", *request.param


@dataclass
class Uninterrupted:
    outcome: tuple[list[dict], bytes]
    seconds: float
    run_dir: Path


@pytest.fixture(scope="module")
def run_uninterrupted(tmp_path_factory) -> Callable[[tuple[str, ...]], Uninterrupted]:
    """Run a job uninterrupted, once for all tests of it; returns its outcome and its duration."""

    @functools.cache
    def run(overrides: tuple[str, ...]) -> Uninterrupted:
        job = Job(tmp_path_factory.mktemp("uninterrupted"), overrides)
        started = time.monotonic()
        assert job.run()
        return Uninterrupted(job.outcome(), time.monotonic() - started, job.directory / "run")

    return run


@pytest.fixture
def uninterrupted(overrides, run_uninterrupted) -> Uninterrupted:
    return run_uninterrupted(overrides)


# Each start of a life is killed at a place in one of its first steps or saves, and leaves what the next one finds.
# Policy and critic are staged and written one after the other; a step is logged before it is saved.
FIRST_SAVES = [(place, 1) for place in ("save:hinted", *(place for place in PLACES if place != "save:hinted"))]
LATER_SAVES = [
    [("save:begin", 2), ("save:staging", 2)],
    [("save:staged", 4), ("save:shards_written", 4)],
    [("save:parts_written", 2), ("save:manifest_written", 2)],
    [("logged", 3), ("save:published", 2)],
    [("logged", 3), ("save:hinted", 2)],
]
WHILE_GENERATING = [(place, 1) for place in ("ahead:begun", "ahead:generated")]  # of a step ahead, before any save
WHILE_GENERATING += [("ahead:begun", 4), ("ahead:generated", 4)]
LIVES = [(ONE_RANK, FIRST_SAVES), (AHEAD, FIRST_SAVES), *((AHEAD, life) for life in LATER_SAVES[:2])]
IN_A_STEP = [("sampled", 2), ("scored", 2), ("updating", 3), ("trained", 2)]
for job, saves in zip((GRPO, DYNAMIC, TURNS), LATER_SAVES[2:], strict=True):
    LIVES += [(job, saves), (job, WHILE_GENERATING), (job, IN_A_STEP)]
LIVES += [(AHEAD, WHILE_GENERATING)]


@pytest.mark.parametrize(("overrides", "life"), LIVES, indirect=["overrides"])
def test_a_job_killed_in_every_phase_ends_like_an_uninterrupted_one(overrides, uninterrupted, life, tmp_path):
    job = Job(tmp_path / "job", overrides)
    for place, nth in life:
        reached = tmp_path / f"reached {place}"
        env = {"TRAINER_FAILPOINT": f"{place},{nth},{reached}"}
        assert not job.run(env=env, kill_when=lambda _, reached=reached: reached.exists()), place
    assert job.run()
    assert job.outcome() == uninterrupted.outcome
    left = [path.name for path in (tmp_path / "job/run/checkpoints").iterdir() if path.name.startswith(".")]
    assert left == []


@pytest.mark.parametrize("overrides", [GRPO], indirect=True)
def test_a_fork_of_a_job_with_rollouts_ahead_ends_like_its_parent(overrides, uninterrupted, tmp_path):
    """Its first step trains on what the checkpoint holds: the weights that sampled that are gone."""
    parent = uninterrupted.run_dir / "checkpoints/global_step_4"
    job = Job(tmp_path / "fork", (*overrides, "trainer.resume_mode=from_path", f"trainer.resume_path={parent}"))
    assert job.run()
    fork = comparable(metrics(job.directory / "run"))
    assert [row["step"] for row in fork] == [5, 6] and fork == uninterrupted.outcome[0][5:]
    exported = job.directory / f"run/exports/global_step_{STEPS}/policy/model.safetensors"
    assert exported.read_bytes() == uninterrupted.outcome[1]


IN_FLIGHT = [("in_flight:finished", 5), ("in_flight:taken", 1), ("in_flight:published", 1), ("in_flight:finished", 9)]
IN_FLIGHT += [("in_flight:taken", 2), ("logged", 1), ("save:shards_written", 1), ("save:published", 1)]


def test_a_job_in_flight_killed_in_every_phase_trains_every_prompt_once(model, tmp_path):
    """Ten prompts, and 24 that are trained: the third epoch is under way."""
    engine = (
        "rollout.engine=tests.support.token_engine:ENGINE",
        "rollout.max_logprob_diff=null",
        "rollout.in_flight_updates=true",
    )
    common = ("logger.save_rollouts=true", "rollout.max_response_tokens=24", "trainer.num_workers=2")
    job = Job(tmp_path / "job", (f"model.path={model}", *engine, *common, "rollout.window=4"))
    for place, nth in IN_FLIGHT:
        reached = tmp_path / f"reached {place} {nth}"
        env = {"TRAINER_FAILPOINT": f"{place},{nth},{reached}"}
        assert not job.run(env=env, kill_when=lambda _, reached=reached: reached.exists()), place
    assert job.run()
    assert_trained_once(job.directory / "run", job.directory / "log", batch=4, most_stale=2)


LAYOUTS = ((), ("trainer.tensor_parallel_size=2",), ("trainer.context_parallel_size=2",))


def test_a_job_killed_under_one_layout_ends_under_others_as_if_never_killed(tmp_path):
    """Killed with its data split over two ranks, then its matrices, then its tokens, it ends on one rank."""
    model = str(tmp_path / "model")
    build_tiny(TinyConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2), model)
    common = (f"model.path={model}", *AHEAD, "algorithm.policy_loss=clip")
    uninterrupted = Job(tmp_path / "uninterrupted", common)
    assert uninterrupted.run()
    for number, axis in enumerate(LAYOUTS):
        reached = tmp_path / f"reached{number}"
        job = Job(tmp_path / "job", (*common, "trainer.ckpt_interval=1", *axis))
        env = {"TRAINER_FAILPOINT": f"save:hinted,1,{reached}"}
        assert not job.run(env=env, kill_when=lambda _, reached=reached: reached.exists())
    job = Job(tmp_path / "job", (*common, "trainer.num_workers=1"))
    assert job.run()
    log = (job.directory / "log").read_text()
    assert all(f"global_step_{step}, step {step} of" in log for step in (1, 2, 3))
    (found, weights), (expected, start) = job.outcome(), uninterrupted.outcome()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    ours, theirs = load(weights), load(start)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


@pytest.mark.parametrize(("overrides", "trial"), [(ONE_RANK, 0), (AHEAD, 1)], indirect=["overrides"])
def test_a_job_killed_at_random_moments_ends_as_if_never_killed(overrides, uninterrupted, trial, tmp_path):
    """Four kills spread over the life of a job, its start and its saves included."""
    moments = random.Random(f"{overrides[1:]} {trial}")
    job = Job(tmp_path / "job", overrides)
    kills, longest = 0, uninterrupted.seconds
    while kills < 4:
        moment = moments.uniform(0.1, longest)
        if job.run(kill_when=lambda seconds, moment=moment: seconds > moment):
            longest *= 0.7  # it is quicker now: aim earlier, and begin again
            shutil.rmtree(tmp_path / "job/run")
        else:
            kills += 1
    assert job.run()
    assert job.outcome() == uninterrupted.outcome
