"""What a page of the documents tells a reader to write and to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def files_of_page(page: str, directory: Path) -> list[str]:
    """Write each block of Python that the text before it names as a file; return the names."""
    pieces = (ROOT / page).read_text().split("```")
    names = []
    for text, block in zip(pieces[::2], pieces[1::2], strict=False):
        found = re.findall(r"`(\w+\.py)`", text)
        if block.startswith("python\n") and found:
            (directory / found[-1]).write_text(block.removeprefix("python\n"))
            names.append(found[-1])
    return names


def commands_of_page(page: str, word: str) -> str:
    """Return the first block of shell commands with this word."""
    pieces = (ROOT / page).read_text().split("```")[1::2]
    return next(piece.removeprefix("bash\n") for piece in pieces if piece.startswith("bash\n") and word in piece)


def load_page(page: str) -> dict[str, Any]:
    """Execute the first block of Python that has imports; return its names."""
    pieces = (ROOT / page).read_text().split("```")[1::2]
    names: dict[str, Any] = {}
    exec(next(piece.removeprefix("python\n") for piece in pieces if piece.startswith("python\nimport ")), names)
    return names
