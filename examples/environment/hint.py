"""Your own environment: a word is to be reversed, and a wrong answer gets a hint and another try."""

from __future__ import annotations

import difflib

from trainer.environments import StepResult


class Hint:
    """After a wrong answer, the policy learns how many letters at its start are right.

    The reward is 1 if the first answer is right, 0.9 and 0.8 for a later one, else half the similarity of the last one.
    """

    def __init__(self, tries: int = 3):
        self.left = tries

    def reset(self, row, seed):
        self.answer = row["answer"]
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, reply):
        text = reply["content"].strip()
        if text == self.answer:
            return StepResult(reward=0.7 + 0.1 * self.left, done=True)
        self.left -= 1
        if self.left == 0:
            similarity = difflib.SequenceMatcher(None, text, self.answer, autojunk=False).ratio()
            return StepResult(reward=similarity / 2, done=True)
        right = next((i for i, (a, b) in enumerate(zip(text, self.answer, strict=False)) if a != b), 0)
        return StepResult([{"role": "user", "content": str(right)}])

    def close(self):
        pass
