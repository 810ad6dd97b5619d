"""Output that cannot be written must not end training, nor change what a program's exit status says."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import environment
from trainer.metrics.tracker import METRICS_FILE
from trainer.process import log_setup
from trainer.process.log_setup import LogFile, escape, messages_to
from trainer.reports.report import final_report, write_report

TEXT = r"é ж 中 🙂 \ud800"
SHOW = f"""
import sys
import logging
from trainer.process.log_setup import guard_output, show_messages
guard_output()
guard_output()  # harmless
show_messages()
from trainer.metrics.progress import Progress
with Progress(3) as progress:
    logging.getLogger("trainer.x").info("{TEXT}")
    for step in (1, 2):
        progress.update(step, {{"reward/mean": 0.5, "time/step": 1.0, "time/rollout": 0.5}})
print("{TEXT}", file=sys.stderr)
sys.stdout.write("a line without an end")
sys.exit(7)
"""


def show(encoding: str = "utf-8", **streams: object) -> subprocess.CompletedProcess:
    # Without PYTHONUNBUFFERED, so that something is left to write when the interpreter ends.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, "-c", SHOW], env=env, timeout=300, **streams)


MESSAGES = """
import logging
from trainer.process.log_setup import messages_to, show_messages
show_messages()
show_messages()  # harmless
LOG = logging.getLogger("trainer.some.module")
LOG.info("50% done")
LOG.warning("%d GiB left", 3)
LOG.debug("of no interest")
for library in (logging.getLogger(), logging.getLogger("httpx")):
    library.info("GET /")
    library.setLevel(logging.INFO)
kept = []
with messages_to(kept.append):
    LOG.error("kept")
LOG.info("the end; kept: %s", kept)
"""


def test_messages_are_printed_unchanged_and_warnings_have_a_prefix():
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["50% done", "WARNING: 3 GiB left", "the end; kept: ['ERROR: kept']"]
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_can_be_printed_in_any_encoding(encoding):
    done = show(encoding, capture_output=True)
    assert done.returncode == 7, done.stderr.decode(encoding)
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert "\\ud800" in out and "\\ud800" in err and "step 2/3" in out and out.endswith("without an end")
    assert ("é" if encoding != "ascii" else "\\xe9") in out


def test_a_full_disk_behind_stdout_is_reported_once():
    with open("/dev/full", "w") as full:
        done = show(stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 7 and done.stderr.count(b"No space left on device") == 1, done.stderr
        assert show(stdout=full, stderr=full).returncode == 7


def test_a_closed_pipe_ends_no_command_and_is_not_warned_of():
    reading, writing = os.pipe()
    os.close(reading)
    done = show(stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 7 and b"WARNING" not in done.stderr, done.stderr


def test_streams_that_are_closed_from_the_start(tmp_path):
    """Their numbers must not be given to files, into which everything printed would then go."""
    code = SHOW.replace("import sys\n", "import sys\nassert sys.stdout is None and sys.stderr is None\n", 1).replace(
        "sys.exit(7)", f"file = open({str(tmp_path / 'file')!r}, 'w'); sys.exit(file.fileno())"
    )
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, code], timeout=300)
    assert done.returncode > 2 and (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_terminal_with_few_characters_or_that_closes(encoding):
    display, terminal = pty.openpty()
    env = {**os.environ, "PYTHONIOENCODING": encoding, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", SHOW], env=env, stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    if encoding == "utf-8":  # the window is closed, so the error has no reader
        os.close(display)
    else:
        shown = b""
        while chunk := _read(display):
            shown += chunk
        os.close(display)
        assert b"2/3" in shown and b"\\xe9" in shown and shown.isascii()
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 7, error


def _read(display: int) -> bytes:
    try:
        return os.read(display, 65536)
    except OSError:  # how a terminal says that the other side has ended
        return b""


def test_a_command_keeps_its_exit_status_when_nothing_can_be_printed():
    with open("/dev/full", "w") as full:
        for words, status in ((["--cfg", "job"], 0), (["no.such=1"], 2)):
            command = [sys.executable, "-m", "trainer", "train", *words]
            assert subprocess.run(command, stdout=full, stderr=full, env=environment()).returncode == status


def test_a_report_that_cannot_be_drawn_is_a_warning_after_a_run_that_ended_well(tmp_path, caplog):
    (tmp_path / METRICS_FILE).write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (tmp_path / "report.png.tmp").mkdir()
    final_report(str(tmp_path))
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and warning.getMessage().startswith("no report was drawn")


@pytest.mark.filterwarnings("ignore:overflow")
def test_an_error_of_the_drawing_itself_is_a_warning_after_a_run_that_ended_well(tmp_path, caplog):
    """No axis of matplotlib reaches from one end of the numbers to the other."""
    rows = [{"step": 1, "reward/mean": 1e308}, {"step": 2, "reward/mean": -1e308}]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="arange"):
        write_report(str(tmp_path))
    final_report(str(tmp_path))
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and "no report was drawn (ValueError: " in warning.getMessage()


def chatty(completion: str, answer: str) -> float:
    """A reward that prints what it sees."""
    print(completion)
    return 1.0


REWARD = """
from tests.support.rewards import reward_pool, score
if __name__ == "__main__":
    with reward_pool("tests.cpu.unit.process.test_log_setup:chatty", 30, 1) as pool:
        rewards, failures = score(pool, ["plain", "\\u4e2d\\ud800"], ["", ""])
    assert rewards == [1.0, 1.0], failures
