"""Commands that end with one sentence, run without the privilege of root to pass over permissions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.jobs import environment


def refused(command: list[str], cwd: Path, **env: str) -> str:
    """Run `command`; returns the one sentence with which it ends. Stages that took long may be named before it."""
    done = subprocess.run(command, cwd=cwd, env=environment() | env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines(keepends=True)
    (sentence,) = [line for line in lines if not line.endswith(" …\n")]
    assert done.stderr.endswith(sentence), lines
    return sentence


def without_privilege(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
