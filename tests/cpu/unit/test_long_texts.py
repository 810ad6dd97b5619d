"""Expressions that meet texts of models, servers and users take a time that grows with the length alone."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from trainer.checkpoint.buckets import _reason
from trainer.data.examples import Stops
from trainer.errors import is_unreachable
from trainer.files.documents import dump_yaml
from trainer.files.redaction import name_secrets, redact_command, redact_text
from trainer.process.failures import INFRASTRUCTURE, JOB, classify
from trainer.rewards.functions import _readable

LENGTH = 400_000
LIMIT_S = 20  # a time that grows with the square of the length is longer by far


@pytest.fixture(autouse=True)
def limited():
    def end(*_):
        raise AssertionError(f"it took {LIMIT_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


def test_messages_are_masked_and_judged_however_long_they_are(monkeypatch):
    monkeypatch.setenv("SERVICE_KEY_NAME", "0123456789")
    name_secrets({"some": {"key_env": "SERVICE_KEY_NAME"}})
    word = "a" * LENGTH
    assert redact_text("${oc.env:" + word) == "${oc.env:" + word
    assert redact_text(word + "://" + word) == word + "://" + word
    assert redact_command([f"environment.kwargs={{{word}}}"]) == [f"environment.kwargs={{{word}}}"]
    assert not is_unreachable("Connect" * (LENGTH // 7)) and is_unreachable("ClientConnectorDNSError: x")
    assert classify(RuntimeError(word)) == (JOB, "exception")
    for text in (f"{word} NCCL watchdog timed out", f"NCCL timed out {word}", f"Connection {word} timeout"):
        assert classify(RuntimeError(text)) == (INFRASTRUCTURE, "collective timeout")
    assert len(_reason("<Message>" * (LENGTH // 9))) <= 200
    assert _reason("Generic S3 error: <Error><Message>Slow down</Message></Error>") == "Slow down: Generic S3 error"
    assert dump_yaml({"a": "1" * LENGTH + "x", "b": "1e5", "c": "1.5e3"}).endswith("b: '1e5'\nc: '1.5e3'\n")


def test_replies_are_read_however_long_they_are():
    added = {1: SimpleNamespace(content="<end>"), 2: SimpleNamespace(content="\n"), 3: SimpleNamespace(content="\n\n")}
    stops = Stops(SimpleNamespace(added_tokens_decoder=added), [1, 2, 3])
    assert stops.end("\n" * LENGTH + "a") is None
    assert stops.end("a<end>" + "\n " * LENGTH) == len("a<end>")
    assert stops.end("a <end> b <end> <end>") == len("a <end> b <end>")
    assert _readable("1" * LENGTH) == "1" * LENGTH
    assert _readable("0.1\\overline{6}") == "\\frac{15}{90}"
