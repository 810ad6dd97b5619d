"""Composition: the YAML groups, the resolvers, and the ways to spell an override."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config import config_of
from trainer.config import compose, conf_dir
from trainer.errors import UserError


def test_the_default_composes():
    config = compose([])
    assert config.trainer.run_dir == "outputs/default" and config.trainer.ckpt_path == "outputs/default/checkpoints"
    assert config.trainer.resume_mode is None
    assert compose(["trainer.resume_mode=latest"]).trainer.resume_mode == "latest"


def choices_of(group: str) -> list[str]:
    return sorted(path.stem for path in Path(conf_dir(), group).glob("*.yaml"))


def test_every_choice_of_the_groups_composes():
    """Several groups at a time."""
    groups = {group: choices_of(group) for group in ("model", "data", "rollout", "logger")}
    needed = {
        "files": ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"],
        "reasoning_gym": ["data.synthetic_args.task=chain_sum"],
    }
    assert all(groups.values())
    for i in range(max(map(len, groups.values()))):
        chosen = {group: choices[i % len(choices)] for group, choices in groups.items()}
        compose([*(f"{group}={choice}" for group, choice in chosen.items()), *needed.get(chosen["data"], [])])
    for experiment in choices_of("experiment"):
        compose([f"experiment={experiment}"])


def test_files_mean_the_group_of_files_unless_something_else_chooses_the_data():
    files = ["data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]"]
    for others in ([], ["experiment=smoke", "trainer.run_dir=x"]):
        assert compose([*others, *files]) == compose(["data=files", *others, *files])
    one_gpu, eight_gpus = (f"gsm8k_qwen3_0.6b_{count}gpu" for count in (1, 8))  # the second builds on the first
    for gsm8k in ("data=gsm8k", f"experiment={eight_gpus}", f"experiment=[{one_gpu},smoke]"):
        assert compose([gsm8k, *files]).data.prompt_key == "question"
    assert compose(["data.synthetic=null", *files]).reward.name == "reverse_text"


@pytest.mark.parametrize("data", ["reverse_text", "gsm8k"])
def test_a_smoke_run_shares_the_warm_start_of_the_real_run(data):
    """A model without warm start would give every completion the same reward. Other models validate less."""
    real, smoke = compose([f"data={data}"]), compose([f"data={data}", "experiment=smoke"])
    assert (smoke.data, smoke.sft, smoke.model) == (real.data, real.sft, real.model)
    if data == "gsm8k":
        assert compose([f"data={data}", "experiment=smoke", "model=qwen3_0.6b"]).data.val_size == 16


def test_the_critic_learns_five_times_as_fast_as_the_policy():
    config = config_of(["algorithm=ppo", "trainer.policy.optimizer.lr=1e-3"])
    assert config.trainer.critic.optimizer.lr == pytest.approx(5e-3)


def test_another_model_does_not_get_the_learning_rate_of_the_embedded_one():
    assert config_of([]).trainer.policy.optimizer.lr == 4e-4
    assert config_of(["algorithm=cispo"]).trainer.policy.optimizer.lr == 2e-4
    assert config_of(["algorithm=cispo", "model.path=some/model"]).trainer.policy.optimizer.lr == 1e-6
    assert config_of(["model.path=some/model"]).trainer.policy.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=ppo", "rollout=transformers", "+algorithm.options.mine=2", "trainer.policy.optimizer.lr=1e-3"],
        ["data.mix.math.files=[a.jsonl]", "data.mix.math.reward.name=[math,gsm8k]", "trainer.val_interval=-1"],
        ["data=gsm8k", "data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]", "trainer.run_name=x"],
        ["rollout.n=0"],
        ["rollout.nn=1"],
    ],
    ids=str,
)
def test_what_tests_compose_quickly_is_what_hydra_composes(words):
    found = []
    for function in (config_of, compose):
        try:
            found.append(function(words))
        except UserError as error:
            found.append(str(error))
    assert found[0] == found[1]
