"""What the learner asks of the ranks, with real ranks of a small model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.ranks import local_cluster
from tests.support.tables import table
from trainer.algorithms import ADVANTAGES, aggregate, correction_weights
from trainer.config import Config
from trainer.episodes import Episode, Sample, TokenScores
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.models.tiny import TinyShape, build_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    build_tiny(size, path)
    return path


def episodes(prompts: int = 2, n: int = 4) -> list[Episode]:
    """Episodes of different lengths and rewards, sampled by a policy that was sure of nothing."""
    made = []
    for prompt in range(prompts):
        for number in range(n):
            ids = np.asarray([65 + prompt, 66, *range(70, 73 + number)])
            mask = (np.arange(len(ids)) > 1).astype(np.float32)
            logprobs = (-5.0 * mask).astype(np.float32)
            uid = f"0:{prompt}"
            made.append(Episode(f"{uid}:{number}", uid, [Sample(ids, mask, logprobs, (1, 1))], float(number % 2)))
    return made


BY_SEQUENCE = {
    "rollout_correction": "tis",
    "options": {"rollout_correction_level": "product", "rollout_correction_high": 1e30},
}


class Step(NamedTuple):
    """A step: its metrics, its seconds by phase, what was computed for tokens, and the rows that passes scored."""

    metrics: dict[str, float]
    seconds: dict[str, float]
    kept: list[TokenScores]
    rows_scored: list[int]


_STEPS: dict[str, Step] = {}


def a_step(model: str, **settings: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of one step, and its seconds by phase (see `whole_step`)."""
    step = whole_step(model, **settings)
    return step.metrics, step.seconds


def whole_step(model: str, **settings: Any) -> Step:
    """A step with these settings, which is computed once for all tests."""
    key = f"{model} {sorted(settings.items())}"
    if key not in _STEPS:
        _STEPS[key] = _compute_step(model, **settings)
    return _STEPS[key]


def _compute_step(
    model: str,
    mini_batch: int = 2,
    ranks: int = 1,
    equal_rewards: bool = False,
    critic_warmup: int = 0,
    update_epochs: int = 1,
    **algorithm: Any,
) -> Step:
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size, cfg.rollout.n = 2, mini_batch, 4
    cfg.trainer.policy.optimizer.lr, cfg.trainer.update_epochs = 1e-2, update_epochs
    cfg.trainer.critic.warmup_steps = critic_warmup
    for name, value in algorithm.items():
        setattr(cfg.algorithm, name, value)
    timer = Timer()
    with local_cluster(ranks, cfg) as cluster:
        learner = Learner(cluster.cfg, cluster, timer)
        learner.build(model)
        made = [replace(episode, reward=1.0) for episode in episodes()] if equal_rewards else episodes()
        scored = _record_scored(learner)
        metrics = learner.update(learner.make_experience(made, 1), 1)
        assert learner.token_scores is not None, "those of the first step are kept"
        kept = list(learner.token_scores)
        speed = learner.speed(len(made), 40, 1e3)
        assert "perf/mfu" not in speed, "no data sheet of a CPU"
        # All four completions of a prompt begin with the same four tokens. Each rank computes them once.
        repeats = 2 * (4 - ranks) * 4 if not critic_warmup else 0
        assert learner._shared == pytest.approx(repeats / 52)
    prompt = np.s_[:, :2]
    assert all(not logprobs[prompt].any() and logprobs.any() for logprobs in scored), "prompts were scored"
    return Step(metrics, timer.pop(), kept, [len(logprobs) for logprobs in scored])


def _record_scored(learner: Learner) -> list[np.ndarray]:
    """The log-probs that the ranks compute in passes of their own."""
    scored: list[np.ndarray] = []
    score = learner.ranks.compute

    def recording(role: str, output: str, *args: Any) -> np.ndarray:
        found = score(role, output, *args)
        if output == "logprobs":
            scored.append(found)
        return found

    learner.ranks.compute = recording  # type: ignore[method-assign]
    return scored


