"""Games for one player of the package textarena."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from trainer.environments.base import Message, StepResult
from trainer.errors import did_you_mean


class TextArena:
    """Plays one game in an episode. The row is not read: the seed of the episode draws what the game draws.

    The policy sees what is new since its last reply. The reward of the episode is that of the game.

    Args:
        id: name of a game for one player, such as `GuessTheNumber-v0`.
        options: of the game.
    """

    def __init__(self, id: str, **options: Any):
        self._id = id
        self._options = options
        self._generators: Any = None
        """States of the generators of the process, which games draw from, while the game does not run."""

    @classmethod
    def check_options(cls, id: str, **options: Any) -> None:
        """Check that there is such a game, and that it is for one player."""
        if id not in ENV_REGISTRY:
            raise LookupError(f"textarena has no game {id}; {did_you_mean(id, ENV_REGISTRY) or 'see its registry'}")
        cls(id, **options).reset({}, 0)

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Return the rules of the game, and what the player sees first."""
        self._generators = None
        with self._own_generators(seed):
            spec = ENV_REGISTRY[self._id]
            # Without the wrappers of observations, which repeat the whole history: the conversation has it.
            wrappers = [one for one in spec.default_wrappers or [] if issubclass(one, textarena.ActionWrapper)]
            game = textarena.make(f"{self._id}-raw" if f"{self._id}-raw" in ENV_REGISTRY else self._id, **self._options)
            for wrap in wrappers:
                game = wrap(game)
            self._game = game
            try:
                game.reset(num_players=1, seed=seed % 2**32)
            except AssertionError as error:
                raise ValueError(f"{self._id} is not for one player: {error}") from error
            return self._observed()

    def step(self, reply: Message) -> StepResult:
        """Make the move of the reply, and return what the player sees then."""
        with self._own_generators():
            done, _ = self._game.step(reply["content"])
            if not done:
                return StepResult(self._observed())
            rewards, about = self._game.close()
        invalid = bool(about.get(0, {}).get("invalid_move", False)) if isinstance(about, Mapping) else False
        return StepResult(reward=float((rewards or {}).get(0, 0.0)), done=True, metrics={"invalid_move": invalid})

    def close(self) -> None:
        """The game holds nothing."""

    def _observed(self) -> list[Message]:
        player, seen = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        if not isinstance(seen, str):
            seen = "\n".join(text for sender, text, kind in seen if (sender, kind) != (player, own))
        return [{"role": "user", "content": seen}]

    @contextlib.contextmanager
    def _own_generators(self, seed: int = 0) -> Iterator[None]:
        """Let the block draw from this game's own generators: many games share the process. `seed`: of new ones."""
        others = random.getstate(), np.random.get_state()
        if self._generators is None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        else:
            random.setstate(self._generators[0])
            np.random.set_state(self._generators[1])
        try:
            yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])
