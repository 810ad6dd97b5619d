"""A process waits at the requested call of a failpoint, and passes all others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import wait_until
from trainer.process.failpoints import failpoint

PASSES = """
from trainer.process.failpoints import failpoint
for name in ("a", "b", "a", "a"):
    failpoint(name)
    print(name, flush=True)
"""


def start(request: str) -> subprocess.Popen:
    env = {**os.environ, "TRAINER_FAILPOINT": request}
    return subprocess.Popen([sys.executable, "-c", PASSES], env=env, stdout=subprocess.PIPE, text=True)


def test_a_process_waits_at_the_nth_call_until_the_file_is_deleted(tmp_path):
    file = tmp_path / "reached"
    process = start(f"a,2,{file}")
    wait_until(file.exists)
    assert [process.stdout.readline() for _ in range(2)] == ["a\n", "b\n"]
    assert process.poll() is None, "it waits"
    file.unlink()
    assert process.communicate(timeout=300)[0] == "a\na\n"


def test_a_process_waits_at_several_calls_of_one_failpoint(tmp_path):
    first, third = tmp_path / "first", tmp_path / "third"
    process = start(f"a,3,{third};a,1,{first}")
    for file, lines in ((first, ""), (third, "aba")):
        wait_until(file.exists)
        assert [process.stdout.readline() for _ in lines] == [f"{name}\n" for name in lines]
        file.unlink()
    assert process.communicate(timeout=300)[0] == "a\n"


def test_other_failpoints_are_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_FAILPOINT", f"another,1,{tmp_path}/reached")
    failpoint("one")
    monkeypatch.delenv("TRAINER_FAILPOINT")
    failpoint("another")
    assert os.listdir(tmp_path) == []


def test_a_test_stops_at_every_failpoint_of_the_package():
    """One that no test names would prove nothing."""
    package, tests = Path(failpoint.__code__.co_filename).parents[1], Path(__file__).parents[3]
    named = {name for path in package.rglob("*.py") for name in re.findall(r'failpoint\("(.*?)"\)', path.read_text())}
    texts = [path.read_text() for path in tests.rglob("*.py")]
    assert len(named) >= 10
    assert not [name for name in named if not any(f'"{name}' in text for text in texts)]
