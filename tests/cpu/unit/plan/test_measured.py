"""Plans beside seconds that ranks and jobs on CPU took, with the constants that the plan had measured of the machine.

Seconds and constants are of the same run of `benchmarks.plan`, in processor time (benchmarks/RESULTS.md, "Recorded with
the constants of the machine"). Nothing is timed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.models import SHAPES, Shape, sizes_of
from benchmarks.plan import CONFIGS, JOBS, SHAPE, config_of
from trainer.config import compose
from trainer.plan.hardware import Cluster, Device
from trainer.plan.plan import make_plan

LARGEST_ERROR = 0.25
MEMORY = 25_276_510_208


def machine(float32: float, bfloat16: float, packed: float, copying: float, sockets: float, slowness: float) -> Cluster:
    """Return the machine of two cores that was measured; speeds in GFLOP/s and GB/s."""
    speeds = [1e9 * speed for speed in (float32, bfloat16, copying, sockets, sockets, copying)]
    return Cluster(1, 2, Device("cpu", MEMORY, *speeds, MEMORY, flops_packed=1e9 * packed, slowness=slowness))


OF_UPDATES = machine(94.30, 9.807, 58.62, 18.71, 1.559, 2.435)
OF_JOBS = machine(88.27, 9.696, 55.71, 16.13, 1.344, 2.400)


def model(save_config, shape: Shape) -> str:
    """Return the directory of a model's config, as `benchmarks.models.make_model` writes it."""
    return save_config("qwen3", **sizes_of(shape))


UPDATES = {
    "grpo": 3.02,
    "sharded": 1.68,
    "tp": 1.99,
    "cp": 2.09,
    "recompute": 2.08,
    "selective": 3.58,
    "ppo": 3.10,
}
"""Measured seconds of an update, by the configs of the benchmark. bfloat16 has no instructions on this machine."""


@pytest.mark.parametrize("name", UPDATES)
def test_updates_take_what_ranks_took(save_config, name):
    phases = make_plan(config_of(model(save_config, SHAPE), name), OF_UPDATES).time.phases
    assert phases["update"] == pytest.approx(UPDATES[name], rel=LARGEST_ERROR)
    if name == "ppo":
        assert phases["scores"] == pytest.approx(0.98, rel=LARGEST_ERROR)


def test_every_config_of_the_benchmark_was_measured():
    assert {*UPDATES, "bfloat16"} == CONFIGS.keys() and {*STEPS, "17M grpo bfloat16"} == JOBS.keys()


@dataclass(frozen=True)
class Step:
    """A step of a job: the tokens of its prompts and completions, and measured seconds."""

    prompt: int
    response: int
    longest: int
    rollout: float
    scores: float
    update: float
    whole: float


STEPS = {
    "demo grpo transformers": Step(9, 8, 12, 0.44, 0.22, 0.37, 1.13),
    "demo grpo": Step(9, 8, 12, 0.60, 0.22, 0.38, 1.34),
    "demo grpo 2 ranks": Step(9, 8, 12, 0.69, 0.17, 0.29, 1.30),
    "demo ppo": Step(9, 8, 12, 0.62, 0.43, 0.82, 2.01),
    "17M grpo": Step(8, 64, 64, 2.34, 1.11, 3.50, 7.22),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_take_what_jobs_took(save_config, name):
    step = STEPS[name]
    path = model(save_config, SHAPES["17M"])
    lengths = (
        f"plan.prompt_tokens={step.prompt}",
        f"plan.response_tokens={step.response}",
        f"rollout.max_response_tokens={step.longest}",
    )
    overrides = [word.replace("MODEL", path) for word in JOBS[name]]
    time = make_plan(compose([*overrides, *lengths, "trainer.ray_address=processes"]), OF_JOBS).time
    assert time.total == pytest.approx(step.whole, rel=LARGEST_ERROR)
    for phase in ("rollout", "scores", "update"):
        assert time.phases[phase] == pytest.approx(getattr(step, phase), rel=LARGEST_ERROR), phase
