"""The arrays that a policy gradient reads from its roles, and those that its functions get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tables import table
from trainer.algorithms import Totals
from trainer.config import AlgorithmConfig, Config, RoleSpec, TaskSpec, policy_gradient_roles
from trainer.config.tasks import add_task
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.objectives import Outputs
from trainer.objectives.batches import batch_of, build_batch
from trainer.objectives.check import check_functions
from trainer.objectives.policy_gradient import PolicyGradient
from trainer.parallel.batching import take_rows

FUNCTIONS = """
import torch

SEEN = []

def with_reference(logprobs, old_logprobs, advantages, mask, ref_logprobs, *, group_ids, totals, aggregation, beta=2.0):
    SEEN.append((ref_logprobs, group_ids))
    loss = beta * (logprobs - ref_logprobs).sum()
    return loss, {"approx_kl": loss.detach(), "clip_frac": loss.detach(), "groups": group_ids.max().float()}

def without(logprobs, old_logprobs, advantages, mask, *, totals, aggregation):
    return logprobs.sum(), {}

def with_teacher(logprobs, old_logprobs, advantages, mask, *, teacher_logprobs, totals, aggregation):
    return (logprobs - teacher_logprobs).sum(), {}

def with_baselines(rewards, mask, group_ids, baselines):
    return rewards - baselines[:, None], rewards

