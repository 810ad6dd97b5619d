"""The best of the fixed layouts."""

from __future__ import annotations

from trainer.config import Config, compose
from trainer.plan.hardware import DEVICES, Cluster
from trainer.plan.plan import make_plan
from trainer.plan.report import Layout, layouts, timed_layouts, with_changes


def best_layout(cfg: Config, cluster: Cluster) -> Layout | None:
    return next((layout for layout in timed_layouts(cfg, cluster) if layout.fits), None)


def test_there_are_at_most_twelve_layouts_and_the_first_changes_nothing(cfg, node, cpu):
    for cluster in (node, cpu, Cluster(16, 8, node.device), Cluster(1, 1, node.device)):
        found = [*layouts(cfg, cluster).values()]
        assert 2 <= len(found) <= 12 and found[0] == {}
        assert any("trainer.policy.lora.rank" in changes for changes in found)
        # Nobody gives ranks or engines an odd number of a node's GPUs.
        shares = {changes.get("trainer.num_workers", 8) for changes in found}
        assert shares <= {1, 8, cluster.gpus, cluster.gpus // 2}
    cfg.trainer.task = "sft"
    assert all("rollout.num_engines" not in changes for changes in layouts(cfg, node).values())


def test_the_best_layout_is_the_fastest_that_fits(cfg, node):
    cfg.model.path, cfg.trainer.num_workers, cfg.rollout.num_engines = "Qwen/Qwen3-8B", 1, 1
    assert not make_plan(cfg, node).fits
    found = timed_layouts(cfg, node)
    best = next(layout for layout in found if layout.fits)
    assert "trainer.policy.lora.rank" not in best.changes
    assert make_plan(with_changes(cfg, best.changes), node).time.total == best.plan.time.total
    before = found[: found.index(best)]
    assert before and all(layout.is_traced and layout.plan.problems for layout in before), "faster, without room"
    after = found[len(before) :]
    kinds = [(not one.plan.fits, "cpu_offload" in str(one.changes), "lora" in str(one.changes)) for one in after]
    assert kinds == sorted(kinds) and any("lora" in str(one.changes) for one in after)


def test_adapters_are_chosen_before_states_in_host_memory_and_after_all_else(cfg):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    best = best_layout(cfg, Cluster(1, 8, DEVICES["h200"]))
    assert best is not None and best.changes["trainer.policy.lora.rank"] == 32
    assert not any("cpu_offload" in key for key in best.changes)
    assert best_layout(cfg, Cluster(1, 1, DEVICES["rtx4090"])) is None


def test_a_run_on_this_machine_has_layouts_of_fewer_processes(cpu):
    cfg = compose(["trainer.num_workers=64", "rollout.num_engines=2"])
    best = best_layout(cfg, cpu)
    assert best.changes == {"trainer.num_workers": 1, "rollout.num_engines": 1}
