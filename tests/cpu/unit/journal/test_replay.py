"""The records at a start: what is held in memory, and what becomes of damaged ones."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest

from tests.cpu.unit.journal.test_journal import group, opened
from trainer.episodes import Episode
from trainer.journal.files import RecordFiles
from trainer.journal.journal import Journal
from trainer.journal.replay import Replay


def episodes_in_memory() -> int:
    gc.collect()
    return sum(type(one) is Episode for one in gc.get_objects())


def record(root: Path, step: int, *names: str, version: int | None = None) -> str:
    """Write groups to one file, by keys that are their names; returns the name of the file."""
    journal = opened(root)
    before = set(journal._files.names())
    journal.add(step, {name: group(name, tokens=3 + step) for name in names}, "start", version)
    journal.wait()
    journal.close()
    (name,) = set(journal._files.names()) - before
    return name


def take(journal: Journal, key: str) -> list[Episode] | None:
    ((version, history),) = journal.replay.candidates(key)
    return journal.replay.take(key, version, history)


@pytest.mark.parametrize("in_flight", [True, False])
def test_only_groups_that_are_taken_are_in_memory(tmp_path, in_flight):
    for step in range(1, 9):
        record(tmp_path, step, *(f"{step}{name}" for name in "abcd"), version=step if in_flight else None)
    before, journal = episodes_in_memory(), opened(tmp_path)
    if in_flight:
        assert journal.replay.candidates("3a") == [(3, "start")]
        assert episodes_in_memory() == before
        found = take(journal, "3a")
    else:
        found = journal.replay.find(3, ["3a"])["3a"]
    assert [episode.uid for episode in found] == ["3a:0", "3a:1"] and len(found[0].samples[0].token_ids) == 6
    assert episodes_in_memory() == before + 2
    assert in_flight or journal.replay.find(3, ["3a", "3b"]).keys() == {"3a", "3b"}, "a group may be asked for twice"
    journal.close()


def test_records_of_one_group_come_in_the_order_of_their_versions(tmp_path):
    for step, version in ((4, 2), (3, 10), (5, 2)):
        record(tmp_path, step, "a", "b", version=version)
    journal = opened(tmp_path)
    assert journal.replay.candidates("a") == [(2, "start"), (10, "start")] and journal.replay.candidates("c") == []
    assert journal.replay.oldest_version() == 2, "also of groups that this start has not admitted yet"
    assert len(journal.replay.take("a", 10, "start")[0].samples[0].token_ids) == 6
    journal.close()


@pytest.mark.parametrize("steps", [(5, 4), (4, 5)])
def test_the_newest_of_two_records_by_the_same_weights_is_taken(tmp_path, steps):
    """A machine did not find the older one in the store, and the group may be trained in another step."""
    for step in steps:
        record(tmp_path, step, "a", version=3)
    journal = opened(tmp_path)
    assert len(take(journal, "a")[0].samples[0].token_ids) == 3 + steps[-1]
    journal.close()


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("damage", [50, -3])
def test_a_damaged_record_gives_way_to_another_one_of_the_group(tmp_path, caplog, in_flight, damage):
    """Arrow does not notice another byte 50, and cannot read a file without the last ones."""
    names = [record(tmp_path, 1, "a", *others, version=1 if in_flight else None) for others in ((), ("b",))]
    for broken in names:
        path = tmp_path / ".journal" / broken
        whole = path.read_bytes()
        path.write_bytes(whole[:damage] + bytes([whole[damage] ^ 1]) + whole[damage:][1:])
        journal = opened(tmp_path)
        found = take(journal, "a") if in_flight else journal.replay.find(1, ["a"]).get("a")
        assert found and found[0].uid == "a:0"
        assert take(journal, "a") if in_flight else journal.replay.find(1, ["a"])
        path.write_bytes(whole)
        journal.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) <= 2 and len({*warnings}) == len(warnings), "each file is named once"
    assert all(warning.endswith("its groups are generated again") for warning in warnings)


@pytest.mark.parametrize("version", [12, None])
def test_any_flipped_bit_is_named_once_and_its_groups_are_generated_again(tmp_path, caplog, version):
    """Also one of the keys and of the metadata, with which Arrow reads a file of other groups."""
    caplog.set_level(logging.INFO)
    path = tmp_path / ".journal" / record(tmp_path, 1, "a", version=version)
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        caplog.clear()
        replay = Replay(RecordFiles(str(tmp_path), None, lambda: None), {path.name: 1})
        assert replay.find(1, ["a"]) == {} and replay.candidates("a") == [] and replay.find(1, ["b"]) == {}
        replay.close()
        warning, line = caplog.messages
        assert path.name in warning and warning.endswith("its groups are generated again"), at
        assert line.endswith("0 groups came from the journal and 2 were generated"), at


def test_the_newest_of_two_records_is_used(tmp_path):
    """Whichever of their names comes first: engines may not repeat themselves."""
    for tokens in (6, 7, 5):
        journal = opened(tmp_path)
        journal.add(1, {"a": group("a", tokens=tokens)}, "start")
        journal.wait()
        journal.close()
        found = opened(tmp_path).replay.find(1, ["a"])["a"]
        assert len(found[0].samples[0].token_ids) == tokens


def test_a_record_that_a_commit_has_deleted_is_not_used_and_not_called_damaged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    name = record(tmp_path, 1, "a", version=1)
    journal = opened(tmp_path)
    assert journal.replay.candidates("a")
    (tmp_path / ".journal" / name).unlink()
    assert take(journal, "a") is None
    journal.close()
    assert "damaged" not in caplog.text
