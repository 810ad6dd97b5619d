"""The calls of an episode as a tree: which call continues which, token by token."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from trainer.agents.messages import ApiError, ChatMessage, split_thoughts
from trainer.agents.requests import ChatRequest
from trainer.data.tokens import TextTooLong, reply_text
from trainer.environments.base import Message
from trainer.environments.conversation import Conversation, sample_of
from trainer.environments.template_tools import TemplateTools
from trainer.environments.tools import ToolCall, read_calls, split_calls, with_tools
from trainer.episodes import Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion


@dataclass(eq=False)
class Turn:
    """One reply of the policy, and the prompt that it answers."""

    number: int  # of the turn, in the order of arrival
    key: str  # the same for the same prompt in another attempt, whatever the order of arrival
    parent: Turn | None  # the turn whose history this one continues
    continues: bool  # the prompt begins with the tokens of the parent, its reply included
    added: np.ndarray
    """`(T,)` int32, the tokens of the prompt behind those of the parent, if it continues it; otherwise all."""
    prompt_length: int
    conversation: Conversation  # it has its tokens only until the reply is there
    history: str  # digest of all messages that the turn answers
    is_side: bool = False  # the reply is not a part of the task, and not trained
    player: str = ""  # who has asked
    completion: Completion | None = None
    reply: str = ""  # the text of the reply as the agent gets it, without calls
    stop: str | None = None  # which text of its request has ended the reply
    is_delivered: bool = False  # the agent has got the reply

    @property
    def prompt_ids(self) -> np.ndarray:
        """`(T,)` int32, what the engine gets."""
        pieces = [piece for turn in self.path()[:-1] for piece in (turn.added, turn.completed.token_ids)]
        return np.concatenate([*pieces, self.added])

    @property
    def token_ids(self) -> np.ndarray:
        """`(T,)` int32, the prompt and the reply."""
        return np.concatenate([self.prompt_ids, self.completed.token_ids])

    @property
    def completed(self) -> Completion:
        assert self.completion is not None
        return self.completion

    def path(self) -> list[Turn]:
        """Return the turns whose tokens this one continues, the first one first, and this one."""
        path = [self]
        while path[-1].continues and path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]


@dataclass
class CallTree:
    """The turns of an episode, in the order of arrival.

    A request whose messages are those of an earlier turn, its reply and more is its child. The child keeps the tokens
    of the parent, if the chat template writes more after them. So an agent that branches, or drops a part of its
    history, gives several samples of one episode, and each token that was sampled is trained in one of them.

    Args:
        longest: most tokens of a prompt.
        limit: texts with more characters are too long, and not encoded (see `trainer.data.tokens`).
        reader: reads the calls of tools that the chat template describes; None: they are text.
    """

    tokenizer: Any
    longest: int
    limit: float = math.inf
    reader: TemplateTools | None = None
    turns: list[Turn] = field(default_factory=list)
    is_sequential: bool = True
    """No turn began while another one was under way. Set by the user of the tree."""
    _replies: defaultdict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    """The turns by the digests of their messages and their reply."""
    _counts: Counter[str] = field(default_factory=Counter)

    def begin(self, request: ChatRequest) -> Turn:
        """Add the turn of a request.

        Raises:
            ApiError: the prompt is too long, or the chat template refuses it.
        """
        begin = xxhash.xxh3_128_hexdigest((request.player + json.dumps(request.tools)).encode())
        histories = [*itertools.accumulate(request.messages, _extend, initial=begin)][1:]  # up to each message
        parent, known = self._find(request.messages, histories)
        tokens = parent.token_ids if parent is not None else np.zeros(0, np.int32)
        try:
            conversation = self._conversation(request, parent, tokens, known)
        except UserError as error:
            raise ApiError(f"messages: {error}", "messages") from error
        except TextTooLong as error:
            raise self._too_long(f"at least {self.longest + 1}") from error
        prompt_ids = np.asarray(conversation.token_ids, np.int32)
        if len(prompt_ids) > self.longest:
            raise self._too_long(str(len(prompt_ids)))
        continues = parent is not None and np.array_equal(prompt_ids[: len(tokens)], tokens)
        added = prompt_ids[len(tokens) :].copy() if continues else prompt_ids
        digest = xxhash.xxh3_128_hexdigest(prompt_ids.tobytes())
        name = f"{digest}:side:" if request.is_side else f"{digest}:{request.player}:"
        key = f"{name}{self._counts[name]}"
        self._counts[name] += 1
        number, length, history = len(self.turns), len(prompt_ids), histories[-1]
        turn = Turn(number, key, parent, continues, added, length, conversation, history)
        turn.is_side, turn.player = request.is_side, request.player
        self.turns.append(turn)
        return self.turns[-1]

    def answer(self, turn: Turn, completion: Completion, request: ChatRequest) -> ChatMessage:
        """Give a turn its reply; return the reply as the agent gets it."""
        length, has_ended = len(completion.token_ids), completion.finish_reason == "stop"
        turn.completion, text, turn.stop = cut_at(
            completion, request.stop, lambda ids: reply_text(self.tokenizer, ids, has_ended and len(ids) == length)
        )
        said = turn.conversation.add_reply(turn.completion)
        turn.conversation.forget_tokens()
        reply = ChatMessage("assistant", *(split_calls(text) if request.reads_calls else (text,)))
        if request.reads_calls and said.get("tool_calls"):
            calls = read_calls(said)
            if calls is None:
                turn.conversation.messages[-1] = {"role": "assistant", "content": text}
            else:
                reply = ChatMessage("assistant", said["content"] or "", calls)
        turn.reply = reply.content
        if not turn.is_side:
            self._replies[_extend(turn.history, reply)].append(turn)
        return reply

    def samples(self) -> list[Sample]:
        """Return the training data. Each reply that the agent has got is trained in one sample.

        They are in the order of arrival; if turns were under way together, in an order that does not depend on time.
        """
        return [
            dataclasses.replace(
                sample_of(
                    leaf.token_ids, [(turn.prompt_length, turn.completed) for turn in leaf.path() if turn in owned]
                ),
                player=leaf.player,
            )
            for leaf, owned in self._leaves()
        ]

    def forget(self) -> None:
        """Free all turns. The samples and the transcript have been taken."""
        self.turns, self._replies = [], defaultdict(list)

    def transcript(self) -> tuple[list[Message], int]:
        """Return the messages of all samples, without those that were in an earlier one; and the number of replies."""
        messages: list[Message] = []
        earlier: list[list[Message]] = []
        replies = 0
        for turn, owned in self._leaves():
            own = turn.conversation.messages
            first = next(one for one in turn.path() if one in owned)
            prompt = len(first.conversation.messages) - 1
            shown = max((_common(own, other) for other in earlier), default=0)
            messages += own[min(shown, prompt) :]
            earlier.append(own)
            replies += len(owned)
        return messages, replies

    def _leaves(self) -> Iterator[tuple[Turn, set[Turn]]]:
        """Yield the last turn of each sample, and the turns that are trained in it."""
        delivered = [turn for turn in self.turns if turn.is_delivered and not turn.is_side]
        inner = {turn.parent for turn in delivered if turn.continues}
        leaves = [turn for turn in delivered if turn not in inner]
        if not self.is_sequential:
            leaves.sort(key=lambda turn: (turn.prompt_length, turn.key))
        owned: set[Turn] = set()
        for leaf in leaves:
            new = set(leaf.path()) - owned
            owned |= new
            yield leaf, new

    def _conversation(self, request: ChatRequest, parent: Turn | None, tokens: np.ndarray, known: int) -> Conversation:
        """Return the conversation that ends with the request.

        Args:
            tokens: of the parent, which has the first `known` messages of the request.
        """
        names_calls = self.reader is not None and bool(request.tools)
        messages = [one.message_with_calls if names_calls else one.message for one in request.messages]
        if parent is None:
            shown = with_tools(messages, request.tools) if request.tools else messages
            return Conversation(self.tokenizer, shown, self.limit, self.reader)
        conversation = parent.conversation.fork(tokens.tolist())
        added = messages[known:]
        if self.reader is not None:  # answers of tools have the ids that the calls have in the conversation
            calls = parent.conversation.messages[-1].get("tool_calls", [])
            ids = {call_id(parent, number): call["id"] for number, call in enumerate(calls)}
            # The agent may have sent the equal reply of another turn: then the answers have the ids of its calls.
            sent = zip(request.messages[known - 1].calls, calls, strict=False)
            ids |= {own.id: call["id"] for own, call in sent if own.id}
            added = [
                {**answer, "tool_call_id": ids[answer["tool_call_id"]]} if answer.get("tool_call_id") in ids else answer
                for answer in added
            ]
        if not conversation.add_messages(added, self.longest):
            raise self._too_long(f"at least {self.longest + 1}")
        return conversation

    def _find(self, messages: Sequence[ChatMessage], histories: Sequence[str]) -> tuple[Turn | None, int]:
        """Return the turn with the longest history that the messages continue, and the length of that history."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].role != "assistant":
                continue
            turns = [turn for turn in self._replies.get(histories[count - 1], []) if turn.is_delivered]
            # Several replies may differ in their thoughts alone, which an agent may leave out.
            same = [turn for turn in turns if turn.reply.strip() == messages[count - 1].content.strip()]
            if turns:
                return min(same or turns, key=lambda turn: (turn.number if self.is_sequential else 0, turn.key)), count
        return None, 0

    def _too_long(self, size: str) -> ApiError:
        """Return the refusal in the words by which clients know it, and then shorten their history."""
        keys = "rollout.max_prompt_tokens, or environment.max_tokens"
        problem = f"prompt is too long: {size} tokens > {self.longest} maximum, the maximum context length ({keys})"
        return ApiError(problem, "messages", "context_length_exceeded")


