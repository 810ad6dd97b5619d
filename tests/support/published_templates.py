"""Chat templates that models were published with, from the wheel of a package that collects them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cpu.test_packaging import tool
from tests.support.lacking import lacking
from tests.support.verifiers import UV

PACKAGE = "trl==1.16.0"


def install_templates(target: Path) -> Path:
    """Install the package, without what it depends on, into an empty folder; return the folder of its templates."""
    if UV is None:
        lacking("PACKAGES", "no uv; `make setup` installs it")
    set_up = tool("install")
    options, environment = set_up.uv_options(set_up.pip_settings([sys.executable, "-m", "pip"]))
    install = [UV, "pip", "install", "--quiet", "--no-deps", *options, "--target", target, PACKAGE]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lacking("PACKAGES", f"{PACKAGE} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return target / "trl" / "chat_templates"
