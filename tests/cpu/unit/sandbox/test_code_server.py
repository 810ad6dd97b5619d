"""How a program is run in its process, without isolation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.sandbox.code_server import _signal_name

RUN = "import random, sys; from trainer.sandbox.code_server import execute; sys.exit(execute(sys.argv[1]))"


@pytest.mark.parametrize(
    ("code", "printed", "status"),
    [
        ("1 + 1", "2\n", 0),
        ("print('x')", "x\n", 0),
        ("raise SystemExit", "", 0),
        ("raise SystemExit(3)", "", 3),
        ("raise SystemExit('no')", "no\n", 1),
        ("print('\\ud800')", "\\ud800\n", 0),
    ],
)
def test_a_program_ends_as_it_says(code, printed, status):
    done = subprocess.run([sys.executable, "-c", RUN, code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (printed, status), done.stderr


def test_an_error_names_lines_of_the_program_alone():
    """So the policy sees the same on every machine, also where the error is that of a library."""
    code = "import json\ndef f():\n    json.loads('x')\ntry:\n    f()\nexcept ValueError:\n    raise KeyError"
    done = subprocess.run([sys.executable, "-c", RUN, code], capture_output=True, text=True)
    assert done.returncode == 1 and "decoder.py" not in done.stdout and "code_server" not in done.stdout
    assert [line for line in done.stdout.splitlines() if "File" in line] == [
        '  File "<code>", line 5, in <module>',
        '  File "<code>", line 3, in f',
        '  File "<code>", line 7, in <module>',
    ]


def test_every_signal_has_a_name():
    assert [_signal_name(number) for number in (9, 35)] == ["SIGKILL", "signal 35"]