def call_id(turn: Turn, number: int) -> str:
    """Return the id that the agent gets for a call of a reply. It is the same in another attempt."""
    return f"call_{turn.key.replace(':', '_')}_{number}"


def _extend(history: str, message: ChatMessage) -> str:
    return xxhash.xxh3_128_hexdigest(f"{history}{message.identity}".encode())


def _common(some: Sequence[Message], others: Sequence[Message]) -> int:
    """Return how many messages two lists have in common at their beginnings."""
    equal = [a == b for a, b in zip(some, others, strict=False)]
    return (equal + [False]).index(False)


def cut_at(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, str, str | None]:
    """Return a completion up to the token that completes one of `stops`, its text before that stop, and the stop.

    Args:
        decode: returns the text of the first tokens of the completion.
    """

    def text(count: int) -> str:
        return decode(completion.token_ids[:count].tolist())

    length = len(completion.token_ids)
    if not any(stop in text(length) for stop in stops):
        return completion, text(length), None
    count = bisect.bisect_left(range(length + 1), True, key=lambda count: any(stop in text(count) for stop in stops))
    shown = text(count)
    end, stop = min((shown.find(stop), stop) for stop in stops if stop in shown)
    spans, left = [], count
    for version, size in completion.version_spans:
        spans.append((version, min(size, left)))
        left -= min(size, left)
    spans = [span for span in spans if span[1] > 0]
    kept = dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason="stop",
        weight_versions=(spans[0][0], spans[-1][0]) if spans else completion.weight_versions,
        version_spans=tuple(spans) if len(spans) > 1 else (),
    )
    return kept, shown[:end], stop


@dataclass(frozen=True)
class Answer:
    """The answer to a request. Its ids are the same in another attempt, and it has no time of day.

    An agent that writes an id or a time into a message would else never do the same again.
    """

    request: ChatRequest
    model: str
    turn: Turn
    message: ChatMessage = ChatMessage("assistant", "")  # the reply; empty while it is under way

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
