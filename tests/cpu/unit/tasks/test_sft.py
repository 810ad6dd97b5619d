"""What the task `sft` makes of a config."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from trainer.config import compose
from trainer.errors import UserError
from trainer.objectives import make_objective
from trainer.plan.model_shape import find_config
from trainer.tasks import Ingredients, build_task
from trainer.tasks.supervised import build_sft as build


def test_a_step_is_one_optimizer_step_with_the_optimizer_of_sft_alone():
    """Whatever the keys of other tasks say, which are not refused either."""
    others = ["algorithm=ppo", "trainer.update_epochs=3", "trainer.critic.warmup_steps=500", "rollout.dtype=bfloat16"]
    optimizer = ["sft.optimizer.lr=0.25", "sft.optimizer.schedule_steps=5"]
    cfg = compose(["trainer.task=sft", "sft.steps=7", *optimizer, *others])
    objective, (policy,) = make_objective(cfg), cfg.roles
    assert policy.name == "policy" and policy.optimizer.lr == 0.25
    assert (policy.optimizer_steps(3), objective.scheduled_steps(policy), objective.temperature) == (3, 5, 1.0)
    assert (cfg.total_steps, cfg.num_engines, cfg.export_dtype, cfg.validates_start) == (7, 0, "float32", False)
    cfg.sft.optimizer.schedule_steps = None
    assert objective.scheduled_steps(cfg.roles[0]) == 7


def test_the_sources_of_a_mix_are_sets_of_examples(model, tmp_path):
    words = ["data.mix.sums.synthetic=arithmetic", "data.mix.sums.size=6", "data.mix.sums.weight=3"]
    words += ["data.mix.words.synthetic=reverse_text", "data.mix.words.size=4", "trainer.val_interval=-1"]
    cfg = compose(["trainer.task=sft", "data=files", f"model.path={model}", *words])
    build(cfg).check_inputs(asks_servers=True)
    nothing: Any = None
    source, _ = build(cfg).source(Ingredients(cfg, model, *[nothing] * 5))
    rows = source.ledger.peek(8)
    assert [source.ledger.name_of(row) for row in rows].count("sums") == 6
    assert all(source.ledger.row(row).mask.any() for row in rows)
    cfg.data.mix["words"].files, cfg.data.mix["words"].synthetic = [str(tmp_path / "none.jsonl")], None
    with pytest.raises(UserError, match="^data.mix.words.files=.*none.jsonl: no such file"):
        build(cfg).check_inputs(asks_servers=True)


def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(model, tmp_path):
    path = shutil.copytree(model, tmp_path / "model")
    file = path / "config.json"
    file.write_text(file.read_text().replace("{", '{"compression_config": {"a": 1},', 1))
    data = ["data.synthetic=arithmetic", "trainer.val_interval=-1"]
    for task in ("sft", "rl"):
        cfg = compose([f"trainer.task={task}", *data, f"model.path={path}"])
        with pytest.raises(UserError, match=f"model.path={path}: its weights are quantised"):
            build_task(cfg).check_inputs(asks_servers=True)
        with pytest.raises(UserError, match=f"model.path={path}: its weights are quantised"):
            find_config(cfg, cfg.roles[0])  # so a plan says it, too
