"""Messages before an engine or a rank wakes up on a shared GPU with too little free memory."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import config, make_batch, update
from trainer.config import Config, FSDPConfig
from trainer.errors import UserError, WorkerError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank, engine_problem, rank_problem

GB = 10**9
FREE, TOTAL = 50 * GB, 80 * GB
TOO_LITTLE = (
    "rollout.colocate=true: an engine needs 46.0 GB of a GPU to wake up, but of 80.0 GB only 50.0 GB are free beside "
    "the rank, of which the optimizer will take 8.0 GB; "
)


def settings(offload: str, share: float = 0.85) -> Config:
    cfg = Config()
    cfg.trainer.offload, cfg.rollout.gpu_memory_utilization = offload, share
    return cfg


@table(
    "cfg, growth, problem",
    [
        (
            settings("none"),
            8 * GB,
            f"{TOO_LITTLE}lower rollout.gpu_memory_utilization=0.85 to 0.8 (vLLM), or set trainer.offload=optimizer, "
            "or use more GPUs",
        ),
        (settings("optimizer", 0.05), 8 * GB, f"{TOO_LITTLE}set trainer.offload=all, or use more GPUs"),
        (settings("none"), 4 * GB, None),
        (settings("all"), 0, None),
    ],
)
def test_an_engine_needs_room_beside_a_rank_that_has_its_optimizer(cfg, growth, problem):
    assert engine_problem(46 * GB, growth, FREE, TOTAL, cfg) == problem


def test_a_rank_needs_room_for_what_was_offloaded():
    assert rank_problem(12 * GB, 12 * GB, settings("all")) is None
    assert rank_problem(12 * GB, 11 * GB, settings("all")) == (
        "trainer.offload=all: a rank needs 12.0 GB of its GPU for what it has moved to host memory, but only 11.0 GB "
        "are free; end other programs on this GPU, or use more GPUs"
    )


def growth_and_size(rank: Rank, path: str) -> list[int]:
    """The expected bytes of the optimizer's states, the real ones after a step, and the expected ones then."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    policy = rank.roles["policy"]
    expected = policy.optimizers.growth("cpu")
    update(rank, "policy", make_batch(), 1)
    real = sum(tensor.to_local().nbytes for tensor in policy.optimizers.tensors("cpu"))
    offloaded = rank.offloaded_bytes(["policy"])
    rank.release_memory()
    return [expected, real, policy.optimizers.growth("cpu"), offloaded, rank.offloaded_bytes(["policy"])]


def test_the_growth_of_the_optimizer_is_known_before_its_first_step(tmp_path):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    cfg = config(offload="optimizer")
    cfg.trainer.policy.lora.rank = 4
    cfg.trainer.policy.fsdp = FSDPConfig(reshard_after_forward=False)
    for expected, real, left, offloaded_before, offloaded in run_ranks(2, growth_and_size, str(tmp_path), cfg=cfg):
        assert expected == real > 0 and left == offloaded_before == 0
        assert offloaded == real


def refusals(rank: Rank, path: str) -> list[type[Exception]]:
    """The errors of an engine that does not fit any more: after it has fit before the first step, and after that."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.release_memory()
    errors = []
    for fits in (True, False, True):
        if fits:
            rank._check_engine(GB, 2 * GB, TOTAL)
        with pytest.raises((UserError, WorkerError)) as error:
            rank._check_engine(2 * GB, GB, TOTAL)
        errors.append(error.type)
        update(rank, "policy", make_batch(), 1)
    return errors


def test_an_engine_that_fits_only_before_the_first_step_is_a_mistake_of_the_config(model_path):
    """The first step takes memory that nothing knows before: NCCL, kernels and their workspaces."""
    (errors,) = run_ranks(1, refusals, model_path, cfg=config(offload="all"))
    assert errors == [UserError, UserError, WorkerError]