def test_a_step_of_one_optimizer_step_needs_no_pass_for_old_log_probs(model):
    """Its own log-probs, detached, are the old ones: the same numbers as with a pass of their own."""
    alone, seconds = a_step(model)
    assert "time/logprob" not in seconds
    # A bound that cuts nothing: the correction of sequences alone asks for log-probs before the update.
    with_pass, seconds = a_step(model, **BY_SEQUENCE)
    assert "time/logprob" in seconds
    weight_free = {"rollout_is/clip_frac", "policy/loss", "policy/grad_norm"}
    assert alone.keys() - weight_free <= with_pass.keys()
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "policy/entropy", "policy/kl"):
        assert alone[name] == pytest.approx(with_pass[name], abs=1e-6), name
    assert alone["policy/clip_frac"] == 0.0
    of_tokens, seconds = a_step(model, rollout_correction="tis", options={"rollout_correction_high": 1e-3})
    assert "time/logprob" not in seconds
    assert of_tokens["rollout_is/clip_frac"] > 0 and of_tokens["policy/loss"] != alone["policy/loss"]


@table(
    "settings",
    [
        {},
        {"ranks": 2, "mini_batch": 1},
        {"update_epochs": 2},
        {"old_logprobs": "rollout"},
        {"equal_rewards": True},
        {"equal_rewards": True, "update_epochs": 2},
    ],
)
def test_what_was_computed_for_tokens_is_kept_with_rollouts(model, settings):
    if "equal_rewards" in settings:
        settings = settings | {"options": {"filter_zero_variance": True}, "overlong_buffer": 0}
    step = whole_step(model, **settings)
    metrics, kept = step.metrics, step.kept
    samples = [sample for episode in episodes() for sample in episode.samples]
    assert [len(one.entropy) for one in kept] == [len(sample.token_ids) for sample in samples]
    for sample, one in zip(samples, kept, strict=True):
        for array in (one.logprobs, one.entropy, one.advantages):
            assert array is None or (array.dtype == np.float32 and not array[sample.mask == 0].any())

    def of_tokens(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([array[sample.mask > 0] for sample, array in zip(samples, arrays, strict=True)])

    if "equal_rewards" not in settings:
        sums = sum(one.advantages[-1] for one in kept[:4])
        assert sums == pytest.approx(0, abs=1e-5) and np.abs(kept[0].advantages).max() > 0.1
        if settings.get("mini_batch") != 1 and "update_epochs" not in settings:
            assert of_tokens([one.entropy for one in kept]).mean() == pytest.approx(metrics["policy/entropy"], abs=1e-5)
    else:
        assert not any(one.advantages.any() for one in kept)
        is_unknown = np.isnan(of_tokens([one.entropy for one in kept]))
        assert is_unknown.all() if "update_epochs" in settings else not is_unknown.any(), "0 would mean: sure"
    if "old_logprobs" in settings:
        assert all(one.logprobs is None for one in kept), "nobody has computed them"
        return
    difference = of_tokens([one.logprobs for one in kept]) - of_tokens([sample.logprobs for sample in samples])
    assert np.abs(difference).mean() == pytest.approx(metrics["rollout/logprob_diff_mean"], abs=1e-6)
    assert np.abs(difference).max() == pytest.approx(metrics["rollout/logprob_diff_max"], abs=1e-6)


@table("mini_batch", [{"mini_batch": 1}, {}])
def test_kept_advantages_are_those_of_the_loss_whoever_has_corrected_them(model, mini_batch):
    """The ranks correct the rows of the first mini-batch, the driver corrects the others."""
    correction = {"rollout_correction": "mis", "options": {"rollout_correction_high": 0.6}}
    plain = whole_step(model, **mini_batch).kept
    kept = whole_step(model, **mini_batch, **correction).kept
    weights = []
    samples = [sample for episode in episodes() for sample in episode.samples]
    for sample, before, one in zip(samples, plain, kept, strict=True):
        arrays = (torch.from_numpy(array)[None] for array in (one.logprobs, sample.logprobs, sample.mask))
        weight = correction_weights(*arrays, kind="mis", low=0.5, high=0.6)[0][0].numpy()
        np.testing.assert_allclose(one.advantages, before.advantages * weight, rtol=1e-6)
        weights.append(weight[sample.mask > 0])
    for part in (weights[:4], weights[4:]):
        dropped = np.concatenate(part) == 0
        assert dropped.any() and not dropped.all(), "the bounds of the test tell nothing"


def test_a_step_whose_rows_are_all_left_out_is_measured_all_the_same(model):
    rewards = {"options": {"filter_zero_variance": True}, "overlong_buffer": 0}
    metrics, _ = a_step(model, equal_rewards=True, **rewards)
    full, _ = a_step(model)
    assert metrics["rollout/logprob_diff_max"] == full["rollout/logprob_diff_max"]
    assert metrics["policy/loss"] == 0.0


def test_the_agreement_is_measured_while_the_critic_warms_up(model):
    agreement = ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl")
    trained, _ = a_step(model, advantage_estimator="gae")
    warming_up, _ = a_step(model, advantage_estimator="gae", critic_warmup=1)
    assert "policy/loss" in trained and "policy/loss" not in warming_up
    for name in agreement:
        assert warming_up[name] == pytest.approx(trained[name], abs=1e-6), name
    sampler, _ = a_step(model, advantage_estimator="gae", critic_warmup=1, old_logprobs="rollout")
    assert not set(agreement) & set(sampler)


def test_the_first_of_several_optimizer_steps_needs_no_pass_for_old_log_probs(model):
    metrics, seconds, _, rows_scored = whole_step(model, mini_batch=1)
    assert "time/logprob" in seconds and metrics["policy/clip_frac"] > 0 and rows_scored == [4]
    with_pass, _, _, rows_scored = whole_step(model, mini_batch=1, **BY_SEQUENCE)
    assert rows_scored == [8]
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl"):
        assert metrics[name] == pytest.approx(with_pass[name], abs=1e-6), name


def test_the_sampler_s_log_probs_can_stand_in_for_the_old_ones(model):
    sampler, seconds = a_step(model, old_logprobs="rollout")
    trainer, _ = a_step(model)
    assert "time/logprob" not in seconds and "rollout/logprob_diff_mean" not in sampler
    assert trainer["policy/kl"] == pytest.approx(0.0, abs=1e-6) and abs(sampler["policy/kl"]) > 0.1
    assert sampler["policy/loss"] != trainer["policy/loss"]


def test_two_ranks_learn_what_one_rank_learns(model):
    one, two = a_step(model, mini_batch=1)[0], a_step(model, mini_batch=1, ranks=2)[0]
    assert one.keys() == two.keys()
    for name in one:
        assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-5), name


