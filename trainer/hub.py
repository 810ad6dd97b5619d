"""The Hugging Face Hub over connections that fail now and then."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def with_retries(call: Callable[[], T]) -> T:
    """`call()`, tried again twice within three seconds while the connection fails.

    Every other error, a missing repository above all, passes at once.
    """
    import tenacity

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_connection_error),
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_exponential(multiplier=0.5, max=2),
        reraise=True,
    )(call)


def is_connection_error(error: BaseException) -> bool:
    """Whether a failed connection lies behind `error`: clients wrap the socket's error in several of their own."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OfflineModeIsEnabled):  # the user's own wish, though it calls itself a ConnectionError
            return False
        if isinstance(seen, (ConnectionError, TimeoutError, socket.gaierror)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def first_line(error: BaseException) -> str:
    """What goes into a sentence of the long messages that these libraries give."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
