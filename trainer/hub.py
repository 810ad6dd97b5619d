"""Requests to the Hugging Face Hub: retries, and errors in one line."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from trainer.redaction import redact_text

T = TypeVar("T")


def with_retries(call: Callable[[], T]) -> T:
    """Return `call()`. If the connection fails, retry twice within three seconds.

    Every other error, such as a missing repository, is raised immediately.
    """
    import tenacity

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_connection_error),
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_exponential(multiplier=0.5, max=2),
        reraise=True,
    )(call)


def is_connection_error(error: BaseException) -> bool:
    """Return whether a failed connection caused `error`. Clients wrap the error of the socket in their own errors."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OfflineModeIsEnabled):  # a ConnectionError that the user asked for: a retry cannot help
            return False
        if isinstance(seen, (ConnectionError, TimeoutError, socket.gaierror)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, without secrets. The messages of these libraries are long."""
    lines = str(error).strip().splitlines()
    return redact_text(lines[0]) if lines else type(error).__name__
