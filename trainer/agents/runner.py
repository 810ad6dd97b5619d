"""Run the episodes of agents, which ask the policy themselves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self

from trainer.agents.call_tree import CallTree, Turn
from trainer.agents.episode import AgentEpisode
from trainer.agents.requests import Rules
from trainer.agents.server import AgentServer, shared_server
from trainer.agents.sessions import AgentSession
from trainer.config import Config
from trainer.environments.base import AgentResult, find_environment, players_of
from trainer.environments.episode_runner import Asks, EnvironmentRunner, RolloutRequest, empty_sample
from trainer.episodes import Episode
from trainer.generation.engine import Request, Sampling
from trainer.sandbox.pool import Calls
from trainer.seeding import environment_seed, turn_seed

LOG = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the policy in requests."""


class AgentRunner(EnvironmentRunner):
    """Runs the episodes of agents, each with an address of its own at the server of the job.

    An agent may take `environment.timeout_s` until its first call, and from each answer to the next call or to its end.
    What the policy takes does not count.
    """

    server: AgentServer

    def __init__(self, cfg: Config, tokenizer: Any):
        super().__init__(cfg, tokenizer)
        most = cfg.environment.agent_concurrency
        self._slots = asyncio.Semaphore(most) if most else None
        self._rollout = cfg.rollout
        self._players = players_of(find_environment(cfg.environment.name or ""))

    def __enter__(self) -> Self:
        e = self._config
        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(shared_server(*e.agent_listens, e.agent_url))
            stack.enter_context(self._pool)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[tuple[Calls, list[str]]]:
        """Run agents that begin together in the block, and log what some of them have raised after a limit."""
        errors: list[str] = []
        await self.server.start()
        async with self._pool.calls() as calls:
            yield calls, errors
        if errors:
            LOG.warning(
                "%d agents ended with an error after a limit of their episode, and count as 0; the first: %s",
                len(errors),
                errors[0],
            )

    async def run(self, request: RolloutRequest, asks: Asks, together: Any) -> Episode:
        """Run an agent. Its episode ends with it; if this is cancelled, the agent is ended."""
        async with self._slots or contextlib.nullcontext():
            return await self._run(request, asks, *together)

    async def _run(self, request: RolloutRequest, asks: Asks, calls: Calls, errors: list[str]) -> Episode:
        replies: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        async def reply(episode: AgentEpisode, turn: Turn, asked: Request) -> None:
            try:
                episode.complete(turn, await asks(asked, turn.key))
            except Exception as error:
                failures.append(error)
                ended.cancel()

        def submit(episode: AgentEpisode, turn: Turn, asked: Request) -> None:
            replies.add(task := asyncio.ensure_future(reply(episode, turn, asked)))
            task.add_done_callback(replies.discard)

        seed, begin = environment_seed(self._seed, request.group), partial(self.begin, request, submit)
        session = AgentSession(
            request.prompt.row, seed, self._config.timeout_s, begin, self.server.discard, asks.turns.key
        )
        ended = asyncio.ensure_future(session.run(calls))
        try:
            await ended
        except asyncio.CancelledError:
            if failures:
                raise failures[0] from None
            raise
        finally:
            asks.finish()
            for task in replies:
                task.cancel()
            self.server.discard(session.episode)
        if session.error:
            errors.append(session.error)
        return self.episode_of(request, session)

    def begin(self, request: RolloutRequest, submit: Callable[[AgentEpisode, Turn, Request], None]) -> AgentEpisode:
        """Return a new episode, which the server serves."""
        r, e = self._rollout, self._config
        stops = request.sampling.stop_token_ids
        usual = Sampling(r.temperature, r.top_p, r.top_k, r.max_response_tokens, stops)
        overrides = e.agent_sampling == "override"
        rules = Rules(MODEL, request.sampling, usual, overrides, e.max_turns, self._most_tokens, self._players)
        tree = CallTree(self._tokenizer, self._longest, self._limit, self._reader)
        seed_of = partial(turn_seed, self._seed, request.step, request.group, request.number)
        episode = AgentEpisode(tree, rules, seed_of, submit, self.server.address)
        self.server.add(episode)
        return episode

    def episode_of(self, request: RolloutRequest, session: AgentSession) -> Episode:
        """Return the episode of an agent that has ended."""
        tree = session.episode.tree
        result = session.result or AgentResult()
        reward = result.reward + sum(result.rewards.values())
        samples = tree.samples()
        rewards = {one.player: reward + result.player_rewards.get(one.player, 0.0) for one in samples} or {"": reward}
        if not session.failure:
            samples = [dataclasses.replace(sample, reward=rewards[sample.player]) for sample in samples]
        messages, turns = tree.transcript()
        counts = {"samples": float(len(samples)), "errors": float(bool(session.error))}
        is_spared = session.failure and not turns
        session.episode.forget()
        return Episode(
            request.uid,
            request.group,
            samples or [empty_sample(self._tokenizer)],
            reward=None if is_spared else sum(rewards.values()) / len(rewards),
            rewards=result.rewards,
            status=session.status,
            failure=session.failure,
            metrics={} if session.failure else {**result.metrics, **counts},
            messages=messages,
            turns=turns,
            answer=self._answer(request),
        )
