"""The answer to a request, as all APIs of the endpoint have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.agents.call_tree import Turn, call_id
from trainer.agents.messages import ChatMessage, split_thoughts
from trainer.agents.requests import ChatRequest
from trainer.environments.tools import ToolCall


@dataclass(frozen=True)
class Answer:
    """The answer to a request. Its ids are the same in another attempt, and it has no time of day.

    An agent that writes an id or a time into a message would else never do the same again.
    """

    request: ChatRequest
    model: str
    turn: Turn
    message: ChatMessage = ChatMessage("assistant", "")
    """The reply; empty while it is under way."""

    @property
    def name(self) -> str:
        """Names the turn, within the episode."""
        return self.turn.key.replace(":", "_")

    @property
    def is_cut(self) -> bool:
        return self.turn.completed.finish_reason == "length"

    @property
    def thoughts_and_text(self) -> tuple[str, str]:
        """What the policy has written up to `</think>`, and the rest.

        A reply of thoughts alone is text: clients drop one without text or call, and change the message before it.
        """
        thoughts, text = split_thoughts(self.message.content)
        return (thoughts, text) if text.strip() or self.message.calls else ("", self.message.content)

    @property
    def prompt_tokens(self) -> int:
        return self.turn.prompt_length

    @property
    def completion_tokens(self) -> int:
        return len(self.turn.completed.token_ids)

    def calls(self) -> Iterator[tuple[str, ToolCall]]:
        """Yield the calls of tools with the ids that the agent gets for them."""
        for number, call in enumerate(self.message.calls):
            yield call_id(self.turn, number), call


def event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event of Anthropic's API, or of OpenAI's API of responses."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
