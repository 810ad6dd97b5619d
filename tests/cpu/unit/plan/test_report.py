"""The text and the JSON of a plan."""

from __future__ import annotations

import json
import os

from trainer.config.axes import axis_sizes
from trainer.models.verdicts import Verdict, keep_verdict, verdict_file
from trainer.plan.hardware import Cluster
from trainer.plan.plan import make_plan
from trainer.plan.report import as_json, as_text, notes, verdict, words


def test_the_verdict_comes_first(cfg, node):
    plan = make_plan(cfg, node)
    sentence = verdict(plan, None, None)
    assert sentence.startswith("It fits 8 H100, takes 8 of 8 GPUs: ") and sentence.endswith(" hours.")
    text = as_text(cfg, plan, sentence)
    assert text.splitlines()[0] == sentence
    for part in (
        "rank and engine",
        "(x8)",
        "update of the policy",
        "KV cache",
        "a checkpoint",
        "a kill costs",
        "tokens",
    ):
        assert part in text
    assert "come from data sheets" in text


def test_the_table_of_memory_names_each_kind_within_its_width(cfg, node):
    cfg.algorithm.kl_coef, cfg.trainer.num_workers, cfg.rollout.num_engines = 0.1, 1024, 1024
    plan = make_plan(cfg, Cluster(128, 8, node.device))
    table = as_text(cfg, plan, "It fits.").partition("Sizes")[0].splitlines()
    place = next(i for i, line in enumerate(table) if line.startswith(" process"))
    first, second = (line.split() for line in table[place - 1 : place + 1])
    assert first == ["engine", "KV", "engine"]
    assert second[:3] == ["process", "phase", "weights"]
    assert second[-6:] == ["weights", "cache", "buffers", "reserved", "all", "of"]
    assert max(map(len, table)) <= 160
    rollout = next(line.split() for line in table if " rollout " in line)
    assert rollout[-6:-3] == [f"{plan.engine.weights / 1e9:.1f}", f"{plan.engine.kv_cache / 1e9:.1f}", rollout[-4]]


def test_a_run_that_does_not_fit_names_the_changes(cfg, node):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    plan = make_plan(cfg, node)
    assert verdict(plan, {"trainer.offload": "all"}, None).endswith("; it fits with trainer.offload=all.")
    larger = Cluster(8, 8, node.device), {"trainer.num_workers": 64}
    assert verdict(plan, None, larger).endswith("; it fits 8 nodes of 8 H100 with trainer.num_workers=64.")
    assert verdict(plan, None, (larger[0], {})).endswith("; it fits 8 nodes of 8 H100 as it is.")
    assert verdict(plan, None, None).endswith(
        "; none of the changes that plan tries makes it fit, nor do 64 times as many nodes."
    )


def test_changes_are_overrides():
    assert words({"a.b": True, "c": 2, "d": "all", "e": None}) == "a.b=true c=2 d=all e=null"


def test_json_has_the_same_numbers(cfg, node):
    plan = make_plan(cfg, node)
    found = json.loads(json.dumps(as_json(cfg, plan, "It fits.", None, None)))
    assert found["fits"] and found["parameters"] == {"policy": 596_049_920}
    (member,) = found["memory"]
    assert all(
        sum(size for kind, size in phase.items() if kind != "all") == phase["all"]
        for phase in member["phases"].values()
    )
    rollout = member["phases"]["rollout"]
    assert (rollout["engine_weights"], rollout["kv_cache"]) == (plan.engine.weights, plan.engine.kv_cache)
    assert found["seconds"]["step"] == plan.time.total
    assert found["checkpoint"] == 12 * 596_049_920
    assert found["shared"] == found["shared_parts"]["objects"] == plan.shared.total > 0
    assert found["shared_parts"]["capacity"] == node.device.host_memory // 2
    assert (found["larger_cluster"], found["larger_changes"]) == (None, {})
    assert found["notes"] == notes(cfg, plan) != []
    saves = plan.saves
    times = [saves.write_s, saves.save_s, saves.blocked_s, saves.waits_s, saves.exports_s]
    assert list(found["save"].values()) == times


