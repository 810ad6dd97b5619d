"""The records that are there at a start: an index of their keys, and the groups when they are taken."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.data.records import decode_groups, key_of_group, keys_in
from trainer.episodes import Episode
from trainer.errors import one_line
from trainer.journal.files import RecordFiles

LOG = logging.getLogger(__name__)

_DAMAGED = "damaged files"
_OTHERS = "of another config, code, history or prompt"


@dataclass(frozen=True)
class _Record:
    """An episode or a group in a file, and what is known of it."""

    name: str
    about: Mapping[str, str]
    order: int
    """Newer files have a higher one."""

    @property
    def sampled_by(self) -> tuple[int, str] | None:
        """The version of a group that was sampled in flight, and its history."""
        return (int(self.about["version"]), self.about["history"]) if "version" in self.about else None


@dataclass
class _Step:
    records: dict[str, list[_Record]]
    """By key. The newest is the last one."""
    used: set[str] = field(default_factory=set)


class Replay:
    """The records that are there at a start. Only keys are held in memory: groups are read when they are taken.

    Args:
        names: the steps of the files, by name. The oldest file comes first.
    """

    def __init__(self, files: RecordFiles, names: Mapping[str, int]):
        self._files = files
        self._order = {name: number for number, name in enumerate(names)}
        self._names: dict[int, list[str]] = {}  # of the files whose keys are not read yet
        for name, step in names.items():
            self._names.setdefault(step, []).append(name)
        self._first, self._last = min(self._names), max(self._names)
        self._open: dict[int, _Step] = {}
        self._unusable: set[str] = set()  # files
        self._held: set[int] = set()  # steps whose episodes are in the checkpoint
        self._counts: Counter[str] = Counter()
        self.is_over = False
        """The run is behind the last step that has records."""

    def find(self, step: int, keys: Sequence[str]) -> dict[str, list[Episode]]:
        """Return the episodes of a step that have a record, by key.

        Args:
            keys: those of all records of each group.
        """
        if step > self._last:
            return {}
        opened = self._opened(step)
        found: dict[str, list[Episode]] = {}
        records = {key: list(opened.records.get(key, ())) for key in keys}
        while missing := [key for key in records if key not in found and records[key]]:
            by_file: dict[str, list[str]] = {}
            for key in missing:  # a damaged record gives way to an older one
                by_file.setdefault(records[key].pop().name, []).append(key)
            for name, some in by_file.items():
                found |= self._read(name, some)
        opened.used |= found.keys()
        groups, lacking = {key_of_group(key) for key in keys}, {key_of_group(key) for key in keys if key not in found}
        in_part = lacking & {key_of_group(key) for key in found}
        self._counts["found"] += len(groups - lacking)
        self._counts["in part"] += len(in_part)
        self._counts["generated"] += len(lacking - in_part)
        return found

    def note_held(self, step: int, groups: int) -> None:
        """Note that the checkpoint has the groups that a step trains on, so no record of them is asked for."""
        if step <= self._last:
            self._held.add(step)
            self._counts["held"] += groups

    def candidates(self, key: str) -> list[tuple[int, str]]:
        """Return the records of a group that was sampled in flight: versions, with their histories.

        The newest one comes first.
        """
        for step in list(self._names):
            self._opened(step)
        records = [record for opened in self._open.values() for record in opened.records.get(key, ())]
        newest_first = sorted(records, key=lambda record: record.order, reverse=True)
        return list(dict.fromkeys(record.sampled_by for record in newest_first if record.sampled_by is not None))

    def oldest_version(self) -> int | None:
        """Return the oldest version that a record names of a group that was sampled in flight; None: there is none."""
        records = (record for opened in self._open.values() for of in opened.records.values() for record in of)
        return min((record.sampled_by[0] for record in records if record.sampled_by is not None), default=None)

    def take(self, key: str, version: int, history: str) -> list[Episode] | None:
        """Return a group that was sampled in flight. None: its record is damaged, or is needed no more."""
        records = [record for opened in self._open.values() for record in opened.records.get(key, ())]
        for record in sorted(records, key=lambda record: record.order, reverse=True):
            if record.sampled_by == (version, history) and (found := self._read(record.name, [key])):
                return found[key]
        return None

    def note(self, key: str, is_found: bool) -> None:
        """Note whether a record of a group that was sampled in flight was taken, or its episodes are generated."""
        for opened in self._open.values():
            if is_found and key in opened.records:
                opened.used.add(key)
        self._counts["found" if is_found else "generated"] += 1

    def end_before(self, step: int) -> None:
        """Forget the steps before `step`: no one asks for them again."""
        for ended in [number for number in self._open if number < step]:
            self._end_step(ended, self._open.pop(ended))
        self.is_over = step > self._last

    def report(self) -> None:
        """Log how many groups came from the journal, and why others did not."""
        for number, step in self._open.items():
            self._end_step(number, step)
        counts = self._counts
        reasons = [f"{counts[name]} {name}" for name in (_DAMAGED, _OTHERS) if counts[name]]
        others = {"in part": "%d in part", "held": "%d were in the checkpoint"}
        LOG.info(
            "rollout.journal: of steps %d to %d, %d groups came from the journal%s and %d were generated%s",
            self._first,
            self._last,
            counts["found"],
            "".join(f", {text % counts[name]}" for name, text in others.items() if counts[name]),
            counts["generated"],
            f"; not used: {', '.join(reasons)}" if reasons else "",
        )

    def _opened(self, step: int) -> _Step:
        if step not in self._open:
            opened = self._open[step] = _Step({})
            for name in self._names.pop(step, []):
                try:
                    keys, about = keys_in(self._files.read(name))  # a damaged index may lack keys
                    if "version" in about and not ("history" in about and about["version"].isdecimal()):
                        raise ValueError("its metadata is damaged")
                except FileNotFoundError:  # deleted since, by a commit
                    continue
                except (OSError, ValueError) as error:
                    self._note_damage(name, error)
                    continue
                for key in keys:
                    opened.records.setdefault(key, []).append(_Record(name, about, self._order[name]))
        return self._open[step]

    def _read(self, name: str, keys: Sequence[str]) -> dict[str, list[Episode]]:
        """Return groups of a file, by key: none if it is damaged, or was deleted since by a commit."""
        if name in self._unusable:
            return {}
        try:
            return decode_groups(self._files.read(name), keys)[0]
        except FileNotFoundError:
            self._unusable.add(name)
        except (OSError, ValueError) as error:
            self._note_damage(name, error)
        return {}

    def _note_damage(self, name: str, error: Exception) -> None:
        LOG.warning(
            "rollout.journal: %s in %s is damaged (%s); its groups are generated again",
            name,
            self._files.directory,
            one_line(str(error)),
        )
        self._counts[_DAMAGED] += 1
        self._unusable.add(name)

    def _end_step(self, number: int, step: _Step) -> None:
        unused = () if number in self._held else step.records.keys() - step.used
        usable = [key for key in unused if any(one.name not in self._unusable for one in step.records[key])]
        self._counts[_OTHERS] += len({key_of_group(key) for key in usable})
