"""Chat templates that models were published with, from the wheel of a package that collects them."""

from __future__ import annotations

from pathlib import Path

from tests.support.packages import install

PACKAGE = "trl==1.16.0"


def install_templates(target: Path) -> Path:
    """Install the package, without what it depends on, into an empty folder; return the folder of its templates."""
    install(PACKAGE, "--target", target, PACKAGE)
    return target / "trl" / "chat_templates"
