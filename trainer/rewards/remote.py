"""The reward `remote`: a server that judges completions over HTTP. docs/rewards.md has the schema."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
import tenacity

from trainer.errors import one_line
from trainer.rewards.parsing import Terms, read_value
from trainer.rewards.signature import RewardSignature

WANTED = ("completion", "answer", "prompt", "messages", "row", "status")
"""What the server gets of each completion."""
_LARGEST_ANSWER = 1 << 20
_LONGEST_REFUSAL = 500
_BACKOFF = tenacity.wait_exponential(multiplier=0.25, max=30) + tenacity.wait_random(0, 0.25)
_PASSING = (408, 425, 429)  # refusals that may pass, besides all errors of the server (5xx)


class _Failure(Exception):
    """The request has failed, and would fail again."""


class _Passing(_Failure):
    """The request has failed, and may succeed later; the server asks to wait `after_s` before the next one."""

    def __init__(self, reason: str, after_s: float = 0.0):
        super().__init__(reason)
        self.after_s = after_s


class RemoteReward:
    """Asks the server at `url` for the rewards of several completions at a time.

    Args:
        timeout_s: longest time for one answer, retries included.
        authorization_env: environment variable with the header `Authorization`; None: no such header.
    """

    signature = RewardSignature(WANTED, is_async=True)
    limit_s = None  # `timeout_s` counts, and what the server said last is the reason

    def __init__(self, url: str, timeout_s: float, authorization_env: str | None):
        self._url = url
        self._timeout_s = timeout_s
        secret = os.environ[authorization_env].strip() if authorization_env else ""
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if secret:
            self._headers["Authorization"] = secret
        self._is_quoted = not secret
        """Whether messages repeat what the server says: one that has the secret could repeat that."""
        self._client: httpx.AsyncClient | None = None

    async def compute(self, calls: list[dict[str, Any]]) -> list[list[Terms | str]]:
        """Return the terms of each completion's reward, or the reason why there are none."""
        try:
            return [[self._read(value)] for value in await self._ask(calls)]
        except _Failure as error:
            reason = str(error)
        except BaseException as error:
            reason = f"raised {self._describe(error)}"
        return [[one_line(reason)]] * len(calls)

    def line_of(self, error: BaseException) -> str:
        return ""

    def _read(self, value: Any) -> Terms | str:
        terms = read_value(value)
        if self._is_quoted or not isinstance(terms, str):
            return terms
        return "returned neither a finite number nor terms"

    def _describe(self, error: BaseException) -> str:
        """Return `Type: text`; the type alone if the text may hold what a server with the secret has sent."""
        return f"{type(error).__name__}: {error}" if self._is_quoted else type(error).__name__

    async def _ask(self, calls: list[dict[str, Any]]) -> list[Any]:
        body = json.dumps({"completions": calls}).encode()
        failure = "nothing yet"
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in tenacity.AsyncRetrying(
                    retry=tenacity.retry_if_exception_type(_Passing), wait=_wait, reraise=True
                ):
                    with attempt:
                        try:
                            return self._rewards_in(await self._post(body), len(calls))
                        except _Failure as error:
                            failure = str(error)
                            raise
        except TimeoutError:
            pass
        raise _Failure(f"no answer within reward.timeout_s={self._timeout_s:g} (the last: {failure})")

    async def _post(self, body: bytes) -> bytes:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout_s, headers=self._headers)
        try:
            async with self._client.stream("POST", self._url, content=body) as response:
                answer = bytearray()
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > _LARGEST_ANSWER:
                        raise _Failure(f"answered with more than {_LARGEST_ANSWER >> 20} MiB")
        except httpx.TransportError as error:
            raise _Passing(one_line(self._describe(error))) from error
        status = response.status_code
        if status == 200:
            return bytes(answer)
        text = f": {answer[:_LONGEST_REFUSAL].decode(errors='replace')}" if self._is_quoted else ""
        reason = f"answered HTTP {status}{text}"
        if status in _PASSING or status >= 500:
            raise _Passing(reason, _seconds(response.headers.get("Retry-After", "")))
        raise _Failure(reason)

    def _rewards_in(self, answer: bytes, count: int) -> list[Any]:
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise _Failure(f"answered what is not JSON ({self._describe(error)})") from error
        rewards = document.get("rewards") if isinstance(document, dict) else None
        if not isinstance(rewards, list):
            raise _Failure("answered without a list `rewards`")
        if len(rewards) != count:
            raise _Failure(f"answered {len(rewards)} rewards for {count} completions")
        return rewards


def _wait(state: tenacity.RetryCallState) -> float:
    """Seconds before the next request: about twice as many each time, and no fewer than the server asks for."""
    error = state.outcome.exception() if state.outcome else None
    return max(_BACKOFF(state), error.after_s if isinstance(error, _Passing) else 0.0)


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0
