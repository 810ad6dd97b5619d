"""`inference.*`: the inference server that stays up while jobs come and go (`trainer inference`)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.config.fields import LONGEST_TIME, Section, number, setting
from trainer.errors import UserError

TOKEN = "TRAINER_INFERENCE_TOKEN"
"""Environment variable with the token of inference servers. Servers, jobs and people need the same value."""

_SHORTEST_TOKEN = 16


def read_token() -> str | None:
    """Return the token of inference servers from the environment; None: the variable is not set.

    Raises:
        UserError: it protects nothing, or no HTTP header can hold it.
    """
    token = os.environ.get(TOKEN)
    if token is not None and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(f"{TOKEN}: a token needs at least {_SHORTEST_TOKEN} printable ASCII characters")
    return token


@dataclass
class InferenceConfig(Section):
    host: str = setting("127.0.0.1", resume="harmless")
    """Address on which the server listens. Beyond the loopback interface it needs a token."""
    port: int = number(8000, at_least=1, at_most=65535, resume="harmless")
    """TCP port on which the server listens."""
    lease_s: float = number(60.0, at_least=1, at_most=LONGEST_TIME, resume="harmless")
    """Seconds without a sign of life after which another job may use the server. The same run may at any time, once it
    has been started again."""
    hang_timeout_s: float = number(120.0, at_least=1, at_most=LONGEST_TIME, resume="harmless")
    """Seconds without progress after which the engine is ended and started again. The load of a model, or of new
    weights, may take half an hour."""
