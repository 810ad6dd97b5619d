"""Games of the package textarena."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.environments.base import Environment, check_options
from trainer.errors import UserError

NAME = "trainer.environments.textarena:TextArena"
GAME = "GuessTheNumber-v0"


def text_arena(*arguments: Any, **options: Any) -> Environment:
    from trainer.environments.textarena import TextArena  # the package takes a second to import

    return TextArena(*arguments, **options)


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def play(seed: int, id: str = GAME, **options: int) -> tuple[list[str], float]:
    """Halve the range until the number is found; return what was said, and the reward."""
    game = text_arena(id, **options)
    said = [game.reset({}, seed)[0]["content"]]
    low, high = map(int, re.search(r"between (\d+) and (\d+)", said[0]).groups())
    while True:
        guess = (low + high) // 2
        step = game.step(reply(f"[{guess}]"))
        if step.done:
            game.close()
            return said, step.reward
        said.append(step.messages[-1]["content"])
        low, high = (guess + 1, high) if "higher" in said[-1] else (low, guess - 1)


def test_a_game_is_played_to_its_end():
    said, reward = play(1)
    assert reward == 1.0 and "You are playing Guess The Number" in said[0]
    assert all(re.fullmatch(r"The target number is (higher|lower)\.", text) for text in said[1:])


def test_the_seed_chooses_the_game():
    assert play(1) == play(1)
    assert len({tuple(play(seed)[0]) for seed in range(12)}) > 3


def test_games_take_options():
    assert "between 1 and 1000 within" in play(1, max_number=1000, max_turns=12)[0][0]


def test_a_wrong_move_is_answered_and_a_second_one_ends_the_game():
    game = text_arena(GAME)
    game.reset({}, 1)
    step = game.step(reply("I do not know"))
    assert not step.done and "invalid move" in step.messages[0]["content"]
    step = game.step(reply("really"))
    assert step.done and step.metrics == {"invalid_move": True}


def test_games_of_one_process_do_not_disturb_each_other():
    """They draw from the generators of the process."""

    def rounds(game: Environment) -> list[str]:
        return [game.step(reply("[red]")).messages[-1]["content"] for _ in range(8)]

    alone = text_arena("Bandit-v0")
    alone.reset({}, 5)
    expected = rounds(alone)
    games = [text_arena("Bandit-v0") for _ in range(2)]
    for game, seed in zip(games, (5, 6), strict=True):
        game.reset({}, seed)
    together = [[game.step(reply("[red]")).messages[-1]["content"] for game in games] for _ in range(8)]
    assert [first for first, _ in together] == expected != [second for _, second in together]


def test_games_that_do_not_exist_or_are_for_two_are_refused_before_the_start():
    with pytest.raises(UserError, match="textarena has no game GuessTheNumber; did you mean GuessTheNumber-v0"):
        check_options(NAME, {"id": "GuessTheNumber"})
    with pytest.raises(UserError, match="TicTacToe-v0 is not for one player"):
        check_options(NAME, {"id": "TicTacToe-v0"})
    check_options(NAME, {"id": GAME, "max_number": 4})
