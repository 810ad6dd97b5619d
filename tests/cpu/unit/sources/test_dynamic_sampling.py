"""Which groups of completions a step trains on."""

from __future__ import annotations

import numpy as np

from trainer.data.ledger import SampleIndex
from trainer.episodes import Episode, Sample
from trainer.sources.sampling import RowGroup, choose_groups


def chosen(groups: list[list[float | None]], wanted: int, complete: bool) -> tuple[list[int], int] | None:
    rows = [RowGroup(SampleIndex(0, 0, 0), [Episode("0:0:0", "0:0", [], reward) for reward in one]) for one in groups]
    return choose_groups([row.teaches for row in rows], wanted, complete)


def test_the_first_groups_that_teach_something_are_chosen():
    same, mixed = [1.0, 1.0], [0.0, 1.0]
    assert chosen([mixed, same, mixed, mixed], 2, complete=False) == ([0, 2], 3)
    assert chosen([mixed, same, same], 2, complete=False) is None
    assert chosen([same, same, mixed], 2, complete=True) == ([0, 2], 3)
    assert chosen([same, same, same], 2, complete=True) == ([0, 1], 3)


def test_a_failure_makes_no_group_worth_training_on():
    failed = None
    mixed, hidden, alone, none = [0.0, 1.0, failed], [1.0, 1.0, failed], [1.0, failed, failed], [failed] * 3
    assert chosen([hidden, alone, none, mixed], 1, complete=False) == ([3], 4)
    assert chosen([hidden, alone, none], 1, complete=False) is None
    assert chosen([hidden, mixed], 2, complete=True) == ([0, 1], 2)


def test_a_prompt_teaches_if_the_rewards_of_one_of_its_players_differ():
    def row(*games: tuple[float | None, float]) -> RowGroup:
        one = np.ones(1, np.float32)
        episodes = [
            Episode("0:0:0", "0:0", [Sample(one, one, one, reward=reward, player=player) for player, reward in pair])
            for pair in (zip("xo", game, strict=True) for game in games)
        ]
        return RowGroup(SampleIndex(0, 0, 0), episodes)

    assert not row((1.0, -1.0), (1.0, -1.0)).teaches, "the two players differ, and none has learnt anything"
    assert row((1.0, -1.0), (1.0, 0.0)).teaches and row((1.0, -1.0), (1.0, 0.0)).mean_reward == 0.25
