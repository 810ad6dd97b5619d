"""The form of errors."""

from __future__ import annotations

from trainer.agents.errors import ApiError


def test_an_error_has_the_body_that_openai_clients_read():
    assert ApiError("no", "n", "x").body() == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "x"}
    }
    assert ApiError("no", status=500).body()["error"]["type"] == "server_error"