def test_an_episode_of_two_samples_is_scored_as_one(model):
    """As if its two halves were one row: the same advantages and metrics of the reward."""
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size, cfg.rollout.n = 2, 2, 4
    whole = episodes()
    first = whole[0].samples[0]
    halves = [replace(first, mask=first.mask * part) for part in np.eye(2)[[0, 0, 0, 1, 1][: len(first.mask)]].T]
    halves = [replace(half, mask=half.mask.astype(np.float32)) for half in halves]
    with local_cluster(1, cfg) as cluster:
        learner = Learner(cluster.cfg, cluster, Timer())
        learner.build(model)
        expected = learner.make_experience(whole, 1)
        found = learner.make_experience([replace(whole[0], samples=halves), *whole[1:]], 1)
        learner.update(found, 1)
    assert len(found.batch["mask"]) == len(whole) + 1
    assert found.batch["advantages"][:2].sum(axis=0) == pytest.approx(expected.batch["advantages"][0])
    assert found.batch["advantages"][2:] == pytest.approx(expected.batch["advantages"][1:])
    names = ("reward/mean", "reward/std", "response_length/mean", "response_length/max")
    assert [found.metrics[name] for name in names] == [expected.metrics[name] for name in names]


@contextlib.contextmanager
def learner_of(model: str, mini_batch: int = 1, epochs: int = 1, **algorithm: Any) -> Iterator[Learner]:
    """A learner on one rank, for steps of two prompts."""
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size, cfg.rollout.n = 2, mini_batch, 4
    cfg.trainer.update_epochs = epochs
    cfg.trainer.policy.optimizer.lr = 1e-2
    for name, value in {"advantage_estimator": "reinforce_plus_plus", **algorithm}.items():
        setattr(cfg.algorithm, name, value)
    with local_cluster(1, cfg) as cluster:
        learner = Learner(cluster.cfg, cluster, Timer())
        learner.build(model)
        yield learner


