"""What the loop hands to the ranks, seen from a whole job's metrics."""

from __future__ import annotations

import pytest

from tests.support.jobs import metrics, run_forked_job


def nothing(completion: str, answer: str) -> float:
    """A reward without which advantages and values stay 0, and the policy loss is KL and entropy alone."""
    return 0.0


@pytest.mark.timeout(900)
def test_the_adapted_kl_coefficient_is_used_and_the_critic_warms_up(tmp_path):
    done = run_forked_job(
        "algorithm=ppo",
        "algorithm.kl_coef=2",
        "+algorithm.options.kl_target=1e-9",
        "+algorithm.options.kl_horizon=32",
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
        "algorithm.entropy_coef=0.3",
        "reward.name=tests.cpu.jobs.test_kl_and_warm_up:nothing",
        "trainer.total_steps=4",
        "trainer.mini_batch_size=8",
        "trainer.update_epochs=1",
        "trainer.critic.warmup_steps=1",
        "trainer.policy.optimizer.lr=1e-3",
        "trainer.policy.optimizer.scheduler=constant",
        "trainer.val_interval=-1",
        "trainer.ckpt_interval=-1",
        "logger.plot=false",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "outputs/default")
    assert ["policy/loss" in row for row in rows] == [False, True, True, True], "the critic warms up for one step"
    assert all("critic/loss" in row for row in rows)
    # 32 completions a step, the horizon: the coefficient falls by a fifth while the KL is 0, then rises by one.
    assert [row["policy/kl_coef"] for row in rows] == pytest.approx([2.0, 2.0, 1.6, 1.92])
    for row in rows[1:]:
        kl_loss = row["policy/loss"] + 0.3 * row["policy/entropy"]
        assert kl_loss == pytest.approx(row["policy/kl_coef"] * row["policy/kl"], rel=1e-3, abs=1e-7)
    assert rows[3]["policy/kl"] > 1e-4, "the policy did not move"
