"""The seed of every completion, from its name."""

from __future__ import annotations

from trainer.keyed import key


def request_seed(run_seed: int, step: int, prompt_uid: str, completion: int) -> int:
    """Seed of completion number `completion` of a prompt in a step; 63 bits, which torch and vLLM accept."""
    return key(run_seed, "completion", step, prompt_uid, completion)
