"""The rows and micro-batches of a step."""

from __future__ import annotations

import pytest

from tests.support.config import check_rules
from trainer.config import Config
from trainer.errors import UserError
from trainer.parallel.axes import AXES
from trainer.plan.workload import workload_of

ALONE = dict.fromkeys(AXES, 1)


def config(n: int = 8, attention: str = "sdpa", **trainer) -> Config:
    cfg = Config()
    cfg.model.attn_implementation = attention
    cfg.rollout.n = n
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 100, 300
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    return cfg


def test_a_prompt_counts_once_where_rows_share_it():
    shared = workload_of(config(), ALONE)
    assert shared.tokens == 64 * 8 * 400
    assert shared.computed_tokens == 64 * (100 + 8 * 300)
    assert workload_of(config(attention="eager"), ALONE).computed_tokens == shared.tokens
    assert shared.optimizer_steps == 2 and shared.computed_in_update == shared.computed_tokens / 2


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("tokens", [1024, 5000, 16384])
def test_a_full_micro_batch_has_as_many_tokens_as_it_may(tokens, shares):
    w = workload_of(config(attention="sdpa" if shares else "eager", max_tokens_per_micro_batch=tokens), ALONE)
    for row in (w.largest_row(w.groups_in_update), w.largest_row(w.groups)):
        assert tokens - 101 <= row.tokens <= tokens
        assert 0 < row.targets <= row.tokens and (row.prefix_lengths is not None) == shares


def test_a_rank_with_few_rows_may_have_the_longest():
    sizes = {**ALONE, "dp_shard": 2}
    few = workload_of(config(n=2, train_batch_size=4, mini_batch_size=2, max_tokens_per_micro_batch=4096), sizes)
    row = few.largest_row(few.groups_in_update)
    assert (row.lengths, row.prefix_lengths, row.targets) == ((1024, 1024), (0, 100), 1848)
    assert not few.may_accumulate
    less = workload_of(config(n=2, train_batch_size=4, mini_batch_size=2, max_tokens_per_micro_batch=1500), sizes)
    row = less.largest_row(less.groups_in_update)
    assert (row.lengths, row.tokens, row.targets) == ((1024, 576), 1500, 1400)
    assert less.may_accumulate and less.micro_batches(less.computed_in_update) == 1


def test_ranks_along_cp_share_a_longer_row():
    w = workload_of(config(max_tokens_per_micro_batch=2048), {**ALONE, "cp": 2, "dp_shard": 2})
    assert (w.row_tokens, w.dp) == (4096, 2)
    assert w.micro_batches(4 * 4096) == 2


def test_a_model_that_cannot_pack_gets_one_sequence_a_micro_batch():
    w = workload_of(config(n=2, train_batch_size=6, mini_batch_size=3), {**ALONE, "dp_shard": 2}, packs=False)
    assert not w.shares_prompts and w.may_accumulate
    assert (w.largest_row(w.groups_in_update).lengths, w.largest_row(w.groups_in_update).targets) == ((1024,), 924)
    assert w.micro_batches(w.computed_in_update) == 3 and w.micro_batches(w.computed_tokens) == 6
    one = workload_of(config(n=1, train_batch_size=1, mini_batch_size=1), ALONE, packs=False)
    assert not one.may_accumulate


def test_a_row_holds_the_longest_sequence():
    assert workload_of(config(max_tokens_per_micro_batch=10), ALONE).row_tokens == 1024


def test_means_are_half_of_the_longest_by_default():
    w = workload_of(Config(), ALONE)
    assert (w.prompt, w.response, w.longest) == (256, 256, 1024)


def test_an_episode_may_have_the_tokens_of_all_turns():
    cfg = Config()
    cfg.environment.name, cfg.environment.max_tokens = "package:Class", 6000
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 100, 5900
    check_rules(cfg, "plan")
    w = workload_of(cfg, ALONE)
    assert (w.longest, w.response, w.longest_response, w.row_tokens) == (6000, 5900, 8 * 512, 16384)
    cfg.environment.max_turns, cfg.plan.response_tokens = 20, None
    w = workload_of(cfg, ALONE)
    assert (w.response, w.longest_response) == (2950, 5900)
    cfg.plan.response_tokens = 5901
    with pytest.raises(UserError, match=r"plan\.response_tokens=5901: .* has 6000 tokens"):
        check_rules(cfg, "plan")


def test_supervised_training_has_examples():
    cfg = Config()
    cfg.trainer.task = "sft"
    w = workload_of(cfg, ALONE)
    assert w.tokens == 8 * 256 and w.optimizer_steps == 1 and not w.shares_prompts
    cfg.plan.prompt_tokens, cfg.plan.response_tokens = 32, 96
    w = workload_of(cfg, {**ALONE, "dp_shard": 2})
    assert w.largest_row(w.groups_in_update).lengths == (128,) * 8  # shorter examples are more examples


def test_mean_lengths_are_at_most_the_longest_that_the_task_has():
    cfg = Config()
    cfg.plan.response_tokens = 2000
    with pytest.raises(UserError, match=r"plan\.response_tokens=2000: .* has 1024 tokens"):
        check_rules(cfg, "plan")
    cfg.trainer.task, cfg.sft.max_length = "sft", 4096
    check_rules(cfg, "plan")  # supervised training reads no rollout limit
    cfg.plan.prompt_tokens = 2100
    with pytest.raises(UserError, match=r"plan\.response_tokens=2000: .* has 4096 tokens"):
        check_rules(cfg, "plan")
