"""Commands that end with one sentence, run without the privilege of root to pass over permissions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.jobs import environment


def refused(command: list[str], cwd: Path, **env: str) -> str:
    """Run `command`; returns the one sentence with which it ends."""
    done = subprocess.run(command, cwd=cwd, env=environment() | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "", done.stdout + done.stderr
    return done.stderr


def without_privilege(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
