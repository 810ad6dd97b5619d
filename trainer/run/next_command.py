"""The command that continues a run, from what its last start recorded."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.files.redaction import HIDDEN

_JOBS = ("train", "sft", "dpo", "rm")
PYTHON_RUN = "trainer.api.worker_main"  # the module of the process that `trainer.train` starts
PASSED_FUNCTIONS = "passed_functions"
"""The package of the functions that were passed to `trainer.train` by value."""
_RESUME = "trainer.resume_mode"
_NONE = ("none", "null", "None", "")


def command_of(words: Sequence[str]) -> list[str]:
    """Return the recorded words of a command as a user gives it; as they are if it was not on the command line."""
    for i, word in enumerate(words):
        if os.path.basename(word) == "trainer" and words[i + 1 : i + 2] in [[job] for job in _JOBS]:
            return ["trainer", *words[i + 1 :]]
    return list(words)


def next_command(start: Mapping[str, Any], changes: Mapping[str, str | None]) -> str:
    """Return how to continue the run: a line for a shell; for a run from Python, the call. A change to None drops the
    key.
    """
    command = command_of(start["command"])
    directory = shlex.quote(start["directory"])
    from_python = PYTHON_RUN in command
    arguments = _resuming(command[command.index(PYTHON_RUN) + 1 :] if from_python else command, changes)
    hidden = f" (write what {HIDDEN} hides)" if any(HIDDEN in argument for argument in arguments) else ""
    if from_python:
        own = [argument for argument in arguments if f"={PASSED_FUNCTIONS}." not in argument.replace("[", "")]
        return f"in Python, in {directory}: the same call of trainer.train, with the overrides {own!r}{hidden}"
    if command[0] == "trainer" and shutil.which("trainer") is None:
        arguments = [sys.executable, "-m", *arguments]
    return f"cd {directory} && {shlex.join(arguments)}{hidden}"


def _resuming(arguments: list[str], changes: Mapping[str, str | None]) -> list[str]:
    """Return arguments that continue the run, with these changes."""
    modes = [argument for argument in arguments if _key(argument) == _RESUME]
    if not modes or modes[-1].partition("=")[2] in _NONE:
        changes = {_RESUME: "latest", **changes}
    kept = [argument for argument in arguments if _key(argument) not in changes]
    given = {_key(argument) for argument in arguments}
    set_anew = {key: value or "null" for key, value in changes.items() if value is not None or key not in given}
    return [*kept, *(f"{key}={value}" for key, value in set_anew.items())]  # a file may set a key, too


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+")
