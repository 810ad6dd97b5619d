"""Episodes of a call that the journal has, and those that are to be run and recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.row_digest import digest_rows
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.journal.journal import Journal


class RecordedGroups:
    """The groups of a call: which the journal has, and which it gets.

    Args:
        requests: the same number for each group, those of one group together.
        history: of the weights that sample; None: those of now.
        decides: settings that decide the episodes besides those of the run. Empty: there are none.
    """

    def __init__(
        self, journal: Journal, requests: Sequence[RolloutRequest], history: str | None = None, decides: str = ""
    ):
        self._journal = journal
        self._history = history
        self._decides = (decides,) if decides else ()
        self._step = requests[0].step
        n = self.size = len(requests) // len({request.group for request in requests})
        groups = [requests[i : i + n] for i in range(0, len(requests), n)]
        self._keys = [self._key(group) if journal.is_on else "" for group in groups]
        self._found = self._find(self._keys)
        self._missing_keys = [key for key in self._keys if key not in self._found]
        self.requests = requests
        self.missing_indices = [i for i in range(len(requests)) if self._keys[i // n] not in self._found]
        """Indices of the requests of the groups that the journal lacks."""
        self.missing = [requests[i] for i in self.missing_indices]
        """These requests."""
        self._kept: set[int] = set()
        self._waiting: dict[int, dict[int, Episode]] = {}  # for the rest of their groups
        self.are_failures_judged = True
        """Whether the call judges if too many episodes have failed."""

    def lacks(self, index: int) -> bool:
        """Return whether an episode is to be given to `keep`. `index`: in `missing`."""
        number = index // self.size
        return self._journal.is_on and number not in self._kept and index not in self._waiting.get(number, ())

    def keep(self, finished: Mapping[int, Episode]) -> None:
        """Record the groups that are complete now. One with a failure waits for `keep_rest`.

        Args:
            finished: episodes with their rewards, by their indices in `missing`: those that it has not been given yet.
        """
        complete = {}
        for index, episode in finished.items():
            if not self.lacks(index):
                continue
            number = index // self.size
            members = self._waiting.setdefault(number, {})
            members[index] = episode
            if len(members) == self.size and not any(member.failure for member in members.values()):
                complete[number] = [members[i] for i in sorted(members)]
        self._add(complete)

    def keep_rest(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Record all groups that are not recorded yet; return the episodes of all requests.

        Args:
            episodes: those of `missing`.
        """
        groups = {i // self.size: list(episodes[i : i + self.size]) for i in range(0, len(episodes), self.size)}
        if self._journal.is_on:
            self._add(groups)
            self._flush()
        made = iter(groups.values())
        return [episode for key in self._keys for episode in self._found.get(key) or next(made)]

    def _flush(self) -> None:
        self._journal.flush()  # while the ranks score the episodes

    def _add(self, groups: Mapping[int, list[Episode]]) -> None:
        new = {number: group for number, group in groups.items() if number not in self._kept}
        keyed = {self._missing_keys[number]: group for number, group in new.items()}
        self._record(keyed)
        self._kept |= new.keys()
        for number in new:
            self._waiting.pop(number, None)

    def _key(self, group: Sequence[RolloutRequest]) -> str:
        """Return the key of a group: a digest of all that decides its episodes."""
        return self._journal.key(self._step, *content_of(group), *self._decides, history=self._history)

    def _find(self, keys: Sequence[str]) -> dict[str, list[Episode]]:
        return self._journal.find(self._step, keys, self._history)

    def _record(self, groups: Mapping[str, list[Episode]]) -> None:
        self._journal.add(self._step, groups, self._history)


def content_of(group: Sequence[RolloutRequest]) -> tuple[Any, ...]:
    """Return what decides the episodes of a group besides the step, the weights and the config."""
    prompt = group[0].prompt
    content = digest_rows([prompt.row], prompt.token_ids, prompt.text, prompt.answer, prompt.messages)
    return group[0].group, [request.number for request in group], tuple(vars(group[0].sampling).values()), content
