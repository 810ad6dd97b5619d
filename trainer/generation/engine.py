"""What an inference engine is to the rest of the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer.generation.weight_sync import WeightSource


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens; the same for all requests of a call."""

    temperature: float
    """0: greedy."""
    top_p: float
    top_k: int
    """-1: all tokens."""
    max_tokens: int
    """Completions are cut here."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion; they are part of it."""


@dataclass(frozen=True)
class Request:
    """One completion to generate. Its tokens depend on prompt, seed and weights, not on its company."""

    prompt_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """What an engine made of a request."""

    token_ids: list[int]
    """With the stop token, when there was one."""
    logprobs: list[float]
    """Of each token under the distribution it was drawn from: log_softmax(logits / temperature), over the tokens
    that top-k and top-p keep. For greedy, log_softmax(logits)."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """The version of the weights that generated it."""


class Engine(Protocol):
    """One copy of the policy that generates. It is built awake."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests. The engine must be awake."""
        ...

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Take the weights of `source`, awake or asleep; completions carry `version` from now on."""
        ...

    def set_version(self, version: int) -> None:
        """Name the weights that are already loaded."""
        ...

    def sleep(self) -> None:
        """Give back the GPU memory, where the engine shares its GPU, until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate, with the weights held before `sleep` or synced since."""
        ...

    def shutdown(self) -> None:
        """End for good."""
        ...
