"""Calls that may hang without end."""

from __future__ import annotations

import threading

import pytest

from trainer.process.bounded_calls import ends_within


def test_a_call_that_hangs_is_left_behind():
    """That of `ray.shutdown` waits for ever for a reply of processes that are gone."""
    assert ends_within(lambda: None, 60)
    assert not ends_within(threading.Event().wait, 0.01)


def test_what_a_call_raises_is_raised_where_it_is_waited_for():
    with pytest.raises(ZeroDivisionError):
        ends_within(lambda: 1 / 0, 60)
