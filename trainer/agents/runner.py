"""Run the episodes of agents, which ask the policy themselves."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

from trainer.agents.call_tree import CallTree, Turn
from trainer.agents.chat_request import Rules
from trainer.agents.episode import AgentEpisode
from trainer.agents.server import AgentServer, shared_server
from trainer.agents.sessions import AgentPool, AgentSession, Cancellation
from trainer.config import Config
from trainer.data.chats import check_generation_prompt
from trainer.data.limits import max_characters
from trainer.environments.agent import AgentResult
from trainer.environments.episode_runner import (
    Clock,
    EpisodeRunner,
    Generation,
    PhaseTimer,
    RolloutRequest,
    check_failures,
    empty_sample,
)
from trainer.environments.template_tools import find_reader
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.request_stream import RequestStream
from trainer.process import time_limits
from trainer.sandbox.pool import NOT_TRIED
from trainer.sandbox.tasks import Round
from trainer.seeding import environment_seed, turn_seed

LOG = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the policy in requests."""


class AgentRunner(EpisodeRunner):
    """Runs the episodes of agents, each with an address of its own at the server of the job.

    An agent may take `environment.timeout_s` until its first call, and from each answer to the next call or to its end.
    What the policy takes does not count.
    """

    server: AgentServer

    def __init__(self, cfg: Config, tokenizer: Any):
        self.config = e = cfg.environment
        self.seed = cfg.trainer.seed
        self.pool = AgentPool(e)
        self._answer_key = cfg.data.answer_key
        self._most_tokens = e.most_tokens
        self._longest = cfg.longest_prompt
        self._rollout = cfg.rollout
        self._tokenizer = copy.deepcopy(tokenizer)  # the thread of the server uses it
        check_generation_prompt(tokenizer)
        self._characters = max_characters(tokenizer, self._longest)
        self._reader = find_reader(cfg.model, self._tokenizer)

    def __enter__(self) -> Self:
        e = self.config
        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(shared_server(e.agent_host, e.agent_port, e.agent_url))
            stack.enter_context(self.pool)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()

    def run(
        self,
        requests: Sequence[RolloutRequest],
        generate: Generation,
        timer: PhaseTimer,
        known: int | None = 0,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[dict[int, Episode]]:
        """Yield episodes as they end. If that fails, or nobody reads on, the agents are ended.

        Raises:
            UserError: more than `environment.max_error_rate` of the episodes have failed.
        """
        with generate.open_stream() as stream:
            yield from _Batch(self, requests, stream, generate).run(timer, known, check)

    def begin(self, request: RolloutRequest, submit: Callable[[AgentEpisode, Turn, Request], None]) -> AgentEpisode:
        """Return a new episode, which the server serves."""
        r, e = self._rollout, self.config
        stops = request.sampling.stop_token_ids
        usual = Sampling(r.temperature, r.top_p, r.top_k, r.max_response_tokens, stops)
        overrides = e.agent_sampling == "override"
        rules = Rules(MODEL, request.sampling, usual, overrides, e.max_turns, self._most_tokens)
        tree = CallTree(self._tokenizer, self._longest, self._characters, self._reader)
        seed_of = partial(turn_seed, self.seed, request.step, request.group, request.number)
        episode = AgentEpisode(tree, rules, seed_of, submit, self.server.address)
        self.server.add(episode)
        return episode

    def episode_of(self, session: AgentSession) -> Episode:
        """Return the episode of an agent that has ended."""
        self.server.remove(session.episode)
        request, tree = session.request, session.episode.tree
        result = session.result or AgentResult()
        samples = tree.samples()
        messages, turns = tree.transcript()
        counts = {"samples": float(len(samples)), "errors": float(bool(session.error))}
        answer = request.prompt.row.get(self._answer_key)
        is_spared = session.failure and (not turns or session.failure.startswith(NOT_TRIED))
        self.server.post(session.episode.forget)
        return Episode(
            request.uid,
            request.group,
            samples or [empty_sample(self._tokenizer)],
            reward=None if is_spared else result.reward + sum(result.rewards.values()),
            rewards=result.rewards,
            status=session.status,
            failure=session.failure,
            metrics={} if session.failure else {**result.metrics, **counts},
            messages=messages,
            turns=turns,
            answer="" if answer is None else str(answer),
        )


class _Batch:
    """The agents of one call of `AgentRunner.run`."""

    def __init__(
        self, runner: AgentRunner, requests: Sequence[RolloutRequest], stream: RequestStream, generate: Generation
    ):
        self._runner = runner
        self._stream = stream
        self._clock = Clock(generate)
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[AgentEpisode, Turn]] = {}
        self._ended: queue.SimpleQueue[AgentSession] = queue.SimpleQueue()
        self._timeout_s = runner.config.timeout_s
        self._next_look = 0.0
        """When to look next for agents that take too long."""
        self._sessions = [self._session(index, request) for index, request in enumerate(requests)]

    def run(self, timer: PhaseTimer, known: int | None, check: Callable[[], None]) -> Iterator[dict[int, Episode]]:
        server, stream, left = self._runner.server, self._stream, len(self._sessions)
        try:
            with self._runner.pool.round() as tasks, server.repeating(stream.wake, time_limits.POLL_INTERVAL_S):
                tasks.submit(self._sessions)
                while left:
                    check()
                    with timer("environment" if stream.is_idle else "rollout"):
                        completions = next(stream)
                    for number, completion in completions.items():
                        self._answer(number, completion)
                    tasks.check()
                    self._cancel_late(tasks)
                    new = list(self._newly_ended())
                    if any(session.failure for session in new):
                        failures = [(session.request, session.failure) for session in self._sessions]
                        check_failures(failures, known, self._runner.config.max_error_rate)
                    left -= len(new)
                    yield {session.index: self._runner.episode_of(session) for session in new}
                tasks.wait(check)
            self._report_errors()
        finally:
            for session in self._sessions:
                server.remove(session.episode)

    def _session(self, index: int, request: RolloutRequest) -> AgentSession:
        runner = self._runner
        seed = environment_seed(runner.seed, request.group)
        begin = partial(runner.begin, submit=self._submit)
        discard, clock = runner.server.discard, self._clock
        return AgentSession(index, request, seed, self._timeout_s, begin, discard, self._note_end, clock)

    def _submit(self, episode: AgentEpisode, turn: Turn, request: Request) -> None:
        number = next(self._numbers)
        self._asked[number] = episode, turn
        with contextlib.suppress(Exception):  # the failure that has ended the stream: its reader raises it, too
            self._stream.submit({number: request})

    def _answer(self, number: int, completion: Completion) -> None:
        episode, turn = self._asked.pop(number)
        self._runner.server.post(episode.complete, turn, completion)

    def _note_end(self, session: AgentSession) -> None:
        self._ended.put(session)
        self._stream.wake()

    def _newly_ended(self) -> Iterator[AgentSession]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._ended.get_nowait()

    def _cancel_late(self, tasks: Round) -> None:
        """End agents that take too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + time_limits.POLL_INTERVAL_S
        late = [task for session in self._sessions if (task := self._cancellation(session)) is not None]
        if late:
            tasks.submit(late)

    def _cancellation(self, session: AgentSession) -> Cancellation | None:
        began, most_s = session.first_began_at, self._runner.config.max_seconds
        if began is None or session.began_at is None:
            return None
        if most_s and self._clock() - began > most_s:
            return session.cancellation(f"was not done after environment.max_seconds={most_s:g}", is_last=True)
        return session.cancellation() if session.episode.idle_s() > self._timeout_s else None

    def _report_errors(self) -> None:
        errors = [session.error for session in self._sessions if session.error]
        if errors:
            LOG.warning(
                "%d of %d agents of step %d ended with an error after a limit of their episode, and count as 0; the "
                "first: %s",
                len(errors),
                len(self._sessions),
                self._sessions[0].request.step,
                errors[0],
            )
