"""What an episode says of itself: its number, its text, its length, and where the policy's replies begin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.episodes import Episode, Sample

QUESTION = {"role": "user", "content": "2 + 2"}
EXAMPLE = {"role": "assistant", "content": "an example of the prompt"}
REPLY = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "sure?"}
SECOND = {"role": "assistant", "content": "yes"}


def sample(*mask: float) -> Sample:
    return Sample(np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=np.float32))


def episode(*messages: dict, turns: int = 1, uid: str = "0:7:3") -> Episode:
    return Episode(uid, "0:7", [sample(0, 1)], messages=messages, turns=turns)


def test_the_number_is_the_last_part_of_the_uid():
    assert episode().number == 3 and episode(uid="1:2:11").number == 11


@pytest.mark.parametrize(
    ("messages", "turns", "text", "prompt"),
    [
        ((QUESTION, REPLY), 1, "4", 1),
        ((QUESTION, REPLY, AGAIN, SECOND), 2, "yes", 1),
        ((QUESTION, REPLY, AGAIN), 1, "4", 1),
        ((EXAMPLE, QUESTION, REPLY), 1, "4", 2),
        ((EXAMPLE, QUESTION), 0, "", 2),
        ((), 1, "", 0),
    ],
    ids=["one turn", "two turns", "unanswered", "example replies", "no reply", "no text"],
)
def test_replies_are_told_from_examples_in_the_prompt(messages, turns, text, prompt):
    found = episode(*messages, turns=turns)
    assert found.text == text
    if messages:
        assert found.split_messages() == (messages[:prompt], messages[prompt:])


def test_the_length_is_the_number_of_sampled_tokens_of_all_samples():
    assert Episode("0:0:0", "0:0", [sample(0, 0, 1, 1), sample(0, 1)]).length == 3


def test_samples_have_the_reward_of_their_episode_unless_their_player_has_one():
    def of(player: str, reward: float | None) -> Sample:
        return replace(sample(0, 1), player=player, reward=reward)

    one = Episode("0:0:0", "0:0", [sample(0, 1), sample(1, 1)], 0.5)
    assert [s.reward for s in one.samples] == [0.5, 0.5] and one.player_rewards == {"": 0.5}
    assert [s.reward for s in replace(one, reward=None).samples] == [None, None]
    assert Episode("0:0:0", "0:0", [], 0.5).player_rewards == {"": 0.5}
    two = Episode("0:0:0", "0:0", [of("x", 1.0), of("o", -1.0), of("x", 1.0)], 0.0)
    assert [(s.player, s.reward) for s in two.samples] == [("x", 1.0), ("x", 1.0), ("o", -1.0)]
    failed = Episode("0:0:0", "0:0", [of("x", None), of("o", None)], None)
    assert failed.player_rewards == {"x": None, "o": None}
    assert replace(failed, reward=0.0).player_rewards == {"x": 0.0, "o": 0.0}
