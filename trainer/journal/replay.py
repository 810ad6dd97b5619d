"""The records that are there at a start: a dictionary from keys to the files that have them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.checkpoint.storage import TURNS
from trainer.data.records import decode_groups, key_of_group, keys_in
from trainer.episodes import Episode
from trainer.errors import one_line
from trainer.journal.files import RecordFiles
from trainer.journal.turns import TurnRecord, decode_turns

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Record:
    """An episode or a group in a file."""

    file: str
    step: int
    sampled_by: tuple[int, str] | None
    """The version of a group that was sampled in flight, and its history."""


class Replay:
    """The records that are there at a start. Only keys are held in memory: groups are read when they are taken.

    Any thread may call all methods. A group may be found twice.

    Args:
        names: the steps of the files, by name. The oldest file comes first.
    """

    def __init__(self, files: RecordFiles, names: Mapping[str, int]):
        self._files = files
        self._lock = threading.RLock()
        self._steps = sorted({*names.values()})
        self._records: dict[str, list[_Record]] = {}  # by key; the newest is the last one
        self._unusable: set[str] = set()  # files
        self._groups: dict[str, int] = {}  # those that have records, with their last steps
        self._used: set[str] = set()
        self._found = self._generated = self._reached = 0
        self._has_all: dict[int, bool] = {}
        self._turn_files = {name: step for name, step in names.items() if name.endswith(TURNS)}
        """Those that are not read yet."""
        self._turns: dict[str, tuple[int, list[TurnRecord]]] = {}
        """Those that were read and not taken, with the step of the last one, by the keys of their episodes."""
        self._replies = 0
        for name, step in names.items():
            if name in self._turn_files:
                continue
            try:
                keys, about = keys_in(files.read(name))
                sampled_by = (int(about["version"]), about["history"]) if "version" in about else None
            except FileNotFoundError:  # deleted since, by a commit
                continue
            except (OSError, ValueError, KeyError) as error:
                self._note_damage(name, error)
                continue
            for key in keys:
                self._records.setdefault(key, []).append(_Record(name, step, sampled_by))
                self._groups[key_of_group(key)] = step

    # ---------------------------------------------------------------------------------------------------
    # Groups of one version of the weights

    def find(self, step: int, keys: Sequence[str]) -> dict[str, list[Episode]]:
        """Return the episodes of a step that have a record, by key. Steps ahead may be asked for in any order.

        Args:
            keys: those of all records of each group.
        """
        with self._lock:
            found: dict[str, list[Episode]] = {}
            records = {key: list(self._records.get(key, ())) for key in keys}
            while missing := [key for key in records if key not in found and records[key]]:
                by_file: dict[str, list[str]] = {}
                for key in missing:  # a damaged record gives way to an older one
                    by_file.setdefault(records[key].pop().file, []).append(key)
                for name, some in by_file.items():
                    found |= self._read(name, some)
            self._reached = max(self._reached, step)
            self._has_all[step] = self._has_all.get(step, True) and len(found) == len({*keys})
            if self._is_within(step):
                lacking = {key_of_group(key) for key in keys if key not in found}
                self._used |= {key_of_group(key) for key in found}
                self._found += len({key_of_group(key) for key in keys} - lacking)
                self._generated += len(lacking)
            return found

    def hold(self, step: int) -> None:
        """Note that a checkpoint has all groups that a step trains on: no record of them is asked for."""
        with self._lock:
            self._has_all.setdefault(step, True)
            self._used |= {key_of_group(k) for k, of in self._records.items() if any(one.step == step for one in of)}

    def has_all(self, step: int) -> bool:
        """Return whether groups of a step were looked for, and all had a record. It is forgotten a step later."""
        with self._lock:
            return self._has_all.get(step, False)

    # ---------------------------------------------------------------------------------------------------
    # Turns

    def take_turns(self, step: int | None, key: str) -> list[TurnRecord]:
        """Return the turns that were recorded of an episode of a step, in their order, and forget them.

        Args:
            step: None: that of the record is not known.
        """
        with self._lock:
            self._read_turns(step)
            return self._turns.pop(key, (0, []))[1]

    def note_replies(self, count: int) -> None:
        """Note that recorded replies of episodes that had not ended were used."""
        with self._lock:
            self._replies += count

    def _read_turns(self, step: int | None) -> None:
        for name in [name for name, of in self._turn_files.items() if step is None or of == step]:
            of = self._turn_files.pop(name)
            try:
                records = decode_turns(self._files.read(name))
            except FileNotFoundError:  # deleted since, by a commit
                continue
            except (OSError, ValueError) as error:
                self._note_damage(name, error)
                continue
            for record in records:
                turns = self._turns.get(record.key, (of, []))[1]
                turns.append(record)
                self._turns[record.key] = of, turns

    # ---------------------------------------------------------------------------------------------------
    # Groups in flight

    def candidates(self, key: str) -> list[tuple[int, str]]:
        """Return the records of a group that was sampled in flight: versions, with their histories.

        The newest one comes first: that is what a step has trained on, if one has. `take` reads one.
        """
        with self._lock:
            self._reached = max(self._steps, default=0)
            sampled_by = [one.sampled_by for one in reversed(self._records.get(key, ()))]
            return list(dict.fromkeys(one for one in sampled_by if one is not None))

    def oldest_version(self) -> int | None:
        """Return the oldest version that a record names of what was sampled in flight; None: there is none."""
        with self._lock:
            self._read_turns(None)
            of_groups = [record.sampled_by for of in self._records.values() for record in of]
            of_turns = [record.sampled_by for _, of in self._turns.values() for record in of]
            return min((one[0] for one in (*of_groups, *of_turns) if one is not None), default=None)

    def take(self, key: str, version: int, history: str) -> list[Episode] | None:
        """Return one of the `candidates`. None: its record is damaged, or it is too old by now."""
        with self._lock:
            for record in reversed(self._records.get(key, ())):
                if record.sampled_by == (version, history) and (found := self._read(record.file, [key])):
                    self._used.add(key)
                    self._found += 1
                    return found[key]
            return None

    def miss(self) -> None:
        """Note that a group that was asked for has no valid record."""
        with self._lock:
            self._generated += 1

    def note_generated(self, step: int) -> None:
        """Note that a step trains on episodes that may have been generated anew (see `has_all`)."""
        with self._lock:
            self._has_all[step] = False

    # ---------------------------------------------------------------------------------------------------

    def end_before(self, step: int) -> None:
        """Forget the steps before `step`: no one asks for them again. After the last step, say what was found."""
        with self._lock:
            self._has_all = {of: has_all for of, has_all in self._has_all.items() if of >= step}
            kept = {key: [one for one in of if one.step >= step] for key, of in self._records.items()}
            self._records = {key: of for key, of in kept.items() if of}
            self._turn_files = {name: of for name, of in self._turn_files.items() if of >= step}
            self._turns = {key: (of, turns) for key, (of, turns) in self._turns.items() if of >= step}
            if not self._is_within(step):
                self.close()

    def close(self) -> None:
        """Log how many groups came from the journal, and forget the rest."""
        with self._lock:
            if not self._steps:
                return
            unused = sum(group not in self._used and step <= self._reached for group, step in self._groups.items())
            LOG.info(
                "rollout.journal: of steps %d to %d, %d groups came from the journal and %d were generated%s%s",
                self._steps[0],
                self._steps[-1],
                self._found,
                self._generated,
                f", with {self._replies} recorded replies" if self._replies else "",
                f"; not used: {unused} of another config, code, history or prompt" if unused else "",
            )
            self._steps, self._records, self._turn_files, self._turns = [], {}, {}, {}
            self._files.forget()

    def _is_within(self, step: int) -> bool:
        return bool(self._steps) and step <= self._steps[-1]

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
        self._unusable.add(name)