def with_values(rewards, mask, group_ids, values):
    return rewards - values, rewards
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch) -> None:
    (tmp_path / "gradient_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def objective(**algorithm) -> PolicyGradient:
    return PolicyGradient(Config(algorithm=AlgorithmConfig(**algorithm)))


def batch(**further) -> dict[str, np.ndarray]:
    """Two groups of two rows of three tokens."""
    mask = np.ones((4, 3), np.float32)
    arrays = {"input_ids": np.arange(12).reshape(4, 3), "mask": mask, "lengths": np.full(4, 3)}
    arrays |= {"group_ids": np.array([0, 0, 1, 1]), "advantages": mask, "old_logprobs": -mask}
    return arrays | further


def policy_loss(made: PolicyGradient, arrays: dict[str, np.ndarray]) -> tuple[float, dict[str, float]]:
    logprobs = torch.full((4, 3), -0.5, requires_grad=True)
    mb = take_rows(arrays, range(4), "cpu")
    loss, metrics = made.loss("policy", Outputs(logprobs), mb, Totals.of(mb["mask"]), made.numbers())
    return loss.item(), {name: value.item() for name, value in metrics.items()}


@table("chosen", ["auto", "off", "mis"])
def test_rollouts_of_older_weights_that_a_checkpoint_held_are_corrected(chosen):
    """So a resume may turn `rollout.ahead` off. Rollouts of another policy are corrected, too."""
    made = objective(rollout_correction=chosen)

    def trained(version: int | None) -> np.ndarray:
        ones, versions = np.ones(3, np.float32), None if version is None else (version, version)
        samples = [Sample(np.arange(3, dtype=np.int32), ones, -2 * ones, versions) for _ in range(4)]
        rows = build_batch(samples, ["0", "0", "1", "1"], 5)
        episodes = [Episode(f"0:0:{i}", "0", [sample], float(i)) for i, sample in enumerate(samples)]
        old = {"old_logprobs": np.full((4, 3), -1.5, np.float32)}
        experience = made.experience(episodes, rows | old)
        in_update = made.experience(episodes, rows | old | {"has_old_logprobs": np.zeros(4, bool)}).batch
        losses = [policy_loss(made, one)[0] for one in (experience.batch, in_update)]
        assert losses[0] == pytest.approx(losses[1])
        return experience.batch["advantages"]

    assert np.array_equal(trained(5), trained(4)) == (chosen != "auto")
    assert np.array_equal(trained(4), trained(None)), "nobody knows how far away another policy is"
    assert np.array_equal(trained(4), trained(0)), "this run's weights count from 1"


def test_players_are_compared_with_themselves_in_one_optimizer_step():
    """Two games of each of two prompts; the first player's conversation of the first game has two samples."""
    ones, steps = np.ones(3, np.float32), []

    def played(uid: str, **rewards: float) -> Episode:
        several = [name for name in rewards for _ in range(1 + (uid == "0:0:0" and name == "x"))]
        samples = [
            Sample(np.arange(3, dtype=np.int32), ones, -ones, (5, 5), reward=rewards[name], player=name)
            for name in several
        ]
        return Episode(uid, uid[:3], samples, 0.0)

    games = [
        played("0:0:0", x=1, o=-1),
        played("0:0:1", x=0, o=1),
        played("0:1:0", x=1, o=0),
        played("0:1:1", x=1, o=0),
    ]
    rows = batch_of(games, 5) | {"old_logprobs": np.full((9, 3), -1.0, np.float32)}
    assert (
        rows["group_ids"].tolist() == [0, 0, 1, 0, 1, 2, 3, 2, 3] and rows["prompt_ids"].tolist() == [0] * 5 + [1] * 4
    )
    made = objective(advantage_estimator="rloo")
    made.cfg.trainer.train_batch_size = made.cfg.trainer.mini_batch_size = 2
    (everything,) = made.mini_batches(rows, 1)
    assert everything.tolist() == [*range(9)]
    made.cfg.trainer.mini_batch_size = 1
    assert sorted(part.tolist() for part in made.mini_batches(rows, 1)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    found = made.experience(games, rows)
    assert found.batch["advantages"][:, 2].tolist() == [1, 1, -2, -1, 2, 0, 0, 0, 0]
    assert found.metrics["reward/mean"] == 0.375 and found.metrics["reward/zero_std_frac"] == 0.5
    made = objective(advantage_estimator="rae")
    for _ in range(2):
        steps.append(made.experience(games, rows))
    assert made.averages.state_dict() == {} and np.array_equal(*(one.batch["advantages"] for one in steps))
    first = steps[0].batch["advantages"][:, 0].tolist()
    assert first == pytest.approx([1, 1, -1, -0.05, 1.05, 0.9525, -0.0025, 0.904875, -0.002375], abs=1e-6)
    made.end_step(steps[0].batch, {}, None)
    assert made.averages.state_dict() == pytest.approx({"x": 0.14036875, "o": 0.00225625})
    assert steps[0].metrics["player/x/baseline"] == made.averages.averages["x"]


def test_the_agreement_of_log_probs_is_measured_on_what_this_run_has_sampled():
    """The rewards of rollouts of another policy are measured, too."""
    ones = np.ones(3, np.float32)

    def measured(*versions: tuple[int, int] | None) -> dict[str, float]:
        samples = [
            Sample(np.arange(3, dtype=np.int32), ones, -(2.0 + 5 * (one is None)) * ones, one) for one in versions
        ]
        episodes = [Episode(f"0:0:{i}", "0", [sample], float(i)) for i, sample in enumerate(samples)]
        old = {"old_logprobs": np.full((len(samples), 3), -1.5, np.float32)}
        batch = build_batch(samples, ["0"] * len(samples), 5)
        found = objective().experience(episodes, batch | old).metrics
        late = objective().end_step({**batch, "sampled": batch["mask"]}, {}, old["old_logprobs"])
        assert {name: late[name] for name in late} == {name: found[name] for name in late}
        return found

    fresh, mixed, foreign = measured((5, 5), (5, 5)), measured((5, 5), None), measured(None, None)
    assert fresh["rollout/logprob_diff_max"] == mixed["rollout/logprob_diff_max"] == pytest.approx(0.5)
    assert not [name for name in foreign if "logprob_diff" in name] and foreign["reward/mean"] == 0.5
    assert foreign["rollout_is/clip_frac"] == 1.0


def test_held_rollouts_of_older_weights_are_refused_where_nothing_corrects_them():
    """A run with `rollout.ahead=0` passes the check of its config, and may still hold such rollouts."""
    ones = np.ones(3, np.float32)

    def train(version: int | None, **algorithm: str) -> None:
        versions = None if version is None else (version, version)
        sample = Sample(np.arange(3, dtype=np.int32), ones, -2 * ones, versions)
        episodes = [Episode(f"0:0:{i}", "0", [sample], float(i)) for i in range(2)]
        made = objective(policy_loss="reinforce", **{"old_logprobs": "rollout", **algorithm})
        made.experience(episodes, build_batch([sample] * 2, ["0", "0"], 5) | {"old_logprobs": np.full((2, 3), -1.5)})

    train(5)
    train(4, rollout_correction="off")
    train(4, old_logprobs="recompute")
    for version in (4, None):
        with pytest.raises(UserError, match="^algorithm.policy_loss=reinforce: has no ratio .* of this step; choose"):
            train(version)


def test_a_policy_loss_of_a_subclass_gets_corrected_advantages():
    """Those of the first optimizer step too, which computes its old log-probs itself."""
    made, seen = objective(rollout_correction="tis"), []

    def own(outputs, mb, totals, numbers):
        seen.append(mb["advantages"])
        return made._policy_loss(outputs, mb, totals, numbers)

    made.losses["policy"] = own
    arrays = {"rollout_logprobs": np.full((4, 3), -2.0, np.float32), "old_logprobs": np.full((4, 3), -1.5, np.float32)}
    for known in (True, False):
        policy_loss(made, batch(**arrays) | {"has_old_logprobs": np.full(4, known)})
    torch.testing.assert_close(seen[1], seen[0] * np.exp(0.5), rtol=1e-5, atol=0)


def test_a_loss_gets_what_it_reads_and_its_metrics_pass():
    made = objective(policy_loss="gradient_functions:with_reference", options={"beta": 3.0})
    assert made.unit == "group" and [score.name for score in made.computes(batch(), 1)] == ["ref_logprobs"]
    reference = np.full((4, 3), -1.0, np.float32)
    sampled = {"ref_logprobs": reference, "rollout_logprobs": reference}
    loss, metrics = policy_loss(made, batch(**sampled))
    assert loss == pytest.approx(3 * 12 * 0.5)
    # With a reference, the KL is that to the reference, whatever the loss says.
    assert metrics.keys() == {"kl", "clip_frac", "groups"} and metrics["groups"] == 1.0
    loss, metrics = policy_loss(made, batch(ref_logprobs=reference))
    assert metrics.keys() == {"groups"}, "the others compare with the engine that sampled, and there was none"


def test_a_loss_reads_what_a_further_role_of_the_task_scores():
    def roles(cfg: Config) -> tuple[RoleSpec, ...]:
        return *policy_gradient_roles(cfg), RoleSpec(
            "teacher", path="/t", path_key="teacher", computes="teacher_logprobs"
        )

    add_task("distilled:TASK", lambda: TaskSpec("distilled:build", roles=roles))
    cfg = Config(algorithm=AlgorithmConfig(policy_loss="gradient_functions:with_teacher"))
    cfg.trainer.task = "distilled:TASK"
    check_functions(cfg)
    made = PolicyGradient(cfg)
    assert [(score.name, score.role) for score in made.computes(batch(), 1)] == [("teacher_logprobs", "teacher")]
    assert policy_loss(made, batch(teacher_logprobs=np.full((4, 3), -1.0, np.float32)))[0] == 12 * 0.5


def test_a_loss_that_reads_nothing_more_needs_no_role_and_no_groups():
    made = objective(policy_loss="gradient_functions:without")
    assert made.unit == "row" and made.computes(batch(), 1) == []
    assert policy_loss(made, batch()) == (-6.0, {})


def test_the_roles_score_what_the_functions_read_before_the_update():
    sampled = batch(rollout_logprobs=np.ones((4, 3), np.float32))
    made = objective(advantage_estimator="gae", kl_coef=0.1)
    scores = made.computes(sampled, 1)
    assert [(s.name, s.role, s.output) for s in scores] == [
        ("old_logprobs", "policy", "logprobs"),
        ("values", "critic", "values"),
        ("ref_logprobs", "reference", "logprobs"),
    ]
    assert made.updates(1) == ["critic", "policy"]
    made.cfg.trainer.critic.warmup_steps = 2
    warming_up = PolicyGradient(made.cfg)
    assert [warming_up.updates(step) for step in (1, 2, 3)] == [["critic"], ["critic"], ["critic", "policy"]]


@table("estimator, subtracted", [("with_baselines", [0.25, 0.5]), ("with_values", [2.0, 2.0])])
def test_an_estimator_of_the_user_s_gets_what_it_reads(estimator, subtracted):
    """The name of the estimator does not matter, and its parameter may be keyword-only or not."""
    made = objective(advantage_estimator=f"gradient_functions:{estimator}")
    assert ("baselines" in made.cfg.algorithm.reads) == (estimator == "with_baselines")
    samples = [Sample(np.arange(3), np.array([0, 1, 1], np.float32), np.zeros(3, np.float32), (1, 1))] * 2
    episodes = [
        Episode(str(i), "0", [sample], reward=1.0, baseline=baseline)
        for i, (sample, baseline) in enumerate(zip(samples, (0.25, 0.5), strict=True))
    ]
    rows = build_batch(samples, ["0", "0"]) | {"values": np.full((2, 3), 2.0, np.float32)}
    found = made.experience(episodes, rows).batch["advantages"]
    assert found[:, -1].tolist() == [1 - value for value in subtracted]
