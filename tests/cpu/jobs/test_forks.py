"""The server that starts jobs of tests: what it promises of each command."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.forks import fork_server, run_forked
from tests.support.jobs import environment, wait_until

HERE = "tests.cpu.jobs.test_forks"


def leaves_a_process(seconds: str) -> None:
    subprocess.Popen(["sleep", seconds], start_new_session=True)


def waits(reached: str) -> None:
    Path(reached).touch()
    signal.pause()


def test_a_module_gets_its_arguments_directory_and_environment_and_its_status_comes_back(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['OWN'])\nsys.exit('refused')\n"
    )
    done = run_forked("own", ["a=1"], tmp_path, environment() | {"OWN": "value"}, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['a=1'] {tmp_path} value\n", "refused\n")


def test_a_process_that_a_command_leaves_behind_is_named_and_ended(tmp_path):
    start = fork_server().start
    left = start(f"{HERE}:leaves_a_process", "60", cwd=tmp_path, env=environment(), patience_s=0.2)
    with pytest.raises(AssertionError, match="left running: .*sleep 60"):
        left.wait(60)
    assert start(f"{HERE}:leaves_a_process", "0.1", cwd=tmp_path, env=environment()).wait(60) == 0


def test_a_command_ends_by_a_signal_and_with_the_test_that_waits_for_it(tmp_path):
    start, waits_here = fork_server().start, f"{HERE}:waits"
    command = start(waits_here, str(tmp_path / "reached"), cwd=tmp_path, env=environment())
    command.kill_group()
    assert command.wait(60) == -signal.SIGKILL
    command = start(waits_here, str(tmp_path / "again"), cwd=tmp_path, env=environment())
    wait_until((tmp_path / "again").exists)
    command.forget()
    wait_until(lambda: not psutil.pid_exists(command.pid))
