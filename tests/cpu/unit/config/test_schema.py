"""The whole config: contradictions between keys, names of keys, and what follows from several keys."""

from __future__ import annotations

import copy
import re

import pytest

from tests.support.config import refusal_of, refusal_of_value
from trainer.config import (
    ENGINES,
    ESTIMATOR,
    LOSS,
    OPEN_SECTIONS,
    AlgorithmConfig,
    Config,
    compose,
    named_options,
    valid_keys,
    validate,
)

BASE = compose([])

TRAINER = [
    (["trainer.mini_batch_size=7"], "trainer.train_batch_size=64.*trainer.mini_batch_size=7"),
    (["trainer.num_workers=3", "trainer.dp_replicate=2"], "trainer.num_workers=3.*trainer.dp_replicate=2"),
    (
        ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.context_parallel_size=4"],
        "trainer.num_workers=4: must be a multiple of trainer.dp_replicate=2 x trainer.context_parallel_size=4",
    ),
    (
        ["trainer.num_workers=2", "trainer.context_parallel_size=2", "model.attn_implementation=eager"],
        "trainer.context_parallel_size=2: needs model.attn_implementation=sdpa",
    ),
    (["trainer.resume_path=x/global_step_1"], "trainer.resume_path.*trainer.resume_mode=from_path"),
    (
        ["trainer.num_workers=2", "trainer.tensor_parallel_size=2", "trainer.policy.fsdp.compile=true"],
        "trainer.policy.fsdp.compile=True: cannot be combined with trainer.tensor_parallel_size: torch 2.13 fails",
    ),
    *(
        (
            [
                *overrides,
                "trainer.num_workers=2",
                "trainer.tensor_parallel_size=2",
                f"trainer.{role}.fsdp.compile=true",
            ],
            f"trainer.{role}.fsdp.compile=True: cannot be combined with trainer.tensor_parallel_size",
        )
        for role, overrides in (("critic", ["algorithm=ppo"]), ("reference", []))
    ),
    (
        ["trainer.num_workers=4", "trainer.min_world_size=5"],
        "min_world_size=5: must be from 1 to .*num_workers=4",
    ),
    (
        ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.min_world_size=1"],
        "trainer.min_world_size=1: must be from 2 to trainer.num_workers=4",
    ),
    (["trainer.offload=all"], "trainer.offload=all: .*set rollout.colocate=true too"),
    (["trainer.resume_mode=from_path"], "trainer.resume_mode.*trainer.resume_path"),
    (["trainer.load_components=[weights]"], "trainer.load_components.*needs trainer.resume_mode=from_path"),
    (["trainer.ckpt_interval=often"], "trainer.ckpt_interval=often: must be a number of steps, -1 or auto"),
    (["trainer.keep_best=1"], "trainer.keep_best=1: .*set trainer.max_ckpts_to_keep too"),
    (["trainer.keep_every=4"], "trainer.keep_every=4: .*set trainer.max_ckpts_to_keep too"),
    (
        ["trainer.keep_best=1", "trainer.max_ckpts_to_keep=1", "trainer.val_interval=-1"],
        "trainer.keep_best=1: trainer.best_metric=val/accuracy is never measured",
    ),
    (["trainer.run_dir='~/runs'"], "trainer.run_dir=~/runs: begins with ~"),
    (["trainer.ckpt_path=ftp://host/x"], "trainer.ckpt_path: must be a directory that all ranks see, or begin with s3"),
    (["trainer.ckpt_path=s3://key:secret@bucket/x"], "^trainer.ckpt_path: must not contain credentials: [^@]*$"),
    (["trainer.ckpt_path=s3://bucket//x"], "trainer.ckpt_path: must not contain . or .. or an empty name"),
    (["trainer.ckpt_replicas=1"], "trainer.ckpt_replicas=1: needs trainer.ckpt_cache_dir"),
    (
        ["trainer.ckpt_replicas=1", "trainer.ckpt_cache_dir=/x", "trainer.ckpt_path=s3://bucket/x"],
        "trainer.ckpt_replicas=1: needs several nodes, so trainer.ray_address",
    ),
    (["trainer.deadline=0001-01-01"], "trainer.deadline=0001-01-01: must be a time"),
    (["trainer.hf_save_lora=adapter"], "trainer.hf_save_lora=adapter: needs trainer.policy.lora.rank"),
]
ROLES = [
    (["trainer.policy.optimizer.betas=[0.9,5]"], "trainer.policy.optimizer.betas=.*: must be two numbers"),
    (["sft.optimizer.betas=[0.9]"], "sft.optimizer.betas=.*: must be two numbers"),
    (["trainer.critic.optimizer.lr=1e-4"], "trainer.critic.optimizer.lr.*algorithm=ppo"),
    (["trainer.critic.lora.rank=4"], "trainer.critic.lora.rank=4: .*has no critic"),
    (["algorithm=ppo", "trainer.critic.warmup_steps=140"], "trainer.critic.warmup_steps=140: leaves no step"),
    (["algorithm.kl_coef=0", "trainer.reference.fsdp.cpu_offload=true"], "trainer.reference.fsdp.cpu_offload"),
    (["trainer.policy.lora.alpha=8"], "trainer.policy.lora.alpha=8.0: needs trainer.policy.lora.rank"),
    (
        ["trainer.policy.lora.rank=4", "trainer.reference.fsdp.cpu_offload=true"],
        "trainer.reference.fsdp.cpu_offload=True: .*without its adapters is the reference",
    ),
]
ALGORITHM = [
    (["algorithm=ppo", "algorithm.kl_estimator=k3+"], r"algorithm.kl_estimator=k3\+.*straight-through"),
    (["algorithm=cispo", "algorithm.kl_controller=adaptive"], "algorithm.kl_controller=adaptive.*kl_coef"),
    (
        ["algorithm.kl_controller=adaptive", "algorithm.kl_horizon=500"],
        "algorithm.kl_horizon=500.0: must be at least the 512 completions of one step",
    ),
    (["algorithm=remax", "rollout.n=1", "algorithm.dynamic_sampling=true"], "rollout.n=1.*dynamic_sampling"),
    (["algorithm=dapo", "rollout.temperature=0"], "rollout.temperature=0.0: .*dynamic_sampling"),
    (["algorithm.overlong_buffer=17"], "algorithm.overlong_buffer=17: exceeds rollout.max_response_tokens=16"),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.pass_k=9"],
        "algorithm.pass_k=9: exceeds rollout.n=8",
    ),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.overlong_buffer=2"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
        "algorithm.advantage_estimator=grpo_passk: .*a penalty taken off",
    ),
    (
        ["algorithm.rollout_correction=mis", "algorithm.rollout_correction_low=3"],
        "rollout_correction_low=3.0: exceeds algorithm.rollout_correction_high=2.0",
    ),
    (
        ["algorithm.rollout_correction=tis", "algorithm.old_logprobs=rollout"],
        "algorithm.rollout_correction=tis: corrects the engine's log-probs",
    ),
    (["algorithm=gspo", "algorithm.ref_sync_interval=5"], "algorithm.ref_sync_interval=5: there is no reference"),
    (
        ["algorithm.ref_sync_interval=5", "trainer.colocate_roles=false"],
        "algorithm.ref_sync_interval=5: .*trainer.colocate_roles=true",
    ),
]
ROLLOUT = [
    (
        ["rollout=transformers", "rollout.tensor_parallel_size=2"],
        "rollout.tensor_parallel_size=2: rollout.engine=transformers runs on one device; choose vllm",
    ),
    (
        ["rollout=transformers", "+rollout.engine_args.x=2"],
        "rollout.engine_args=.*: rollout.engine=transformers takes none; choose vllm",
    ),
    (["rollout.lora_sync=merged"], "rollout.lora_sync=merged: needs trainer.policy.lora.rank"),
    (
        ["trainer.policy.lora.rank=4", "rollout=transformers", "rollout.lora_sync=adapter"],
        "rollout.lora_sync=adapter: rollout.engine=transformers serves no adapters; choose merged or rollout=vllm",
    ),
    (["trainer.policy.lora.rank=600", "rollout.lora_sync=adapter"], "rollout.lora_sync=adapter: .*up to rank 512"),
]
MODEL_AND_DATA = [
    (["model.tiny.num_kv_heads=3"], "model.tiny.num_kv_heads=3: must divide"),
    (["model.tiny.head_dim=3"], "model.tiny.head_dim=3: must be even"),
    (["sft.max_length=5000"], "sft.max_length=5000: exceeds model.tiny.max_position_embeddings"),
    (["rollout.max_response_tokens=4090"], "rollout.max_response_tokens=4090: with .*max_position_embeddings=4096"),
    (["data=reverse_text", "data.train_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["data=reverse_text", "data.val_files=[a.jsonl]"], "data.synthetic.*data=files"),
    (["reward.name=[math,gsm8k]", "reward.weights=[1]"], "reward.weights=.*a weight for each of the 2 rewards"),
    (["reward.name=[math,gsm8k]", "reward.weights=[1,2,3]"], "reward.weights=.*a weight for each of the 2 rewards"),
    (["reward.name=remote", "reward.url=http://judge:0/score"], "reward.url=.*must be an address such as"),
    (["reward.name=remote", "reward.url=http://judge:x/score"], "reward.url=.*must be an address such as"),
    (["data=files"], r"data.train_files=\[\]: name at least one file"),
    (["data=files", "data.train_files=[a.jsonl]"], "trainer.val_interval=10: needs data.val_files"),
    (["data.train_size=-1"], "data.train_size=-1: a generator needs a number of examples"),
    (["+data.synthetic_args.letters=3"], "data.synthetic_args.*min_letters"),
    (["environment.name=guess"], "environment.name=guess: must be an import path package.module:Class"),
    (
        ["environment.name=guess:Guess", "algorithm.overlong_buffer=4"],
        "algorithm.overlong_buffer=4: is for one completion",
    ),
    (["data.curriculum=hardest"], "data.curriculum=hardest: must be an import path"),
]
SUPERVISED = [
    (["sft.source=rollouts"], "sft.source=rollouts: needs data.train_files"),
    (["sft.min_reward=1"], "sft.min_reward=1.0: .*sft.source=rollouts"),
    (["sft.max_weight=2"], "sft.max_weight=2.0: .*sft.source=rollouts"),
    (["sft.train_on=[]"], r"sft.train_on=\[\]: names no role"),
    (["sft.weights=[1,2]"], r"sft.weights=\[1.0, 2.0\]: must name one weight for each of the 0"),
    (
        ["data=files", "data.train_files=[a,b]", "data.val_files=[c]", "sft.weights=[1,0]"],
        r"sft.weights=\[1.0, 0.0\]: must be numbers above 0",
    ),
]


AT_THE_BOUND = [
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.pass_k=8", "algorithm.kl_in=loss"],
    ["algorithm.advantage_estimator=grpo_passk", "algorithm.kl_in=reward", "algorithm.kl_coef=0"],
    ["algorithm.rollout_correction=mis", "algorithm.rollout_correction_low=2"],
    ["algorithm.rollout_correction=tis", "algorithm.rollout_correction_low=3"],
    ["algorithm.overlong_buffer=16"],
    ["algorithm.kl_controller=adaptive", "algorithm.kl_horizon=512"],
    ["algorithm.dynamic_sampling=true", "rollout.n=2"],
    ["trainer.num_workers=4", "trainer.min_world_size=4"],
    ["trainer.num_workers=4", "trainer.dp_replicate=2", "trainer.min_world_size=2"],
    ["data=files", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"],
    ["reward.name=[math,gsm8k]", "reward.weights=[1,2]"],
    ["reward.name=remote", "reward.url=http://judge:1/score"],
]
"""Configs that one step further would contradict themselves, or whose contradiction has no effect."""


@pytest.mark.parametrize("overrides", AT_THE_BOUND, ids=lambda overrides: " ".join(overrides[-2:]))
def test_what_is_at_a_bound_is_accepted(overrides):
    compose(overrides)


def test_a_critic_that_warms_up_leaves_the_policy_fewer_optimizer_steps():
    cfg = compose(["algorithm=ppo", "trainer.mini_batch_size=32", "trainer.critic.warmup_steps=3"])
    cfg.trainer.update_epochs = 2
    policy, critic, *_ = cfg.roles
    assert [critic.optimizer_steps(steps) for steps in (2, 5)] == [2 * 4, 5 * 4]
    assert [policy.optimizer_steps(steps) for steps in (2, 5)] == [0, 2 * 4]


@pytest.mark.parametrize("overrides, sentence", TRAINER + ROLES + ALGORITHM + ROLLOUT + MODEL_AND_DATA + SUPERVISED)
def test_contradictions_are_refused_in_one_sentence(overrides, sentence):
    assert re.search(sentence, refusal_of(overrides))


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "/tmp/x", ".", "..", " x", "x ", "a\nb", "a\tb", "x" * 201, "é" * 101]
)
def test_names_of_runs_that_are_not_plain_are_refused(name):
    assert "must be a plain name" in refusal_of_value(BASE, "trainer.run_name", name)


@pytest.mark.parametrize("name", ["x", "my run", "lr=1e-4,seed=2", "run.2", "..x", "-x", "x" * 200, "λ", "C:\\x"])
def test_other_names_of_runs_are_accepted(name):
    config = copy.deepcopy(BASE)
    config.trainer.run_name = name
    validate(config)


@pytest.mark.parametrize(
    "names, problem",
    [
        (["rolout.n"], "no key or section rolout.n; did you mean rollout.n, or"),
        (["rollout.m"], "no key or section rollout.m; docs/config.md lists the keys of rollout"),
        (["rollout.n", "nothing"], "no key or section nothing"),
        (["rollout.n.x"], "no key or section rollout.n.x"),
        (["trainer."], "no key or section trainer."),
        (["*"], r"no key or section \*"),
        (["algorithm.options.sharpness"], "no key or section .*sharpness; name algorithm.options as a whole"),
        (["rollout.engine_args.dtype"], "name rollout.engine_args as a whole"),
        (["trainer.colocate"], "no key or section trainer.colocate; it is now trainer.colocate_roles"),
    ],
)
def test_allowed_changes_must_name_keys_or_sections(names, problem):
    assert re.search(problem, refusal_of_value(BASE, "trainer.allow_config_change", names))


def test_keys_sections_and_open_sections_may_be_allowed():
    names = ["trainer", "rollout.n", "trainer.policy.optimizer", "algorithm.options", "model.path"]
    assert compose([f"trainer.allow_config_change=[{','.join(names)}]"]).trainer.allow_config_change == names


def test_open_sections_are_those_with_keys_of_the_users_choice():
    assert OPEN_SECTIONS == (
        "trainer.divergence_limits",
        "algorithm.options",
        "model.chat_template_kwargs",
        "data.synthetic_args",
        "environment.kwargs",
        "rollout.engine_args",
    )


def test_valid_keys_are_those_below_a_section():
    assert valid_keys()[:2] == ["trainer", "algorithm"]
    assert valid_keys("reward.remote") == [
        "reward.remote.completions_per_request",
        "reward.remote.deadline_s",
        "reward.remote.header",
        "reward.remote.header_env",
    ]
    assert valid_keys("nothing") == []


@pytest.mark.parametrize(
    "overrides, adapter, base",
    [
        ([], False, False),
        (["trainer.policy.lora.rank=8"], True, True),
        (["trainer.policy.lora.rank=8", "rollout=transformers"], False, True),
        (["trainer.policy.lora.rank=8", "rollout.lora_sync=merged", "trainer.colocate_roles=false"], False, False),
        (["trainer.policy.lora.rank=600", "algorithm.ref_sync_interval=2"], False, False),
    ],
)
def test_who_gets_adapters_and_who_is_the_reference(overrides, adapter, base):
    config = compose(overrides)
    assert (config.syncs_adapter, any(role.is_policy_base for role in config.roles)) == (adapter, base)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_rank_that_an_engine_serves_decides_what_auto_means(engine):
    config = Config()
    config.rollout.engine, most = engine, ENGINES[engine].max_lora_rank
    config.trainer.policy.lora.rank = most + 1
    assert not config.syncs_adapter
    config.trainer.policy.lora.rank = max(most, 1)
    assert config.syncs_adapter == (most > 0)


def test_named_options_are_those_that_are_set():
    algorithm = AlgorithmConfig(dual_clip=3.0, clip_high=0.3, lam=0.5, kl_target=0.1, options={"x": 1})
    assert named_options(algorithm, LOSS) == {"clip_high": 0.3, "dual_clip": 3.0}
    assert named_options(algorithm, ESTIMATOR) == {"lam": 0.5}
