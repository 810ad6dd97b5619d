"""What a server refuses before it starts."""

from __future__ import annotations

import socket

import pytest

from trainer.config import compose
from trainer.errors import UserError
from trainer.inference.server import check, listen

TOKEN = "TRAINER_INFERENCE_TOKEN"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_beyond_the_loopback_interface_it_wants_a_token(monkeypatch, host):
    cfg = compose(["inference.engine=transformers", f"inference.host='{host}'"])
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(UserError, match=f"inference.host={host}: others can reach .* variable {TOKEN}"):
        check(cfg)
    monkeypatch.setenv(TOKEN, "x" * 16)
    assert check(cfg) == "x" * 16


@pytest.mark.parametrize("token", ["", "short", "é" * 20, "a" * 20 + "\n"])
def test_a_token_that_protects_nothing_is_refused(monkeypatch, token):
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(UserError, match="needs at least 16 printable ASCII characters"):
        check(compose(["inference.engine=transformers"]))


def test_a_port_that_is_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"inference.port={port}: cannot listen there .*in use"):
            listen("127.0.0.1", port, "inference.")
