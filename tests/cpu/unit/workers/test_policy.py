"""The policy update without old log-probs."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import GROUPS, PER_GROUP, WIDTH, config, make_batch
from tests.support.whole_batches import compute_batch, update_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, correction_of
from trainer.errors import LogprobMismatchError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.objectives.experience import correct_advantages
from trainer.parallel.batching import Batch, mini_batches
from trainer.workers.rank import Rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, num_layers=1, seed=3), path)
    return path


def assemble(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The rows of all ranks as one array; 0 where no rank has any."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (rows, values))
    whole = np.zeros((GROUPS * PER_GROUP, WIDTH), np.float32)
    for own, of_rank in parts:
        whole[own, : of_rank.shape[1]] = of_rank
    return whole


def update_both_ways(rank: Rank, path: str) -> dict:
    """The same step with the old log-probs of a pass of their own, and without."""
    batch = make_batch()
    del batch["old_logprobs"]

    def corrected(batch: Batch) -> Batch:
        return {**batch, "advantages": correct_advantages(batch, rank.cfg.algorithm, correction_of(rank.cfg))}

    rank.build(roles(rank.cfg, ["policy"]), path)
    old = assemble(*compute_batch(rank, "policy", "logprobs", batch))
    given = update_batch(rank, "policy", corrected({**batch, "old_logprobs": old}), 1)
    rank.build(roles(rank.cfg, ["policy"]), path)
    first = mini_batches(batch["group_ids"], rank.roles["policy"].config, 1)[0]
    known = ~np.isin(np.arange(len(old)), first)
    some = {"old_logprobs": old * known[:, None], "has_old_logprobs": known} if known.any() else {}
    fresh = update_batch(rank, "policy", corrected({**batch, **some}), 1)
    return {
        "old": old * ~known[:, None],
        "given": given.metrics,
        "rows given": len(given.rows),
        "fresh": fresh.metrics,
        "logprobs": assemble(fresh.rows, fresh.logprobs),
    }


@pytest.mark.parametrize("ranks, size, correction", [(1, GROUPS, "tis"), (2, 2, "tis")])
def test_the_first_optimizer_step_computes_the_old_logprobs_of_its_rows(model_path, ranks, size, correction):
    """It corrects its advantages itself, too."""
    cfg = config(mini_batch_size=size, max_tokens_per_micro_batch=70)
    cfg.algorithm.rollout_correction = correction
    for found in run_ranks(ranks, update_both_ways, model_path, cfg=cfg):
        assert found["fresh"] == pytest.approx(found["given"], rel=1e-5, abs=1e-7)
        assert found["fresh"]["clip_frac"] == 0
        np.testing.assert_allclose(found["logprobs"], found["old"], atol=1e-6)
        assert np.abs(found["old"]).max() > 1
        assert found["rows given"] == 0


def several_steps(rank: Rank, path: str, configs: list[Config]) -> list[str]:
    batch, found = make_batch(), []
    del batch["old_logprobs"]
    for cfg in configs:
        rank.cfg = cfg
        rank.build(roles(rank.cfg, ["policy"]), path)
        with pytest.raises(ValueError) as error:
            update_batch(rank, "policy", batch, 1)
        found.append(str(error.value))
    return found


def test_several_optimizer_steps_need_the_old_logprobs(model_path):
    """In mini-batches, or in epochs."""
    configs = [config(mini_batch_size=3), config(mini_batch_size=GROUPS, update_epochs=2)]
    (found,) = run_ranks(1, several_steps, model_path, configs, cfg=configs[0])
    assert len(found) == 2 and all("need the old log-probs" in sentence for sentence in found)


def metrics_of(rank: Rank, path: str) -> list[dict]:
    sampled = make_batch()
    written = {name: array for name, array in sampled.items() if name != "rollout_logprobs"}
    rank.build(roles(rank.cfg, ["policy"]), path)
    return [update_batch(rank, "policy", batch, 1).metrics for batch in (sampled, written)]


def test_kl_clip_fraction_and_entropy_exist_for_sampled_batches_only(model_path):
    cfg = dataclasses.replace(config())
    cfg.algorithm.entropy_coef = 0.0
    sampled, written = run_ranks(1, metrics_of, model_path, cfg=cfg)[0]
    assert written.keys() == {"loss", "grad_norm", "lr"}
    assert sampled.keys() == written.keys() | {"kl", "clip_frac", "entropy"}


def compare_logprobs(rank: Rank, path: str) -> dict[str, str]:
    """What the update says of engines whose log-probs differ by so much; "untouched" if it left the weights alone."""
    cfg, batch, found = rank.cfg, make_batch(), {}
    rank.build(roles(cfg, ["policy"]), path)
    own = assemble(*compute_batch(rank, "policy", "logprobs", batch))
    wrong = np.arange(len(own)) % 3 == 0
    cases = {
        "rounding": ({"rollout_logprobs": own + 4e-4}, "auto"),
        "another model": ({"rollout_logprobs": own - 0.01}, "auto"),
        "another model, without old log-probs": ({"rollout_logprobs": own - 0.01, "old_logprobs": None}, "auto"),
        "other weights": ({"rollout_logprobs": own - 0.1 * wrong[:, None], "is_stale": wrong}, "auto"),
        "a higher limit": ({"rollout_logprobs": own - 0.01}, "0.02"),
        "a lower limit": ({"rollout_logprobs": own + 4e-4}, "1e-4"),
        "no limit": ({"rollout_logprobs": own - 3}, None),
        "top-p": ({"rollout_logprobs": own - 3}, "auto"),
    }
    for name, (arrays, limit) in cases.items():
        cfg.rollout.max_logprob_diff, cfg.rollout.top_p = limit, 0.9 if name == "top-p" else 1.0
        rank.build(roles(cfg, ["policy"]), path)
        changed = {key: array for key, array in {**batch, **arrays}.items() if array is not None}
        try:
            update_batch(rank, "policy", changed, 4)
        except LogprobMismatchError as error:
            same = np.array_equal(own, assemble(*compute_batch(rank, "policy", "logprobs", batch)))
            found[name] = f"{'untouched' if same else 'changed'}: {error}"
    return found


def test_a_step_whose_tokens_another_model_has_sampled_is_not_trained_on(model_path):
    for found in run_ranks(2, compare_logprobs, model_path, cfg=config(mini_batch_size=GROUPS)):
        assert list(found) == ["another model", "another model, without old log-probs", "a lower limit"]
        assert all(sentence.startswith("untouched: rollout.max_logprob_diff: ") for sentence in found.values())
        assert "differ by 0.01 nats per token in step 4, and at most 0.001 is" in found["another model"]


def jump(rank: Rank, path: str, directory: str) -> list[str]:
    """What is said of three steps: of rounding, of far more than it after a resume, and of that in a first step."""
    batch, files, found = make_batch(), ShardedFiles(directory), []
    rank.build(roles(rank.cfg, ["policy"]), path)
    for step, difference in enumerate((2e-6, 5e-4, 5e-4), start=1):
        own = assemble(*compute_batch(rank, "policy", "logprobs", batch))
        try:
            update_batch(
                rank, "policy", {**batch, "rollout_logprobs": own + np.float32(difference) * batch["mask"]}, step
            )
        except LogprobMismatchError as error:
            found.append(str(error))
        if step == 1:
            rank.begin_save(["policy"], files)
            rank.finish_save()
        rank.build(roles(rank.cfg, ["policy"]), path)
        if step == 1:
            rank.call("policy", "load", files)
    return found


def test_a_jump_below_the_limit_stops_the_run_too(model_path, tmp_path):
    cfg = config(mini_batch_size=GROUPS)
    cfg.rollout.max_logprob_diff = "auto"
    ((sentence,),) = run_ranks(1, jump, model_path, str(tmp_path), cfg=cfg)
    assert re.search(r"differ by 0.0005 nats per token in step 2 after at most (2|1.9)e-06 in earlier steps", sentence)


def reference_dtypes(rank: Rank, path: str) -> dict:
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    return {
        role: (
            {str(p.dtype) for p in worker.module.parameters()},
            any(p.requires_grad for p in worker.module.parameters()),
        )
        for role, worker in rank.roles.items()
    }


def test_a_reference_is_held_in_the_dtype_of_its_forward_pass(model_path):
    cfg = config()
    cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
    cfg.algorithm.kl_coef = 0.1
    found = run_ranks(1, reference_dtypes, model_path, cfg=cfg)[0]
    assert found == {"policy": ({"torch.float32"}, True), "reference": ({"torch.bfloat16"}, False)}
