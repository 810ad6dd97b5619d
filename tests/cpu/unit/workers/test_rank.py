"""Policy, critic and reference over real process groups: the result never depends on how it was split."""

from __future__ import annotations

import copy
import os
import random
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.jobs import wait_until
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import (
    GROUPS,
    PER_GROUP,
    assembled,
    assert_close,
    config,
    make_batch,
    save_then_step,
    step_into_nan,
    train_two_steps,
    update,
)
from trainer.checkpoint.sharded import ShardedFiles
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """A model with tied embeddings. Of models without, of written weights and of restarts: `test_layouts.py`."""
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, tie_word_embeddings=True, seed=3), path)
    return path


@pytest.fixture(scope="module")
def single_rank(model_path):
    return run_ranks(1, train_two_steps, model_path, cfg=config())


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory):
    """What two ranks compute, and where they write the weights."""
    out = str(tmp_path_factory.mktemp("two"))
    return run_ranks(2, train_two_steps, model_path, out, cfg=config(max_tokens_per_micro_batch=70)), out


@pytest.mark.parametrize(
    "world_size, settings",
    [
        (1, {}),
        (1, {"pack": False}),
        (2, None),
        (4, {"max_tokens_per_micro_batch": 50, "dp_replicate": 2}),
    ],
    ids=["prompts computed for each completion", "rows alone", "2 ranks", "2 replicas of 2 ranks"],
)
def test_result_does_not_depend_on_ranks_replicas_or_micro_batches(
    model_path, single_rank, two_ranks, world_size, settings
):
    if settings is None:
        results = two_ranks[0]
    else:
        results = run_ranks(world_size, train_two_steps, model_path, None, bool(settings), cfg=config(**settings))
    for result in results:
        for ours, theirs in zip(result["metrics"], single_rank[0]["metrics"], strict=True):
            assert_close(ours, theirs)
    mask = make_batch()["mask"]
    for name in ("logprobs", "values"):
        difference = np.abs(assembled(results, name) - assembled(single_rank, name)) * mask
        assert difference.max() < 1e-4, name
    assert abs(assembled(single_rank, "values") * mask).max() > 1e-3, "the critic did not move"


def test_logprobs_equal_transformers_and_transformers_loads_the_weights(model_path, two_ranks):
    results, out = two_ranks
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    start = copy.deepcopy(model.state_dict())
    missing, unexpected = model.load_state_dict(load_file(f"{out}/model.safetensors"), strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing)
    model.tie_weights()
    assert any((start[name] != value).any() for name, value in model.state_dict().items())
    batch = make_batch()
    ids = torch.from_numpy(batch["input_ids"])
    with torch.no_grad():
        expected = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    difference = np.abs(assembled(results, "logprobs")[:, 1:] - expected.numpy()) * batch["mask"][:, 1:]
    assert difference.max() < 1e-5


def load_weights_alone(rank: Rank, path: str, directory: str) -> tuple[float, int]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    torch.manual_seed(7)
    expected = float(torch.rand(()))
    torch.manual_seed(7)
    rank.call("policy", "load", ShardedFiles(directory), ("weights",))
    weights = float(sum(p.full_tensor().double().abs().sum() for p in rank.roles["policy"].module.parameters()))
    assert float(torch.rand(())) == expected, "the generators were touched"
    return weights, rank.roles["policy"].optimizers.steps


def all_weights(rank: Rank, path: str, directory: str) -> float:
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.call("policy", "load", ShardedFiles(directory), ("weights", "optimizer", "rng"))
    assert rank.roles["policy"].optimizers.steps > 0
    return float(sum(p.full_tensor().double().abs().sum() for p in rank.roles["policy"].module.parameters()))


def restore_twice(rank: Rank, path: str, directory: str) -> tuple[tuple[float, int], float]:
    save_then_step(rank, path, directory)
    return load_weights_alone(rank, path, directory), all_weights(rank, path, directory)


def test_weights_can_be_restored_alone(model_path, tmp_path):
    (((weights, steps), expected),) = run_ranks(1, restore_twice, model_path, str(tmp_path), cfg=config())
    assert weights == expected and steps == 0


def fail_to_write(rank: Rank, path: str, directory: str) -> str:
    rank.build(roles(rank.cfg, ["policy"]), path)
    if rank.rank == 1:  # its shard cannot be made: a directory has its name
        os.makedirs(f"{directory}/policy/__1_0.distcp")
    dist.barrier()
    rank.begin_save(["policy"], ShardedFiles(directory))
    with pytest.raises(OSError) as error:
        rank.finish_save()
    update(rank, "policy", make_batch(), 1)  # training continues
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/again"))
    assert rank.finish_save()
    return str(error.value)


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_and_the_next_save_succeeds(model_path, tmp_path):
    first, second = run_ranks(2, fail_to_write, model_path, str(tmp_path), cfg=config())
    assert first == second and "rank 1" in first


