"""One episode of an agent, as the endpoint sees it: its calls, its limits, and the requests that are repeated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping

from trainer.agents.answers import Answer, Choice
from trainer.agents.call_tree import CallTree, Turn
from trainer.agents.chat_request import ChatRequest, Rules, parse_request
from trainer.agents.errors import ApiError
from trainer.errors import describe_error
from trainer.generation.engine import Completion, Request, Sampling

LOG = logging.getLogger(__name__)

Submit = Callable[["AgentEpisode", Turn, Request], None]
"""Gives a request to the engines. `AgentEpisode.complete` is called with the completion."""

_RETRY_COUNT, _IDEMPOTENCY = "X-Stainless-Retry-Count", "Idempotency-Key"


def ended() -> ApiError:
    """Return the answer to calls after the end of an episode."""
    return ApiError("the episode has ended", code="episode_ended", status=410)


class Call:
    """A request that is answered once, however often it is repeated."""

    def __init__(self, request: ChatRequest, turns: list[Turn]):
        self.request = dataclasses.replace(request, messages=[], tools=())  # the turns have what they need of these
        self.turns = turns
        self.choices: dict[Turn, Choice] = {}
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.readers = 0
        """Connections that wait for the answer."""
        self.answer.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may wait

    @property
    def is_delivered(self) -> bool:
        """The agent has got the answer, as far as this side knows."""
        return self.turns[0].is_delivered

    @is_delivered.setter
    def is_delivered(self, value: bool) -> None:
        for turn in self.turns:
            turn.is_delivered = value


class AgentEpisode:
    """The calls of one episode. All methods but the constructor and `idle_s` run on the thread of the server.

    A request is a repetition of an earlier one if both have the same `Idempotency-Key`; if it has the same content, and
    its client says that it repeats it (`X-Stainless-Retry-Count`, which OpenAI's clients send); or if it has the same
    content as one whose connection broke before the answer. Any other request is a call of its own: an agent that asks
    the same twice wants two replies.

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
        self._seed_of = seed_of
        self._submit = submit
        self._calls: list[Call] = []
        self._by_key: dict[str, Call] = {}
        self._by_turn: dict[Turn, Call] = {}
        self._under_way = 0
        self._idle_since: float | None = None
        self._has_ended = False

    # ---------------------------------------------------------------------------------------------------
    # Time

    def start_clock(self) -> None:
        """Note that the agent begins now."""
        self._idle_since = time.monotonic()

    def idle_s(self) -> float:
        """Return for how long the agent has been busy without a call under way."""
        since = self._idle_since
        return time.monotonic() - since if since is not None else 0.0

    # ---------------------------------------------------------------------------------------------------
    # Calls

    async def chat(self, body: bytes, headers: Mapping[str, str]) -> tuple[Call, Answer]:
        """Return the answer to a request. `delivering` must follow.

        Raises:
            ApiError: there is none.
        """
        if self._has_ended:
            raise ended()
        request = parse_request(body, self.rules)
        key = headers.get(_IDEMPOTENCY)
        call = self._repeated(request, key, headers)
        if call is None:
            call = self._begin(request)
            if key is not None:
                self._by_key[key] = call
        call.readers += 1
        try:
            return call, await asyncio.shield(call.answer)
        except BaseException:
            call.readers -= 1
            raise

    @contextlib.contextmanager
    def delivering(self, call: Call) -> Iterator[None]:
        """Send an answer in the block. It counts as delivered unless that fails."""
        before, call.is_delivered = call.is_delivered, True  # now: the agent may end before the block does
        try:
            yield
        except BaseException:
            call.is_delivered = before
            raise
        finally:
            call.readers -= 1

    def complete(self, turn: Turn, completion: Completion) -> None:
        """Answer a turn. Its call gets an error if that fails."""
        call = self._by_turn.pop(turn, None)
        if call is None or self._has_ended or call.answer.done():
            return
        try:
            call.choices[turn] = Choice(turn, self.tree.answer(turn, completion, call.request))
        except Exception as error:
            LOG.exception("a reply to an agent cannot be read")
            self._end_call()
            call.answer.set_exception(ApiError(f"the reply cannot be read: {describe_error(error)}", status=500))
            return
        if len(call.choices) < len(call.turns):
            return
        self._end_call()
        self.limit = "length" if any(self._was_cut(turn, call.request) for turn in call.turns) else ""
        choices = [call.choices[turn] for turn in call.turns]
        call.answer.set_result(Answer(call.request, self.rules.model, choices))

    def end(self) -> None:
        """Refuse all calls from now on, also those under way."""
        self._has_ended, self._idle_since = True, None
        for call in self._calls:
            if not call.answer.done():
                call.answer.set_exception(ended())

    def forget(self) -> None:
        """Free all calls, after the end."""
        assert self._has_ended
        self._calls, self._by_key, self._by_turn = [], {}, {}
        self.tree.forget()

    def _repeated(self, request: ChatRequest, key: str | None, headers: Mapping[str, str]) -> Call | None:
        """Return the earlier call that a request repeats; None: there is none."""
        if key is not None and (call := self._by_key.get(key)) is not None:
            if call.request.digest != request.digest:
                raise ApiError(f"{_IDEMPOTENCY}: an earlier request with this key had another body", code="reused_key")
            return call
        same = [call for call in self._calls if call.request.digest == request.digest]
        broken = [call for call in same if not call.readers and not call.is_delivered]
        if broken:
            return broken[0]
        says_so = headers.get(_RETRY_COUNT, "0") not in ("", "0")
        return same[-1] if says_so and same else None

    def _begin(self, request: ChatRequest) -> Call:
        turns, most = len(self.tree.turns), self.rules.max_turns
        if turns + request.n > most:
            self.limit = "turns"
            problem = f"environment.max_turns={most}: the episode has had {turns} replies, and this request wants "
            raise ApiError(f"{problem}{request.n} more", code="too_many_turns")
        try:
            new = self.tree.begin(request)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                self.limit = "length"
            raise
        call = Call(request, new)
        self._calls.append(call)
        if self._under_way:
            self.tree.is_sequential = False
        self._under_way += 1
        self._idle_since = None
        prompt = new[0].prompt_ids
        sampling = self._sampling(request, len(prompt))
        for turn in new:
            self._by_turn[turn] = call
            self._submit(self, turn, Request(prompt, self._seed_of(turn.key), sampling))
        return call

    def _was_cut(self, turn: Turn, request: ChatRequest) -> bool:
        """Return whether a reply has reached a limit of the run, and not that of its request."""
        completion, own = turn.completed, request.max_tokens
        is_own = own is not None and own < self.rules.sampling.max_tokens and len(completion.token_ids) == own
        return completion.finish_reason == "length" and not is_own

    def _sampling(self, request: ChatRequest, prompt: int) -> Sampling:
        return self.rules.sampling.within(request.max_tokens).within(self.rules.max_tokens, prompt)

    def _end_call(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle_since = time.monotonic()
