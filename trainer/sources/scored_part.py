"""The rewards of the episodes of one source in a call, while others are generated."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from trainer.data.datasets import of_source
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.process import time_limits
from trainer.rewards.scorer import Scoring
from trainer.rewards.terms import RewardInput
from trainer.sources.routes import Route


class ScoredPart:
    """Gives the episodes of one source their rewards.

    Args:
        route: of the source.
        requests: of the episodes, by their indices in the call. Those of one group follow one another. They are whole
            groups if the route wants these.
        n: episodes in a group.
        block: is left when all rewards are known.
        purpose: names what the episodes are for, in messages.
    """

    def __init__(
        self,
        route: Route,
        requests: Mapping[int, RolloutRequest],
        n: int,
        block: contextlib.ExitStack,
        purpose: str,
    ):
        self._source = next(iter(requests.values())).prompt.source
        self.session: Scoring | None = None
        """None: the environment gives the rewards, or all are 0."""
        if route.scorer is not None:
            self.session = block.enter_context(route.scorer.scoring(n, of_source(purpose, [self._source])))
        self.accept: Callable[[], None] = lambda: None
        """Called when the step uses the rewards of `scores`."""
        self._cfg = route.cfg
        self._requests = requests
        self._indices = list(requests)
        """In the call, by the index in this part."""
        self._own_indices = {index: own for own, index in enumerate(self._indices)}
        self._wants_groups = route.wants_groups
        self._groups: list[range] = []
        """For each index in this part those of its group, as far as they are in it."""
        for _, members in itertools.groupby(request.group for request in requests.values()):
            first, size = len(self._groups), len(list(members))
            self._groups += [range(first, first + size)] * size
        self._waiting: set[int] = set()  # single episodes whose rewards have not begun
        self._began_at = time.monotonic()

    def take(self, chunk: Mapping[int, Episode], ended: Mapping[int, Episode]) -> dict[int, Episode]:
        """Take episodes that have just ended. Return those whose rewards are known now: all, without a scorer.

        Args:
            chunk: the episodes, of any source, by their indices in the call.
            ended: all that have ended so far.
        """
        new = [index for index in chunk if index in self._own_indices]
        if self.session is None:
            return {index: self._with_reward(chunk[index], *_own_reward(chunk[index])) for index in new}
        owns = {self._own_indices[index] for index in new}
        groups = sorted({self._groups[own] for own in owns}, key=lambda group: group.start)
        whole = [group for group in groups if all(self._indices[own] in ended for own in group)]
        if self._wants_groups:  # a request to a server has completions of one group alone
            begun = [(group.start, group.stop) for group in whole]
        else:
            begun = _runs(sorted(self._due(owns, whole)))
        for first, end in begun:
            indices = self._indices[first:end]
            self.session.add(first, [_reward_input(self._requests[index], ended[index]) for index in indices])
        return {}

    def _due(self, owns: set[int], whole: Sequence[range]) -> set[int]:
        """Return the single episodes whose rewards begin now: those of whole groups, and at times all that wait.

        Rewards that begin one by one take the cores from the engines, and no record comes sooner for it.

        Args:
            owns: those that have just ended.
            whole: the groups of which none is missing any more.
        """
        self._waiting |= owns
        now = time.monotonic()
        if now - self._began_at >= time_limits.JOURNAL_FLUSH_S:
            due = self._waiting
        else:
            due = self._waiting.intersection(own for group in whole for own in group)
        if due:
            self._began_at = now
        self._waiting = self._waiting - due
        return due

    def finished(self, ended: Mapping[int, Episode], lacks: Callable[[int], bool]) -> dict[int, Episode]:
        """Return the episodes whose rewards are known so far, of those that `lacks` asks for."""
        if self.session is None:
            return {}
        known = {self._indices[own]: result for own, result in self.session.finished().items()}
        return {index: self._with_reward(ended[index], *result) for index, result in known.items() if lacks(index)}

    def scores(self, ended: Mapping[int, Episode], meanwhile: Callable[[], None]) -> dict[int, Episode]:
        """Wait for the rewards of all episodes, and return these."""
        assert self.session is not None
        scores = self.session.scores(meanwhile)
        self.accept = scores.accept
        results = zip(self._indices, scores.each(), strict=True)
        return {index: self._with_reward(ended[index], *result) for index, result in results}

    def _with_reward(self, episode: Episode, reward: float, terms: Mapping[str, float], reason: str) -> Episode:
        """Return an episode with its reward.

        Args:
            reason: why the reward or the environment failed; empty: it did not. An environment that may have failed
                through what the policy did has given a reward of 0: else the policy could learn to leave that way.
        """
        is_left_out = reason and self._cfg.on_failure == "leave_out" and episode.reward is None
        return dataclasses.replace(
            episode,
            reward=None if is_left_out else reward,
            rewards=terms,
            failure=reason,
            source=self._source,
        )


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each run of consecutive numbers, which are in order."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def by_source(requests: Sequence[RolloutRequest]) -> dict[str, dict[int, RolloutRequest]]:
    """Return requests by the sources of their prompts, with their indices."""
    found: dict[str, dict[int, RolloutRequest]] = {}
    for index, request in enumerate(requests):
        found.setdefault(request.prompt.source, {})[index] = request
    return found


def _own_reward(episode: Episode) -> tuple[float, dict[str, float], str]:
    """Return the reward that an environment gave, its terms, and why it failed."""
    return episode.reward or 0.0, dict(episode.rewards), episode.failure


def _reward_input(request: RolloutRequest, episode: Episode) -> RewardInput:
    """Return an episode as a scorer gets it."""
    prompt = request.prompt
    return RewardInput(episode.text, prompt.answer, prompt.text, episode.messages, prompt.row, episode.status, episode)
