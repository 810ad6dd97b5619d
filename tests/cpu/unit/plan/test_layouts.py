"""The best of the fixed layouts."""

from __future__ import annotations

from trainer.config import compose
from trainer.plan.hardware import DEVICES, Cluster
from trainer.plan.layouts import best_layout, layouts, with_changes
from trainer.plan.plan import make_plan


def test_there_are_at_most_twelve_layouts_and_the_first_changes_nothing(cfg, node, cpu):
    for cluster in (node, cpu, Cluster(16, 8, node.device), Cluster(1, 1, node.device)):
        found = layouts(cfg, cluster)
        assert 2 <= len(found) <= 12 and found[0] == {}
        assert any("trainer.policy.lora.rank" in changes for changes in found)
    cfg.trainer.task = "sft"
    assert all("rollout.num_engines" not in changes for changes in layouts(cfg, node))


def test_the_best_layout_is_the_fastest_that_fits(cfg, node):
    cfg.model.path, cfg.trainer.num_workers, cfg.rollout.num_engines = "Qwen/Qwen3-8B", 1, 1
    assert not make_plan(cfg, node).fits
    best = best_layout(cfg, node)
    assert best.plan.fits and "trainer.policy.lora.rank" not in best.changes
    assert make_plan(with_changes(cfg, best.changes), node).time.total == best.plan.time.total
    others = []
    for changes in layouts(cfg, node):
        plan = make_plan(with_changes(cfg, changes), node, traced=False)
        if plan.fits and "trainer.policy.lora.rank" not in changes:
            others.append(plan.time.total)
    assert min(others) <= best.plan.time.total  # a faster one has no room for its activations


def test_adapters_are_the_best_only_if_nothing_else_fits(cfg):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    best = best_layout(cfg, Cluster(1, 8, DEVICES["h200"]))
    assert best is not None and best.changes["trainer.policy.lora.rank"] == 32
    assert best_layout(cfg, Cluster(1, 1, DEVICES["rtx4090"])) is None


def test_a_run_on_this_machine_has_layouts_of_fewer_processes(cpu):
    cfg = compose(["trainer.num_workers=64", "rollout.num_engines=2"])
    best = best_layout(cfg, cpu)
    assert best.changes == {"trainer.num_workers": 1, "rollout.num_engines": 1}