def test_a_kl_in_the_reward_reads_the_old_log_probs_of_all_rows(model):
    """The policy is still the reference: the KL is 0 for every row, also for those of the first optimizer step."""
    with learner_of(model) as learner:
        plain = learner.make_experience(episodes(), 1)
    with learner_of(model, kl_in="reward", kl_coef=0.5) as learner:
        found = learner.make_experience(episodes(), 1)
        assert "has_old_logprobs" not in found.batch
        assert (found.batch["old_logprobs"] == found.batch["ref_logprobs"]).all()
        np.testing.assert_array_equal(found.batch["advantages"], plain.batch["advantages"])
        learner.update(found, 1)
        moved = learner.make_experience(episodes(), 2)
        assert not np.allclose(moved.batch["old_logprobs"], moved.batch["ref_logprobs"])
        assert not np.allclose(moved.batch["advantages"], plain.batch["advantages"]), "the KL is paid"


def half_of_gae(rewards, mask, group_ids, values):
    """An estimator of a user, which reads the values of a critic."""
    advantages, returns = ADVANTAGES["gae"](rewards, mask, group_ids, values=values)
    return 0.5 * advantages, returns


def pulled_to_reference(logprobs, old_logprobs, advantages, mask, ref_logprobs, *, group_ids, aggregation, totals):
    """A loss of a user, which reads the reference and whole groups, and has a metric of its own."""
    loss = aggregate((logprobs - ref_logprobs).square() - advantages * logprobs, mask, aggregation, totals)
    groups = torch.tensor(float(len(group_ids[mask.any(dim=1)].unique())))
    return loss, {"groups_seen": groups}


def test_functions_of_a_user_get_the_models_and_the_groups_that_they_read(model):
    """A critic for `values`, a reference for `ref_logprobs` without a KL, and no group in two micro-batches."""
    functions = {
        "advantage_estimator": f"{__name__}:half_of_gae",
        "policy_loss": f"{__name__}:pulled_to_reference",
    }
    cfg = Config()
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 2
    cfg.trainer.max_tokens_per_micro_batch = 6
    cfg.algorithm = replace(cfg.algorithm, **functions)
    found = []
    for ranks in (1, 2):
        with local_cluster(ranks, cfg) as cluster:
            learner = Learner(cluster.cfg, cluster, Timer())
            learner.build(model)
            assert list(learner.objective.roles) == ["policy", "critic", "reference"]
            experience = learner.make_experience(episodes(), 1)
            assert {"values", "ref_logprobs", "advantages"} <= experience.batch.keys()
            found.append(learner.update(experience, 1))
    for metrics in found:
        assert {"critic/loss", "critic/explained_variance", "policy/loss"} <= metrics.keys()
        assert metrics["policy/groups_seen"] == 2.0, "a group in two pieces would count twice"
        assert "policy/clip_frac" not in metrics
    for name in found[0]:
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4, abs=1e-5), name


def test_an_adaptive_kl_weight_acts_on_the_next_step_s_rewards(model):
    settings = {"kl_in": "reward", "kl_coef": 0.5}
    settings["options"] = {"kl_target": 1e-9, "kl_horizon": 8}
    with learner_of(model, **settings) as learner:
        learner.update(learner.make_experience(episodes(), 1), 1)
        assert learner.kl.coef == pytest.approx(0.5 * 1.2), "the update saw 8 completions of 8"
        adapted = learner.make_experience(episodes(), 2)
        assert adapted.metrics["policy/kl_coef"] == learner.kl.coef
        learner.kl.coef = 0.0
        free = learner.make_experience(episodes(), 2)
        assert not np.allclose(adapted.batch["advantages"], free.batch["advantages"])