def run_out_of_space(rank: Rank, path: str, directory: str) -> str:
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/good"))
    rank.finish_save()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:  # the kernel refuses to let its files grow, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    rank.begin_save(["policy"], ShardedFiles(f"{directory}/full"))
    with pytest.raises(OSError) as error:
        rank.finish_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    rank.call("policy", "load", ShardedFiles(f"{directory}/good"), ("weights", "optimizer", "rng"))
    return str(error.value)


def test_a_full_disk_fails_the_save_and_keeps_the_previous_checkpoint(model_path, tmp_path):
    first, second = run_ranks(2, run_out_of_space, model_path, str(tmp_path), cfg=config())
    assert first == second and "rank 1 could not write policy" in first and "GB are free" in first


def save_while_copying_is_held(rank: Rank, path: str, directory: str) -> tuple[float, bool, float]:
    """The weights when the save began, whether the next step waited, and the weights that were saved."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update(rank, "policy", make_batch(), 1)
    policy = rank.roles["policy"]
    before = float(sum(p.full_tensor().double().abs().sum() for p in policy.module.parameters()))
    wait, held, before_steps = policy.before_weights_change, Path(directory, "held"), policy.optimizers.steps

    def let_copy_and_wait():
        """Let the weights be copied when the first optimizer step is about to change them."""
        if policy.optimizers.steps == before_steps:
            wait_until(held.exists)
            threading.Timer(0.3, held.unlink).start()
        wait()

    policy.before_weights_change = let_copy_and_wait
    os.environ["TRAINER_FAILPOINT"] = f"save:staging,1,{held}"
    rank.begin_save(["policy"], ShardedFiles(directory))
    update(rank, "policy", make_batch(), 2)  # must wait: these weights are still to be copied
    waited = rank.pop_stall_seconds() > 0
    rank.finish_save()
    return before, waited, all_weights(rank, path, directory)


def test_an_optimizer_step_waits_for_the_copy_of_the_weights(model_path, tmp_path):
    ((before, waited, saved),) = run_ranks(1, save_while_copying_is_held, model_path, str(tmp_path), cfg=config())
    assert waited and saved == before


def test_a_nan_stops_every_rank_and_changes_no_weights(model_path):
    cfg = config(mini_batch_size=GROUPS)
    for message, untouched in run_ranks(2, step_into_nan, model_path, cfg=cfg):
        assert "policy" in message and "nan" in message
        assert untouched


def draw(rank: Rank) -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.random()), random.random()


def test_ranks_draw_different_numbers_and_repeat_them_after_a_restart():
    first, again = (run_ranks(2, draw, cfg=config(seed=1)) for _ in range(2))
    assert first == again
    other_seed = run_ranks(2, draw, cfg=config(seed=2))
    for generator in zip(*first, *other_seed, strict=True):
        assert len(set(generator)) == 4


def mini_batches(rank: Rank, path: str, steps: list[int]) -> dict[tuple[int, int], list[list[int]]]:
    """The groups of each mini-batch of the policy and of the critic, by step and epoch."""
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    orders = {}
    for role, worker in (("policy", rank.roles["policy"]), ("critic", rank.roles["critic"])):
        seen: list[list[int]] = []
        optimizer_step = worker.optimizer_step

        def recording(share, part, *others, optimizer_step=optimizer_step, seen=seen):
            own = [row for rows in part.micro_batches for row in rows]
            parts: list = [None] * rank.world_size
            dist.all_gather_object(parts, share.batch["group_ids"][own].tolist())
            seen.append(sorted(group for part in parts for group in part))
            return optimizer_step(share, part, *others)

        worker.optimizer_step = recording
        for step in steps:
            update(rank, role, make_batch(), step)
            epochs, seen[:] = [seen[: GROUPS // 2], seen[GROUPS // 2 :]], []
            for epoch, order in enumerate(epochs):
                assert orders.setdefault((step, epoch), order) == order, "policy and critic differ"
    return orders


def test_mini_batches_are_whole_groups_ordered_by_step_and_epoch(tmp_path):
    build_tiny(
        TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1), str(tmp_path)
    )
    cfg = config(mini_batch_size=2, update_epochs=2, seed=3)
    first, second = run_ranks(2, mini_batches, str(tmp_path), [1, 2], cfg=cfg)
    assert first == second, "the ranks differ"
    for order in first.values():
        assert [len(mini_batch) for mini_batch in order] == [2 * PER_GROUP] * (GROUPS // 2)
        assert sorted(g for mini_batch in order for g in mini_batch) == make_batch()["group_ids"].tolist()
    assert len({str(order) for order in first.values()}) == 4, "an order came twice"
    resumed = run_ranks(1, mini_batches, str(tmp_path), [2], cfg=cfg)[0]
    assert resumed == {key: order for key, order in first.items() if key[0] == 2}
    cfg.trainer.seed += 1
    assert run_ranks(1, mini_batches, str(tmp_path), [2], cfg=cfg)[0] != resumed
