"""Files that a run appends to: torn by a kill, and deleted or changed by somebody while the run appends to them."""

from __future__ import annotations

import errno
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.full_disk import fill, free
from tests.support.metrics import make_tracker
from tests.support.namespaces import small_disk
from tests.support.toy import toy_config
from trainer.errors import UserError
from trainer.files import appended
from trainer.files.appended import REPLACED, AppendedFile, open_appended, repair_last_line
from trainer.metrics.tracker import read_metrics
from trainer.process.failure_log import INCIDENTS, JOB, Incident, read_incidents
from trainer.process.log_setup import LogFile
from trainer.rewards.cache import RewardCache
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import record_start

LINES = [json.dumps({"step": n, "text": "x" * 7 * n, "list": [n]}).encode() for n in range(4)]
WHOLE = b"".join(line + b"\n" for line in LINES)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, len(WHOLE)), tail=st.sampled_from([b"", b"\0" * 9, b'{"step": 1', b"\xff\xfe"]))
def test_an_incomplete_line_is_repaired_before_the_next_append(tmp_path_factory, cut, tail):
    path = tmp_path_factory.mktemp("file") / "lines.jsonl"
    path.write_bytes(WHOLE[:cut] + tail)
    AppendedFile(str(path)).append(b'{"last": 1}\n')
    *lines, last = path.read_bytes().splitlines()
    assert last == b'{"last": 1}'
    complete = WHOLE[:cut].count(b"\n")
    if not tail and WHOLE[:cut].splitlines()[complete:] == LINES[complete : complete + 1]:
        complete += 1  # only its line break was missing
    assert lines == LINES[:complete]


