"""The command that continues a run, from what its last start recorded."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import with_new_words
from trainer.files.redaction import HIDDEN, redact_command

_MODULES = {"trainer.main": "train", "trainer.sft": "sft"}
PYTHON_RUN = "trainer.api.worker_main"
"""The module of the process that `trainer.train` starts."""
_PYTHON_RUNS = (PYTHON_RUN, "trainer.api.child")  # its name in earlier versions
PASSED_FUNCTIONS = "passed_functions"
"""The package of the functions that were passed to `trainer.train` by value."""
_PASSED = re.compile(rf"{PASSED_FUNCTIONS}\.(\w+?)(?:_\d+)?:(\w+)")
_RESUME = "trainer.resume_mode"
_TASK = "trainer.task"
_NONE = ("none", "null", "None", "")


def command_of(words: Sequence[str]) -> list[str]:
    """Return the recorded words of a command as a user gives it; as they are if it was not on the command line."""
    words = with_new_words(redact_command(words))  # earlier versions recorded secrets
    for i, word in enumerate(words):
        if word in _MODULES:
            return ["trainer", _MODULES[word], *words[i + 1 :]]
        if os.path.basename(word) == "trainer" and words[i + 1 : i + 2] in [[name] for name in _MODULES.values()]:
            return ["trainer", *words[i + 1 :]]
    return list(words)


def next_command(start: Mapping[str, Any], changes: Mapping[str, str | None], task: str = "rl") -> str:
    """Return how to continue the run: a line for a shell; for a run from Python, the call.

    Args:
        start: the line of `starts.jsonl`.
        changes: keys that the next start sets, with their values; None: a key that it does not set any more.
        task: of the run. Calls of `trainer.train` of earlier versions did not name it among their overrides.
    """
    command = command_of(start["command"])
    directory = shlex.quote(start["directory"])
    module = next((word for word in command if word in _PYTHON_RUNS), None)
    if module and task != "rl" and _TASK not in map(_key, command):
        changes = {_TASK: task, **changes}
    arguments = _resuming(command[command.index(module) + 1 :] if module else command, changes)
    hidden = f" (write what {HIDDEN} hides)" if any(HIDDEN in argument for argument in arguments) else ""
    if module:
        return f"in Python, in {directory}{_call(arguments)}{hidden}"
    if command[0] == "trainer" and shutil.which("trainer") is None:
        arguments = [sys.executable, "-m", *arguments]
    return f"cd {directory} && {shlex.join(arguments)}{hidden}"


def _call(overrides: Sequence[str]) -> str:
    """Return the call of `trainer.train`, after the names of the functions that it passes again."""
    given, names = {}, {}
    for override in overrides:
        if passed := _PASSED.search(override):
            value = override.partition("=")[2]
            parts = [_PASSED.fullmatch(part) or repr(part) for part in value.strip("[]").split(",")]
            names |= {part[2]: None for part in parts if not isinstance(part, str)}
            shown = [part if isinstance(part, str) else part[2] for part in parts]
            given[passed[1]] = f"[{', '.join(shown)}]" if value.startswith("[") else shown[0]
    kept = [override for override in overrides if not _PASSED.search(override)]
    arguments = [f"{kept!r}", *(f"{name}={value}" for name, value in given.items())]
    functions = f", with the same {' and '.join(names)}" if names else ""
    return f"{functions}: trainer.train({', '.join(arguments)})"


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
