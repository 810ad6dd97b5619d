"""Episodes of a call that the journal has, and those that are to be run and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.records import key_of_episode
from trainer.data.row_digest import digest_rows
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.journal.journal import Journal


class RecordedEpisodes:
    """The episodes of a call: which the journal has, and which it gets.

    A record is an episode, or a whole group where its rewards become known together.

    Args:
        requests: the same number for each group, those of one group together.
        history: of the weights that sample; None: those of now.
        decides: settings that decide the episodes besides those of the run. Empty: there are none.
        are_single: whether the episodes of a source are recorded one by one.
    """

    def __init__(
        self,
        journal: Journal,
        requests: Sequence[RolloutRequest],
        history: str | None = None,
        decides: str = "",
        are_single: Callable[[str], bool] = lambda source: False,
    ):
        self._journal = journal
        self._history = history
        self._decides = (decides,) if decides else ()
        self._step = requests[0].step
        self.requests = requests
        n = self.size_of_groups = len(requests) // len({request.group for request in requests})
        self._keys: list[str] = []
        indices: list[range] = []  # of the requests of each record
        for first in range(0, len(requests), n):
            group = requests[first : first + n]
            size = 1 if are_single(group[0].prompt.source) else n
            indices += [range(i, i + size) for i in range(first, first + n, size)]
            self._keys += self._keys_of(group, size) if journal.is_on else [""] * (n // size)
        self._found = self._find(self._keys)
        lacking = [(key, of) for key, of in zip(self._keys, indices, strict=True) if key not in self._found]
        self._missing_keys = [key for key, _ in lacking]
        self.missing_indices = [index for _, of in lacking for index in of]
        """Indices of the requests that have no record."""
        self.missing = [requests[i] for i in self.missing_indices]
        """These requests."""
        self._record_of = [number for number, (_, of) in enumerate(lacking) for _ in of]
        """The record of each of `missing`, by its position among those that are missing."""
        self._sizes = [len(of) for _, of in lacking]
        self._kept: set[int] = set()
        self._waiting: dict[int, dict[int, Episode]] = {}  # for the rest of their groups
        self.are_failures_judged = True
        """Whether the call judges if too many episodes have failed."""

    def lacks(self, index: int) -> bool:
        """Return whether an episode is to be given to `keep`. `index`: in `missing`."""
        number = self._record_of[index]
        return self._journal.is_on and number not in self._kept and index not in self._waiting.get(number, ())

    def keep(self, finished: Mapping[int, Episode]) -> None:
        """Record what is complete now. An episode or a group with a failure waits for `keep_rest`.

        Args:
            finished: episodes with their rewards, by their indices in `missing`: those that it has not been given yet.
        """
        complete = {}
        for index, episode in finished.items():
            if not self.lacks(index):
                continue
            number = self._record_of[index]
            members = self._waiting.setdefault(number, {})
            members[index] = episode
            if len(members) == self._sizes[number] and not any(member.failure for member in members.values()):
                complete[number] = [members[i] for i in sorted(members)]
        self._add(complete)

    def keep_rest(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Record all that is not recorded yet; return the episodes of all requests.

        Args:
            episodes: those of `missing`.
        """
        records: dict[int, list[Episode]] = {}
        for number, episode in zip(self._record_of, episodes, strict=True):
            records.setdefault(number, []).append(episode)
        if self._journal.is_on:
            self._add(records)
            self._flush()
        made = iter(records.values())
        return [episode for key in self._keys for episode in self._found.get(key) or next(made)]

    def _flush(self) -> None:
        self._journal.flush()  # while the ranks score the episodes

    def _add(self, groups: Mapping[int, list[Episode]]) -> None:
        new = {number: group for number, group in groups.items() if number not in self._kept}
        self._record({self._missing_keys[number]: group for number, group in new.items()})
        self._kept |= new.keys()
        for number in new:
            self._waiting.pop(number, None)

    def _keys_of(self, group: Sequence[RolloutRequest], size: int) -> list[str]:
        """Return the keys of the records of a group: digests of all that decides their episodes."""
        numbers = [request.number for request in group]
        if size == len(group):
            return [self._key(group, numbers)]
        of_group = self._key(group, [])  # one digest for all: that of a row can take long
        return [key_of_episode(of_group, number) for number in numbers]

    def _key(self, group: Sequence[RolloutRequest], numbers: Sequence[int]) -> str:
        return self._journal.key(self._step, *content_of(group, numbers), *self._decides, history=self._history)

    def _find(self, keys: Sequence[str]) -> dict[str, list[Episode]]:
        return self._journal.find(self._step, keys, self._history)

    def _record(self, groups: Mapping[str, list[Episode]]) -> None:
        self._journal.add(self._step, groups, self._history)


def content_of(group: Sequence[RolloutRequest], numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return what decides the episodes of a group with these numbers besides the step, the weights and the config."""
    prompt = group[0].prompt
    content = digest_rows([prompt.row], prompt.token_ids, prompt.text, prompt.answer, prompt.messages)
    return group[0].group, numbers, tuple(vars(group[0].sampling).values()), content
