"""Packages that tests need beside the locked ones, from the index that the set-up uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cpu.release.test_packaging import tool
from tests.support.lacking import lacking


def find_uv() -> str:
    """Return the path of uv. Where there is none, skip the test, or fail it (`lacking`)."""
    uv = shutil.which("uv", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
    return uv or lacking("PACKAGES", "no uv; `make setup` installs it")


def install(name: str, *words: object) -> None:
    """Install packages without what they depend on. Where they cannot be, skip the test, or fail it (`lacking`).

    Args:
        name: for the message.
        words: for `uv pip install`.
    """
    set_up = tool("install")
    options, environment = set_up.uv_options(set_up.pip_settings([sys.executable, "-m", "pip"]))
    command = [find_uv(), "pip", "install", "--quiet", "--no-deps", *options, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lacking("PACKAGES", f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def make_venv(root: Path, name: str, requirements: Path) -> Path:
    """Make a virtual environment with packages and without what they depend on; return its interpreter.

    Args:
        name: of the package that the tests want, for the message.
        requirements: the file that lists the packages.
    """
    subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, root], check=True, timeout=300)
    install(name, "--python", root / "bin/python", "-r", requirements)
    return root / "bin/python"
