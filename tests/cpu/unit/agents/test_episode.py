"""The calls of an episode: repeated ones, limits, time, and the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.agents import runs_of
from trainer.agents.call_tree import CallTree, Turn
from trainer.agents.episode import AgentEpisode
from trainer.agents.messages import ApiError
from trainer.agents.requests import Rules
from trainer.generation.engine import Completion, Request, Sampling
from trainer.seeding import turn_seed

USUAL = Sampling(1.0, 1.0, -1, 8, (4,))
RULES = Rules("policy", USUAL, USUAL, overrides=False, max_turns=4)
RETRY = {"X-Stainless-Retry-Count": "1"}


class Talk:
    """An episode, and what it asks of the engines. `pending` holds what they have not answered."""

    def __init__(self, tokenizer: Any, longest: int = 100, **rules: Any):
        self.pending: list[tuple[Turn, Request]] = []
        self.requests: list[Request] = []
        self.tokenizer = tokenizer
        self.episode = AgentEpisode(
            CallTree(tokenizer, longest),
            dataclasses.replace(RULES, **rules),
            lambda key: turn_seed(1, 2, "0:0", 3, key),
            self._submit,
            lambda secret: f"http://x/{secret}",
        )

    def _submit(self, episode: AgentEpisode, turn: Turn, request: Request) -> None:
        assert episode is self.episode
        self.pending.append((turn, request))
        self.requests.append(request)

    def answer(self, text: str = "ok<|end|>", reason: str = "stop") -> None:
        """Answer the first request that waits."""
        turn, request = self.pending.pop(0)
        tokens = self.tokenizer.encode(text)[: request.sampling.max_tokens]
        self.episode.complete(turn, Completion(tokens, [-1.0] * len(tokens), reason, 1))

    async def send(self, text: str = "a", headers: Any = (), breaks: bool = False, **fields: Any) -> asyncio.Task[str]:
        """Begin a request; the task returns the first reply. `breaks`: the connection breaks as the answer is sent."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}], **fields}

        async def call() -> str:
            with self.episode.asking("chat/completions", json.dumps(body).encode(), dict(headers)) as (call, _):
                reply = await asyncio.shield(call.reply)
                with call.delivering():
                    if breaks:
                        raise ConnectionResetError
                return reply.content

        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


def replies(talk: Talk) -> int:
    return sum(len(list(runs_of(sample))) for sample in talk.episode.tree.samples())


def over(test: Callable[[Talk], Any]) -> Callable[[Any], None]:
    """A test as a coroutine."""

    def run(tokenizer: Any) -> None:
        asyncio.run(test(Talk(tokenizer)))

    return run


@over
async def test_a_call_gets_the_reply_of_the_engine(talk):
    task = await talk.send()
    assert not task.done() and len(talk.requests) == 1
    talk.answer()
    assert await task == "ok"
    assert talk.requests[0].sampling == USUAL and replies(talk) == 1


@over
async def test_a_request_that_a_client_repeats_gets_the_same_answer(talk):
    """While the first waits, when its answer was lost, and when it was sent."""
    first = await talk.send()
    second = await talk.send(headers=RETRY)
    talk.answer()
    assert await first == await second == "ok"
    assert await (await talk.send(headers=RETRY)) == "ok"
    assert len(talk.requests) == 1 == replies(talk)


@over
async def test_a_request_whose_connection_broke_may_be_repeated_without_a_header(talk):
    first = await talk.send()
    first.cancel()
    await asyncio.sleep(0)
    second = await talk.send()
    talk.answer()
    assert await second == "ok" and len(talk.requests) == 1
    broken = await talk.send("b", breaks=True)
    talk.answer("no<|end|>")
    with pytest.raises(ConnectionResetError):
        await broken
    assert replies(talk) == 1
    assert await (await talk.send("b")) == "no"
    assert len(talk.requests) == 2 == replies(talk)


@over
async def test_the_same_request_again_is_another_call(talk):
    """Also while the first one waits. Each has its own seed, which does not depend on the order."""
    tasks = [await talk.send(), await talk.send()]
    for text in ("one<|end|>", "two<|end|>"):
        talk.answer(text)
    assert [await task for task in tasks] == ["one", "two"]
    third = await talk.send()
    talk.answer("three<|end|>")
    assert await third == "three" and replies(talk) == 3
    assert len({request.seed for request in talk.requests}) == 3
    assert not talk.episode.tree.is_sequential


