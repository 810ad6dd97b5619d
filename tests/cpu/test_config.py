"""The schema, and the sentence that wrong input gets."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.cpu.jobs import run_job
from trainer import config
from trainer.algorithms import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, options_of, resolve
from trainer.config import (
    ADVANTAGE_OPTIONS,
    LOSS_OPTIONS,
    Config,
    chosen_options,
    compose,
    conf_dir,
    field_docs,
)
from trainer.errors import UserError
from trainer.validation import validate


def test_the_default_composes_and_resume_is_spelled_any_way():
    cfg = compose([])
    assert cfg.trainer.run_dir == "outputs/default" and cfg.trainer.ckpt_path == "outputs/default/checkpoints"
    assert cfg.trainer.resume_mode is None
    for spelled in ("+trainer.resume_mode=latest", "trainer.resume_mode=latest", "++trainer.resume_mode=latest"):
        assert compose([spelled]).trainer.resume_mode == "latest"


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["trainer.mini_batch_size=7"], "trainer.train_batch_size=64.*trainer.mini_batch_size=7"),
        (["trainer.total_steps=0"], "trainer.total_steps=0: must be at least 1"),
        (["trainer.seed=-1"], "trainer.seed=-1"),
        (["trainer.num_workers=3", "trainer.replicas=2"], "trainer.num_workers=3.*trainer.replicas=2"),
        (["trainer.resume_mode=sometimes"], "trainer.resume_mode.*null, none, latest, from_path"),
        (["trainer.resume_path=x/global_step_1"], "trainer.resume_path.*trainer.resume_mode=from_path"),
        (["trainer.resume_mode=from_path"], "trainer.resume_mode.*trainer.resume_path"),
        (["trainer.critic.optimizer.lr=1e-4"], "trainer.critic.optimizer.lr.*algorithm=ppo"),
        (["algorithm.kl_coef=0", "trainer.reference.fsdp.cpu_offload=true"], "trainer.reference.fsdp.cpu_offload"),
        (["rollout.n=1"], "rollout.n=1.*grpo"),
        (["rollout.temperature=0"], "rollout.temperature=0"),
        (["rollout.top_p=1.5"], "rollout.top_p=1.5"),
        (["rollout.engine=sglang"], "rollout.engine=sglang: choose one of vllm, transformers"),
        (["rollout=transformers", "rollout.tensor_parallel_size=2"], "rollout.tensor_parallel_size=2"),
        (["algorithm.advantage_estimator=magic"], "algorithm.advantage_estimator=magic: choose one of gae, grpo, rloo"),
        (["algorithm.policy_loss=magic"], "algorithm.policy_loss=magic: choose one of clip, gspo"),
        (["algorithm.tau_pos=1"], "algorithm.tau_pos=1.0: algorithm.policy_loss=clip does not take it.*clip_low"),
        (["algorithm=gspo", "algorithm.dual_clip=3"], "algorithm.dual_clip=3.0: algorithm.policy_loss=gspo"),
        (
            ["algorithm=rloo", "algorithm.gamma=0.9"],
            "algorithm.gamma=0.9: algorithm.advantage_estimator=rloo.*no option",
        ),
        (["+algorithm.options.x=1"], "algorithm.options.*import path"),
        (["algorithm=ppo", "algorithm.kl_estimator=k3+"], r"algorithm.kl_estimator=k3\+.*straight-through"),
        (["algorithm=rloo", "rollout.n=1"], "rollout.n=1.*rloo"),
        (["algorithm=cispo", "algorithm.kl_controller=adaptive"], "algorithm.kl_controller=adaptive.*kl_coef"),
        (["algorithm=remax", "rollout.n=1", "algorithm.dynamic_sampling=true"], "rollout.n=1.*dynamic_sampling"),
        (
            ["algorithm.advantage_estimator=grpo_passk", "algorithm.pass_k=9", "algorithm.normalize_std=null"],
            "algorithm.pass_k=9: exceeds rollout.n=8",
        ),
        (
            ["algorithm.advantage_estimator=grpo_passk", "algorithm.normalize_std=null", "algorithm.overlong_buffer=2"],
            "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
        ),
        (
            ["algorithm.rollout_correction=mis", "algorithm.rollout_correction_low=3"],
            "rollout_correction_low=3.0: exceeds algorithm.rollout_correction_high=2.0",
        ),
        (
            ["algorithm.policy_loss=clip_cov", "algorithm.cov_high=0.5"],
            "algorithm.cov_high=0.5: leaves no room from cov_low=1.0",
        ),
        (
            [
                "algorithm=dapo",
                "algorithm.advantage_estimator=reinforce_plus_plus",
                "algorithm.normalize_std=null",
                "rollout.temperature=0",
            ],
            "rollout.temperature=0.0: .*dynamic_sampling",
        ),
        (["trainer.policy.optimizer.betas=[0.9,5]"], "trainer.policy.optimizer.betas=.*: must be two numbers"),
        (["sft.optimizer.eps=0"], "sft.optimizer.eps=0.0: must be above 0"),
        (["algorithm.rollout_correction=is"], "algorithm.rollout_correction=is: choose one of null, tis, mis"),
        (["algorithm=ppo", "algorithm.gamma=nan"], "algorithm.gamma=nan"),
        (["data.train_files=[a.jsonl]"], "data.generator.*data=files"),
        (["+data.generator_args.letters=3"], "data.generator_args.*min_letters"),
        (["model.tiny.num_kv_heads=3"], "model.tiny.num_kv_heads=3"),
        (["trainer.master_port=70000"], "trainer.master_port=70000"),
        (["trainer.policy.lora.rank=0"], "trainer.policy.lora.rank=0: must be at least 1"),
        (["algorithm=ppo", "trainer.critic.lora.rank=-1"], "trainer.critic.lora.rank=-1: must be at least 1"),
        (["trainer.policy.lora.rank=4", "trainer.policy.lora.alpha=0"], "trainer.policy.lora.alpha=0"),
        (["trainer.policy.lora.alpha=8"], "trainer.policy.lora.alpha=8.0: needs trainer.policy.lora.rank"),
        (["trainer.critic.lora.rank=4"], "trainer.critic.lora.rank=4: .*has no critic"),
        (["rollout.lora_sync=merged"], "rollout.lora_sync=merged: needs trainer.policy.lora.rank"),
        (["trainer.hf_save_lora=adapter"], "trainer.hf_save_lora=adapter: needs trainer.policy.lora.rank"),
        (
            ["trainer.policy.lora.rank=4", "rollout=transformers", "rollout.lora_sync=adapter"],
            "rollout.lora_sync=adapter: rollout.engine=transformers serves no adapters",
        ),
        (["trainer.policy.lora.rank=600", "rollout.lora_sync=adapter"], "rollout.lora_sync=adapter: .*up to rank 512"),
        (
            ["trainer.policy.lora.rank=4", "trainer.reference.fsdp.cpu_offload=true"],
            "trainer.reference.fsdp.cpu_offload=True: .*without its adapters is the reference",
        ),
        (
            ["algorithm=gspo", "algorithm.ref_update_interval=5"],
            "algorithm.ref_update_interval=5: there is no reference",
        ),
        (
            ["algorithm.ref_update_interval=5", "trainer.colocate=false"],
            "algorithm.ref_update_interval=5: .*colocate=true",
        ),
        (["algorithm.ref_update_interval=0"], "algorithm.ref_update_interval=0: must be at least 1"),
        (
            ["algorithm.kl_controller=adaptive", "algorithm.kl_horizon=500"],
            "algorithm.kl_horizon=500.0: must be at least the 512 completions of one step",
        ),
        (["data.curriculum=hardest"], "data.curriculum=hardest: must be an import path"),
        (["sft.source=rollouts"], "sft.source=rollouts: needs data.train_files"),
        (["sft.min_reward=1"], "sft.min_reward=1.0: .*sft.source=rollouts"),
        (["sft.train_on=[]"], r"sft.train_on=\[\]: names no role"),
        (["sft.weights=[1,2]"], r"sft.weights=\[1.0, 2.0\]: must name one weight for each of the 0"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(overrides, sentence):
    with pytest.raises(UserError) as error:
        compose(overrides)
    assert re.search(sentence, str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["trainer.nub_workers=2"], "trainer.nub_workers: no such key; valid are .*trainer.num_workers"),
        (["trainer.num_workers=two"], "trainer.num_workers: .*'two'"),
        (["algorithm.options.mine=2"], r"algorithm.options.mine: .* write \+algorithm.options.mine=VALUE"),
        (
            ["data=files", "data.train_files=[no.jsonl]", "trainer.val_interval=-1"],
            r"data.train_files=no.jsonl: no such file",
        ),
        (["algorithm=gppo"], "algorithm/gppo.*grpo.* ppo"),
        (["trainer.device=cuda"], "trainer.num_workers=1: more ranks than CUDA devices"),
        (["trainer.run_dir=/dev/null/run"], "trainer.run_dir=/dev/null/run: cannot be written"),
        (["model.path=no/such-model"], "model.path=no/such-model"),
        (["reward.name=no.such.module:f"], "reward.name=no.such.module:f"),
        (["trainer.ray_address=127.0.0.1:1"], "trainer.ray_address=127.0.0.1:1: no Ray cluster answers"),
    ],
)
def test_the_command_line_says_what_is_wrong_and_exits_with_2(overrides, sentence, tmp_path):
    done = run_job(*overrides, cwd=tmp_path, small=False)
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert re.search(sentence, line), done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_job("rollout=transformers", f"trainer.master_port={port}", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(f"trainer.master_port={port}: cannot be used.*0 for a free one", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_prompts_that_are_all_too_long_are_refused(tmp_path):
    done = run_job("rollout=transformers", "rollout.max_prompt_tokens=2", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.max_prompt_tokens=2" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs/default/metrics.jsonl").exists()


def test_the_option_tables_are_those_of_the_functions():
    own = {"values", "baselines", "eps", "aggregation", "totals"}  # given by the caller, or not for users
    for registry, table in ((ADVANTAGES, ADVANTAGE_OPTIONS), (POLICY_LOSSES, LOSS_OPTIONS)):
        assert {name: set(options_of(f)) - own for name, f in registry.items()} == {n: set(o) for n, o in table.items()}
    assert (KL_ESTIMATORS, AGGREGATIONS) == (config.KL_ESTIMATORS, config.AGGREGATIONS)


@pytest.mark.parametrize("preset", sorted(p.stem for p in Path(conf_dir(), "algorithm").glob("*.yaml")))
def test_presets_compose_and_their_options_reach_the_functions(preset):
    algorithm = compose([f"algorithm={preset}"]).algorithm
    for registry, name in ((ADVANTAGES, algorithm.advantage_estimator), (POLICY_LOSSES, algorithm.policy_loss)):
        assert set(chosen_options(registry[name], algorithm)) <= set(options_of(registry[name]))
    if preset == "dapo":
        assert algorithm.overlong_buffer == 4 and chosen_options(POLICY_LOSSES["clip"], algorithm) == {
            "clip_high": 0.28
        }


def test_the_critic_may_share_the_policy_s_optimizer_settings():
    cfg = compose(["algorithm=ppo", "trainer.critic.optimizer=${trainer.policy.optimizer}"])
    assert cfg.trainer.critic.optimizer == cfg.trainer.policy.optimizer
    assert compose(["algorithm=ppo"]).trainer.critic.optimizer.lr == pytest.approx(5 * cfg.trainer.policy.optimizer.lr)


@pytest.mark.parametrize(
    "overrides, adapter, base",
    [
        ([], False, False),
        (["trainer.policy.lora.rank=8"], True, True),
        (["trainer.policy.lora.rank=8", "rollout=transformers"], False, True),
        (["trainer.policy.lora.rank=8", "rollout.lora_sync=merged", "trainer.colocate=false"], False, False),
        (["trainer.policy.lora.rank=600", "algorithm.ref_update_interval=2"], False, False),
    ],
)
def test_who_gets_adapters_and_who_is_the_reference(overrides, adapter, base):
    cfg = compose(overrides)
    assert (cfg.syncs_adapter, cfg.reference_is_base) == (adapter, base)


def test_functions_by_import_path_get_their_options(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text("def mine(logprobs, old, advantages, mask, *, sharpness, clip_low): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "my_losses:mine"
    options = ["algorithm.clip_high=null", "algorithm.clip_low=0.1", "+algorithm.options.sharpness=3"]
    algorithm = compose([f"algorithm.policy_loss={path}", *options]).algorithm
    function = resolve(POLICY_LOSSES, path, "algorithm.policy_loss")
    assert chosen_options(function, algorithm) == {"clip_low": 0.1, "sharpness": 3}


def test_every_key_is_documented():
    import dataclasses

    def check(cls, instance):
        docs = field_docs(cls)
        for f in dataclasses.fields(cls):
            value = getattr(instance, f.name)
            if cls is not Config:
                assert docs.get(f.name), f"{cls.__name__}.{f.name}"
            if dataclasses.is_dataclass(value):
                check(type(value), value)

    check(Config, Config())
    validate(compose([]))
