"""The metrics of a batch, and those of each source of a mix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.config import Config, EnvironmentConfig, RewardConfig
from trainer.config.data import SourceConfig
from trainer.episodes import Episode, Sample
from trainer.sources.episode_metrics import episode_metrics, failure_metrics, mean_versions, staleness
from trainer.sources.evaluation import RolloutEvaluator

MATH = SourceConfig(files=["a"], reward=RewardConfig(success_threshold=0.5))
GAMES = SourceConfig(files=["b"], environment=EnvironmentConfig(name="a:B"))


def mix() -> Config:
    cfg = Config()
    cfg.data.mix = {"math": MATH, "games": GAMES}
    return cfg


def episode(group: str, reward: float | None, source: str = "", length: int = 2, **fields) -> Episode:
    sample = Sample(np.zeros(length, np.int32), np.ones(length, np.float32))
    return Episode(f"{group}:0", group, [sample], reward=reward, source=source, **fields)


EPISODES = [
    episode("math:0:1", 1.0, "mix.math", rewards={"exact": 1.0}),
    episode("math:0:1", 0.0, "mix.math", rewards={"exact": 0.0}, length=4),
    episode("math:0:2", 0.5, "mix.math", rewards={"exact": 0.5}),
    episode("math:0:2", None, "mix.math", failure="broke"),
    episode("games:0:1", 3.0, "mix.games", turns=2, metrics={"moves": 4.0}),
    episode("games:0:1", 3.0, "mix.games", turns=3, metrics={"moves": 6.0}),
]


def test_each_source_has_metrics_of_its_own():
    found = episode_metrics(mix(), EPISODES)
    assert found == {
        "data/games/failures": 0.0,
        "data/games/response_length/mean": 2.0,
        "data/games/reward/mean": 3.0,
        "data/games/reward/std": 0.0,
        "data/games/accuracy": 1.0,
        "data/games/reward/zero_std_frac": 1.0,
        "data/games/episode/moves/mean": 5.0,
        "data/games/episode/turns/mean": 2.5,
        "data/games/episode/tokens/mean": 2.0,
        "data/math/failures": 1.0,
        "data/math/response_length/mean": 2.5,
        "data/math/reward/mean": 0.5,
        "data/math/reward/std": pytest.approx(np.std([1.0, 0.0, 0.5])),
        "data/math/accuracy": pytest.approx(2 / 3),
        "data/math/reward/zero_std_frac": 0.5,
        "data/math/reward/exact/mean": 0.5,
    }


def test_metrics_read_the_rewards_of_players():
    """Also where an episode has failed; a group is a prompt and a player."""

    def game(source: str, number: int, x: float | None, o: float | None) -> Episode:
        one = np.ones(1, np.float32)
        samples = [Sample(one, one, one, reward=r, player=name, sampled_by="old") for name, r in (("x", x), ("o", o))]
        return Episode(f"0:1:{number}", "0:1", samples, None if x is None else 0.0, source=source)

    of_mix = [game("mix.games", 0, 1.0, -1.0), game("mix.games", 1, 0.5, -1.0), game("mix.games", 2, None, None)]
    found = episode_metrics(mix(), of_mix)
    assert found["data/games/reward/mean"] == -0.125 and found["data/games/reward/zero_std_frac"] == 0.5
    assert found["data/games/player/x/reward/mean"] == 0.75 and found["data/games/player/o/reward/mean"] == -1.0
    assert found["data/games/accuracy"] == 0.25 and found["rollout/replayed_frac"] == 1.0
    alone = [replace(one, source="") for one in of_mix]
    assert episode_metrics(Config(), alone) == {"player/o/reward/mean": -1.0, "player/x/reward/mean": 0.75}
    evaluator = RolloutEvaluator(Config(), None, [])
    assert evaluator._reward_metrics(alone, 1) == {
        "val/failures": 0.0, "val/reward/mean": -0.125, "val/accuracy": 0.25, "val/player/x/reward/mean": 0.75,
        "val/player/o/reward/mean": -1.0,
    }  # fmt: skip


def test_failures_are_counted_by_what_has_failed():
    assert failure_metrics(mix(), EPISODES) == {"reward/failures": 1.0, "environment/failures": 0.0}
    alone = [episode("0:1", None, failure="broke"), episode("0:1", 1.0)]
    assert failure_metrics(Config(), alone) == {"reward/failures": 1.0}
    assert failure_metrics(Config(environment=GAMES.environment), alone) == {"environment/failures": 1.0}


def test_without_any_known_reward_a_source_has_no_mean():
    found = episode_metrics(mix(), [episode("math:0:1", None, "mix.math", failure="broke")])
    assert "data/math/reward/mean" not in found and "data/math/accuracy" not in found


def test_without_a_mix_the_names_are_those_of_the_run():
    found = episode_metrics(Config(), [episode("0:1", 1.0, rewards={"exact": 1.0})])
    assert found == {"reward/exact/mean": 1.0}


def test_only_weights_of_this_run_have_an_age():
    ones = np.ones(2, np.float32)

    def of(*versions: tuple[int, int] | None) -> list[Episode]:
        samples = [Sample(np.zeros(2, np.int32), ones, -ones, one) for one in versions]
        return [Episode("0:0:0", "0:0", samples)]

    mixed = of((3, 4), (0, 0), None)
    assert staleness(mixed, 5) == {"rollout/staleness_mean": 2.0, "rollout/staleness_max": 2.0}
    assert mean_versions(mixed) == {"rollout/versions_mean": 2.0}
    assert staleness(of((0, 0), None), 5) == mean_versions(of((0, 0), None)) == {}
