"""From episodes to the batch that is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tables import table
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES, shape_rewards
from trainer.config import AlgorithmConfig, Config, RolloutConfig, correction_of
from trainer.objectives.experience import (
    add_advantages,
    choose_learnable_rows,
    correct_advantages,
    correction_metrics,
    describe_rewards,
    explained_variance,
    logprob_mismatch,
    mask_rows,
)


def batch(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Two groups of two; the first row has tool output (mask 0) inside and after its completion."""
    mask = np.array([[0, 1, 0, 1, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 0]], dtype=np.float32)
    zeros = np.zeros_like(mask)
    return {
        "input_ids": zeros.astype(np.int64), "mask": mask, "lengths": np.array([5, 3, 5, 4]),
        "group_ids": np.array([0, 0, 1, 1]), "old_logprobs": zeros, "rollout_logprobs": zeros, **arrays,
    }  # fmt: skip


def test_metrics_of_a_step_by_hand():
    ours = np.array([[9, -1, 9, -1, 9], [9, -1, -1, 9, 9], [9, -1, -1, -1, -1], [9, 9, -1, -1, 9]], dtype=np.float32)
    engine = np.where(ours < 0, np.float32(-1.5), np.float32(0.0))
    engine[2, 4] = -3.0
    given = batch(old_logprobs=ours, rollout_logprobs=engine)
    status = ["stop", "stop", "length", "stop"]
    found = describe_rewards(given, np.array([1.0, 0.0, 0.75, 0.25]), status) | logprob_mismatch(given)
    expected = {
        "reward/mean": 0.5, "reward/std": np.sqrt(0.15625), "reward/zero_std_frac": 0.0, "response_length/mean": 2.5,
        "response_length/max": 4.0, "response_length/clip_ratio": 0.25, "rollout/logprob_diff_mean": 0.65,
        "rollout/logprob_diff_max": 2.0, "rollout/ratio_max": np.exp(2.0),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_step_whose_agents_have_not_asked_has_no_mismatch():
    given = batch()
    given["mask"] = np.zeros_like(given["mask"])
    assert logprob_mismatch(given) == {}


def test_the_reward_comes_at_the_last_completion_token_and_values_reach_over_tool_output():
    values = np.full((4, 5), 0.5, dtype=np.float32)
    values[0, [2, 4]] = 100.0  # of tool output: no state that an action was taken in
    a = AlgorithmConfig(advantage_estimator="gae", options={"gamma": 1.0, "lam": 1.0})
    done = add_advantages(batch(values=values), np.array([1.0, 0.0, 1.0, 0.0]), a)
    assert done["advantages"][0].tolist() == [0, 0.5, 0, 0.5, 0]
    assert done["returns"][0].tolist() == [0, 1, 0, 1, 0]
    assert done["advantages"][1].tolist() == [0, -0.5, -0.5, 0, 0]
    one_step = add_advantages(batch(values=values), np.array([1.0, 0.0, 1.0, 0.0]), AlgorithmConfig(
        advantage_estimator="gae", options={"gamma": 1.0, "lam": 0.0}))  # fmt: skip
    assert one_step["advantages"][0].tolist() == [0, 0.0, 0, 0.5, 0]  # the next value is that of the next own token


def test_a_kl_in_the_reward_is_paid_by_every_completion_token():
    ref = np.full((4, 5), -1.0, dtype=np.float32)
    ref[:, 0] = np.nan  # of the prompt
    a = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", kl_in="reward", kl_coef=0.1, kl_estimator="k1")
    returns = add_advantages(batch(ref_logprobs=ref), np.array([1.0, 0.0, 1.0, 0.0]), a, kl_coef=0.1)["returns"]
    np.testing.assert_allclose(returns[0], [0, 0.8, 0, 0.9, 0], atol=1e-6)
    np.testing.assert_allclose(returns[3], [0, 0, -0.2, -0.1, 0], atol=1e-6)


@table("kind, weight", [("tis", 2.0), ("mis", 0.0)])
def test_a_correction_weighs_advantages_and_counts_what_it_cuts(kind, weight):
    ours = np.zeros((4, 5), dtype=np.float32)
    ours[2, 1] = np.log(8.0)
    a = AlgorithmConfig(rollout_correction=kind, options={"rollout_correction_high": 2.0})
    given = add_advantages(batch(old_logprobs=ours), np.array([1.0, 0.0, 1.0, 0.0]), a)
    corrected = correct_advantages(given, a, kind)
    expected = given["advantages"].copy()
    expected[2, 1] *= weight
    np.testing.assert_allclose(corrected, expected, rtol=1e-6)
    assert correction_metrics(given, a, kind) == {"rollout_is/clip_frac": pytest.approx(1 / 10)}
    assert correct_advantages(given, a, None) is given["advantages"]


WIDE: dict[str, dict[str, float]] = {
    "clip": {"clip_low": 1.0, "clip_high": 1e9},
    "clip_cov": {"clip_low": 1.0, "clip_high": 1e9},
    "gspo": {"clip_low": 1.0, "clip_high": 1e9},
    "cispo": {"clip_high": 1e9},
    "importance_weighted_ce": {"max_weight": 1e9},
    "kl_cov": {"cov_kl_coef": 0.0},
}
"""The losses whose ratio is an importance weight, with options that remove its bounds."""


def gradient_error(loss: str, old_logprobs: str, correction: str, ahead: int = 1) -> torch.Tensor:
    """Return the error of the expected gradient if other weights sampled the completions, of one token each.

    The expectation is exact: each token counts with the probability that the sampler gives it.
    """
    generator = torch.Generator().manual_seed(3)
    logits, older = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    ours, sampler = logits.log_softmax(0), older.log_softmax(0)
    a = AlgorithmConfig(
        policy_loss=loss,
        old_logprobs=old_logprobs,
        rollout_correction=correction,
        options={"rollout_correction_high": 1e9},
    )
    kind = correction_of(Config(algorithm=a, rollout=RolloutConfig(ahead=ahead)))
    total = torch.zeros((), dtype=torch.float64)
    for token in range(7):
        old = sampler if old_logprobs == "rollout" else ours.detach()
        batch = {
            name: values[token].reshape(1, 1).numpy()
            for name, values in {"old_logprobs": old, "rollout_logprobs": sampler, "advantages": advantages}.items()
        }
        batch |= {"mask": np.ones((1, 1))}
        batch["advantages"] = correct_advantages(batch, a, kind)
        given = (torch.from_numpy(batch[name]) for name in ("old_logprobs", "advantages", "mask"))
        value, _ = POLICY_LOSSES[loss](ours[token].reshape(1, 1), *given, **WIDE.get(loss, {}))
        total = total + sampler[token].exp() * value
    on_policy = -(ours.detach().exp() * advantages * ours).sum()
    (error,) = torch.autograd.grad(total - on_policy, logits)
    return error


@table("loss", POLICY_LOSSES)
def test_samples_of_older_weights_give_the_gradient_of_fresh_samples(loss):
    assert gradient_error(loss, "recompute", "auto").abs().max() < 1e-12
    assert gradient_error(loss, "recompute", "off").abs().max() > 1e-2, "nothing to correct"
    assert gradient_error(loss, "recompute", "auto", ahead=0).abs().max() > 1e-2, "only older weights need it"
    if loss in WIDE:
        assert gradient_error(loss, "rollout", "auto").abs().max() < 1e-12


def test_rows_that_are_left_out_have_no_mask():
    status = ["stop", "stop", "length", "stop"]
    rewards = np.array([1.0, 1.0, 1.0, 0.0])
    kept = mask_rows(batch(), rewards, status, AlgorithmConfig(options={"filter_zero_variance": True}))["mask"]
    assert kept.any(axis=1).tolist() == [False, False, True, True]
    kept = mask_rows(batch(), rewards, status, AlgorithmConfig(options={"overlong_masking": True}))["mask"]
    assert kept.any(axis=1).tolist() == [True, True, False, True]


SOME_FAIL = np.array([True, False, True, True, True, False, True, False, False])
"""Of three groups of three, two good rows, all three, one."""


@table("estimator", ADVANTAGES)
def test_rows_whose_reward_failed_change_nothing_for_the_others(estimator):
    """The other rows learn the same, to the last bit, as in a batch without the failed rows."""
    rng = np.random.default_rng(3)
    mask = (np.arange(6) < rng.integers(1, 7, 9)[:, None]).astype(np.float32)
    values = rng.normal(size=mask.shape).astype(np.float32) * mask
    given = {"mask": mask, "values": values, "group_ids": np.repeat([4, 1, 2], 3)}
    given |= {"old_logprobs": -mask, "teacher_logprobs": -2 * values**2}
    rewards, baselines = rng.integers(0, 2, 9).astype(np.float64), rng.normal(size=9)
    given["player_baselines"] = rng.normal(size=9)
    a = AlgorithmConfig(advantage_estimator=estimator)

    def learnt(batch: dict, rewards: np.ndarray, baselines: np.ndarray, known: np.ndarray) -> tuple:
        learnable = choose_learnable_rows(batch, rewards, known, a, 0.0)
        done = mask_rows(
            add_advantages(batch, rewards, a, 0.0, baselines, learnable), rewards, ["stop"] * len(rewards), a, learnable
        )
        return learnable, done

    learnable, found = learnt(given, rewards, baselines, SOME_FAIL)
    alone = learnable.copy()  # a group of which one row is left teaches nothing if its rows are compared
    alone[6:] = False
    compares = estimator not in ("gae", "reward", "reinforce_plus_plus", "remax", "rae", "reverse_kl", "zero")
    assert learnable.tolist() == (alone if compares else SOME_FAIL).tolist()
    _, expected = learnt(
        {name: array[learnable] for name, array in given.items()},
        rewards[learnable],
        baselines[learnable],
        learnable[learnable],
    )
    for name in ("mask", "advantages", "returns"):
        assert np.array_equal(found[name][learnable], expected[name]), name
        assert not found[name][~learnable].any()
    everything, done = learnt(given, rewards, baselines, np.ones(9, bool))
    plain = mask_rows(add_advantages(given, rewards, a, 0.0, baselines), rewards, ["stop"] * 9, a)
    assert everything.all() and all(np.array_equal(done[name], plain[name]) for name in plain)
    nothing, done = learnt(given, rewards, baselines, np.zeros(9, bool))
    assert not nothing.any() and not any(done[name].any() for name in ("mask", "advantages", "returns"))


def test_rows_that_failed_count_in_no_metric_of_the_rewards_and_hide_no_equal_group():
    rewards, known = np.array([1.0, 0.0, 1.0, 0.25]), np.array([True, False, True, True])
    found = describe_rewards(batch(), rewards, ["stop"] * 4, known)
    assert found["reward/mean"] == 0.75 and found["reward/zero_std_frac"] == 0.5
    assert found["reward/std"] == pytest.approx(np.std([1.0, 1.0, 0.25]))
    none = describe_rewards(batch(), rewards, ["stop"] * 4, np.zeros(4, bool))
    assert none["reward/zero_std_frac"] == 1.0 and not {"reward/mean", "reward/std"} & set(none)
    equal = np.array([1.0, 0.0, 1.0, 1.0])
    a = AlgorithmConfig(options={"filter_zero_variance": True}, advantage_estimator="reinforce_plus_plus")
    assert not mask_rows(batch(), equal, ["stop"] * 4, a, known)["mask"].any(), "a failed reward is no 0"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_reward_that_its_penalties_take_out_of_the_range_is_left_out(caplog, sign):
    rewards = np.array([-1e12 - 5e5, 0.0, 1.0, 0.0])
    a = AlgorithmConfig(overlong_buffer=2, options={"overlong_factor": 5e5}, advantage_estimator="reward")
    assert choose_learnable_rows(batch(), rewards, np.ones(4, bool), a, 0.0).tolist() == [False, True, True, True]
    assert "1 rewards are left out: with the penalties" in caplog.text
    far = np.zeros((4, 5), np.float32)
    far[2, 1:] = -1e6 * sign
    a = AlgorithmConfig(kl_in="reward", kl_estimator="k1", advantage_estimator="reward")
    learnable = choose_learnable_rows(batch(ref_logprobs=far), np.zeros(4), np.ones(4, bool), a, 1e7)
    assert learnable.tolist() == [True, True, False, True]
    far[2, 1] = np.nan
    assert choose_learnable_rows(batch(ref_logprobs=far), np.zeros(4), np.ones(4, bool), a, 1e7).all(), (
        "the loss ends the run"
    )


def test_explained_variance_is_that_of_scikit_learn():
    values, returns = np.array([0.0, 1.0, 2.0]), np.array([0.5, 1.0, 2.5])
    assert explained_variance(values, returns) == pytest.approx(1 - np.var(returns - values) / np.var(returns))
    equal = np.full(1000, 0.3, dtype=np.float32)
    equal[::2] += 1e-8  # rounding
    assert explained_variance(np.linspace(0, 1, 1000), equal) == 0.0
    assert explained_variance(np.full(3, 0.25), np.ones(3)) == 1.0


Settings = dict[str, Any]


def gae(**options: Any) -> Settings:
    return {"advantage_estimator": "gae", **options}


CORRECTED = {"rollout_correction": "mis"}
EXPERIENCE_CHANGES: list[tuple[str, Any, Settings]] = [
    ("advantage_estimator", "rloo", {}),
    ("options", {"normalize_std": False}, {}),
    ("options", {"gamma": 0.5}, gae(options={"gamma": 1.0})),
    ("options", {"lam": 0.5}, gae(options={"lam": 1.0})),
    ("options", {"pass_k": 2}, {"advantage_estimator": "grpo_passk", "options": {"pass_k": 1}}),
    ("rollout_correction", "tis", {}),
    ("options", {"rollout_correction_level": "product"}, CORRECTED),
    ("options", {"rollout_correction_low": 0.9}, CORRECTED),
    ("options", {"rollout_correction_high": 1.01}, CORRECTED),
    ("options", {"filter_zero_variance": True}, {}),
    ("overlong_buffer", 2, {}),
    ("options", {"overlong_factor": 3.0}, {"overlong_buffer": 2}),
    ("options", {"overlong_masking": True}, {}),
]
PROVEN_KEYS = {f"algorithm.{key}" for key, *_ in EXPERIENCE_CHANGES} - {"algorithm.options"}
"""Keys that a resume changes with permission, and whose changes the tests of this file prove."""


def experience(algorithm: AlgorithmConfig) -> dict[str, np.ndarray]:
    """Return the batch that a step trains on, from two groups of three completions."""
    rng = np.random.default_rng(0)
    mask = (np.arange(5) < np.array([[5], [3], [4], [5], [2], [5]])).astype(np.float32)
    old = -np.abs(rng.normal(size=mask.shape)).astype(np.float32) * mask
    batch = {
        "mask": mask,
        "group_ids": np.array([0, 0, 0, 1, 1, 1]),
        "old_logprobs": old,
        "rollout_logprobs": (old + 0.5 * rng.normal(size=mask.shape).astype(np.float32)) * mask,
        "values": rng.normal(size=mask.shape).astype(np.float32),
    }
    lengths = mask.sum(axis=1).astype(int)
    status = ["length" if n == 5 else "stop" for n in lengths]
    rewards = shape_rewards(
        torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).double(),
        torch.from_numpy(lengths),
        5,
        algorithm.overlong_buffer,
        algorithm.run_option("overlong_factor"),
    ).numpy()
    config = Config(algorithm=algorithm)
    batch = add_advantages(batch, rewards, algorithm)
    batch["advantages"] = correct_advantages(batch, algorithm, correction_of(config))
    return mask_rows(batch, rewards, status, algorithm)


@table("key, value, before", EXPERIENCE_CHANGES)
def test_a_step_s_experience_follows_the_config(key, value, before):
    """The experience is a pure function of the step's rollouts and the config: nothing restored can hide a change."""
    old, new = (experience(AlgorithmConfig(**settings)) for settings in (before, {**before, key: value}))
    assert any(not np.array_equal(old[name], new[name]) for name in ("advantages", "mask"))
