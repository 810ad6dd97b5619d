"""Calls that may hang without end."""

from __future__ import annotations

import threading

from trainer.process.bounded_calls import ends_within


def test_a_call_that_hangs_is_left_behind():
    """That of `ray.shutdown` waits for ever for a reply of processes that are gone."""
    assert ends_within(lambda: None, 60)
    assert not ends_within(threading.Event().wait, 0.01)