def test_the_weight_of_the_kl_reaches_the_loss(model):
    losses = []
    for coef in (0.5, 50.0):
        with learner_of(model, kl_coef=0.5, kl_estimator="k3") as learner:
            learner.kl.coef = coef
            losses.append(learner.update(learner.make_experience(episodes(), 1), 1)["policy/loss"])
    assert losses[0] != losses[1]


def test_rows_are_filtered_by_the_rewards_that_are_trained_on(model):
    """Equal rewards, of which the penalty of long completions makes different ones."""
    equal = [replace(episode, reward=1.0) for episode in episodes()]
    longest = int(equal[3].samples[0].mask.sum())
    with learner_of(model, options={"filter_zero_variance": True}) as learner:
        assert not learner.make_experience(equal, 1).batch["mask"].any()
        learner.cfg.algorithm.overlong_buffer = 2
        learner.cfg.rollout.max_response_tokens = longest
        assert learner.make_experience(equal, 1).batch["mask"].any(axis=1).all()


def test_a_row_that_is_left_out_is_the_row_of_its_own_episode(model):
    """The first episode has two samples, so rows and episodes count differently."""
    made = [replace(episode, status="length" if i == 1 else "stop") for i, episode in enumerate(episodes())]
    made[0] = replace(made[0], samples=made[0].samples * 2)
    equal_second = [replace(episode, reward=1.0) if episode.group == "0:1" else episode for episode in made]
    with learner_of(model, options={"overlong_masking": True}) as learner:
        kept = learner.make_experience(made, 1).batch["mask"].any(axis=1)
        assert kept.tolist() == [True, True, False, *[True] * 6]
        learner.cfg.algorithm.options = {"filter_zero_variance": True}
        kept = learner.make_experience(equal_second, 1).batch["mask"].any(axis=1)
        assert kept.tolist() == [True] * 5 + [False] * 4


def test_the_baseline_of_each_episode_is_subtracted(model):
    with learner_of(model, advantage_estimator="remax") as learner:
        zero, half = (
            learner.make_experience([replace(episode, baseline=baseline) for episode in episodes()], 1).batch
            for baseline in (0.0, 0.5)
        )
    np.testing.assert_allclose(half["advantages"], zero["advantages"] - 0.5 * zero["mask"], atol=1e-6)


def test_the_reference_takes_the_policy_s_weights_at_its_interval_alone(model):
    with learner_of(model, kl_coef=0.1, ref_sync_interval=2) as learner:

        def reference(step: int) -> np.ndarray:
            experience = learner.make_experience(episodes(), step)
            learner.update(experience, step)
            return experience.batch["ref_logprobs"]

        seen = [reference(step) for step in (1, 2, 3, 4, 5)]
    changes = [not np.array_equal(before, after) for before, after in zip(seen, seen[1:], strict=False)]
    assert changes == [False, True, False, True], "after the steps 2 and 4"


def test_the_speed_counts_each_pass_and_the_tokens_of_each_epoch_once(model):
    speeds = []
    for coef, epochs in ((0.0, 1), (0.5, 1), (0.0, 2)):
        with learner_of(model, mini_batch=2, epochs=epochs, kl_coef=coef) as learner:
            learner.update(learner.make_experience(episodes(), 1), 1)
            learner.peak_flops = 1.0
            speeds.append(learner.speed(samples=8, tokens=52, seconds=1.0))
    plain, with_reference, two_epochs = (speed["perf/mfu"] for speed in speeds)
    # In units of 2 FLOPs a token and parameter, an update takes 3. A pass of the reference takes 1, as does one for
    # the old log-probs, which two epochs need.
    assert with_reference == pytest.approx(plain * 4 / 3)
    assert two_epochs == pytest.approx(plain * (1 + 2 * 3) / 3)


