"""Requests to the Hugging Face Hub: retries, and errors in one line."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

from trainer.files.redaction import redact_text

T = TypeVar("T")

_SNAPSHOT = re.compile(r"models--[^/]+/snapshots/([0-9a-f]{40})")
_pinned: dict[str, str] = {}


def pin(revisions: Mapping[str, str]) -> dict[str, str]:
    """Use these commits of models and data sets, by their ids, from now on. Return the previous ones.

    The id of a data set is `hf://OWNER/NAME`. A resumed run uses the commits with which it started, although `main` of
    the Hub may have changed since.
    """
    previous = dict(_pinned)
    _pinned.clear()
    _pinned.update(revisions)
    return previous


def pin_data(name: str, commit: str) -> None:
    _pinned[name] = commit


def pinned(name: str) -> str | None:
    return _pinned.get(name)


def pinned_data() -> dict[str, str]:
    return {name: commit for name, commit in _pinned.items() if is_data(name)}


def is_data(name: str) -> bool:
    return name.startswith("hf://")


def revision_of(path: str) -> str | None:
    """Return the commit of a model directory in the Hub's cache, or None for any other directory."""
    match = _SNAPSHOT.fullmatch("/".join(path.split(os.sep)[-3:]))
    return None if match is None else match.group(1)


def with_retries(call: Callable[[], T]) -> T:
    """Return `call()`. If the connection fails, retry twice within three seconds. Other errors are raised."""
    import tenacity

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_connection_error),
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_exponential(multiplier=0.5, max=2),
        reraise=True,
    )(call)


def is_connection_error(error: BaseException) -> bool:
    """Return whether a failed connection caused `error`. Clients wrap the socket's error in their own errors."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OfflineModeIsEnabled):  # a ConnectionError by the user's choice: a retry cannot help
            return False
        if isinstance(cause, (ConnectionError, TimeoutError, socket.gaierror)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def why_missing(error: BaseException) -> str:
    """Return why a model is neither a directory nor on the Hub, from the error of a request to the Hub."""
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, HFValidationError):  # no id of the Hub: the path of a directory was meant
        return "no such directory"
    problem = "the Hub cannot be reached" if is_connection_error(error) else "the Hub has no such model"
    return f"no such directory, and {problem} ({first_line(error)})"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, without secrets. The messages of these libraries are long. A line
    that ends with a colon announces the next one, which follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines)) + 1
    return redact_text(" ".join(lines[:end])) if lines else type(error).__name__