"""


def test_a_reward_that_prints_is_not_counted_as_failed(tmp_path):
    (tmp_path / "score.py").write_text(REWARD)
    env = environment() | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": f"{Path(__file__).parents[3]}"}
    with open("/dev/full", "w") as out:
        done = subprocess.run([sys.executable, "score.py"], cwd=tmp_path, env=env, stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


LOG = """
import logging, sys
from trainer.process.log_setup import LOG_FILE, logging_to_file, show_messages
show_messages()
with logging_to_file():
    ours = logging.getLogger("trainer.x")
    ours.info("before the lock")
    LOG_FILE.open(sys.argv[1])
    LOG_FILE.open(sys.argv[1] + ".inner")  # of a run inside of this one
    ours.warning("two\\nlines")
    library = logging.getLogger("matplotlib")
    library.setLevel(logging.INFO)
    library.info("generated new fontManager")
    library.warning("a font is missing")
    LOG_FILE.write("error: one sentence")
"""


def test_the_log_file_has_every_message_with_its_time_and_is_continued(tmp_path):
    path = tmp_path / "log.txt"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", LOG, str(path)], capture_output=True, text=True, timeout=300)
        assert done.stdout == "before the lock\nWARNING: two\nlines\n"
        assert done.stderr == "a font is missing\n"
    times, texts = zip(*((line[:19], line[20:]) for line in path.read_text().splitlines()), strict=True)
    lines = (
        "before the lock",
        "WARNING: two",
        "lines",
        "WARNING: matplotlib: a font is missing",
        "error: one sentence",
    )
    assert texts == 2 * lines
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time) for time in times)
    assert os.listdir(tmp_path) == ["log.txt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_an_unwritable_log_file_does_not_end_the_job(tmp_path):
    for path in ("/dev/full", str(tmp_path / "no/such/directory/log.txt")):
        done = subprocess.run([sys.executable, "-c", LOG, path], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stderr == "a font is missing\n"


@given(text=st.text())
def test_terminal_control_characters_are_escaped(text):
    for lines in (True, False):
        shown = escape(text, lines)
        assert escape(shown, lines) == shown
        assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
                    and not (lines and c in "\n\t")]  # fmt: skip
    plain = "".join(c for c in text if c.isprintable())
    assert escape(plain) == plain


def test_joiners_in_words_and_emoji_are_not_escaped():
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d💻"):
        assert escape(text) == text
    assert escape("ab\u200dc\u200c") == "ab\\u200dc\\u200c"


HOSTILE = "a\x1b[31m\x07\x9b2J\r\u202eb\u2066\u200b\u2028c\nd\te"
SAFE = "a\\x1b[31m\\x07\\x9b2J\\r\\u202eb\\u2066\\u200b\\u2028c\nd\te"


def test_messages_errors_and_the_log_are_escaped(tmp_path, capsys, monkeypatch):
    kept: list[str] = []
    log = LogFile()
    log.is_used = True
    log.open(str(tmp_path / "log.txt"))
    record = logging.LogRecord("trainer.x", logging.INFO, "", 0, "%s", (HOSTILE,), None)
    with messages_to(kept.append):
        log_setup._MESSAGES.emit(record)
    log.emit(record)
    log.close()
    assert kept == [SAFE]
    lines = (tmp_path / "log.txt").read_text().split("\n")
    assert [line[20:] for line in lines] == [*SAFE.split("\n"), ""]
    log_setup.show(HOSTILE)
    log_setup.show(HOSTILE, error=True)
    assert capsys.readouterr() == (f"{SAFE}\n", f"{SAFE}\n")


def test_warnings_of_libraries_are_escaped(capsys):
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("httpx", logging.WARNING, "", 0, "%s", (HOSTILE,), sys.exc_info())
    handler = log_setup._LibraryWarnings()
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        handler.emit(record)
    finally:
        root.handlers = before
    shown = capsys.readouterr().err
    assert SAFE in shown and "\x1b" not in shown and "ValueError" in shown
