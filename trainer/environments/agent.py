"""The protocol of an agent: a program of the user that asks the policy through an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Endpoint:
    """Where one episode of an agent reaches the policy. Any OpenAI client works with it, also in another process."""

    base_url: str
    """A secret address of this episode: who knows it speaks for the agent. It ends with the episode."""
    api_key: str
    """For clients that want one. The endpoint accepts any key."""
    model: str
    """Name of the policy in requests."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a process, from which OpenAI clients take the address and the key."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


@dataclass(frozen=True)
class AgentResult:
    """What an agent returns at the end of its episode."""

    reward: float = 0.0
    """Of the episode."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the reward. They are added to `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of the episode, to be logged."""


class Agent(Protocol):
    """A program that runs one episode. It is made for each episode, in a process of the sandbox."""

    def run(
        self, row: Mapping[str, Any], seed: int, endpoint: Endpoint
    ) -> AgentResult | float | Awaitable[AgentResult | float]:
        """Run the episode; return its reward.

        May be `async`. Otherwise it runs in a thread, beside the agents of other episodes.

        Args:
            row: the whole row of the data.
            seed: for what the agent draws. Episodes of one prompt in a step have the same seed.
            endpoint: the policy.
        """
        ...
