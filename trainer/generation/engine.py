"""The protocol of an inference engine: what goes in, what comes out, and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer.generation.weight_sync import WeightSource


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, for all requests of a call."""

    temperature: float
    """0 means greedy."""
    top_p: float
    top_k: int
    """-1 means all tokens."""
    max_tokens: int
    """Longest completion; longer ones are cut."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion. They belong to it."""


@dataclass(frozen=True)
class Request:
    """One completion to generate. Its tokens depend on prompt, seed and weights, not on other requests."""

    prompt_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    token_ids: list[int]
    """Includes the stop token, if there was one."""
    logprobs: list[float]
    """Log-prob of each token under the distribution from which it was drawn: log_softmax(logits / temperature) over
    the tokens that top-k and top-p keep. Greedy: log_softmax(logits)."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """Version of the weights that generated it."""


class Engine(Protocol):
    """One copy of the policy that generates. It is awake when it is built."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return completions in the order of the requests. The engine must be awake."""
        ...

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Load the weights of `source`, awake or asleep. Completions carry `version` from now on."""
        ...

    def set_version(self, version: int) -> None:
        """Set the version of the weights that are loaded."""
        ...

    def sleep(self) -> None:
        """Release the GPU memory until `wake`, if the engine shares its GPU."""
        ...

    def wake(self) -> None:
        """Get ready to generate, with the weights from before `sleep`, or those synced since."""
        ...

    def shutdown(self) -> None:
        """End the engine."""
        ...
