"""Copies of the journal in an object store."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.unit.journal.test_journal import files, group, opened, steps_on_disk, train
from tests.support.buckets import make_bucket, use_s3
from tests.support.fault_proxy import Faults, fault_proxy
from tests.support.full_disk import fill
from tests.support.jobs import wait_until
from tests.support.namespaces import small_disk
from trainer.checkpoint.buckets import ObjectStorage
from trainer.checkpoint.storage import JOURNAL, open_storage, order_of_records, records_in, step_of_records
from trainer.errors import UserError
from trainer.journal.pieces import Pieces
from trainer.process import time_limits

_names = itertools.count()


@pytest.fixture
def storage(s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    return open_storage(make_bucket(f"journal-{next(_names)}") + "/run")


def test_another_machine_trains_on_the_records_of_the_lost_one(storage, tmp_path, caplog):
    first = opened(tmp_path / "lost", storage=storage)
    train(first, range(1, 5))
    assert first.settled(60) and set(records_in(storage).values()) == {1, 2, 3, 4}
    shutil.rmtree(tmp_path / "lost")
    damaged = next(name for name, step in records_in(storage).items() if step == 3)
    storage.put(f"{JOURNAL}/{damaged}", b"?")
    second = opened(tmp_path / "new", storage=storage)
    assert train(second, range(1, 5)) == {1: True, 2: True, 3: False, 4: True}
    second.remove_until(lambda: 3)
    assert second.settled(60)
    assert set(records_in(storage).values()) == {4} == steps_on_disk(tmp_path / "new")
    second.remove_after(2)
    assert not records_in(storage)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert damaged in warning and storage.root in warning, "a damaged file is named"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("content", [b"", None])
def test_a_damaged_file_on_the_disk_is_replaced_by_its_copy_in_the_store(storage, tmp_path, caplog, own, content):
    """It keeps its age: what this machine has written is newer than what it has fetched."""
    journal = opened(tmp_path / "first", storage=storage)
    train(journal, range(1, 4))
    assert journal.settled(60)
    journal.close()
    here = tmp_path / ("first" if own else "second")
    opened(here, storage=storage).close()
    by_step = {step: name for name, step in records_in(storage).items()}
    storage.put(f"{JOURNAL}/{by_step[3]}", b"?")
    ages = {}
    for step in (2, 3):
        path = here / JOURNAL / by_step[step]
        whole, status = path.read_bytes(), path.stat()
        path.write_bytes(whole[:-9] if content is None else content)
        os.utime(path, ns=(status.st_mtime_ns,) * 2)
        ages[step] = status.st_mtime_ns
    again = opened(here, storage=storage)
    assert train(again, range(1, 4)) == {1: True, 2: True, 3: False}, "of step 3 no copy is whole"
    path = here / JOURNAL / by_step[2]
    assert path.stat().st_mtime_ns == ages[2] and (ages[2] > 0) == own
    again.close()
    (told,) = [message for message in caplog.messages if "is replaced by its copy" in message]
    assert by_step[2] in told and storage.root in told


@pytest.mark.parametrize("trains", [False, True])
def test_a_start_that_finds_the_disk_full_leaves_the_room_to_checkpoints(storage, tmp_path, caplog, trains):
    """Another start tries again, because other programs may have freed space.

    What the run has trained and logged in another way meanwhile does not come back.
    """
    caplog.set_level("WARNING")
    journal = opened(tmp_path, storage=storage)
    train(journal, range(1, 6))
    assert journal.settled(60)
    size = sum(path.stat().st_size for path in (tmp_path / JOURNAL).iterdir())
    with small_disk("64k") as disk:
        ballast, run = Path(disk) / "ballast", Path(disk) / "run"
        fill(Path(disk))
        os.truncate(ballast, ballast.stat().st_size - size // 2 // 4096 * 4096)
        again = opened(run, storage=storage)
        assert not trains or train(again, range(1, 3)) == {1: False, 2: False}
        assert files(run) == [] and set(records_in(storage).values()) == (set() if trains else {*range(1, 6)})
        (warning,) = caplog.messages
        assert "rollouts are not recorded any more ([Errno 28] No space left on device" in warning
        ballast.unlink()
        again.start(0, "start")
        assert train(again, range(1, 7)) == {**dict.fromkeys(range(1, 6), not trains), 6: False}
        assert steps_on_disk(run) == {*range(1, 7)}
        again.close()
    journal.close()


def record(root: Path, tokens: int, storage: Any = None) -> str:
    """Record a group of step 1; returns the name of its file."""
    journal = opened(root, storage=storage)
    journal.add(1, {"a": group("a", tokens=tokens)}, "start")
    journal.wait()
    assert journal.settled(60)
    journal.close()
    return max(journal._pieces.names(), key=journal._pieces.age)


def tokens_of(root: Path, **options: Any) -> int:
    journal = opened(root, **options)
    try:
        return len(journal.find(1, ["a"])["a"][0].samples[0].token_ids)
    finally:
        journal.close()


def test_what_this_machine_has_trained_on_comes_before_records_of_the_store(storage, tmp_path):
    """The store failed while a new machine started, so the group was sampled again, and the step trained on that."""
    old = record(tmp_path / "lost", 3, storage)
    record(tmp_path / "new", 4)
    assert tokens_of(tmp_path / "new", storage=storage) == 4
    assert old in files(tmp_path / "new"), "it is there, and may stand in for a damaged one"
    assert tokens_of(tmp_path / "new") == 4


def test_the_newest_of_the_records_of_lost_machines_is_used(storage, tmp_path):
    """Every other machine starts while the store fails, so it does not know the records of those before it."""
    for number, tokens in enumerate((6, 7, 5, 8, 3, 4)):
        root = tmp_path / str(number)
        record(root, tokens, storage if number % 2 else None)
        journal = opened(root, storage=storage)  # the store is there again
        assert journal.settled(60)
        journal.close()
        assert tokens_of(tmp_path / f"{number} lost", storage=storage) == tokens


def test_no_clock_decides_about_records_that_the_machine_has_found(storage, tmp_path):
    """Those of an earlier build have no number, and are older than all others."""
    name = record(tmp_path / "first", 3, storage)
    data, (step, _, digest) = storage.get(f"{JOURNAL}/{name}"), name.split("-")
    storage.delete(f"{JOURNAL}/{name}")
    old, ahead = f"{step}-{digest}", f"{step}-{9 * 10**18}-{digest}"
    storage.put(f"{JOURNAL}/{old}", data)
    assert tokens_of(tmp_path / "second", storage=storage) == 3
    storage.put(f"{JOURNAL}/{ahead}", b"cut off")  # by a machine whose clock is far ahead
    newer = record(tmp_path / "third", 5, storage)
    storage.put(f"{JOURNAL}/{ahead}", data)
    assert tokens_of(tmp_path / "fourth", storage=storage) == 5
    (tmp_path / "fifth/.journal").mkdir(parents=True)
    (tmp_path / f"fifth/.journal/{ahead}").write_bytes(data)  # its own clock was far ahead
    record(tmp_path / "fifth", 4)
    assert tokens_of(tmp_path / "fifth") == 4
    assert sorted([old, ahead, newer], key=order_of_records) == [old, ahead, newer]


def test_a_start_copies_what_an_earlier_one_has_not(storage, tmp_path):
    name = record(tmp_path, 3)
    journal = opened(tmp_path, storage=storage)
    assert journal.settled(60) and [*records_in(storage)] == [name]
    journal.close()


def test_a_copy_that_is_under_way_does_not_bring_back_what_the_run_has_left_behind(storage, tmp_path):
    may_copy = threading.Event()

    def fence() -> None:
        if threading.current_thread() is not threading.main_thread():
            may_copy.wait(60)

    journal = opened(tmp_path, storage=storage, store_fence=fence)
    train(journal, range(1, 2))
    threading.Timer(0.5, may_copy.set).start()
    journal.remove_after(0)
    may_copy.wait(60)
    assert journal.settled(60) and not records_in(storage)
    journal.close()


def test_an_error_of_any_kind_does_not_end_the_thread_that_deletes(tmp_path, caplog):
    journal = opened(tmp_path)
    train(journal, range(1, 3))
    journal.remove_until(lambda: 1 // 0)
    journal.remove_until(lambda: 1)
    assert journal.settled(60) and steps_on_disk(tmp_path) == {2}
    assert sum("ZeroDivisionError" in message for message in caplog.messages) == 1
    journal.close()


def test_what_interrupted_writes_have_left_is_deleted_at_a_start(tmp_path):
    name = record(tmp_path, 3)
    left = [f"step_2-{'0' * 32}.arrow{end}" for end in (".tmp", ".fetched", ".fetched.tmp")]
    for other in (*left, "notes.tmp"):
        (tmp_path / ".journal" / other).write_bytes(b"?")
    journal = opened(tmp_path)
    assert files(tmp_path) == ["notes.tmp", name]
    (tmp_path / ".journal" / left[0]).write_bytes(b"?")
    journal.start(0, "start")
    assert left[0] in files(tmp_path), "the ranks have started again: a thread may be writing it"
    journal.close()


def test_records_that_a_run_has_left_behind_are_not_used_though_the_store_failed(
    storage, tmp_path, monkeypatch, caplog
):
    """Neither after a kill. What the run has recorded since then stays."""
    journal = opened(tmp_path, storage=storage)
    train(journal, range(1, 4))
    assert journal.settled(60)
    journal.start(1, "h1")
    names = ObjectStorage.names

    def fail(*_: Any) -> None:
        raise OSError(110, "no answer")

    monkeypatch.setattr(ObjectStorage, "names", fail)
    journal.remove_after(1)
    assert steps_on_disk(tmp_path) == {1}
    journal.add(2, {journal.key(2, "new"): group("new")})
    journal.wait()
    journal.close()
    assert sum("steps after 1" in message for message in caplog.messages) == 1
    again = opened(tmp_path, 1, "h1", storage=storage)
    again.close()
    assert len(files(tmp_path)) == 3, "the note, the records of step 1 and the new one: nothing is fetched"
    monkeypatch.setattr(ObjectStorage, "names", names)
    opened(tmp_path, 1, "h1", storage=storage).close()
    assert sorted(records_in(storage).values()) == [1, 2] == sorted(records_in(open_storage(str(tmp_path))).values())
    assert not list(tmp_path.glob(".journal/abandoned*"))


def test_records_that_a_run_has_left_behind_are_deleted_once_the_store_answers(storage, tmp_path, monkeypatch):
    """So a machine that has not the disk of this one does not use them."""
    here = tmp_path / "here"
    journal = opened(here, storage=storage)
    train(journal, range(1, 5))
    assert journal.settled(60)
    journal.start(1, "h1")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "names", lambda *_: (_ for _ in ()).throw(OSError(110, "no answer")))
        journal.remove_after(1)
    assert sorted(records_in(storage).values()) == [1, 2, 3, 4]
    key = journal.key(2, "new")
    journal.add(2, {key: group("new")})
    journal.wait()
    assert journal.settled(60)
    shutil.rmtree(here)
    assert sorted(records_in(storage).values()) == [1, 2]
    other = opened(tmp_path / "there", 1, "h1", storage=storage)
    assert other.find(2, [key]) and steps_on_disk(tmp_path / "there") == {2}
    other.close()
    journal.close()


def test_a_copy_under_way_does_not_forget_that_the_run_has_gone_back_further(storage, tmp_path, monkeypatch):
    """The run goes back further after the copy has listed the files of a slow store."""
    is_listed, may_go_on = threading.Event(), threading.Event()
    names = ObjectStorage.names

    def names_slowly(self: ObjectStorage, prefix: str = "") -> list[str]:
        found = names(self, prefix)
        is_listed.set()
        may_go_on.wait(60)
        return found

    journal = opened(tmp_path, storage=storage)
    train(journal, range(1, 5))
    assert journal.settled(60)
    journal._pieces.abandoned_after = 3
    monkeypatch.setattr(ObjectStorage, "names", names_slowly)
    monkeypatch.setattr(time_limits, "JOURNAL_WAIT_S", 0.1)
    journal.add(2, {journal.key(2, "new"): group("new")})
    journal._writer.flush()
    assert is_listed.wait(60)
    journal._upkeep.remove_after(1)
    may_go_on.set()
    assert journal.settled(60) and journal._pieces.abandoned_after == 1
    journal.close()


def test_what_another_machine_has_recorded_since_stays(storage, tmp_path, monkeypatch):
    """This machine went back to step 1 while the store failed. Another one committed step 3, and trained step 4."""
    here, there = tmp_path / "here", tmp_path / "there"
    opened(here, 1, "h1", storage=storage).close()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStorage, "names", lambda *_: (_ for _ in ()).throw(OSError(110, "no answer")))
        journal = opened(here, 1, "h1", storage=storage)
        journal.remove_after(1)
        journal.close()
    other = opened(there, 3, "h3", storage=storage)
    other.add(4, {other.key(4, "a"): group("a")})
    other.wait()
    assert other.settled(60)
    other.close()
    again = opened(here, 3, "h3", storage=storage)
    assert again.find(4, [again.key(4, "a")])
    again.close()
    assert not list(here.glob(".journal/abandoned*"))


def test_a_kill_while_a_run_goes_back_brings_nothing_back(storage, tmp_path, monkeypatch):
    journal = opened(tmp_path, storage=storage)
    train(journal, range(1, 4))
    assert journal.settled(60)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            journal.remove_after(1)
    journal.close()
    for path in (tmp_path / ".journal").glob("step_[23]-*"):
        path.unlink()
    opened(tmp_path, 1, "h1", storage=storage).close()
    assert sorted(records_in(storage).values()) == [1]


def test_a_job_that_lost_the_store_neither_copies_nor_deletes(storage, tmp_path):
    owner = opened(tmp_path / "owner", storage=storage)
    train(owner, range(1, 2))
    assert owner.settled(60)

    def fence() -> None:
        raise UserError("lost the checkpoints")

    loser = opened(tmp_path / "loser", storage=storage, store_fence=fence)
    before = records_in(storage)
    train(loser, range(2, 4))
    loser.remove_until(lambda: 9)
    assert loser.settled(60) and records_in(storage) == before


def test_a_store_out_of_service_is_one_warning(storage, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trainer.process.time_limits.STORAGE_RETRY_S", 0.0)
    use_s3(monkeypatch, "http://127.0.0.1:9")
    journal = opened(tmp_path, storage=open_storage(storage.root))
    train(journal, range(1, 4))
    assert journal.settled(120) and steps_on_disk(tmp_path) == {1, 2, 3}
    journal.remove_until(lambda: 2)
    assert journal.settled(120) and steps_on_disk(tmp_path) == {3}, "what is on the disk is deleted all the same"
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("trainer.journal")]
    assert len(warnings) == 2, "one for what is fetched, one for what is copied"
    journal.close()


def test_a_slow_store_keeps_no_file_on_the_disk_and_gets_only_what_is_still_needed(s3_url, tmp_path, monkeypatch):
    faults, is_quick = Faults(), threading.Event()
    with fault_proxy(s3_url, faults) as url:
        use_s3(monkeypatch, url)
        store = open_storage(make_bucket(f"journal-{next(_names)}") + "/run")
        journal = opened(tmp_path, storage=store, store_fence=lambda: is_quick.wait(60))
        for step in range(1, 11):
            train(journal, range(step, step + 1))
            journal.remove_until(lambda last=step - 2: last)
        wait_until(lambda: steps_on_disk(tmp_path) == {9, 10})
        is_quick.set()
        assert journal.settled(60) and set(records_in(store).values()) == {9, 10} == steps_on_disk(tmp_path)
        journal.close()
    puts = {step_of_records(path.rpartition("/")[2]) for command, path, _ in faults.seen if command == "PUT"} - {None}
    assert puts >= {9, 10} and len(puts) <= 3, "one copy had begun; the others were needed no more"
