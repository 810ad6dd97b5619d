"""The files of the journal, on a disk and in an object store."""

from __future__ import annotations

import itertools
import shutil

import pytest

from tests.cpu.unit.journal.test_journal import files, group, opened, train
from tests.support.buckets import make_bucket, use_s3
from trainer.checkpoint.storage import JOURNAL, open_storage, records_in
from trainer.errors import UserError

_names = itertools.count()


@pytest.fixture
def storage(s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    return open_storage(make_bucket(f"journal-{next(_names)}") + "/run")


def steps_in(storage) -> set[int]:
    return set(records_in(storage.names(JOURNAL)).values())


def test_a_file_is_newer_than_those_with_lower_numbers():
    names = [f"step_7-{number}-{'0' * 32}.arrow" for number in (10, 9, 100)]
    assert [*records_in([*names, "step_7-10-0.arrow", "x.tmp"])] == [names[1], names[0], names[2]]


def test_another_machine_trains_on_the_records_of_the_lost_one(storage, tmp_path, caplog):
    first = opened(tmp_path / "lost", storage=storage)
    train(first, range(1, 5))
    assert steps_in(storage) == {1, 2, 3, 4} and not (tmp_path / "lost").exists()
    damaged = next(name for name, step in records_in(storage.names(JOURNAL)).items() if step == 3)
    storage.put(f"{JOURNAL}/{damaged}", b"?")
    second = opened(tmp_path / "new", storage=storage)
    assert train(second, range(1, 5)) == {1: True, 2: True, 3: False, 4: True}
    second.remove_until(lambda: 3)
    assert second.settled(60) and steps_in(storage) == {4}
    second.remove_after(2)
    assert not (tmp_path / "new" / JOURNAL).exists(), "what was brought takes no space any more"
    assert not steps_in(storage)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert damaged in warning, "a damaged file is named"


def test_the_newest_record_is_used_whatever_the_clock_of_its_machine_says(storage, tmp_path, monkeypatch):
    for tokens, time_ns in ((6, 10**18), (7, 10**17), (5, 10**16)):
        monkeypatch.setattr("trainer.journal.files.time.time_ns", lambda now=time_ns: now)
        journal = opened(tmp_path / str(tokens), storage=storage)
        journal.add(1, {"a": group("a", tokens=tokens)}, "start")
        journal.close()
        found = opened(tmp_path / "reader", storage=storage).replay.find(1, ["a"])["a"]
        assert len(found[0].samples[0].token_ids) == tokens


def test_what_interrupted_writes_have_left_is_deleted_at_a_start(tmp_path):
    train(opened(tmp_path), range(1, 2))
    (name,) = files(tmp_path)
    shutil.copy(tmp_path / JOURNAL / name, tmp_path / JOURNAL / f"{name}.tmp")
    opened(tmp_path)
    assert files(tmp_path) == [name]


def test_a_job_that_lost_the_store_neither_writes_nor_deletes(storage, tmp_path):
    train(opened(tmp_path / "owner", storage=storage), range(1, 2))

    def fence() -> None:
        if lost:
            raise UserError("lost the checkpoints")

    lost: list[bool] = []
    loser = opened(tmp_path / "loser", 1, storage=storage, fence=fence)
    lost.append(True)
    loser.add(2, {loser.key(2): group("a")})
    with pytest.raises(UserError, match="lost the checkpoints"):
        loser.wait()
    loser.remove_until(lambda: 9)
    assert loser.settled(60) and steps_in(storage) == {1}


def test_a_store_out_of_service_costs_the_records_alone(storage, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trainer.process.time_limits.STORAGE_RETRY_S", 0.0)
    use_s3(monkeypatch, "http://127.0.0.1:9")
    journal = opened(tmp_path, storage=open_storage(storage.root))
    train(journal, range(1, 3))
    journal.close()
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("trainer.journal")]
    assert len(warnings) == 2 and "are not used" in warnings[0] and "not recorded until a later try" in warnings[1]
    assert not steps_in(open_storage(str(tmp_path))) and not (tmp_path / JOURNAL).exists()
