"""The time in which no engine could generate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.generation import pauses
from trainer.generation.pauses import Pauses


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pauses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_seconds_of_blocks_add_up_also_while_one_is_open(clock):
    found = Pauses()
    clock[0] += 5
    assert found.seconds == 0
    with found.count():
        clock[0] += 2
        assert found.seconds == 2
    clock[0] += 5
    with pytest.raises(OSError), found.count():
        clock[0] += 3
        raise OSError
    clock[0] += 5
    assert found.seconds == 5


def test_blocks_that_overlap_count_once(clock):
    found = Pauses()
    first, second = found.count(), found.count()
    first.__enter__()
    clock[0] += 1
    second.__enter__()
    clock[0] += 1
    first.__exit__(None, None, None)
    clock[0] += 1
    second.__exit__(None, None, None)
    clock[0] += 1
    assert found.seconds == 3
