"""File systems of a test's own: commands in a private mount namespace, where the machine permits one."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from collections.abc import Sequence

import pytest

_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@functools.cache
def _refusal() -> str:
    try:
        tried = subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else ""


def with_mounts(mounts: Sequence[str], command: Sequence[str]) -> list[str]:
    """A command line that runs `command` where the `mounts` (arguments of `mount`) are made, for itself alone."""
    if _refusal():
        pytest.skip(f"no mount namespace here: {_refusal()}")
    script = "".join(f"mount {mount} && " for mount in mounts) + f"exec {shlex.join(command)}"
    return [*_UNSHARE, "sh", "-c", script]
