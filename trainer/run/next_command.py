"""The command that continues a run, from what its last start recorded."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.files.redaction import HIDDEN, redact_command

_MODULES = {"trainer.main": "train", "trainer.sft": "sft"}
_CHILD = "trainer.api.worker_main"
_RESUME = "trainer.resume_mode"
_NONE = ("none", "null", "None", "")


def command_of(words: Sequence[str]) -> list[str]:
    """Return the recorded words of a command as a user gives it; as they are if it was not on the command line."""
    words = redact_command(words)  # earlier versions recorded secrets
    for i, word in enumerate(words):
        if word in _MODULES:
            return ["trainer", _MODULES[word], *words[i + 1 :]]
        if os.path.basename(word) == "trainer" and words[i + 1 : i + 2] in [[name] for name in _MODULES.values()]:
            return ["trainer", *words[i + 1 :]]
    return list(words)


def next_command(start: Mapping[str, Any], changes: Mapping[str, str], supervised: bool) -> str:
    """Return the text that says how to continue the run: a line for a shell; for a run from Python, the call.

    Args:
        start: the line of `starts.jsonl`.
        changes: keys that the next start sets, with their values.
        supervised: the run is supervised training.
    """
    command = command_of(start["command"])
    directory = shlex.quote(start["directory"])
    from_python = _CHILD in command
    arguments = command[command.index(_CHILD) + 1 :] if from_python else command
    arguments = _resuming(arguments, changes)
    hidden = f" (write what {HIDDEN} hides)" if any(HIDDEN in argument for argument in arguments) else ""
    if from_python:
        more = ", supervised=True" if supervised else ""
        again = f"in Python, in {directory}, with the same functions: trainer.train({arguments!r}{more})"
    else:
        if command[0] == "trainer" and shutil.which("trainer") is None:
            arguments = [sys.executable, "-m", *arguments]
        again = f"cd {directory} && {shlex.join(arguments)}"
    return again + hidden


def _resuming(arguments: list[str], changes: Mapping[str, str]) -> list[str]:
    """Return arguments that continue the run, with these changes."""
    modes = [argument for argument in arguments if _key(argument) == _RESUME]
    if not modes or modes[-1].partition("=")[2] in _NONE:
        changes = {_RESUME: "latest", **changes}
    kept = [argument for argument in arguments if _key(argument) not in changes]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")