def test_seeds_depend_on_the_prompt_and_not_on_the_order(tokenizer):
    async def seeds(*texts: str) -> dict[str, set[int]]:
        talk = Talk(tokenizer, max_turns=9)
        for text in texts:
            await talk.send(text)
        found: dict[str, set[int]] = {}
        for text, request in zip(texts, talk.requests, strict=True):
            found.setdefault(text, set()).add(request.seed)
        return found

    assert asyncio.run(seeds("a", "b", "a", "c")) == asyncio.run(seeds("c", "a", "a", "b"))


@over
async def test_an_episode_has_so_many_replies(talk):
    for text in "abcd":
        await talk.send(text)
    with pytest.raises(ApiError, match=r"environment.max_turns=4: the episode has had them"):
        await (await talk.send("e"))
    assert talk.episode.limit == "turns" and len(talk.requests) == 4
    while talk.pending:
        talk.answer()
    assert talk.episode.limit == ""


def test_a_prompt_that_is_too_long_is_refused_and_the_episode_goes_on(tokenizer):
    async def run() -> None:
        talk = Talk(tokenizer, longest=8)
        with pytest.raises(ApiError, match="12 tokens > 8 maximum"):
            await (await talk.send("x" * 10))
        assert talk.episode.limit == "length"
        task = await talk.send("x")
        talk.answer()
        assert await task == "ok" and talk.episode.limit == ""

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields, rules, limit, status",
    [
        ({}, {}, 8, "length"),
        ({"max_tokens": 5}, {}, 5, ""),
        ({"max_tokens": 50}, {}, 8, "length"),
        ({"max_completion_tokens": 8}, {}, 8, "length"),
        ({}, {"max_tokens": 7}, 4, "length"),
    ],
)
def test_a_reply_has_at_most_the_tokens_of_all_limits(tokenizer, fields, rules, limit, status):
    """A reply that the run has cut gives the episode its status, if it is the last one."""

    async def run() -> None:
        talk = Talk(tokenizer, **rules)
        task = await talk.send(**fields)
        assert talk.requests[0].sampling.max_tokens == limit
        talk.answer("y" * 20, "length")
        assert await task == "y" * limit and talk.episode.limit == status

    asyncio.run(run())


@over
async def test_time_counts_while_no_call_is_under_way(talk):
    assert talk.episode.idle_s() == 0
    talk.episode.start_clock()
    await asyncio.sleep(0.01)
    assert talk.episode.idle_s() > 0
    task = await talk.send()
    assert talk.episode.idle_s() == 0
    talk.answer()
    await task
    await asyncio.sleep(0.01)
    assert talk.episode.idle_s() > 0
    talk.episode.end()
    assert talk.episode.idle_s() == 0


@over
async def test_a_reply_that_cannot_be_read_ends_its_call_with_an_error(talk):
    """Then time counts again, and a repetition gets the same."""

    def broken(*_: Any) -> Any:
        raise RecursionError("too deep")

    talk.episode.start_clock()
    task = await talk.send()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk.episode.tree, "answer", broken)
        talk.answer()
    for failed in (task, await talk.send(headers=RETRY)):
        with pytest.raises(ApiError, match="the reply cannot be read: RecursionError: too deep") as refusal:
            await failed
        assert refusal.value.status == 500
    await asyncio.sleep(0.01)
    assert talk.episode.idle_s() > 0 and replies(talk) == 0 and not talk.pending
    task = await talk.send("b")
    talk.answer()
    assert await task == "ok" and talk.episode.tree.is_sequential


@over
async def test_after_the_end_all_calls_are_refused(talk):
    waiting = await talk.send()
    talk.episode.end()
    talk.answer()
    for task in (waiting, await talk.send("b")):
        with pytest.raises(ApiError, match="the episode has ended") as refusal:
            await task
        assert refusal.value.status == 400
    assert talk.episode.tree.samples() == []