def test_notes_name_a_network_and_experts_that_were_not_measured(cfg, node, save_config):
    cfg.model.path = save_config("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    text = "\n".join(notes(cfg, make_plan(cfg, Cluster(2, 8, node.device), traced=False)))
    assert "each GPU sends 50 GB/s to other nodes" in text and "models with experts count at 15%" in text


def test_a_note_says_how_much_shared_memory_a_node_counts_with(cfg, node):
    def found() -> bool:
        notes_of_plan = notes(cfg, make_plan(cfg, node, traced=False))
        return any(note.startswith("shared memory of a node counts as 50% of its memory") for note in notes_of_plan)

    assert not found()
    cfg.trainer.ckpt_path, cfg.trainer.ckpt_cache_dir = "s3://bucket/run", "/dev/shm/run"
    assert found()
    cfg.plan.shared_memory_gb = 64.0
    assert not found()


def test_notes_name_what_counts_as_nothing(cfg, node):
    def text() -> str:
        return "\n".join(notes(cfg, make_plan(cfg, node)))

    cfg.trainer.val_interval = -1
    assert "rewards is not known and counts as 0" in text()
    assert "to other nodes" not in text() and "experts" not in text()
    assert "validation" not in text() and "outside of this cluster" not in text()
    assert "plan.gen_batches" not in text() and "an episode has" not in text()
    cfg.algorithm.dynamic_sampling = True
    assert "plan.gen_batches=1 does not count" in text()
    cfg.plan.gen_batches = 2.0
    assert "plan.gen_batches" not in text()
    cfg.environment.name, cfg.environment.max_tokens = "package:Class", 4096
    assert "an episode has 2,176 of at most 4,096 tokens, on average, and all after the first 256 count" in text()
    cfg.trainer.val_interval = 5
    assert "hours are without validation" in text()
    cfg.rollout.engine, cfg.rollout.urls, cfg.rollout.colocate = "server", ["http://host:8000"] * 8, False
    assert "rollout.engine=server generates outside of this cluster: the time of rollouts" in text()


def test_a_note_says_that_saves_take_longer_than_their_interval(cfg, node):
    def slow() -> list[str]:
        return [note for note in notes(cfg, make_plan(cfg, node, traced=False)) if note.startswith("a save takes")]

    assert slow() == []
    cfg.trainer.ckpt_interval, cfg.plan.storage_gb_s = 1, 0.01
    plan = make_plan(cfg, node, traced=False)
    (note,) = slow()
    assert f"longer than the {plan.time.total:.3g} s between saves (1 step), so training waits " in note
    assert note.endswith(
        "at each; a larger trainer.ckpt_interval or faster storage (plan.storage_gb_s) makes the waits shorter"
    )
    cfg.trainer.ckpt_async = False
    assert "; trainer.ckpt_async=true, a larger trainer.ckpt_interval or faster storage" in slow()[0]
    cfg.trainer.ckpt_interval, cfg.trainer.ckpt_interval_minutes = -1, 0.01
    assert "a larger trainer.ckpt_interval_minutes or faster" in slow()[0]
    cfg.trainer.ckpt_interval, cfg.trainer.ckpt_interval_minutes = -1, -1  # the last save alone
    assert slow() == []


def test_notes_say_which_share_of_activations_compiled_blocks_count_with(cfg, node):
    def share() -> list[str]:
        found = [note for note in notes(cfg, make_plan(cfg, node, traced=False)) if note.startswith("compiled")]
        return [note.removeprefix("compiled blocks count with ").split()[0] for note in found]

    def saved() -> int:
        return make_plan(cfg, node).roles[0].update.saved

    fsdp = cfg.trainer.policy.fsdp
    for mode in ("none", "selective"):
        fsdp.activation_checkpointing, fsdp.compile = mode, None
        (compiled,) = share()
        kept = saved()
        fsdp.compile = False
        assert share() == []
        assert compiled == f"{kept / saved():.0%}" != "100%"
    fsdp.activation_checkpointing, fsdp.compile = "full", None
    assert share() == []  # all of what is kept without a compiler


def test_a_verdict_on_the_model_that_is_kept_is_named(cfg, node, tmp_path):
    plan = make_plan(cfg, node)
    cfg.model.path, cfg.model.cache_dir = str(tmp_path / "model"), str(tmp_path / "cache")
    os.mkdir(cfg.model.path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert not any(cfg.model.path in note for note in notes(cfg, plan))
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    file = verdict_file(cfg.model, cfg.model.path, node.device.kind, sizes, cfg.roles[0], True, cfg.longest_row)
    for kept, said in (
        (Verdict(), "an earlier start has compared it"),
        (Verdict("its window differs"), "its window"),
    ):
        keep_verdict(file, kept)
        assert [note for note in notes(cfg, plan) if note.startswith(f"model.path={cfg.model.path}: {said}")]
