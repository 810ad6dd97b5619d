"""Run the episodes of agents, which ask the policy themselves, each in a process of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self

from trainer.agents.call_tree import CallTree, Turn
from trainer.agents.episode import AgentEpisode
from trainer.agents.requests import Rules
from trainer.agents.server import AgentServer, shared_server
from trainer.config import Config
from trainer.environments.base import AgentResult, Endpoint, find_environment, players_of
from trainer.environments.episode_runner import RESULT, Asks, EnvironmentRunner, RolloutRequest, empty_sample
from trainer.episodes import Episode
from trainer.files.documents import mismatch
from trainer.generation.engine import Request, Sampling
from trainer.process import time_limits
from trainer.sandbox.limits import LARGEST_REWARD, MAX_ATTEMPTS
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls
from trainer.seeding import environment_seed, turn_seed

LOG = logging.getLogger(__name__)

MODEL = "policy"  # name of the policy in requests
_LIMIT = "environment.timeout_s"


class AgentSession:
    """The agent of one episode on the driver. One that fails, or is late, runs again from the start, at a new address.

    Args:
        timeout_s: see `AgentRunner`.
        begin: returns a new episode of the endpoint.
        end: ends one.
        episode_id: see `Endpoint`.
    """

    def __init__(
        self,
        row: Any,
        seed: int,
        timeout_s: float,
        begin: Callable[[], AgentEpisode],
        end: Callable[[AgentEpisode], None],
        episode_id: str = "",
    ):
        self.result: AgentResult | None = None  # None: the agent has failed
        self.status = self.failure = ""
        """Why the episode has ended: `timeout` or `failed` if the agent has failed. And the reason."""
        self.error = ""
        """What the agent has raised after a limit. Then it has not failed, but has no reward."""
        self._row, self._seed, self._timeout_s = row, seed, timeout_s
        self._begin, self._end, self._episode_id = begin, end, episode_id
        self.episode = begin()

    async def run(self, calls: Calls) -> None:
        """Run the agent until it has ended, or has failed for good.

        Raises:
            WorkerError: the processes cannot start.
        """
        failures, is_alone = 0, False
        while not self.status:
            try:
                self._take(await self._attempt(calls, is_alone))
                return
            except CallLost as lost:
                is_alone = is_alone or lost.is_suspect
            except CallFailed as failed:
                failures += 1
                if failed.status == "raised" and self.episode.limit:  # it does not know what to do without the reply
                    self.result, self.error, self.status = AgentResult(), failed.reason, self.episode.limit
                    return
                if failures >= MAX_ATTEMPTS:
                    self.status = "timeout" if failed.status == "timeout" else "failed"
                    self.failure = f"run {failed.reason}"
                    return
            self._end(self.episode)
            self.episode = self._begin()

    async def _attempt(self, calls: Calls, is_alone: bool) -> Any:
        """Return what the agent has returned (see `Calls.ask`). One that takes too long is ended."""
        episode = self.episode
        endpoint = dataclasses.asdict(Endpoint(episode.base_url, episode.secret, episode.rules.model, self._episode_id))
        message, clock = [0, "run", self._row, self._seed, endpoint], episode.start_clock
        no_limit = _LIMIT, math.inf  # the time of the policy must not count (see `AgentRunner`)
        call = Call(message, "agent", no_limit, is_alone=is_alone, is_session=True, ends_session=True, on_sent=clock)
        asked = asyncio.ensure_future(calls.ask(call))
        try:
            while not (await asyncio.wait([asked], timeout=time_limits.POLL_INTERVAL_S))[0]:
                if episode.idle_s() > self._timeout_s:
                    raise CallFailed("timeout", f"took longer than {_LIMIT}={self._timeout_s:g}")
        finally:
            asked.cancel()  # if it has not ended
        return await asked

    def _take(self, value: Any) -> None:
        if mismatch(value, RESULT):
            self.status, self.failure = "failed", "has written into the pipe of its process"
            return
        result = AgentResult(**{name: value[name] for name in RESULT})
        of_players = max(result.player_rewards.values(), key=abs, default=0.0)
        total = result.reward + sum(result.rewards.values()) + of_players
        if abs(total) <= LARGEST_REWARD:
            self.result, self.status = result, self.episode.limit or "stop"
        else:
            self.status = "failed"
            self.failure = f"gave rewards that add up to {total:g}, beyond {LARGEST_REWARD:g}"


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
