"""One episode of an agent, as the endpoint sees it: its calls, its limits, and the requests that are repeated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping

from trainer.agents.call_tree import Answer, CallTree, Turn
from trainer.agents.chat_wire import ChatWire
from trainer.agents.messages import ApiError, ChatMessage
from trainer.agents.messages_wire import MessagesWire
from trainer.agents.requests import ChatRequest, Rules, Wire, parse_request
from trainer.agents.responses_wire import ResponsesWire
from trainer.errors import describe_error
from trainer.generation.engine import Completion, Request

LOG = logging.getLogger(__name__)


Submit = Callable[["AgentEpisode", Turn, Request], None]
"""Gives a request to the engines. `AgentEpisode.complete` is called with the completion."""

WIRES: dict[str, Callable[[], Wire]] = {
    "chat/completions": ChatWire,
    "messages": MessagesWire,
    "responses": ResponsesWire,
}
"""The APIs of the endpoint, by their paths below its base URL."""
_RETRY_COUNT = "X-Stainless-Retry-Count"


def ended() -> ApiError:
    """Return the answer to calls after the end of an episode, or at an address that was never one.

    Its status is one that no client repeats.
    """
    return ApiError("the episode has ended, or there was none at this address", code="episode_ended")


class Call:
    """A request that is answered once, however often it is repeated."""

    def __init__(self, request: ChatRequest, turn: Turn):
        self.request = dataclasses.replace(request, messages=[], tools=())  # the turn has what it needs of these
        self.turn = turn
        self.reply: asyncio.Future[ChatMessage] = asyncio.get_running_loop().create_future()
        self.readers = 0  # connections that wait for the reply
        self.reply.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may wait

    @contextlib.contextmanager
    def delivering(self) -> Iterator[None]:
        """Send the reply in the block. It counts as delivered unless that fails."""
        before, self.turn.is_delivered = self.turn.is_delivered, True  # now: the agent may end before the block does
        try:
            yield
        except BaseException:
            self.turn.is_delivered = before
            raise


class AgentEpisode:
    """The calls of one episode. All methods but `start_clock` run on the event loop of the server.

    A request is a repetition of an earlier one if it has the same content, and its client says that it repeats it
    (`X-Stainless-Retry-Count` above 0, which OpenAI's and Anthropic's clients send), or the connection of the earlier
    one broke before the answer. Any other request is a call of its own: an agent that asks the same twice wants two
    replies.

    Args:
        seed_of: returns the seed for a turn, by its key.
        submit: gives a request to the engines.
        address: returns the base URL for a secret.
    """

    def __init__(
        self, tree: CallTree, rules: Rules, seed_of: Callable[[str], int], submit: Submit, address: Callable[[str], str]
    ):
        self.secret = secrets.token_hex(16)
        self.base_url = address(self.secret)
        self.rules = rules
        self.tree = tree
        self.limit = ""
        """Status of the limit that has refused the last call, or cut its reply; empty: none has."""
        self._wires = {path: wire() for path, wire in WIRES.items()}
        self._seed_of = seed_of
        self._submit = submit
        self._calls: list[Call] = []
        self._under_way: dict[Turn, Call] = {}
        self._idle_since: float | None = None
        self._has_ended = False

    # ---------------------------------------------------------------------------------------------------
    # Time

    def start_clock(self) -> None:
        """Note that the agent begins now. Any thread may call this, before the agent can ask."""
        self._idle_since = time.monotonic()

    def idle_s(self) -> float:
        """Return for how long the agent has been busy without a call under way."""
        since = self._idle_since
        return time.monotonic() - since if since is not None else 0.0

    # ---------------------------------------------------------------------------------------------------
    # Calls

    def wire(self, path: str) -> Wire:
        """Return the API at a path."""
        return self._wires[path]

    @contextlib.contextmanager
    def asking(self, path: str, body: bytes, headers: Mapping[str, str]) -> Iterator[tuple[Call, Answer]]:
        """Have the call of a request at the path of an API in the block, and the answer, still without the reply.

        Raises:
            ApiError: the request is refused.
        """
        if self._has_ended:
            raise ended()
        request = parse_request(body, self.rules, self._wires[path])
        call = self._repeated(request, headers) or self._begin(request)
        call.readers += 1
        try:
            yield call, Answer(request, self.rules.model, call.turn)
        finally:
            call.readers -= 1

    def complete(self, turn: Turn, completion: Completion) -> None:
        """Answer a turn. Its call gets an error if that fails."""
        call = self._under_way.pop(turn, None)
        if call is None or self._has_ended or call.reply.done():
            return
        if not self._under_way:
            self._idle_since = time.monotonic()
        try:
            message = self.tree.answer(turn, completion, call.request)
        except Exception as error:
            LOG.exception("a reply to an agent cannot be read")
            call.reply.set_exception(ApiError(f"the reply cannot be read: {describe_error(error)}", status=500))
            return
        if not turn.is_side:
            own = call.request.max_tokens  # a cut at it is no limit of the run
            is_own = own is not None and own < self.rules.sampling.max_tokens and len(turn.completed.token_ids) == own
            self.limit = "length" if turn.completed.finish_reason == "length" and not is_own else ""
        call.reply.set_result(message)

    def end(self) -> None:
        """Refuse all calls from now on, also those under way."""
        self._has_ended, self._idle_since = True, None
        for call in self._calls:
            if not call.reply.done():
                call.reply.set_exception(ended())

    def forget(self) -> None:
        """Free all calls, after the end."""
        assert self._has_ended
        self._calls, self._under_way, self._wires = [], {}, {}
        self.tree.forget()

    def _repeated(self, request: ChatRequest, headers: Mapping[str, str]) -> Call | None:
        """Return the earlier call that a request repeats; None: there is none."""
        same = [call for call in self._calls if call.request.digest == request.digest]
        broken = [call for call in same if not call.readers and not call.turn.is_delivered]
        if broken:
            return broken[0]
        says_so = headers.get(_RETRY_COUNT, "0") not in ("", "0")
        return same[-1] if says_so and same else None

    def _begin(self, request: ChatRequest) -> Call:
        turns, most = sum(turn.is_side == request.is_side for turn in self.tree.turns), self.rules.max_turns
        if turns >= most:
            self.limit = self.limit if request.is_side else "turns"
            raise ApiError(f"environment.max_turns={most}: the episode has had them", code="too_many_turns")
        try:
            turn = self.tree.begin(request)
        except ApiError as error:
            if error.code == "context_length_exceeded" and not request.is_side:
                self.limit = "length"
            raise
        if not turn.is_side and not all(other.is_side for other in self._under_way):
            self.tree.is_sequential = False
        call = self._under_way[turn] = Call(request, turn)
        self._calls.append(call)
        self._idle_since = None
        prompt, rules = turn.prompt_ids, self.rules
        sampling = rules.sampling.within(request.max_tokens).within(rules.max_tokens, len(prompt))
        self._submit(self, turn, Request(prompt, self._seed_of(turn.key), sampling))
        return call
