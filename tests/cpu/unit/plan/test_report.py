"""The text of a plan."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.scale import CASES, HEADS, plan_of, row_of
from tests.support.forks import run_forked
from tests.support.jobs import environment
from tests.support.pages import ROOT
from trainer.models.model_check import Verdict, keep_verdict, verdict_file
from trainer.parallel.axes import axis_sizes
from trainer.plan.hardware import COMPILED_KEEPS, Cluster
from trainer.plan.plan import make_plan
from trainer.plan.report import Layout, as_text, notes, verdict, words

PAGE = (ROOT / "docs/scale.md").read_text()


def test_the_verdict_comes_first(cfg, node):
    plan = make_plan(cfg, node)
    layout = Layout("as configured", {}, plan, True)
    sentence = verdict(plan, layout)
    assert sentence.startswith("It fits 8 H100, takes 8 of 8 GPUs: ") and sentence.endswith(" hours.")
    slow = dataclasses.replace(plan, time=dataclasses.replace(plan.time, phases={"update": 150.0}))
    text = as_text(cfg, plan, [layout, Layout("shared", {}, slow)])
    assert text.splitlines()[0] == sentence
    for part in ("rank and engine", "(x8)", "update of the policy", "KV cache", "a checkpoint", "disk"):
        assert part in text
    assert "come from data sheets" in text
    words = " ".join(text.split())
    assert f"as configured {plan.time.total:.3g} s fits shared 150 s not checked" in words
    assert "256 tokens of a prompt and 256 of a response on average (plan.prompt_tokens, plan.resp" in words
    assert max(map(len, text.partition("Time of")[0].splitlines())) <= 160


def test_the_best_layout_is_named_if_the_run_does_not_fit_or_it_is_faster(cfg, node):
    fits = make_plan(cfg, node, traced=False)
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    plan = make_plan(cfg, node, traced=False)
    best = Layout("shared", {"trainer.offload": "all"}, fits, True)
    assert "; it fits with trainer.offload=all: " in verdict(plan, best)
    assert verdict(plan, None).endswith("; none of the layouts that plan tries makes it fit.")
    cfg.model.path = "Qwen/Qwen3-8B"
    assert verdict(make_plan(cfg, node, traced=False), best).endswith(" a step with trainer.offload=all.")
    assert verdict(fits, best).endswith(" hours.")
    assert words({"a.b": True, "c": 2, "d": "all", "e": None}) == "a.b=true c=2 d=all e=null"


def test_notes_name_what_counts_as_nothing_or_was_not_measured(cfg, node, save_config):
    def text(cluster: Cluster = node) -> str:
        return "\n".join(notes(cfg, make_plan(cfg, cluster, traced=False)))

    assert "rewards and validation is not known and counts as 0" in text()
    assert "to other nodes" not in text() and "experts" not in text()
    cfg.model.path = save_config("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    found = text(Cluster(2, 8, node.device))
    assert "each GPU sends 50 GB/s to other nodes" in found and "models with experts count at 15%" in found
    cfg.rollout.engine, cfg.rollout.urls, cfg.rollout.colocate = "server", ["http://host:8000"] * 8, False
    assert "rollout.engine=server generates outside of this cluster" in text()


def test_a_verdict_on_the_model_that_is_kept_is_named(cfg, node, tmp_path):
    plan = make_plan(cfg, node, traced=False)
    cfg.model.path, cfg.model.cache_dir = str(tmp_path / "model"), str(tmp_path / "cache")
    os.mkdir(cfg.model.path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert not any(cfg.model.path in note for note in notes(cfg, plan))
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    file = verdict_file(cfg, cfg.model.path, sizes, cfg.roles[0])
    for kept, said in (
        (Verdict(), "an earlier start has compared it"),
        (Verdict("its window differs"), "its window"),
    ):
        keep_verdict(file, kept)
        assert [note for note in notes(cfg, plan) if note.startswith(f"model.path={cfg.model.path}: {said}")]


# The page


@pytest.mark.parametrize("name", ["0.6B-1", "8B-8"])
def test_the_rows_of_the_page_are_those_of_the_plans(name):
    plan = plan_of(name)
    for table in HEADS:
        assert f"\n{row_of(table, name, plan)}\n" in PAGE, "`python -m benchmarks.scale` makes the tables"
    assert all(
        PAGE.count(f"\n| {case.split('-')[0]} on {int(case.split('-')[1]):,} GPU") == len(HEADS) for case in CASES
    )


def test_the_page_says_what_compiled_blocks_keep():
    shares = [f"{100 * COMPILED_KEEPS[mode]:.0f} %" for mode in ("none", "selective")]
    text = " ".join(PAGE.split())
    assert f"A compiled block counts with {shares[0]} of the activations" in text
    assert f"with {shares[1]} if `fsdp.activation_checkpointing` is `selective`" in text


# The command


def plan_command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("trainer", ["plan", *arguments], cwd, environment(), 300)


def test_the_command_prints_the_plan(tmp_path):
    shared = ["model=qwen3_0.6b", "plan.gpus=8xH100", "trainer.num_workers=4", "rollout.num_engines=4"]
    done = plan_command(tmp_path, *shared)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("It fits 8 H100, takes 8 of 8 GPUs: ")


def test_the_command_refuses_in_one_sentence(tmp_path):
    refused = {
        "error: plan.gpus=8xV100: the GPU V100 is not known; choose one of ": ["plan.gpus=8xV100"],
        "error: rollout.n: trainer.task=sft does not read it": ["trainer.task=sft", "rollout.n=4", "plan.gpus=8xH100"],
    }
    for sentence, arguments in refused.items():
        done = plan_command(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
