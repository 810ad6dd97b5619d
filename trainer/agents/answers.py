"""Answers of the chat API: whole, and as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.agents.call_tree import Turn, call_id
from trainer.agents.chat_request import ChatRequest
from trainer.agents.messages import ChatMessage


@dataclass(frozen=True)
class Choice:
    """A reply, as it is returned."""

    turn: Turn
    message: ChatMessage

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.message.calls else self.turn.completed.finish_reason

    def calls(self) -> list[dict[str, Any]]:
        """Return the calls of tools."""
        return [
            {
                "id": call_id(self.turn, i),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(self.message.calls)
        ]


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    request: ChatRequest
    model: str
    choices: Sequence[Choice]

    def whole(self, tokenizer: Any) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = [
            {
                "index": i,
                "message": {
                    "role": "assistant",
                    "content": _content(choice),
                    **({"tool_calls": choice.calls()} if choice.message.calls else {}),
                },
                "finish_reason": choice.finish_reason,
                "logprobs": self._logprobs(choice, tokenizer),
            }
            for i, choice in enumerate(self.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self, tokenizer: Any) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        head = self._head("chat.completion.chunk") | ({"usage": None} if self.request.include_usage else {})

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode()

        for i, choice in enumerate(self.choices):
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": _content(choice)}]
            deltas += [{"tool_calls": [{"index": k, **call}]} for k, call in enumerate(choice.calls())]
            for k, delta in enumerate(deltas):
                logprobs = self._logprobs(choice, tokenizer) if k == 0 else None
                yield event([{"index": i, "delta": delta, "finish_reason": None, "logprobs": logprobs}])
            yield event([{"index": i, "delta": {}, "finish_reason": choice.finish_reason, "logprobs": None}])
        if self.request.include_usage:
            yield event([], usage=self._usage())
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.choices[0].turn.key.replace(":", "_")
        # No time of day: an agent that writes it into a message would never do the same again.
        return {"id": f"chatcmpl-{name}", "object": kind, "created": 0, "model": self.model}

    def _usage(self) -> dict[str, int]:
        prompt = self.choices[0].turn.prompt_length
        completion = sum(len(choice.turn.completed.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, choice: Choice, tokenizer: Any) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        completion = choice.turn.completed
        content = []
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
            text = tokenizer.decode([token])
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


def _content(choice: Choice) -> str | None:
    return choice.message.content or (None if choice.message.calls else "")
