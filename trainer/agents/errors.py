"""Errors of the endpoint, in the form that OpenAI clients know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is not answered.

    Args:
        param: the field of the request that is to blame.
        code: a name for programs.
        status: of HTTP. Clients repeat 408, 409, 429 and those from 500 on, unless a header forbids it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
