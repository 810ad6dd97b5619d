"""A small environment: the policy may try again when its answer is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainer.environments.base import Message, StepResult


class RetryEnv:
    """Asks the row's prompt until the answer is right, at most `tries` times.

    The reward of an episode is the similarity of its best answer to the right one, between 0 and 1: each step earns
    what it is better than those before.

    Args:
        tries: most answers.
        again: message to the policy after a wrong answer.
        prompt_key: column of the prompt, a text.
        answer_key: column of the right answer.
    """

    def __init__(self, tries: int = 2, again: str = "?", prompt_key: str = "prompt", answer_key: str = "answer"):
        self._left = tries
        self._again = again
        self._keys = prompt_key, answer_key
        self._best = 0.0

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        prompt, answer = self._keys
        self._answer = str(row[answer])
        return [{"role": "user", "content": str(row[prompt])}]

    def step(self, reply: Message) -> StepResult:
        text = reply["content"].strip()
        similarity = difflib.SequenceMatcher(None, text, self._answer, autojunk=False).ratio()
        reward = max(0.0, similarity - self._best)
        self._best = max(similarity, self._best)
        self._left -= 1
        if text == self._answer or self._left <= 0:
            return StepResult(reward=reward, done=True)
        return StepResult([{"role": "user", "content": self._again}], reward)

    def close(self) -> None:
        pass
