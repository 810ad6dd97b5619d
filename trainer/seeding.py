"""Keyed randomness: every draw is a function of its name and does not depend on earlier draws.

A resumed run therefore draws the same numbers as the uninterrupted run, on any number of ranks.
"""

from __future__ import annotations

import numpy as np
import xxhash

HASH_SEED = "0"
"""`PYTHONHASHSEED` of processes that run what others have written: the order of a set of texts depends on it."""


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit number that depends on all parts and their order. It is the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def request_seed(run_seed: int, step: int, prompt_uid: str, completion: int, turn: int = 0) -> int:
    """Return the seed of a completion: 63 bits, which torch and vLLM accept.

    Args:
        completion: its number among those of the prompt in the step.
        turn: the number of replies before it in its episode.
    """
    if turn == 0:
        return derive_seed(run_seed, "completion", step, prompt_uid, completion)
    return derive_seed(run_seed, "completion", step, prompt_uid, completion, turn)


def turn_seed(run_seed: int, step: int, prompt_uid: str, completion: int, turn: str) -> int:
    """Return the seed of a reply to an agent, whose calls have no order: `turn` names the prompt of the reply."""
    return derive_seed(run_seed, "agent", step, prompt_uid, completion, turn)


def environment_seed(run_seed: int, prompt_uid: str) -> int:
    """Return the seed of the environments of a prompt, the same for all its episodes: they differ in the policy's
    replies alone, so their rewards can be compared."""
    return derive_seed(run_seed, "environment", prompt_uid)


def permutation(n: int, *parts: int | str) -> np.ndarray:
    """Return the permutation of `range(n)` that `parts` name, int64 `(n,)`. It sorts the raw 64-bit output of Philox,
    because NumPy guarantees that this output never changes. NumPy gives no such guarantee for `shuffle`."""
    return np.argsort(np.random.Philox(key=derive_seed(*parts)).random_raw(n), kind="stable")
