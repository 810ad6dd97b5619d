"""A reward that counts its calls, and waits at one answer until a file is there."""

from __future__ import annotations

import os
import time


def score(completion: str, answer: str) -> float:
    with open(os.environ["REWARD_CALLS"], "a") as file:
        file.write(f"{answer}\n")
    while answer == "wait" and not os.path.exists(os.environ["REWARD_GO"]):
        time.sleep(0.01)
    return float(sum(map(ord, completion)) % 3)
