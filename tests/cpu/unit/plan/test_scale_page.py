"""The tables of docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu, gpu_plan
from benchmarks.scale import CASES, HEADS, plan_of, row_of
from trainer.config import Config
from trainer.metrics.throughput import peak_flops
from trainer.plan.hardware import COMPILED_KEEPS, DEVICES, GB, Device, parse_cluster
from trainer.plan.plan import Plan, make_plan

PAGE = (Path(__file__).parents[4] / "docs/scale.md").read_text()


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_those_of_the_plans(name):
    plan = plan_of(name)
    for table in HEADS:
        assert f"\n{row_of(table, name, plan)}\n" in PAGE, "`python -m benchmarks.scale` makes the tables"


def test_every_case_has_its_rows():
    for name in CASES:
        model, gpus = name.split("-")
        assert PAGE.count(f"\n| {model} on {int(gpus):,} GPU") == len(HEADS)


def test_the_page_says_what_compiled_blocks_keep():
    shares = [f"{100 * COMPILED_KEEPS[mode]:.0f} %" for mode in ("none", "selective")]
    text = " ".join(PAGE.split())
    assert f"A compiled block counts with {shares[0]} of the activations" in text
    assert f"with {shares[1]} if `fsdp.activation_checkpointing` is `selective`" in text


def test_the_page_says_where_the_constants_are():
    text = " ".join(PAGE.split())
    constants, peaks = (f"`{module.replace('.', '/')}.py`" for module in (Device.__module__, peak_flops.__module__))
    assert f"All constants of hardware, with their sources, are in {constants}, but for one table" in text
    assert f"the peaks of GPUs in bfloat16 are in {peaks}" in text
    assert all(one.flops_bfloat16 == peak_flops(one.name.replace("RTX", "RTX ")) for one in DEVICES.values())


def plan_of_measured(path: str, name: str, epochs: int = 1) -> Plan:
    """Return the plan of passes that were measured on an H100. With two epochs, all rows are scored."""
    gpu.config_of(name).save_pretrained(path)
    cfg = gpu_plan.make_config(path, 8704, "none")
    if name == "1.7B":  # as benchmarks.gpu computes it
        lengths = gpu.make_batch(2 * 16384, 1000)["lengths"]
        cfg = Config()
        cfg.model.path, cfg.rollout.n, cfg.trainer.share_prefixes = path, 1, False
        cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
        cfg.trainer.policy.fsdp.activation_checkpointing = "selective"
        cfg.trainer.max_tokens_per_micro_batch, cfg.trainer.update_epochs = 16384, epochs
        cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = len(lengths)
        cfg.plan.prompt_tokens = int(lengths.mean()) // 4
        cfg.plan.response_tokens = int(lengths.mean()) - cfg.plan.prompt_tokens
        cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens = 256, 768
    return make_plan(cfg, parse_cluster("1xH100"))


@pytest.mark.parametrize("name", ["0.6B", "1.7B"])
def test_the_page_says_what_the_plan_of_today_says_of_measured_passes(tmp_path, name):
    plan = plan_of_measured(str(tmp_path), name, epochs=2)
    sizes = {phase.name: phase.total - phase.sizes["reserved"] for phase in plan.members[0].phases}
    scores, update = sizes["scores of the policy"], sizes["update of the policy"]
    seconds = dict(plan.time.phases)
    if name == "0.6B":
        seconds["scores"] *= 2  # one of two optimizer steps scores its rows itself
    else:
        scores -= plan.roles[0].state[1]  # not yet made when it was measured
        seconds["update"] = plan_of_measured(str(tmp_path), name).time.phases["update"]
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {name}, ")]
    assert rows[0].endswith(f"| {scores / GB:.1f} GB, {seconds['scores']:.3f} s |")
    assert rows[1].endswith(f"| {update / GB:.1f} GB, {seconds['update']:.3f} s |")
