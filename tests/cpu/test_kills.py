"""Kill it anywhere, restart it with the same command: it goes on as if nothing had happened.

A small job of real ranks, manager, ledger and tracker is killed, all its processes at once, inside every
phase of a save and at random moments, and restarted until it finishes. Its metrics and the bytes of its
final weights must be those of a run that nobody killed.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.support.killed_group import STEPS, Forks
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny

pytestmark = pytest.mark.early

PLACES = ("logged", "save:begin", "save:staging", "save:staged", "save:shards_written", "save:parts_written",
          "save:manifest_written", "save:published", "save:hinted", "save:deleting")  # fmt: skip


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(
        TinyConfig(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16), path
    )
    return path


@pytest.fixture(scope="module")
def uninterrupted(forks, model, tmp_path_factory):
    """Metrics and weights of runs that nobody kills, by number of ranks."""
    results = {}
    for world_size in (1, 2):
        run = tmp_path_factory.mktemp(f"whole{world_size}")
        assert forks.run(spec(run, model, world_size))
        results[world_size] = outcome(run)
    return results


def spec(run: Path, model: str, world_size: int, **more) -> dict:
    return {"run_dir": str(run / "run"), "log": str(run / "log"), "model": model, "world_size": world_size, **more}


def outcome(run: Path) -> tuple[list[dict], bytes]:
    lines = (run / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a line is missing, or there twice"
    return rows, (run / "run/exports/final/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_in_every_phase_of_a_save_ends_as_if_never_killed(
    forks, model, uninterrupted, world_size, tmp_path
):
    """20 kills: at each place, early in the run, and again late in the restarted run."""
    kills = 0
    for place in PLACES:
        run = tmp_path / place.replace(":", "_")
        run.mkdir()
        nth = [3, 2] if place == "logged" else [1, 2]
        if place in ("save:staged", "save:shards_written"):
            nth = [1, 4]  # policy and critic pass it, once each a save
        for attempt, n in enumerate(nth):
            reached = run / f"reached{attempt}"
            env = {"TRAINER_FAILPOINT": f"{place},{n},{reached}"}
            finished = forks.run(spec(run, model, world_size, env=env), lambda _, r=reached: r.exists())
            kills += not finished
        assert forks.run(spec(run, model, world_size)), "restarted for the last time"
        assert outcome(run) == uninterrupted[world_size], place
        left = [p.name for p in (run / "run/checkpoints").iterdir() if p.name.startswith(".")]
        assert left == [], place
        shutil.rmtree(run)
    assert kills >= 18  # a late place may lie beyond the end of the restarted run


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_at_random_moments_ends_as_if_never_killed(forks, model, uninterrupted, world_size, tmp_path):
    """Kills spread over the life of a run, start-up and saves included, until each of 3 runs has had 4."""
    moments = random.Random(world_size)
    for trial in range(3):
        run = tmp_path / str(trial)
        run.mkdir()
        kills, whole = 0, 4.0
        while kills < 4:
            at = moments.uniform(0.2, whole)
            finished = forks.run(spec(run, model, world_size), lambda seconds, at=at: seconds > at)
            if finished:
                whole *= 0.7  # this machine is quicker: aim earlier, and start over
                shutil.rmtree(run / "run")
            kills += not finished
        assert forks.run(spec(run, model, world_size))
        assert outcome(run) == uninterrupted[world_size]
