"""Composition: the YAML groups, the resolvers, and the ways to spell an override."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import compose, conf_dir
from trainer.objectives.check import check_functions


def test_the_default_composes_and_resume_is_spelled_any_way():
    config = compose([])
    assert config.trainer.run_dir == "outputs/default" and config.trainer.ckpt_path == "outputs/default/checkpoints"
    assert config.trainer.resume_mode is None
    for spelled in ("+trainer.resume_mode=latest", "trainer.resume_mode=latest", "++trainer.resume_mode=latest"):
        assert compose([spelled]).trainer.resume_mode == "latest"


@pytest.mark.parametrize("preset", sorted(p.stem for p in Path(conf_dir(), "algorithm").glob("*.yaml")))
def test_presets_compose_and_their_functions_take_their_options(preset):
    config = compose([f"algorithm={preset}"])
    if preset == "dapo":
        assert config.algorithm.overlong_buffer == 4 and config.algorithm.clip_high == 0.28
    check_functions(config)


@pytest.mark.parametrize("group", ["model", "data", "rollout", "logger", "experiment"])
def test_every_choice_of_the_groups_composes(group):
    paths = list(Path(conf_dir(), group).glob("*.yaml"))
    assert paths
    needed = {
        "files": ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"],
        "reasoning_gym": ["data.synthetic_args.task=chain_sum"],
    }
    for path in paths:
        compose([f"{group}={path.stem}", *needed.get(path.stem, [])])


def test_files_mean_the_group_of_files_unless_something_else_chooses_the_data():
    files = ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"]
    for others in ([], ["algorithm=ppo"], ["experiment=smoke", "trainer.run_dir=x"], ["reward.name=mine:score"]):
        assert compose([*others, *files]) == compose(["data=files", *others, *files])
    one_gpu, eight_gpus = (f"gsm8k_qwen3_0.6b_{count}gpu" for count in (1, 8))  # the second builds on the first
    for gsm8k in ("data=gsm8k", *(f"experiment={name}" for name in (one_gpu, eight_gpus, f"[{one_gpu},smoke]"))):
        assert compose([gsm8k, *files]).data.prompt_key == "question"
    assert compose(["data.synthetic=null", *files]).reward.name == "reverse_text"


@pytest.mark.parametrize("data", ["arithmetic", "reverse_text", "gsm8k"])
def test_a_smoke_run_shares_the_warm_start_of_the_real_run(data):
    """A model without warm start would give every completion the same reward. Other models validate less."""
    real, smoke = compose([f"data={data}"]), compose([f"data={data}", "experiment=smoke"])
    assert (smoke.data, smoke.sft, smoke.model) == (real.data, real.sft, real.model)
    assert compose([f"data={data}", "experiment=smoke", "model=qwen3_0.6b"]).data.val_size == 16


def test_the_critic_learns_five_times_as_fast_as_the_policy():
    config = compose(["algorithm=ppo", "trainer.policy.optimizer.lr=1e-3"])
    assert config.trainer.critic.optimizer.lr == pytest.approx(5e-3)


def test_another_model_does_not_get_the_learning_rate_of_the_embedded_one():
    assert compose([]).trainer.policy.optimizer.lr == 4e-4
    assert compose(["algorithm=cispo"]).trainer.policy.optimizer.lr == 2e-4
    assert compose(["algorithm=cispo", "model.path=some/model"]).trainer.policy.optimizer.lr == 1e-6
    assert compose(["model.path=some/model"]).trainer.policy.optimizer.lr == 1e-6
