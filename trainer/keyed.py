"""Keyed randomness: every draw is a function of its name, never of what was drawn before.

A resumed run therefore draws what the uninterrupted run would have drawn, on any number of ranks.
"""

from __future__ import annotations

import numpy as np
import xxhash


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on all parts and their order, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def request_seed(run_seed: int, step: int, prompt_uid: str, completion: int) -> int:
    """Seed of completion number `completion` of a prompt in a step; 63 bits, which torch and vLLM accept."""
    return key(run_seed, "completion", step, prompt_uid, completion)


def permutation(n: int, *parts: int | str) -> np.ndarray:
    """A permutation of `range(n)` named by `parts`; int64 `(n,)`.

    Sorts by Philox's raw 64-bit output, which NumPy guarantees never to change (its `shuffle` is not).
    """
    return np.argsort(np.random.Philox(key=key(*parts)).random_raw(n), kind="stable")