def test_in_several_epochs_the_old_log_probs_of_all_rows_are_computed_before(model):
    """In the second epoch the weights have moved, so the first optimizer step's own are no longer the old ones."""
    with learner_of(model) as learner:
        assert "has_old_logprobs" in learner.make_experience(episodes(), 1).batch
    with learner_of(model, epochs=2) as learner:
        scored = learner.make_experience(episodes(), 1)
        assert "has_old_logprobs" not in scored.batch
        assert (scored.batch["old_logprobs"][scored.batch["mask"] > 0] < 0).all()
        learner.update(scored, 1)


def test_metrics_of_rewards_are_those_before_penalties_and_of_episodes(model):
    """The first episode has two samples. Its reward counts once, and without the penalty of its length."""
    made = episodes()
    made[0] = replace(made[0], samples=made[0].samples * 2)
    with learner_of(model, overlong_buffer=2) as learner:
        learner.cfg.rollout.max_response_tokens = int(made[3].samples[0].mask.sum())
        metrics = learner.make_experience(made, 1).metrics
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.5)
    lengths = [6, 4, 5, 6, 3, 4, 5, 6]
    assert metrics["response_length/mean"] == pytest.approx(sum(lengths) / 8)


def answered(model: str, count: int) -> list[Sample]:
    """Prompts with the answers that transformers gives greedily; every third has one other token at its end."""
    network = AutoModelForCausalLM.from_pretrained(model)
    made = []
    for i in range(count):
        prompt = [3 + i, 40 + i % 7, 9]
        length = 2 + i % 4
        options = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length, "suppress_tokens": None}
        ids = network.generate(torch.tensor([prompt]), eos_token_id=None, pad_token_id=0, **options)[0].numpy().copy()
        if i % 3 == 0:
            ids[-1] = (ids[-1] + 1) % 256
        made.append(Sample(ids.astype(np.int32), (np.arange(len(ids)) > 2).astype(np.float32)))
    return made


def test_the_accuracy_is_that_of_greedy_decoding_and_changes_no_training(model):
    """An answer is exact if each of its tokens is the likeliest one after the true ones before it."""
    cfg, samples = Config(), answered(model, 20)
    cfg.algorithm.advantage_estimator, cfg.algorithm.policy_loss = "reward", "reinforce"
    cfg.trainer.train_batch_size = cfg.trainer.mini_batch_size = 20
    found = []
    for checks in (True, False):
        with local_cluster(2, cfg) as cluster:
            learner = Learner(cluster.cfg, cluster, Timer())
            learner.build(model)
            losses = []
            for step in (1, 2):
                if checks:
                    assert step > 1 or learner.accuracy(samples) == pytest.approx(13 / 20)
                    right = [sample for i, sample in enumerate(samples) if i % 3]
                    assert step > 1 or learner.accuracy(right) == 1.0
                taught = [Episode(str(i), str(i), [sample]) for i, sample in enumerate(samples)]
                losses.append(learner.update(learner.make_experience(taught, step), step))
            found.append(losses)
    assert found[0] == found[1]


@table("estimator, ranks, mini_batch", [("grpo", 1, 2), ("gae", 2, 1)])
def test_a_step_with_failed_rewards_learns_what_it_would_learn_without_them(model, estimator, ranks, mini_batch):
    """On one rank in a mini-batch of two prompts, and on two ranks in mini-batches of one."""
    some = [replace(one, reward=None, failure="is nan") if i in (1, 6) else one for i, one in enumerate(episodes())]
    kept = [one for one in some if one.reward is not None]

    def learnt(given: list[Episode], ranks: int, mini_batch: int) -> dict[str, float]:
        cfg = Config()
        cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
        cfg.trainer.train_batch_size, cfg.trainer.mini_batch_size, cfg.rollout.n = 2, mini_batch, 4
        cfg.algorithm.advantage_estimator = estimator
        with local_cluster(ranks, cfg) as cluster:
            learner = Learner(cluster.cfg, cluster, Timer())
            learner.build(model)
            return learner.update(learner.make_experience(given, 1), 1)

    expected, found = learnt(kept, 1, mini_batch), learnt(some, ranks, mini_batch)
    for name in expected:
        if name.startswith(("policy/", "critic/", "reward/")):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
