"""What the driver reads from the config acts after a resume, in a whole job."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from tests.support.jobs import metrics, run_forked_job
from trainer.config import OptimizerConfig
from trainer.workers.optimizers import learning_rate

CHANGES = {
    "trainer.train_batch_size": 4,
    "trainer.critic.warmup_steps": 3,
    "algorithm.dynamic_sampling": True,
    "algorithm.options.max_gen_batches": 2,
    "reward.name": "arithmetic",
    "reward.weights": [2.0],
    "rollout.n": 3,
    "rollout.top_k": 1,
    "rollout.dtype": "bfloat16",
}
ONLY_BUILT_FROM_THE_CONFIG = {
    "environment.name",
    "environment.kwargs",
    "environment.max_turns",
    "environment.max_tokens",
    "environment.agent_sampling",
    "algorithm.old_logprobs",
    "algorithm.teacher.path",
    "algorithm.teacher.divergence",
    "algorithm.teacher.beta",
    "algorithm.teacher.temperature",
    "algorithm.teacher.top_k",
    "model.trust_remote_code",
    "reward.url",
    "reward.model.path",
    "rollout.engine",
    "rollout.top_p",
    "rollout.engine_args",
    "sft.steps",
}
"""What makes engines, environments, remote rewards, frozen models and requests. No saved state takes part, as the names
of all saved state show."""
PROVEN_KEYS = {*CHANGES, *ONLY_BUILT_FROM_THE_CONFIG} - {"algorithm.options.max_gen_batches"}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_resume_may_change_acts_in_a_whole_job(tmp_path):
    base = [
        "algorithm=ppo",
        "algorithm.kl_coef=0.01",
        "algorithm.kl_in=loss",
        "trainer.policy.optimizer.schedule_steps=4",
        "trainer.resume_mode=latest",
        "rollout.max_response_tokens=8",
    ]
    first = run_forked_job(*base, cwd=tmp_path, timeout=400)
    assert first.returncode == 0, first.stdout + first.stderr
    changes = [f"{key}={value}" for key, value in CHANGES.items()]
    keys = [key.replace("options.max_gen_batches", "options") for key in CHANGES]  # permission is for all options
    allowed = f"trainer.allow_config_change=[{','.join(keys)}]"
    again = run_forked_job(*base, "trainer.total_steps=4", *changes, allowed, cwd=tmp_path, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    for key in keys:
        assert f"config changed since the checkpoint: {key}: " in again.stdout
    second, third, fourth = metrics(tmp_path / "outputs/default")[2:]
    assert "sampling/batches" not in second and third["sampling/batches"] == 2
    assert third["progress/prompts"] - second["progress/prompts"] == 4
    assert third["progress/samples"] - second["progress/samples"] == 4 * 3
    assert third["reward/zero_std_frac"] == 1.0, "the likeliest token alone is sampled"
    assert fourth["rollout/logprob_diff_max"] > 1e-3 > second["rollout/logprob_diff_max"]
    assert "policy/loss" in second and "policy/loss" not in third and fourth["policy/loss"] is not None
    checkpoint = tmp_path / "outputs/default/checkpoints/global_step_4"
    trainer = yaml.safe_load((checkpoint / "config.yaml").read_text())["trainer"]
    policy = OptimizerConfig(**trainer["policy"]["optimizer"])
    critic = replace(policy, lr=trainer["critic"]["optimizer"]["lr"])  # it follows the policy's schedule
    rates = [learning_rate(critic, 2, total_steps=4), learning_rate(policy, 0, total_steps=1)]
    assert [third["critic/lr"], fourth["policy/lr"]] == rates, "each step has one optimizer step now, and had two"
    assert not (second["reward/mean"] * 8 * 4).is_integer(), "similar words have a reward between 0 and 1"
    assert (third["reward/mean"] * 4 * 3 / 2).is_integer(), "equal words alone have a reward, of 2"

    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert set(state) == {"step", "history", "counters", "kl_controller", "best", "tracker", "rng"}
    assert set(json.loads((checkpoint / "data.json").read_text())) == {
        "format",
        "seed",
        "rows",
        "fingerprint",
        "epoch",
        "position",
        "trained_ahead",
    }
