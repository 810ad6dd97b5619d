"""The client of an inference server that scores token ids: a frozen reward model, or a teacher.

docs/rewards.md has the protocol. A model is known by the digest of its weights, not by its name or address.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from trainer.errors import RESTART_HINT, UserError, WorkerError, one_line
from trainer.files.documents import checked_object, is_number, parse_object
from trainer.process import time_limits
from trainer.process.log_setup import show
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    import numpy as np  # the config imports this module

TOKEN = "TRAINER_INFERENCE_TOKEN"
"""Environment variable with the token of inference servers. Servers, jobs and people need the same value."""
_SHORTEST_TOKEN = 16
STATUS, SCORE, VOCABULARY = "/trainer/status", "/trainer/score", "/trainer/vocabulary"
LOGPROBS, SCORES = "logprobs", "scores"
"""What a server computes: log-probs of tokens (a language model), or one score of a sequence (a reward model)."""
MOST_TOP_K = 256  # likeliest tokens that a server gives at most for each token
_SEQUENCES, _REQUESTS = 16, 4
"""Sequences in a request, and requests that run at the same time."""
_PASSING = (408, 425, 429)


def read_token() -> str | None:
    """Return the token of inference servers from the environment; None: the variable is not set. Raises UserError: it
    protects nothing, or no HTTP header can hold it."""
    token = os.environ.get(TOKEN)
    if token is not None and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(f"{TOKEN}: a token needs at least {_SHORTEST_TOKEN} printable ASCII characters")
    return token


class _Passing(Exception):
    """The server does not answer now."""


class ModelServer:
    """The frozen model behind the server at `url`. Any thread may use it.

    Each method waits for a server that does not answer, up to `SERVER_ABSENCE_S`.

    Raises:
        UserError: the server refuses, or is not what the run needs.
        WorkerError: it has not answered in time (cause `server_absent`).
    """

    def __init__(self, url: str, key: str, computes: str):
        import httpx

        self.url, self.key = url.rstrip("/"), key
        self._computes = computes
        token = read_token()
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
            timeout=httpx.Timeout(time_limits.SERVER_SILENCE_S, connect=time_limits.SERVER_CONNECT_S),
            trust_env=False,  # a proxy for the internet is no way to a server of the cluster
        )

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """What the server said of its model when this process first asked."""
        shape: dict[Any, Any] = {"computes": str, "weights": str, "max_tokens": int}
        found = self._call("GET", STATUS, shape)
        if found["computes"] != self._computes:
            needed = {LOGPROBS: "a language model", SCORES: "a reward model, a sequence classifier with one label"}
            raise self._refusal(f"serves another kind of model; start it with {needed[self._computes]}")
        return found

    @property
    def weights(self) -> str:
        """Digest of the weights, as `trainer.files.atomic_io.digest_weights` returns it."""
        return self.description["weights"]

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of the model's tokens, by their texts."""
        return self._call("GET", VOCABULARY, {"tokens": {str: int}})["tokens"]

    def check_length(self, tokens: int) -> None:
        """Refuse a server that does not take sequences of `tokens` tokens."""
        most = self.description["max_tokens"] - (self._computes == LOGPROBS)  # the engine samples one more
        if tokens > most:
            problem = f"takes sequences of {most} tokens, and those of this run have up to {tokens}"
            raise self._refusal(f"{problem}; start it with a larger rollout.max_prompt_tokens")

    def scores(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Return the score `(B,)` of each sequence after its last token, float64."""
        import numpy as np

        found = self._map(sequences, {})
        if not all(is_number(one) for one in found):
            raise self._refusal("gave a score that is no finite number")
        return np.asarray(found, np.float64)

    def logprobs(self, sequences: Sequence[np.ndarray], top_k: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens of each sequence but the first, `(T - 1,)`, and their log-probs, float32. With `top_k`, the
        likeliest tokens at each of them, `(T - 1, k)`, and theirs."""
        import numpy as np

        found = []
        for ids, answer in zip(sequences, self._map(sequences, {"top_k": top_k}), strict=True):
            shape = (len(ids) - 1, top_k) if top_k else (len(ids) - 1,)
            try:
                tokens = np.asarray(answer["ids"] if top_k else ids[1:], np.int32).reshape(shape)
                logprobs = np.asarray(answer["logprobs"], np.float32).reshape(shape)
            except (KeyError, TypeError, ValueError) as error:
                raise self._refusal(f"gave no log-probs of each token ({one_line(str(error))})") from error
            if np.isnan(logprobs).any():
                raise self._refusal("gave log-probs that are no numbers")
            found.append((tokens, logprobs))
        return found

    def _map(self, sequences: Sequence[np.ndarray], options: dict[str, Any]) -> list[Any]:
        """Return the answer for each sequence. Several requests run at the same time."""

        ended = threading.Event()

        def ask(some: Sequence[np.ndarray]) -> list[Any]:
            body = {"weights": self.weights, "token_ids": [ids.tolist() for ids in some], **options}
            answers = self._call("POST", SCORE, {"answers": list}, json.dumps(body).encode(), ended)["answers"]
            if len(answers) != len(some):
                raise self._refusal(f"gave {len(answers)} answers for {len(some)} sequences")
            return answers

        pieces = [sequences[i : i + _SEQUENCES] for i in range(0, len(sequences), _SEQUENCES)]
        with SIGNALS.waiting(), ThreadPoolExecutor(_REQUESTS) as threads:
            futures = [threads.submit(ask, piece) for piece in pieces]
            try:
                while wait(futures, time_limits.POLL_INTERVAL_S).not_done:
                    SIGNALS.check()
            finally:
                ended.set()  # a signal does not wait for a server that is gone
                threads.shutdown(wait=False, cancel_futures=True)
        return [answer for future in futures for answer in future.result()]

    def _call(self, method: str, path: str, shape: Any, body: bytes = b"", ended: Any = None) -> dict[str, Any]:
        """Return the JSON object that the server answers. Waits for it if need be, until `ended` is set."""
        began = time.monotonic()
        deadline, warned = began + time_limits.SERVER_ABSENCE_S, began + time_limits.SERVER_WARNING_S
        while True:
            try:
                return self._ask(method, path, shape, body)
            except _Passing as error:
                lost = f"the inference server {self.url} ({self.key}) does not answer ({error})"
                if (now := time.monotonic()) > deadline or ended is not None and ended.is_set():
                    waited = f"{lost}; waited for {time_limits.SERVER_ABSENCE_S:g} s"
                    raise WorkerError(waited, RESTART_HINT, "server_absent") from error
                if now > warned:
                    show(f"WARNING: {lost}; waiting for it, up to {time_limits.SERVER_ABSENCE_S:g} s", error=True)
                    warned = deadline
            SIGNALS.check()
            time.sleep(time_limits.SERVER_RETRY_S)

    def _ask(self, method: str, path: str, shape: Any, body: bytes) -> dict[str, Any]:
        import httpx

        try:
            response = self._client.request(method, path, content=body)
        except (httpx.TransportError, httpx.StreamError) as error:
            raise _Passing(one_line(str(error)) or type(error).__name__) from error
        if response.status_code in (401, 403):
            raise self._refusal(f"refuses the token of this job; set {TOKEN} to that of the server")
        if response.status_code >= 500 or response.status_code in _PASSING:
            raise _Passing(f"HTTP {response.status_code}")
        try:
            answer = parse_object(response.content)
            if "kind" in answer:
                raise self._refusal(one_line(str(answer.get("error"))))
            if path == STATUS and answer.get("state", "ready") != "ready":
                raise _Passing("it is starting")
            return checked_object(answer, shape)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise self._refusal(f"is no server of a frozen model ({one_line(str(error))})") from error

    def _refusal(self, problem: str) -> UserError:
        return UserError(f"{self.key}={self.url}: {problem}")


model_server = functools.cache(ModelServer)  # returns the server at an address, one for each process