def test_an_incomplete_json_line_is_removed_and_text_is_completed(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(WHOLE + b'{"text": "' + b"y" * 300_000)
    repair_last_line(str(path))
    assert path.read_bytes() == WHOLE
    log = tmp_path / "log.txt"
    log.write_text("one\ntwo")
    repair_last_line(str(log))
    assert log.read_text() == "one\ntwo\n"
    repair_last_line(str(tmp_path / "missing.jsonl"))
    assert not (tmp_path / "missing.jsonl").exists()


def delete(path: Path) -> None:
    path.unlink()


def edit(path: Path) -> None:
    """As `sed -i` and most editors do: another file takes its place."""
    content = path.read_bytes().splitlines(keepends=True)
    path.with_suffix(".new").write_bytes(b"".join(content[1:]))
    path.with_suffix(".new").replace(path)


def empty(path: Path) -> None:
    """As `> FILE` in a shell does."""
    path.write_bytes(b"")


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def copy(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").replace(path)


HARMS = [delete, edit, empty, tear, copy]


@pytest.mark.parametrize("harm", HARMS)
def test_metrics_keep_all_lines_when_the_file_is_changed(tmp_path, harm, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker = make_tracker(tmp_path)
    tracker.log(1, {"a": 1.0})
    tracker.close()
    tracker = make_tracker(tmp_path)
    tracker.rewind(1)
    for step in (2, 3):
        harm(path)
        tracker.log(step, {"a": 1.0})
    harm(path)
    tracker.flush()
    assert [row["step"] for row in read_metrics(str(path))] == [1, 2, 3]
    harm(path)
    tracker.rewind(2)
    harm(path)
    tracker.close()
    assert path.read_bytes() == b'{"step": 1, "a": 1.0}\n{"step": 2, "a": 1.0}\n'
    assert tracker.first_step == 1
    told = [text for text in caplog.messages if "while the run appends to it" in text]
    assert len(told) == (0 if harm is copy else 5)
    assert (tmp_path / f"metrics.jsonl{REPLACED}").exists() == (harm not in (delete, copy))


@pytest.mark.parametrize("harm", HARMS)
def test_incidents_and_rewards_keep_all_lines(tmp_path, harm):
    before = INCIDENTS.open(str(tmp_path))
    store = RewardCache(str(tmp_path))
    for step in range(3):
        INCIDENTS.record(Incident(step, "rank", "rank 0", "n", JOB, "exception", "ended", 0.0, "text"))
        store.add({f"key {step}": [{"reward": 1.0}]}, f"step {step}")
        harm(tmp_path / "incidents.jsonl")
        harm(tmp_path / "rewards.jsonl")
    store.add({"key 3": [{"reward": 1.0}]}, "step 3")
    INCIDENTS.close(before)
    assert [incident.step for incident in read_incidents(str(tmp_path))] == [0, 1, 2]
    again = RewardCache(str(tmp_path))
    assert all(again.find(f"key {step}", "step 9") for step in range(4))
    assert (tmp_path / "rewards.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_fenced_process_does_not_write_the_file_again(tmp_path):
    def fence() -> None:
        raise UserError("another job holds the directory")

    file = AppendedFile(str(tmp_path / "lines.jsonl"), fence)
    file.append(b"{}\n")
    (tmp_path / "lines.jsonl").write_bytes(b'{"of": "the other"}\n')
    with pytest.raises(UserError, match="another job"):
        file.append(b"{}\n")
    assert (tmp_path / "lines.jsonl").read_bytes() == b'{"of": "the other"}\n'


def test_a_failed_rewrite_leaves_the_file_unchanged(tmp_path):
    """A full disk, or a kill, must not leave the run without the file."""
    calls = []

    def fence() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise UserError("before the new file appears")

    path = tmp_path / "lines.jsonl"
    file = AppendedFile(str(path), fence)
    file.append(b'{"a": 1}\n')
    path.write_bytes(b'{"b": 1}\n')
    with pytest.raises(UserError, match="before the new file"):
        file.append(b'{"c": 1}\n')
    assert path.read_bytes() == (tmp_path / f"lines.jsonl{REPLACED}").read_bytes() == b'{"b": 1}\n'
    file.append(b'{"c": 1}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"c": 1}\n'


@pytest.mark.parametrize("harm", [delete, edit, empty])
@pytest.mark.parametrize("again", [delete, lambda path: None])
def test_a_change_between_check_and_write_is_found_at_the_next_check(tmp_path, harm, again, monkeypatch):
    path = tmp_path / "lines.jsonl"
    file = AppendedFile(str(path))
    file.append(b'{"a": 1}\n')

    def open_later(name: str, mode: int | None) -> int:
        harm(path)
        return open_appended(name, mode)

    with monkeypatch.context() as patch:
        patch.setattr(appended, "open_appended", open_later)
        file.append(b'{"b": 1}\n')
    again(path)
    file.append(b'{"c": 1}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"b": 1}\n{"c": 1}\n'


def test_lines_for_which_a_full_disk_has_no_room_are_written_later(tmp_path, caplog):
    caplog.set_level("INFO")
    with small_disk("64k") as directory:
        path, disk = Path(directory, "lines.jsonl"), Path(directory)
        file = AppendedFile(str(path))
        lines = [json.dumps({"step": step, "text": "x" * 3000}).encode() + b"\n" for step in range(9)]
        file.append(lines[0], durable=True)
        fill(disk)
        for line in lines[1:4]:
            file.append(line, durable=True)
        on_disk = path.read_bytes()
        assert on_disk.startswith(lines[0]) and len(on_disk) <= 4096, "an incomplete line is there"
        assert file.content() == b"".join(lines[:4])
        with pytest.raises(OSError, match="No space left on device.*lines.jsonl"):
            file.sync()
        path.touch()
        free(disk)
        file.append(lines[4])
        assert path.read_bytes() == b"".join(lines[:5])
        assert [text.partition("lines.jsonl")[2] for text in caplog.messages] == [
            ": cannot be written (No space left on device); its lines wait in memory for room: free space on the disk, "
            "or repair it",
            ": the lines that have waited for room are written",
        ]
        fill(disk)
        file.append(lines[5])
        free(disk)
        file.sync()
        assert path.read_bytes() == b"".join(lines[:6])
        fill(disk)
        file.append(lines[6])
        path.write_bytes(b'{"of": "somebody"}\n')  # it gives room back
        file.append(lines[7])
        free(disk)
        file.append(lines[8])
        assert path.read_bytes() == file.content() == b"".join(lines)
        assert Path(f"{path}{REPLACED}").read_bytes() == b'{"of": "somebody"}\n'


def test_the_first_line_waits_as_well(tmp_path):
    with small_disk("64k") as directory:
        fill(Path(directory))
        file = AppendedFile(f"{directory}/lines.jsonl")
        file.append(b'{"a": 1}\n')
        free(Path(directory))
        file.append(b'{"b": 1}\n')
        assert Path(directory, "lines.jsonl").read_bytes() == b'{"a": 1}\n{"b": 1}\n'


def failing(function: Any, times: int, number: int = errno.ENOSPC) -> Any:
    """The function, which first does its work and fails all the same, so many times."""
    left = [OSError(number, os.strerror(number))] * times

    def call(*arguments: Any) -> Any:
        value = function(*arguments)
        if left:
            raise left.pop()
        return value

    return call


def test_lines_are_there_once_if_the_disk_reports_only_later_that_it_is_full(tmp_path, monkeypatch):
    """As network file systems do, when what was written is to be made durable."""
    file = AppendedFile(str(tmp_path / "lines.jsonl"))
    file.append(b'{"a": 1}\n', durable=True)
    monkeypatch.setattr(appended.os, "fsync", failing(os.fsync, 1))
    file.append(b'{"b": 1}\n', durable=True)
    file.append(b'{"c": 1}\n', durable=True)
    assert (tmp_path / "lines.jsonl").read_bytes() == file.content() == b'{"a": 1}\n{"b": 1}\n{"c": 1}\n'
    assert os.listdir(tmp_path) == ["lines.jsonl"]


def test_lines_of_earlier_starts_stay_if_they_cannot_be_read_for_a_while(tmp_path, monkeypatch):
    (tmp_path / "lines.jsonl").write_bytes(WHOLE)
    monkeypatch.setattr(appended, "read_file", failing(appended.read_file, 1, errno.EROFS))
    file = AppendedFile(str(tmp_path / "lines.jsonl"))
    file.append(b'{"b": 1}\n')
    assert (tmp_path / "lines.jsonl").read_bytes() == WHOLE
    file.append(b'{"c": 1}\n')
    assert (tmp_path / "lines.jsonl").read_bytes() == file.content() == WHOLE + b'{"b": 1}\n{"c": 1}\n'


def test_threads_append_complete_lines(tmp_path, caplog, request):
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)
    file = AppendedFile(str(tmp_path / "lines.jsonl"))

    def append(number: int) -> None:
        for i in range(50):
            file.append(json.dumps({"step": number, "i": i}).encode() + b"\n")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    lines = (tmp_path / "lines.jsonl").read_bytes()
    assert len(lines.splitlines()) == 200 and lines == file.content()
    assert caplog.messages == []


def test_the_log_follows_its_path(tmp_path):
    path, log = tmp_path / "log.txt", LogFile()
    log.is_used = True
    log.open(str(path))

    def lines(file: Path) -> list[str]:
        return [line.split(" ", 2)[2] for line in file.read_text().splitlines()]

    log.write("one")
    path.unlink()
    log.write("two")
    assert lines(path) == ["one", "two"]
    path.rename(tmp_path / "log.1")  # rotated: its lines are there
    log.write("three")
    copy(path)
    log.write("four")
    assert (lines(tmp_path / "log.1"), lines(path)) == (["one", "two"], ["three", "four"])
    log.close()


def test_lines_of_the_log_wait_for_room_on_a_full_disk():
    with small_disk("64k") as directory:
        path, log = Path(directory, "log.txt"), LogFile()
        log.is_used = True
        log.open(str(path))
        log.write("one")
        fill(path.parent)
        texts = [f"{number} {'x' * 3000}" for number in range(4)]
        for text in texts:
            log.write(text)
        assert path.read_bytes().endswith(b"\n")
        free(path.parent)
        log.write("two")
        log.close()
        assert [line.split(" ", 2)[2] for line in path.read_text().splitlines()] == ["one", *texts, "two"]


def test_a_start_repairs_all_files_even_if_the_run_is_finished(tmp_path):
    names = ("metrics.jsonl", "metrics.cut.jsonl", "incidents.jsonl", "starts.jsonl", "rewards.jsonl")
    for name in names:
        (tmp_path / name).write_bytes(WHOLE + b'{"step": 9, "a": 0.')
    (tmp_path / "log.txt").write_bytes(b"a line\nhalf")
    cfg = toy_config(tmp_path)
    with RunDirectory(cfg).open():
        assert {name: (tmp_path / name).read_bytes() for name in names} == dict.fromkeys(names, WHOLE)
        assert (tmp_path / "log.txt").read_bytes() == b"a line\nhalf\n"
        with (tmp_path / "starts.jsonl").open("ab") as file:
            file.write(b'{"torn')
        record_start(str(tmp_path), cfg)
    starts = (tmp_path / "starts.jsonl").read_bytes().splitlines()
    assert starts[:-1] == LINES
    assert json.loads(starts[-1])["pid"] == os.getpid()
