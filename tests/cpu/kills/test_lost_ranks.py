"""Jobs that lose ranks and continue from the copies in shared memory: the result is that of an uninterrupted job."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.killed_jobs import build_smallest, outcome, run_until
from trainer.files.shared_memory import PREFIX, SHARED_MEMORY
from trainer.process.failures import read_incidents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> tuple[str, ...]:
    return (
        f"model.path={build_smallest(tmp_path_factory.mktemp('model'))}",
        "trainer.num_workers=2",
        "trainer.max_restarts=9",
        "trainer.ckpt_interval=100",
        "rollout.ahead=1",
        "algorithm=grpo",
        "trainer.policy.optimizer.name=tests.support.faults:FaultyAdamW",
    )


def directories() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(PREFIX)}


def test_ranks_lost_before_within_and_after_an_optimizer_step_cost_the_step_under_way(
    overrides, uninterrupted, tmp_path
):
    """A step makes two optimizer steps, and the load of a copy one more. The last fault takes both ranks at once."""
    faults = tmp_path / "faults"
    faults.mkdir()
    for name in ("before,4,0", "within,5,1", "after,6,0", "after,6,1"):
        (faults / name).touch()
    run, log = tmp_path / "run", tmp_path / "log"
    copies = "trainer.copy_steps=true"
    assert run_until(log, f"trainer.run_dir={run}", copies, *overrides, env={"TEST_FAULTS": str(faults)})
    text = log.read_text()
    assert os.listdir(faults) == [], text
    assert outcome(run) == uninterrupted
    resumed = re.findall(rf"resumed from {SHARED_MEMORY}/\S+/global_step_(\d+),", text)
    assert resumed == ["1", "2", "4"], text
    assert [one.step for one in read_incidents(str(run))] == [2, 3, 5]


def test_a_damaged_copy_is_not_used_and_the_ranks_continue_from_the_last_commit(overrides, uninterrupted, tmp_path):
    """The file of rank 1 is damaged before step 4, in which the rank is lost. The last commit is that of step 2."""
    faults, run, log, reached = (tmp_path / name for name in ("faults", "run", "log", "reached"))
    faults.mkdir()
    (faults / "before,7,1").touch()
    damaged = []

    def damage(job: int) -> None:
        if reached.exists() and not damaged:
            mine = {f"{SHARED_MEMORY}/{name}" for name in directories()} - before
            damaged.extend(copy for path in mine for copy in Path(path).glob("global_step_3/policy/rank_1.bin"))
            with damaged[0].open("r+b") as file:
                file.seek(1000)
                file.write(b"damaged!")
            reached.unlink()

    before = {f"{SHARED_MEMORY}/{name}" for name in directories()}
    command = [f"trainer.run_dir={run}", *overrides, "trainer.ckpt_interval=2", "trainer.copy_steps=true"]
    env = {"TEST_FAULTS": str(faults), "TRAINER_FAILPOINT": f"scored,4,{reached}"}
    assert run_until(log, *command, env=env, disturb=damage)
    text = log.read_text()
    assert len(damaged) == 1 and not damaged[0].exists()
    assert "the copies of the last steps cannot be used" in text and "policy/rank_1.bin" in text
    assert f"resumed from {run}/checkpoints/global_step_2, step 2" in text, text
    assert outcome(run) == uninterrupted


def test_engines_that_hold_the_weights_of_a_copy_get_none(overrides, tmp_path):
    """Without rollouts ahead, the engines have the weights of the step in which a rank is lost, and keep them."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "before,4,1").touch()
    runs = tmp_path / "undisturbed", tmp_path / "run"
    for run in runs:
        command = [f"trainer.run_dir={run}", *overrides, "rollout.ahead=0", "trainer.copy_steps=true"]
        env = {"TEST_FAULTS": str(faults)} if run is runs[1] else {}
        assert run_until(run.with_suffix(".log"), *command, env=env)
    assert os.listdir(faults) == [] and [one.step for one in read_incidents(str(runs[1]))] == [2]
    assert outcome(runs[1]) == outcome(runs[0])
