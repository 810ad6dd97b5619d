"""Functions of the user's, whose modules may do anything when they are imported."""

from __future__ import annotations

import signal
import sys

import pytest

from trainer.errors import UserError
from trainer.plugins import import_function
from trainer.signals import SIGNALS, Stopped


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit)"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "E: its text cannot be read"),
        ("raise ValueError('a\\n' * 20_000_000)", "ValueError: a a a"),
    ],
)
def test_a_module_that_raises_at_import_is_refused_in_one_line(tmp_path, monkeypatch, code, reason):
    (tmp_path / "raising.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(UserError) as caught:
        import_function("raising:f", "data.curriculum")
    message = str(caught.value)
    assert message.startswith(f"data.curriculum=raising:f: cannot be imported ({reason}")
    assert len(message) < 300
    assert message.isprintable()


def test_a_signal_during_an_import_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "signalled.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with SIGNALS.listening(), pytest.raises(Stopped, match=signal.SIGTERM.name):
        import_function("signalled:f", "data.curriculum")
