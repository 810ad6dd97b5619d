"""What a plan may change."""

from __future__ import annotations

from trainer.config import compose
from trainer.plan.advice import with_changes
from trainer.plan.hardware import Cluster
from trainer.plan.levers import has_gpus, joined, layouts, levers, splits


def test_each_layout_has_its_gpus(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 4, 6
    assert not has_gpus(cfg, node)
    found = layouts(cfg, node)
    assert {} not in found
    assert {"rollout.colocate": True, "rollout.num_engines": 4} in found
    assert {"rollout.num_engines": 4} in found and {"trainer.num_workers": 2} in found
    assert all(has_gpus(with_changes(cfg, layout), node) for layout in found)


def test_one_engine_gets_more_gpus(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines = 4, 1
    assert {"rollout.tensor_parallel_size": 4} in layouts(cfg, node)
    assert {"rollout.tensor_parallel_size": 8} not in layouts(cfg, node)  # the ranks need four GPUs


def test_engine_sizes_divide_the_attention_heads(cfg, node):
    cfg.model.path = "Qwen/Qwen2.5-7B"  # 28 heads
    sizes = {layout.get("rollout.tensor_parallel_size", 1) for layout in layouts(cfg, node)}
    assert sizes == {1, 2, 4}


def test_more_ranks_leave_the_gpus_of_engines(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload, cfg.rollout.ahead = False, "none", 1
    cfg.trainer.num_workers = cfg.rollout.num_engines = 4
    cluster = Cluster(3, 8, node.device)
    found = layouts(cfg, cluster)
    ranks = {layout.get("trainer.num_workers", 4) for layout in found if "rollout.num_engines" not in layout}
    assert max(ranks) == 20 and {4, 8, 16} < ranks


def test_ranks_are_multiples_of_the_layout(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers, cfg.trainer.tensor_parallel_size, cfg.rollout.num_engines = 8, 2, 3
    counts = {layout.get("trainer.num_workers", 8) for layout in layouts(cfg, node)}
    assert 4 in counts and all(count % 2 == 0 for count in counts)


def test_each_trained_model_recomputes(node):
    cfg = compose(["algorithm=ppo", "data=gsm8k", "model.path=Qwen/Qwen3-0.6B"])
    changes = [lever.options[-1] for lever in levers(cfg, node, False)]
    modes = {key for key in joined(changes) if key.endswith("activation_checkpointing")}
    assert modes == {f"trainer.{role}.fsdp.activation_checkpointing" for role in ("policy", "critic")}


def test_one_rank_frees_the_weights_that_stay_gathered(cfg, node):
    key = "trainer.policy.fsdp.reshard_after_forward"
    cases = ((1, None, 1, True), (8, None, 8, False), (8, False, 8, True), (1, True, 1, False))
    for ranks, setting, engines, expected in cases:
        cfg.trainer.num_workers, cfg.trainer.policy.fsdp.reshard_after_forward = ranks, setting
        cfg.rollout.num_engines = engines
        changes = [option for lever in levers(cfg, node, True) for option in lever.options]
        assert ({key: True} in changes) is expected


def test_micro_batches_hold_the_longest_sequence(cfg, node):
    (tokens,) = [
        [option["trainer.max_tokens_per_micro_batch"] for option in lever.options]
        for lever in levers(cfg, node, True)
        if "trainer.max_tokens_per_micro_batch" in lever.options[0]
    ]
    assert tokens == [8192, 4096, 2048, 1024] and cfg.longest_sequence == 1024
    cfg.rollout.max_response_tokens = 5000
    values = [option for lever in levers(cfg, node, True) for option in lever.options]
    assert {"trainer.max_tokens_per_micro_batch": 5512} in values


def test_nothing_is_changed_that_saves_no_memory(cfg, node, cpu):
    assert cfg.trainer.ckpt_async  # a save copies in any case
    for cluster in (node, cpu):
        assert not any(
            "trainer.ckpt_async" in option for lever in levers(cfg, cluster, True) for option in lever.options
        )


def test_ranks_with_gpus_of_their_own_keep_their_states_there(cfg, node):
    cfg.trainer.offload = "none"
    assert {"trainer.offload": "all"} in [option for lever in levers(cfg, node, True) for option in lever.options]
    assert not any("trainer.offload" in option for lever in levers(cfg, node, False) for option in lever.options)


def test_the_lightest_value_may_be_that_of_the_config(cfg, node):
    cfg.trainer.policy.fsdp.cpu_offload = True  # as trainer.offload is `all`
    cfg.algorithm.kl_coef = 0
    changed = {key: lever for lever in levers(cfg, node, True) for key in joined(lever.options)}
    assert changed["trainer.offload"].lightest == changed["trainer.policy.fsdp.cpu_offload"].lightest == {}
    assert changed["trainer.offload"].options == ({"trainer.offload": "none"}, {"trainer.offload": "optimizer"})


def test_sequences_and_matrices_are_split_over_the_ranks_that_a_size_needs(cfg, node, cpu):
    cfg.trainer.num_workers, cfg.trainer.context_parallel_size = 6, 2
    cp, tp = "trainer.context_parallel_size", "trainer.tensor_parallel_size"
    ranks = {"trainer.num_workers": 8}
    assert splits(cfg, node) == [[{cp: 4, **ranks}, {cp: 8, **ranks}], [{tp: 2, **ranks}, {tp: 4, **ranks}]]
    assert [change[cp] for change in splits(cfg, Cluster(64, 8, node.device))[0]] == [4, 8, 16, 32, 64]
    assert [change[tp] for change in splits(cfg, Cluster(64, 8, node.device))[1]] == [2, 4, 8]
    assert splits(cfg, cpu) == []
