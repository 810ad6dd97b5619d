"""Calls that may hang without end, and are left behind then."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainer.process.signals import SIGNALS


def ends_within(action: Callable[[], object], limit_s: float) -> bool:
    """Call `action` on another thread, and return whether it ends within `limit_s` seconds.

    Raises:
        Exception: what `action` has raised within this time.
    """
    failures: list[Exception] = []

    def call() -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call, daemon=True)
    with SIGNALS.blocked():
        thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    return not thread.is_alive()
