"""The stages of the start-up: which one runs, and since when; and that each is a safe point."""

from __future__ import annotations

import gc
import importlib.metadata
import signal
import sys
import time

import pytest

from trainer.process import startup
from trainer.process.signals import SIGNALS, Stopped
from trainer.process.startup import importing, running_stage, stage


def test_the_innermost_stage_runs_and_has_its_own_clock():
    assert running_stage() is None
    before = time.monotonic()
    with stage("outer"):
        outer = running_stage()
        with stage("inner"):
            inner = running_stage()
        assert running_stage() == outer, "it has run all the time"
    assert running_stage() is None
    assert (outer[0], inner[0]) == ("outer", "inner") and before <= outer[1] <= inner[1] <= time.monotonic()


def test_a_stage_that_fails_ends():
    with pytest.raises(OSError), stage("loading"):
        raise OSError
    assert running_stage() is None


def test_a_stage_is_a_safe_point_for_signals():
    with SIGNALS.listening():
        with pytest.raises(Stopped), stage("outer"):
            with stage("inner"):
                assert running_stage()[0] == "inner"
                signal.raise_signal(signal.SIGTERM)
                reached = True
        assert reached and running_stage() is None


def test_imports_need_no_garbage_collection_and_leave_it_as_it_was():
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [10, 1000])
def test_only_what_large_libraries_have_made_is_kept_from_collections(count, monkeypatch):
    before, names = gc.get_freeze_count(), [f"module_{number}" for number in range(count)]
    try:
        with importing():
            for name in names:
                monkeypatch.setitem(sys.modules, name, sys)
        assert (gc.get_freeze_count() > before) == (count == 1000)
    finally:
        gc.unfreeze()


def test_the_distributions_of_packages_are_read_when_others_are_asked_for(monkeypatch):
    read, reads = importlib.metadata.packages_distributions, []
    monkeypatch.setattr(startup, "_read_distributions", lambda: reads.append(1) or read())
    with importing():
        found = importlib.metadata.packages_distributions()
        assert found.get("torch") == ["torch"] and not reads
        assert found.get("yaml") == ["PyYAML"] and found.get("no_such_package", []) == [] and reads
        assert dict(found) == read()
    assert importlib.metadata.packages_distributions() == read()
