"""Files that a run appends to: lines torn by a kill, and lines that wait for room on a full disk."""

from __future__ import annotations

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.full_disk import fill, free
from tests.support.namespaces import small_disk
from tests.support.toy import toy_config
from trainer.config.command_line import outcome_of
from trainer.errors import UserError
from trainer.files.appended import AppendedFile, open_appended
from trainer.metrics.tracker import read_metrics
from trainer.process.log_setup import LogFile
from trainer.reports.diagnose import main
from trainer.run.directory import RunDirectory
from trainer.run.run_metadata import record_start

LINES = [json.dumps({"step": n, "text": "x" * 7 * n, "list": [n]}).encode() for n in range(4)]
WHOLE = b"".join(line + b"\n" for line in LINES)


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, len(WHOLE)), tail=st.sampled_from([b"", b"\0" * 9, b'{"step": 1', b"y" * 300_000]))
def test_a_torn_line_is_cut_before_the_next_append(tmp_path_factory, cut, tail):
    path = tmp_path_factory.mktemp("file") / "lines.jsonl"
    path.write_bytes(WHOLE[:cut] + tail)
    AppendedFile(str(path)).append(b'{"last": 1}\n')
    complete = WHOLE[:cut].count(b"\n")
    assert path.read_bytes().splitlines() == [*LINES[:complete], b'{"last": 1}']


def test_a_fenced_process_appends_nothing(tmp_path):
    def fence() -> None:
        raise UserError("another job holds the directory")

    file = AppendedFile(str(tmp_path / "lines.jsonl"), fence)
    with pytest.raises(UserError, match="another job"):
        file.append(b"{}\n")
    assert not (tmp_path / "lines.jsonl").exists()


def test_lines_for_which_a_full_disk_has_no_room_are_written_later(tmp_path, caplog):
    with small_disk("64k") as directory:
        path, disk = Path(directory, "lines.jsonl"), Path(directory)
        file = AppendedFile(str(path), mode=0o600)
        lines = [json.dumps({"step": step, "text": "x" * 3000}).encode() + b"\n" for step in range(6)]
        file.append(lines[0], durable=True)
        fill(disk)
        for line in lines[1:4]:
            file.append(line, durable=True)
        assert path.read_bytes() in (lines[0], lines[0] + lines[1]), "an incomplete line is there"
        with pytest.raises(OSError, match="No space left on device.*lines.jsonl"):
            file.sync()
        free(disk)
        file.append(lines[4])
        assert path.read_bytes() == b"".join(lines[:5])
        assert len(caplog.messages) == 1 and "its lines wait in memory" in caplog.messages[0]
        fill(disk)
        file.append(lines[5])
        free(disk)
        file.sync()
        assert path.read_bytes() == b"".join(lines)
        assert path.stat().st_mode & 0o777 == 0o600


def test_lines_beyond_a_limit_on_the_size_of_files_wait_too(tmp_path, caplog):
    file, limits = AppendedFile(str(tmp_path / "lines")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        for line in (b"1234567\n", b"12\n", b"3\n"):  # the limit is the end of the first one
            file.append(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "lines").read_bytes() == b"1234567\n"
    file.sync()
    assert (tmp_path / "lines").read_bytes() == b"1234567\n12\n3\n"
    text = outcome_of(OSError(errno.EFBIG, os.strerror(errno.EFBIG), "x")).text
    assert text.startswith(
        "x: cannot be written (File too large); make room on the disk (or in a quota, or `ulimit -f`)"
    )


def test_threads_append_complete_lines(tmp_path):
    file = AppendedFile(str(tmp_path / "lines.jsonl"))

    def append(number: int) -> None:
        for i in range(50):
            file.append(json.dumps({"step": number, "i": i}).encode() + b"\n")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_bytes().splitlines()]
    assert sorted((line["step"], line["i"]) for line in lines) == [(n, i) for n in range(4) for i in range(50)]


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


def test_a_start_cuts_torn_lines_of_all_files(tmp_path):
    names = ("metrics.jsonl", "incidents.jsonl", "starts.jsonl", "rewards.jsonl")
    for name in names:
        (tmp_path / name).write_bytes(WHOLE + b'{"step": 9, "a": 0.')
    (tmp_path / "log.txt").write_bytes(b"a line\nhalf")
    cfg = toy_config(tmp_path)
    with RunDirectory(cfg).open():
        assert {name: (tmp_path / name).read_bytes() for name in names} == dict.fromkeys(names, WHOLE)
        assert (tmp_path / "log.txt").read_bytes() == b"a line\n"
        with (tmp_path / "starts.jsonl").open("ab") as file:
            file.write(b'{"torn')
        record_start(str(tmp_path), cfg)
    starts = (tmp_path / "starts.jsonl").read_bytes().splitlines()
    assert starts[:-1] == LINES
    assert json.loads(starts[-1])["pid"] == os.getpid()


def test_what_is_no_file_in_a_run_directory_is_named_at_once(tmp_path):
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("directory", "pipe"):
        path = str(tmp_path / name)
        for use in (open_appended, read_metrics, lambda path: AppendedFile(path).append(b"x\n")):
            with pytest.raises(OSError, match="not a regular file|Is a directory") as raised:
                use(path)
            end = outcome_of(raised.value)
            assert (end.status, end.trace) == (2, "") and end.text.startswith(f"{path}: "), end
    for name in ("incidents.jsonl", "starts.jsonl", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
        assert main([str(tmp_path)]) == 2, "diagnose ends with one sentence"
        os.remove(tmp_path / name)
